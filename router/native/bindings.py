"""Bindings of the router's native code: what `kvrelay_router.h` declares.

Structs are allocated and read with cffi; functions hold Python's lock: they take microseconds, and
would wait longer to get the lock back. They take addresses for pointers.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from kvrelay.engine.native import declarations, load

FOLDER = Path(__file__).parent
FLAGS = ("-fvisibility=hidden", "-flto")

ffi = declarations(FOLDER / "kvrelay_router.h")
_ADDRESS = ffi.typeof("uintptr_t")
constants = ffi.dlopen(None)  # the enums of the header


@cache
def bindings() -> Any:
    """The functions. Compiled when first asked for; raises NativeBuildError where that fails."""
    return load(FOLDER, FLAGS, ffi=ffi, hold_gil=True)


def address_of(pointer: Any) -> int:
    """The address that a cffi pointer or array points to."""
    return int(ffi.cast(_ADDRESS, pointer))
