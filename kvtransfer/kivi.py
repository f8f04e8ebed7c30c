"""KV in four bits a number (KIVI-4), for sessions that ask for it: where their blocks are kept
below the device, not where they are computed with.

A block is what is quantised together: keys in groups of a channel over 16 tokens, values in groups
of 32 channels of a token, each with its least and largest number as they were: 5.5 bits a number in
bfloat16. A block that comes back and leaves again does not change any more (`c/kivi.c`).

Some blocks stay exact: KV in float8, which has lost as much already; latents and heads of several
shapes, for which nobody has measured what it costs; states of recurrent layers; what a drafter
keeps.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.engine.kv.spec import DTYPE_BYTES, KVSpec
from kvrelay.engine.native import declarations, load
from kvrelay.engine.support import Capability, No, Trait, kv_traits, no_to

if TYPE_CHECKING:  # who only asks for sizes has no arrays
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

SOURCE = Path(__file__).parent / "c" / "kivi.c"
KINDS = {"bfloat16": 1, "float32": 2}  # as in kivi.h
GROUP_TOKENS, GROUP_CHANNELS = 16, 32  # as in kivi.c
MAX_MATRIX = 1 << 18  # numbers that a head has in a block


class Quantizer:
    """Blocks of one shape. May be used from several threads. Without a C compiler, NativeBuildError
    when it is made."""

    def __init__(self, spec: KVSpec, num_kv_heads: int) -> None:
        """`num_kv_heads`: of each plane of a block, of one rank. `spec`: not `why_exact`."""
        assert why_exact(spec) is None, spec
        functions, matrix = load_native(), (spec.block_size, spec.head_dim)
        self._shape = KINDS[spec.dtype], spec.num_layers, num_kv_heads, *matrix
        self._encode, self._decode = functions.kvr_kivi_encode, functions.kvr_kivi_decode
        self.block_bytes = spec.bytes_per_block // spec.num_kv_heads * num_kv_heads
        self.num_bytes = coded_bytes(spec, num_kv_heads)

    def encode(self, block: Bytes, out: Bytes) -> bool:
        """Fill the first `num_bytes` of `out`. False: it has numbers that are not finite."""
        assert len(block) == self.block_bytes, (len(block), self.block_bytes)
        assert len(out) >= self.num_bytes, (len(out), self.num_bytes)
        assert block.flags.c_contiguous
        assert out.flags.c_contiguous
        return bool(self._encode(*self._shape, block.ctypes.data, out.ctypes.data))

    def decode(self, coded: Bytes, block: Bytes) -> None:
        """Fill `block`, whatever `coded` has."""
        assert len(block) == self.block_bytes, (len(block), self.block_bytes)
        assert len(coded) >= self.num_bytes, (len(coded), self.num_bytes)
        assert block.flags.c_contiguous
        assert coded.flags.c_contiguous
        self._decode(*self._shape, coded.ctypes.data, block.ctypes.data)


def why_exact(spec: KVSpec) -> No | None:
    """Why blocks of this shape cannot be quantised; None: they can."""
    numbers, own = spec.block_size * spec.head_dim, set[Trait]()
    if spec.dtype not in KINDS or numbers % 8 or numbers > MAX_MATRIX:
        own = {Trait.UNEVEN_KV}
    return no_to(Capability.APPROXIMATE_KV, kv_traits(spec) | own)


def coded_bytes(spec: KVSpec, num_kv_heads: int) -> int:
    """What a block takes, of a shape that is not `why_exact`."""
    tokens, channels = spec.block_size, spec.head_dim
    groups = -(-tokens // GROUP_TOKENS) * channels + tokens * -(-channels // GROUP_CHANNELS)
    pair = 2 * groups * DTYPE_BYTES[spec.dtype] + tokens * channels
    return spec.num_layers * num_kv_heads * pair


@cache
def load_native() -> Any:
    """The functions, compiled when first asked for. Raises NativeBuildError."""
    return load(SOURCE, ("-march=native",), ffi=declarations(SOURCE.with_suffix(".h")))
