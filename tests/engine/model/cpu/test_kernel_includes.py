"""The C kernels' includes: a straight order, from what all share up to a whole step."""

from __future__ import annotations

import re
from pathlib import Path

from kvrelay.engine.model.cpu import kernels

FOLDER = kernels.FOLDER.resolve()
ORDER = (".", "gemm", "attention", "layers", "sampling", "step")  # each may include those before it
MAX_LINES = 350
FILES = sorted(p for end in ("*.c", "*.h") for p in FOLDER.rglob(end))


def included(path: Path) -> list[Path]:
    found = re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
    return [(path.parent / name).resolve() for name in found]


def test_folders_include_what_stands_before_them_only() -> None:
    for path in FILES:
        here = ORDER.index(path.parent.relative_to(FOLDER).as_posix())
        for other in included(path):
            assert other.exists(), f"{path} includes {other}"
            there = ORDER.index(other.parent.relative_to(FOLDER).as_posix())
            assert there <= here, f"{path} includes {other}"


def test_no_file_includes_itself_by_way_of_others() -> None:
    done: set[Path] = set()

    def visit(path: Path, under: tuple[Path, ...]) -> None:
        assert path not in under, " -> ".join(each.name for each in (*under, path))
        if path not in done:
            for other in included(path):
                visit(other, (*under, path))
            done.add(path)

    for path in FILES:
        visit(path, ())
    assert len(done) == len(FILES) > 30


def test_files_are_short() -> None:
    lengths = {p.name: p.read_text(encoding="utf-8").count("\n") for p in FILES}
    assert max(lengths.values()) <= MAX_LINES, lengths
