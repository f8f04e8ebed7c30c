"""C code is compiled once, kept, rebuilt when it changes, and missed with one clear line."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from kvrelay.engine.native import NativeBuildError, build, declarations, load


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries are kept; nothing is there yet."""
    monkeypatch.delenv("KVRELAY_CACHE", raising=False)
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sources that need each other and a header, one of them in a folder of its own."""
    path = tmp_path / "sums"
    (path / "inner").mkdir(parents=True)
    (path / "sums.h").write_text("enum { BASE = 40 };\nint two(void);\nint answer(void);\n")
    (path / "answer.c").write_text('#include "sums.h"\nint answer(void) { return BASE + two(); }\n')
    (path / "inner" / "two.c").write_text('#include "sums.h"\nint two(void) { return 2; }\n')
    return path


def test_a_folder_of_sources_becomes_one_library(cache: Path, folder: Path) -> None:
    path = build(folder)
    assert answer(path) == 42
    assert list(cache.iterdir()) == [path]
    (folder / "sums.h").write_text("enum { BASE = 50 };\nint two(void);\nint answer(void);\n")
    (folder / "inner" / "two.c").write_text("int two(void) { return 3; }\n")
    assert answer(build(folder)) == 53


def test_what_a_header_declares_can_be_called(cache: Path, folder: Path) -> None:
    (folder / "sums.h").write_text(
        "#ifndef SUMS_H\n#define SUMS_H\n#define LONG(x) \\\n    (x)\n"
        "/* A comment. */\nenum { BASE = 40 };\nint two(void);\nint answer(void);\n#endif\n"
    )
    ffi = declarations(folder / "sums.h")
    for library in (load(folder, ffi=ffi), load(folder, ffi=ffi, hold_gil=True)):
        assert library.answer() == library.BASE + 2 == 42


def test_a_compiler_without_link_time_optimization_does_without(
    cache: Path, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\ncase " $* " in *" -flto "*) echo no >&2; exit 1;; esac\nexec cc "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    path = build(folder, ("-flto",))
    assert answer(path) == 42
    assert build(folder, ("-flto",)) == path
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize("damage", ["cut off", "garbage", "one byte"])
def test_a_damaged_library_is_built_again(damage: str, cache: Path, source: Path) -> None:
    path = build(source)
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    damaged = {"cut off": whole[: len(whole) // 2], "garbage": b"x" * 5000, "one byte": changed}
    path.write_bytes(damaged[damage])
    assert load(source).answer() == 42
    assert list(cache.iterdir()) == [path]


def test_a_whole_library_that_cannot_be_loaded_is_built_again_once(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened, real = build(source), [], ctypes.CDLL

    def refused(name: str) -> ctypes.CDLL:
        opened.append(Path(name).stat().st_ino)
        if len(opened) > healed_at:
            return real(name)
        raise OSError("wrong ELF class")

    monkeypatch.setattr(ctypes, "CDLL", refused)
    healed_at = 1
    assert load(source).answer() == 42
    assert len(set(opened)) == 2, "the second one is another file"
    load.cache_clear()
    opened.clear()
    healed_at = 9
    with pytest.raises(NativeBuildError, match=rf"{path}.*wrong ELF class"):
        load(source)
    assert len(opened) == 2


def test_a_library_is_on_the_disk_before_it_gets_its_name(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(handle: int) -> None:
        order.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def noted_replace(made: Path, path: Path) -> None:
        order.append(("rename", str(made)))
        replace(made, path)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    path = build(source)
    [made] = [name for action, name in order if action == "rename"]
    assert order == [
        *(("fsync", made), ("fsync", str(Path(made).parent))),
        *(("rename", made), ("fsync", str(path.parent))),
    ]


def test_whoever_waits_for_another_builder_too_long_is_told(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.engine.native.BUILD_TIMEOUT_S", 0.05)
    cache.parent.mkdir(parents=True)
    lock = cache.parent / "native-answer.lock"
    with FileLock(lock), pytest.raises(NativeBuildError, match=f"{lock} for 0.05 s"):
        build(source)


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
    monkeypatch.delenv("KVRELAY_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NativeBuildError, match="XDG_CACHE_HOME"):
        build(source)
