"""C beside Python: compiled when it is first loaded, and kept in the user's cache directory.

Life of a library: its sources are in a package. The first process that loads it compiles them, in
parallel; others wait for it under a file lock, and later ones find the library. Its name is a hash
of the sources and headers, the compiler, the flags and the kind of machine. It is synced to disk
before it is renamed into place, and ends with a digest of itself: a truncated or overwritten
library is compiled again. Python's own headers are not needed. A wheel brings libraries for where
there is no compiler (`prebuilt`).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cffi import FFI

from kvrelay.engine import prebuilt
from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.files import check_owner, given_folder
from kvrelay.engine.prebuilt import NATIVE, contents_of, digest_of, folder_of, sources_of

BUILD_TIMEOUT_S = 600.0  # for one file: on a machine that is busy it takes minutes
FLAGS = ("-O3", "-std=c11", "-fPIC")
MAX_SHOWN = 300  # characters of what the compiler wrote
MARK = b"kvrelay-library\0"  # before the digest at the end of a library

_CTYPES: dict[str, Any] = {
    "void": None,
    "_Bool": ctypes.c_bool,
    "int": ctypes.c_int,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
}


class NativeBuildError(RuntimeError):
    """C code cannot be built here. The text is one line that says what is needed."""


@cache
def load(
    source: Path,
    flags: Sequence[str] = (),
    *,
    hold_gil: bool = False,
    ffi: FFI | None = None,
    cache_dir: Path | None = None,
) -> Any:
    """The shared library made from `source`, which is built as `build` says.

    A `ctypes.CDLL`, or with `ffi` an object with the functions that are declared there (see
    `declarations`), which take addresses for pointers. With `hold_gil` calls keep Python's lock:
    right for calls of microseconds, which would wait longer to get it back than they take.
    """
    opener: Callable[[str], Any] = ctypes.PyDLL if hold_gil else ctypes.CDLL
    if ffi is not None:
        opener = partial(_declared, ffi, ctypes.PYFUNCTYPE if hold_gil else ctypes.CFUNCTYPE)
    if given := prebuilt.find(source, flags, has_compiler()):
        with contextlib.suppress(OSError):  # for an older C library than this wheel's
            return opener(str(given))
    path = build(source, flags, cache_dir=cache_dir)
    try:
        return opener(str(path))
    except OSError:  # its bytes are those that were written, and still it is not for this machine
        path = build(source, flags, cache_dir=cache_dir, instead_of=path.stat())
    try:
        return opener(str(path))
    except OSError as error:
        raise NativeBuildError(f"{path} cannot be loaded, newly compiled: {error}") from error


def _declared(ffi: FFI, prototype: Any, path: str) -> SimpleNamespace:
    """The declared functions and constants. Called through ctypes: cffi always releases the lock,
    and takes pointers of the right type only. `library` is what keeps them loaded."""
    library, found = ffi.dlopen(path), SimpleNamespace(library=ctypes.CDLL(path))
    for name in dir(library):
        value = getattr(library, name)
        if isinstance(value, ffi.CData):
            kind = ffi.typeof(value)
            is_text = kind.result.kind == "pointer" and kind.result.item.cname == "char"
            result = ctypes.c_char_p if is_text else _ctype(kind.result)
            made = prototype(result, *map(_ctype, kind.args))
            value = made(int(ffi.cast("uintptr_t", value)))
        setattr(found, name, value)
    return found


def _ctype(kind: Any) -> Any:
    """The type of an argument, result or field, for ctypes."""
    if kind.kind == "pointer":
        return ctypes.c_void_p
    return _structure(kind) if kind.kind == "struct" else _CTYPES[kind.cname]


def structure(ffi: FFI, name: str) -> Any:
    """A struct that a header declares, as a class of ctypes: pointers are addresses in it."""
    return _structure(ffi.typeof(name))


@cache
def _structure(kind: Any) -> Any:
    fields = [(name, _ctype(field.type)) for name, field in kind.fields]
    made: Any = type(kind.cname, (ctypes.Structure,), {"_fields_": fields})
    assert all(getattr(made, name).offset == field.offset for name, field in kind.fields), kind
    return made


def declarations(*headers: Path) -> FFI:
    """What C headers declare, for cffi. Lines of the preprocessor are left out, so constants that
    Python needs have to be enums there."""
    ffi = FFI()
    for header in headers:
        text = header.read_text(encoding="utf-8")
        ffi.cdef(re.sub(r"^[ \t]*#(?:.*\\\n)*.*$", "", text, flags=re.MULTILINE))
    return ffi


def build(
    source: Path,
    flags: Sequence[str] = (),
    *,
    cache_dir: Path | None = None,
    instead_of: os.stat_result | None = None,
) -> Path:
    """Path of the shared library made from `source`; compiles it unless that was done before.

    `source` is one C file or a folder of them, with its subfolders. `flags` (a tuple) come after
    the usual ones; where a compiler fails with -flto it is run without. The library is kept in
    `cache_dir`/native. `instead_of`: a library that could not be loaded although its bytes are
    right. Raises NativeBuildError.
    """
    compiler = _compiler(source)
    command = [*compiler, *FLAGS, *flags]
    name = source.stem if source.is_file() else "-".join(source.parts[-2:])
    root = cache_dir or default_cache_dir()
    path = root / "native" / f"{name}-{_key(source, command)}.so"
    try:
        given_folder(path.parent)
        if not _is_sound(path, instead_of):
            _build_once(source, command, path, root / f"native-{name}.lock", instead_of)
    except OSError as error:
        raise NativeBuildError(
            f"cannot use {path.parent}, where compiled C code is kept ({error.strerror}): set"
            " KVRELAY_CACHE or XDG_CACHE_HOME to a directory that can be written to"
        ) from error
    return path


def has_compiler() -> bool:
    """Whether `CC`, or what a system calls its compiler, is there."""
    return shutil.which((shlex.split(os.environ.get("CC", "")) or ["cc"])[0]) is not None


def _compiler(source: Path) -> list[str]:
    """`CC`, which may have arguments, or what a system calls its compiler."""
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    program = shutil.which(command[0])
    if program is None:
        raise NativeBuildError(
            f"{source.name} needs a C compiler, and there is no {command[0]!r} on PATH: install one"
            " (for example gcc or clang), or set CC to its command"
        )
    return [program, *command[1:]]


def _key(source: Path, command: Sequence[str]) -> str:
    """Changes with whatever the library is made of."""
    program = os.path.realpath(command[0])
    stat = os.stat(program)
    parts = [
        repr((program, stat.st_size, stat.st_mtime_ns, *command[1:])).encode(),
        repr((platform.system(), platform.machine(), platform.libc_ver())).encode(),
    ]
    parts += contents_of(source)
    if NATIVE in command:
        parts.append(_cpu())  # a home directory may be shared by unlike machines
    return digest_of(parts)


def _cpu() -> bytes:
    """Identifies what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    wanted = (b"model name", b"flags", b"Features", b"CPU part")
    return b"\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _is_sound(path: Path, instead_of: os.stat_result | None) -> bool:
    """Whether the library is there with all its bytes, and is not that one."""
    try:
        check_owner(path)  # it is loaded into this process
        whole = path.read_bytes()
        if instead_of is not None and os.path.samestat(path.stat(), instead_of):
            return False
    except FileNotFoundError:
        return False
    library, mark, digest = whole.rpartition(MARK)
    return bool(mark) and digest == hashlib.sha256(library).digest()


def _build_once(
    source: Path, command: list[str], path: Path, lock: Path, instead_of: os.stat_result | None
) -> None:
    """One of the processes (and threads) that get here together compiles. Raises OSError where
    nothing can be written."""
    from filelock import FileLock, Timeout  # 45 ms to import, and seldom needed

    try:
        with FileLock(lock, timeout=BUILD_TIMEOUT_S):
            if not _is_sound(path, instead_of):
                compile_library(source, command, path)
    except Timeout as error:
        raise NativeBuildError(
            f"another process has held {lock} for {BUILD_TIMEOUT_S:g} s, to compile {source.name}:"
            " end it, or wait and start again"
        ) from error
    except NotImplementedError:  # a file system without locks: each builds, the last one stays
        compile_library(source, command, path)


def compile_library(source: Path, command: list[str], path: Path) -> None:
    """Into `path`, by a compiler with its flags. Raises NativeBuildError."""
    try:
        _compile(source, command, path)
    except NativeBuildError:
        if "-flto" not in command:
            raise
        _compile(source, [flag for flag in command if flag != "-flto"], path)


def _compile(source: Path, command: list[str], path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix=path.stem, dir=path.parent) as scratch,
        ThreadPoolExecutor(os.cpu_count()) as threads,
    ):

        def compile_one(number: int, file: Path) -> str:
            made = f"{scratch}/{number}-{file.stem}.o"
            _run([*command, "-c", f"-I{folder_of(source)}", "-o", made, str(file)])
            return made

        sources = sources_of(source)
        objects = list(threads.map(compile_one, range(len(sources)), sources))
        made = Path(scratch) / path.name
        _run([*command, "-shared", "-o", str(made), *objects, "-lm"])
        _publish(made, path)


def _publish(made: Path, path: Path) -> None:
    """Rename it into place once all of it, with its digest, is on the disk."""
    with made.open("r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(MARK + digest)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(made.parent)
    os.replace(made, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _run(arguments: list[str]) -> None:
    try:
        run = subprocess.run(arguments, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(
            f"{shlex.join(arguments)} took longer than {BUILD_TIMEOUT_S:g} s: a C11 compiler that"
            " works is needed"
        ) from error
    except OSError as error:
        raise NativeBuildError(f"{shlex.join(arguments)} cannot be run: {error}") from error
    if run.returncode:
        raise NativeBuildError(
            f"{arguments[0]} failed: exit status {run.returncode}, {_first_error(run.stderr)}:"
            " a C11 compiler with its standard headers is needed. The command was"
            f" {shlex.join(arguments)}"
        )


def _first_error(written: str) -> str:
    lines = [line.strip() for line in written.splitlines() if line.strip()]
    telling = next((line for line in lines if "error" in line.lower()), "")
    return (telling or " ".join(lines) or "no message")[:MAX_SHOWN]
