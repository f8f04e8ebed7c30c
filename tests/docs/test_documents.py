"""Documents: lines within 100 columns, links that resolve, and names that exist in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from kvrelay.cluster.cli.main import main as kvrelay
from tests.structure import PACKAGES, ROOT

MAX_COLUMNS = 100
HIDDEN = {".venv", ".venv-vllm", ".git", "node_modules", ".pytest_cache", "shared"}
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not HIDDEN & set(path.relative_to(ROOT).parts) and not path.is_symlink()
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
DOTTED = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.[a-z_0-9]+)+)`")
FILE = re.compile(rf"`((?:{'|'.join([*PACKAGES, 'tests', 'benchmarks', 'docs'])})/[\w./-]+)`")
STATUS = re.compile(r"# \d+\. [^\n]+\n\nStatus: (Accepted|Superseded( in part)? by \[ADR \d+\])")
COMMAND = re.compile(r"kvrelay (?!-)([a-z-]+)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_of(text: str) -> str:
    """What stands in code blocks and in backticks, a line each."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return "\n".join([*fenced, *re.findall(r"`([^`\n]+)`", text)])


def anchors_of(path: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def offenders(find: Callable[[Path, str], Iterable[str]]) -> list[str]:
    texts = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    return [f"{name_of(path)}: {each}" for path, text in texts.items() for each in find(path, text)]


def test_lines_are_within_the_columns() -> None:
    def long_lines(_: Path, text: str) -> Iterator[str]:
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > MAX_COLUMNS and "://" not in line and not line.startswith("!["):
                yield f"{number}: {line}"

    assert not offenders(long_lines)


def test_relative_links_resolve() -> None:
    def broken_links(path: Path, text: str) -> Iterator[str]:
        for target in LINK.findall(text):
            if "://" in target or target.startswith("mailto:"):
                continue
            file, _, anchor = target.partition("#")
            there = (path.parent / file).resolve() if file else path
            if not there.exists() or (anchor and anchor not in anchors_of(there)):
                yield target

    assert not offenders(broken_links)


def test_modules_files_and_commands_that_are_named_exist() -> None:
    commands = {*kvrelay.list_commands(None)}  # type: ignore[arg-type]

    def missing(path: Path, text: str) -> Iterator[str]:
        yield from (name for name in DOTTED.findall(text) if not is_in_code(name))
        yield from (name for name in FILE.findall(text) if not (ROOT / name).exists())
        yield from {*COMMAND.findall(code_of(text))} - commands

    assert not offenders(missing)


def test_the_index_by_reader_has_every_page() -> None:
    index = ROOT / "docs/README.md"
    linked = {target.partition("#")[0] for target in LINK.findall(index.read_text("utf-8"))}
    assert {path.name for path in index.parent.glob("*.md")} - {"README.md"} <= linked


def pages_linked_from(pages: set[Path]) -> set[Path]:
    """A link to a folder shows its pages, as the host of a repository does."""
    found: set[Path] = set()
    for page in pages:
        for target in LINK.findall(page.read_text("utf-8")):
            path = (page.parent / target.partition("#")[0]).resolve()
            found |= {*path.glob("*.md")} if path.is_dir() else {path} & {*DOCUMENTS}
    return found


def test_every_page_is_two_steps_from_the_readme() -> None:
    first = pages_linked_from({ROOT / "README.md"})
    assert {*(ROOT / "docs").rglob("*.md")} <= first | pages_linked_from(first)
    assert ROOT / "docs/security.md" in first


def test_the_page_of_commands_has_every_command() -> None:
    page = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    rows = "\n".join(line for line in page.splitlines() if line.startswith("| `kvrelay "))
    commands = {*kvrelay.list_commands(None)}  # type: ignore[arg-type]
    assert commands <= {*re.findall(r"`(?:kvrelay )?([a-z-]+)", rows)}


def test_each_decision_has_a_status() -> None:
    def without_status(path: Path, text: str) -> Iterator[str]:
        if path.parent.name == "adr" and not STATUS.match(text):
            yield text.partition("\n")[0]

    assert not offenders(without_status)


def is_in_code(dotted: str) -> bool:
    """A module, a package, or a name that its module defines or a setting of a section."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:end])
        file = base.with_suffix(".py") if not base.is_dir() else base / "__init__.py"
        if file.is_file():
            if end == len(parts):
                return True
            if base.is_dir():
                break  # `router.policy` is a setting, not a module
            return re.search(rf"\b{parts[end]}\b", file.read_text(encoding="utf-8")) is not None
    section, _, key = dotted.partition(".")
    example = (ROOT / "kvrelay.example.toml").read_text(encoding="utf-8")
    body = example.partition(f"\n[{section}]")[2].partition("\n[")[0]
    return re.search(rf"^{re.escape(key)} *=", body, flags=re.MULTILINE) is not None


ROOMS = [*PACKAGES, "cluster/api", "cluster/control"]


@pytest.mark.parametrize("room", ROOMS)
def test_the_map_of_a_room_names_its_parts(room: str) -> None:
    """All folders, and nothing that is not there. Small rooms have none."""
    folder = ROOT / room
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    lines = re.findall(r"^    (\w[\w, ]*?)  ", text, flags=re.MULTILINE)
    named = {name for line in lines for name in line.split(", ")}
    assert all((folder / name).is_dir() or (folder / f"{name}.py").exists() for name in named), room
    folders = {path.parent.name for path in folder.glob("*/*.py")} - {"c"}
    assert folders <= named or len(list(folder.glob("*.py"))) < 6, folders - named
