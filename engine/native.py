"""C beside Python: compiled when it is first loaded, and kept in the user's cache directory.

Life of a library: a source lies in its package; the first process that loads it has `cc` make a
shared library under a name that says what it was made of (the source and the headers beside it,
the compiler, the flags, the kind of machine); every later process loads that file. It is put there
by renaming, so whoever sees the name sees all of it, and processes that build it at the same time
each put the same thing there. Nothing of Python's own headers is needed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

BUILD_TIMEOUT_S = 120.0
FLAGS = ("-O3", "-std=c11", "-fPIC", "-shared")
MAX_SHOWN = 300  # characters of what the compiler said


class NativeBuildError(RuntimeError):
    """C code cannot be built here. The text is one line that says what is needed."""


@cache
def load(source: Path, flags: Sequence[str] = (), *, hold_gil: bool = False) -> ctypes.CDLL:
    """The shared library made from `source`. `flags` (a tuple) come after the usual ones.

    With `hold_gil`, calls keep Python's lock: right for calls of microseconds, which would wait
    longer to get it back than they take.
    """
    path = build(source, flags)
    return (ctypes.PyDLL if hold_gil else ctypes.CDLL)(str(path))


def build(source: Path, flags: Sequence[str] = ()) -> Path:
    """Path of the shared library made from `source`; compiles it unless that was done before."""
    compiler = _compiler(source)
    path = _cache_dir() / f"{source.stem}-{_key(source, compiler, flags)}.so"
    if not path.exists():
        _compile(source, [*compiler, *FLAGS, *flags], path)
    return path


def compiler_command() -> list[str]:
    """`CC`, which may have arguments, or what a system calls its compiler."""
    return shlex.split(os.environ.get("CC", "")) or ["cc"]


def _compiler(source: Path) -> list[str]:
    command = compiler_command()
    program = shutil.which(command[0])
    if program is None:
        raise NativeBuildError(
            f"{source.name} needs a C compiler, and there is no {command[0]!r} on PATH: install one"
            " (for example gcc or clang), or set CC to its command"
        )
    return [program, *command[1:]]


def _key(source: Path, compiler: Sequence[str], flags: Sequence[str]) -> str:
    """Changes with whatever the library is made of."""
    program = os.path.realpath(compiler[0])
    stat = os.stat(program)
    parts = [
        *(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))),
        repr((program, stat.st_size, stat.st_mtime_ns, *compiler[1:])).encode(),
        repr((*FLAGS, *flags)).encode(),
        repr((platform.system(), platform.machine(), platform.libc_ver())).encode(),
    ]
    if any("native" in flag for flag in flags):
        parts.append(_cpu_features())  # a home directory may be shared by unlike machines
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def _cpu_features() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    path = Path(base) / "kvrelay" / "native"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise NativeBuildError(
            f"cannot make {path}, where compiled C code is kept ({error.strerror}): set"
            " XDG_CACHE_HOME to a directory that can be written to"
        ) from error
    return path


def _compile(source: Path, command: Sequence[str], path: Path) -> None:
    try:
        handle, made = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise NativeBuildError(
            f"cannot write to {path.parent}, where compiled C code is kept ({error.strerror}): set"
            " XDG_CACHE_HOME to a directory that can be written to"
        ) from error
    os.close(handle)
    arguments = [*command, "-o", made, str(source), "-lm"]
    try:
        run = subprocess.run(arguments, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
        if run.returncode:
            raise NativeBuildError(
                f"{shlex.join(arguments)} failed with status {run.returncode}: a C11 compiler with"
                f" its standard headers is needed; it said: {_first_error(run.stderr)}"
            )
        os.replace(made, path)
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(
            f"{shlex.join(arguments)} took longer than {BUILD_TIMEOUT_S:g} s: a C11 compiler that"
            " works is needed"
        ) from error
    except OSError as error:
        raise NativeBuildError(f"{shlex.join(arguments)} cannot be run: {error}") from error
    finally:
        Path(made).unlink(missing_ok=True)


def _first_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = next((line for line in lines if "error" in line.lower()), "")
    return (telling or " ".join(lines) or "nothing")[:MAX_SHOWN]
