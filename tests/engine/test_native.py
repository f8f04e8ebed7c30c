"""C code is compiled once, kept, rebuilt when it changes, and missed with one clear line."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.native import NativeBuildError, build, load


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries are kept; nothing is there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvrelay" / "native"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    (tmp_path / "number.h").write_text("#define NUMBER 42\n")
    path.write_text('#include "number.h"\nint answer(void) { return NUMBER; }\n')
    return path


def answer(path: Path) -> int:
    number: int = ctypes.CDLL(str(path)).answer()
    return number


def test_a_library_is_built_once_and_then_found(cache: Path, source: Path) -> None:
    path = build(source)
    assert answer(path) == 42
    made_at = path.stat().st_mtime_ns
    assert build(source) == path
    assert path.stat().st_mtime_ns == made_at
    assert list(cache.iterdir()) == [path], "nothing else is left there"
    assert load(source).answer() == load(source, hold_gil=True).answer() == 42


def test_whatever_a_library_is_made_of_gives_it_another_name(cache: Path, source: Path) -> None:
    paths = {build(source), build(source, ("-DX=1",)), build(source, ("-march=native",))}
    (source.parent / "number.h").write_text("#define NUMBER 43\n")
    paths.add(changed := build(source))
    source.write_text(source.read_text() + "\n")
    paths.add(build(source))
    assert len(paths) == 5
    assert answer(changed) == 43


def test_builders_at_the_same_time_all_get_it(cache: Path, source: Path) -> None:
    command = (
        "from pathlib import Path; from engine.native import load;"
        f"print(load(Path({str(source)!r})).answer())"
    )

    def one(_: int) -> str:
        root = Path(__file__).parents[2]
        run = subprocess.run(
            [sys.executable, "-c", command], capture_output=True, text=True, timeout=60, cwd=root
        )
        return run.stdout.strip() or run.stderr

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(one, range(4))) == {"42"}
    assert len(list(cache.iterdir())) == 1


def test_a_missing_compiler_is_named(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(NativeBuildError, match=r"'no-such-compiler'.*install one") as error:
        build(source)
    assert "\n" not in str(error.value)


def test_a_source_that_does_not_compile_says_what_the_compiler_said(
    cache: Path, source: Path
) -> None:
    source.write_text("int answer(void) { return nonsense; }\n")
    with pytest.raises(NativeBuildError, match=r"error.*nonsense") as error:
        build(source)
    assert "\n" not in str(error.value)
    assert list(cache.iterdir()) == []


def test_a_cache_that_is_no_directory_is_named(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NativeBuildError, match="XDG_CACHE_HOME"):
        build(source)
