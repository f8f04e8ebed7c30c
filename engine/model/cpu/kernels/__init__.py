"""The CPU kernels: C sources in the folders beside this file, compiled once per machine type and
cached. What Python calls and fills is declared in the `api.h` of each folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvrelay.engine import native

FOLDER = Path(__file__).parent
# No -ffast-math: linked into a shared library it turns off denormals for the whole process.
FLAGS = (
    *("-std=gnu11", "-O2", "-ftree-vectorize", "-march=native", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)

_ffi = native.declarations(
    *(FOLDER / name / "api.h" for name in ("gemm", "sampling", "layers", "attention", "step"))
)
constants: Any = _ffi.dlopen(None)  # the enums


def structure(name: str) -> Any:
    """A class of ctypes for a struct that the kernels are given."""
    return native.structure(_ffi, name)


class KernelsUnavailable(Exception):
    """The kernels cannot be compiled or loaded here; the text says why."""


def load(cache_dir: Path) -> Any:
    """The compiled kernels, kept in `cache_dir`/native: the functions that are declared, which
    take addresses. Raises KernelsUnavailable."""
    try:
        return native.load(FOLDER, FLAGS, cache_dir=cache_dir, ffi=_ffi)
    except native.NativeBuildError as error:
        raise KernelsUnavailable(str(error)) from error
