"""The CPU kernels: C sources beside this file, compiled once per machine type and cached.

A library's name is the hash of its sources, the flags and the CPU, so a changed source or another
machine on the same cache directory never meets a stale one. Of processes that start together one
compiles, on all its cores; the others wait for it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from time import monotonic

from filelock import FileLock, Timeout

from engine.native import compiler_command

SOURCES = (
    *("pool.c", "linear.c", "narrowed.c", "linear_integers.c", "linear_pairs.c"),
    *("linear_halves.c", "linear_tiles.c", "linear_int8_tiles.c", "linear_pack.c"),
    *("experts.c", "layers.c", "attention.c", "attention_tile.c", "step.c", "sampling.c"),
    "decode.c",
)
# No -ffast-math: linked into a shared library it turns off denormals for the whole process.
FLAGS = (
    *("-std=gnu11", "-O2", "-ftree-vectorize", "-march=native", "-pthread", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)
COMPILE_TIMEOUT_S = 120.0

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
    """The compiled kernels, from `cache_dir`/kernels or compiled into it. Raises
    KernelsUnavailable."""
    here = Path(__file__).parent
    headers = sorted(path.name for path in here.glob("*.h"))
    texts = [(here / name).read_bytes() for name in (*headers, *SOURCES)]
    key = blake2b(digest_size=12)
    for part in (*texts, " ".join(FLAGS).encode(), _cpu().encode()):
        key.update(blake2b(part).digest())
    library = cache_dir / "kernels" / f"cpu-{key.hexdigest()}.so"
    if not library.is_file():
        _compile_once([here / name for name in SOURCES], library)
    try:
        return _bind(ctypes.CDLL(str(library)))
    except OSError as error:
        raise KernelsUnavailable(f"{library} cannot be loaded: {error}") from error


def _bind(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _compile_once(sources: list[Path], library: Path) -> None:
    lock = library.parent.with_suffix(".lock")
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=COMPILE_TIMEOUT_S):
            if not library.is_file():
                _compile(sources, library)
    except Timeout as error:
        waited = f"{COMPILE_TIMEOUT_S:.0f} s"
        raise KernelsUnavailable(f"another process has held {lock} for {waited}") from error
    except NotImplementedError as error:  # filelock 3, on a file system without flock
        raise KernelsUnavailable(f"{lock} cannot be locked: {error}") from error
    except OSError as error:
        raise KernelsUnavailable(f"{error.strerror}: {error.filename or lock}") from error


def _compile(sources: list[Path], library: Path) -> None:
    """Raises OSError where nothing can be written."""
    compiler, deadline = compiler_command(), monotonic() + COMPILE_TIMEOUT_S

    def run(*arguments: str) -> None:
        subprocess.run(
            [*compiler, *FLAGS, *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=max(deadline - monotonic(), 0),
        )

    try:
        with (
            tempfile.TemporaryDirectory(dir=library.parent) as scratch,
            ThreadPoolExecutor(os.cpu_count()) as threads,
        ):
            objects = [f"{scratch}/{source.stem}.o" for source in sources]
            list(threads.map(lambda o, s: run("-c", "-o", o, str(s)), objects, sources))
            made = Path(scratch) / library.name
            run("-o", str(made), *objects, "-lm")
            made.rename(library)
    except subprocess.CalledProcessError as error:
        first = next(iter(error.stderr.strip().splitlines()), f"exit status {error.returncode}")
        raise KernelsUnavailable(f"{compiler[0]} failed: {first}") from error
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailable(f"{compiler[0]} took over {COMPILE_TIMEOUT_S:.0f} s") from error


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    told = dict.fromkeys(line for line in lines if line.startswith(wanted))
    return "\n".join([platform.machine(), platform.processor(), *told])
