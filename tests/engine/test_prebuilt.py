"""Libraries that a wheel brings: found by what they are made of, for this processor, and used where
nothing can be compiled."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from kvrelay.engine import prebuilt
from kvrelay.engine.native import FLAGS, NativeBuildError, compile_library, load
from kvrelay.engine.prebuilt import LEVELS, NATIVE, Level, find, place_of

SAPPHIRE, ICELAKE, V3, _ = LEVELS


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the libraries of a wheel are; none yet."""
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "libraries")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KVRELAY_CACHE", raising=False)
    return tmp_path / "libraries"


def machine(monkeypatch: pytest.MonkeyPatch, name: str, features: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: name)
    monkeypatch.setattr(prebuilt, "_features", lambda: set(features.split()))


def has(folder: Path, source: Path, flags: tuple[str, ...], *levels: Level) -> None:
    for level in levels:
        path = folder / place_of(source, flags, level)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def chosen(source: Path, flags: tuple[str, ...], has_compiler: bool = False) -> str:
    found = find(source, flags, has_compiler)
    return "" if found is None else found.parent.name


def test_the_best_level_that_the_processor_has_is_taken(
    folder: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(folder, source, (NATIVE,), SAPPHIRE, ICELAKE, V3)
    machine(monkeypatch, "x86_64", f"{SAPPHIRE.needs} fpu")
    assert chosen(source, (NATIVE,)) == "sapphirerapids"
    machine(monkeypatch, "x86_64", SAPPHIRE.needs.replace("amx_bf16", ""))
    assert chosen(source, (NATIVE,)) == "icelake-server"
    machine(monkeypatch, "x86_64", V3.needs)
    assert chosen(source, (NATIVE,)) == "x86-64-v3"
    machine(monkeypatch, "x86_64", "sse2")
    assert chosen(source, (NATIVE,)) == ""
    machine(monkeypatch, "riscv64", SAPPHIRE.needs)
    assert chosen(source, (NATIVE,)) == ""


def test_where_there_is_a_compiler_it_makes_what_is_for_this_processor(
    folder: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, "x86_64", V3.needs)
    has(folder, source, (NATIVE,), V3)
    has(folder, source, ("-O2",), V3)
    assert chosen(source, (NATIVE,), has_compiler=True) == ""
    assert chosen(source, ("-O2",), has_compiler=True) == "x86_64"
    assert chosen(source, ("-O3",), has_compiler=True) == "", "of other flags"


def test_a_library_is_loaded_without_a_compiler_until_its_source_changes(
    folder: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = next(each for each in LEVELS if each.machine == platform.machine())
    path = folder / place_of(source, (), level)
    path.parent.mkdir(parents=True)
    compile_library(source, ["cc", *FLAGS], path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load(source).answer() == 42
    source.write_text("int answer(void) { return 43; }\n")
    load.cache_clear()
    with pytest.raises(NativeBuildError, match="needs a C compiler"):
        load(source)
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").rglob("*.so"))
