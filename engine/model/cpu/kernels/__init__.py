"""The CPU kernels: C sources beside this file, compiled once per machine type and cached."""

from __future__ import annotations

import ctypes
from pathlib import Path

from engine import native

FOLDER = Path(__file__).parent
SOURCES = tuple(sorted(FOLDER.rglob("*.c")))
# No -ffast-math: linked into a shared library it turns off denormals for the whole process.
FLAGS = (
    *("-std=gnu11", "-O2", "-ftree-vectorize", "-march=native", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "kvr_vector_width": (_LONG, []),
    "kvr_attention_bytes": (_LONG, []),
    "kvr_attention_stretch": (_LONG, []),
    "kvr_attention_tile": (_LONG, [_LONG, _LONG]),
    "kvr_rope_bytes": (_LONG, []),
    "kvr_multiplies": (_INT, [_INT]),
    "kvr_packed_bytes": (_LONG, [_LONG, _LONG, _INT]),
    "kvr_pack": (None, [_POINTER, _LONG, _LONG, _INT, _INT, _POINTER, _POINTER, _INT]),
    "kvr_linear": (
        None,
        [
            *(_POINTER, _LONG, _LONG, _LONG, _POINTER, _INT),
            *(_LONG, _POINTER, _POINTER, _LONG, _INT, _INT, _INT),
        ],
    ),
    "kvr_heads": (
        None,
        [
            *(_POINTER, _LONG, _LONG, _POINTER, _INT, _LONG, _LONG, _LONG, _LONG),
            *(_POINTER, _LONG, _LONG, _INT),
        ],
    ),
    "kvr_mixture_bytes": (_LONG, []),
    "kvr_add_experts": (None, [*([_POINTER] * 3), _LONG, _LONG, _INT, _INT]),
    "kvr_attention_plan": (
        None,
        [_LONG, _POINTER, _POINTER, *([_LONG] * 4), _POINTER, _POINTER, _POINTER],
    ),
    "kvr_attention": (None, [_POINTER, _POINTER, _POINTER, _POINTER]),
    "kvr_layer_bytes": (_LONG, []),
    "kvr_step_bytes": (_LONG, []),
    "kvr_layers": (None, [_POINTER, _LONG, _POINTER]),
    "kvr_before_attention": (None, [_POINTER, _POINTER]),
    "kvr_after_attention": (None, [_POINTER, _POINTER]),
    "kvr_rms_norm": (
        None,
        [_POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, ctypes.c_float, _INT],
    ),
    "kvr_rope_write": (None, [*([_POINTER] * 5), _LONG, _LONG, _INT]),
    "kvr_latent_write": (
        None,
        [_POINTER, _POINTER, _LONG, _LONG, _POINTER, _LONG, _POINTER, _LONG, _INT],
    ),
    "kvr_draw_bytes": (_LONG, []),
    "kvr_draw": (None, [_POINTER, _LONG, _LONG, _POINTER, _POINTER, _INT]),
    "kvr_cap": (None, [_POINTER, _LONG, ctypes.c_float, _INT]),
    "kvr_decode_bytes": (_LONG, []),
    "kvr_decode": (_LONG, [_POINTER]),
    "kvr_embed": (None, [_POINTER, _INT, _POINTER, _LONG, _LONG, _POINTER]),
}


class KernelsUnavailable(Exception):
    """The kernels cannot be compiled or loaded here; the text says why."""


def load(cache_dir: Path) -> ctypes.CDLL:
    """The compiled kernels, kept in `cache_dir`/native. Raises KernelsUnavailable."""
    try:
        return _bind(native.load(FOLDER, FLAGS, cache_dir=cache_dir))
    except native.NativeBuildError as error:
        raise KernelsUnavailable(str(error)) from error


def _bind(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
