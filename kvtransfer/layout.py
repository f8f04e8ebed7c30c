"""Where the bytes of a KV block lie: one block, one span, one descriptor.

The pool is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, so a block is one
contiguous run of bytes in device memory, host memory, a file and on the wire, and the heads of a
tensor-parallel rank are one contiguous run inside each (layer, k or v) plane of the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from engine.config import DTYPE_BYTES, KVSpec

LAYOUT_VERSION = 1
"""Raised whenever the same KVSpec comes to mean other bytes."""

FINGERPRINT_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Byte offsets in a pool of `spec`; every span is `(offset, length)` in bytes."""

    spec: KVSpec

    @property
    def bytes_per_block(self) -> int:
        return self.spec.bytes_per_block

    def span(self, block_id: int) -> tuple[int, int]:
        """The block, from the start of the pool."""
        assert block_id >= 0, block_id
        return block_id * self.bytes_per_block, self.bytes_per_block

    def heads(self, rank: int, tp_size: int) -> range:
        """KV heads of a tensor-parallel rank. `num_kv_heads` is a multiple of `tp_size`."""
        assert 0 <= rank < tp_size, (rank, tp_size)
        assert self.spec.num_kv_heads % tp_size == 0, (self.spec.num_kv_heads, tp_size)
        share = self.spec.num_kv_heads // tp_size
        return range(rank * share, (rank + 1) * share)

    def rank_spans(self, rank: int, tp_size: int) -> list[tuple[int, int]]:
        """The rank's share of a block, from the start of the block: one span per plane, that is
        `2 * num_layers`, in order of (layer, k before v)."""
        spec = self.spec
        head = spec.block_size * spec.head_dim * DTYPE_BYTES[spec.dtype]
        plane = spec.num_kv_heads * head
        heads = self.heads(rank, tp_size)
        return [
            (i * plane + heads.start * head, len(heads) * head) for i in range(2 * spec.num_layers)
        ]


def fingerprint(model: bytes, spec: KVSpec, version: int = LAYOUT_VERSION) -> bytes:
    """Names what KV bytes mean: the model (a digest of its config and weights), shape and layout.

    Two workers exchange KV, and two block names can be equal, only if this is.
    """
    shape = (
        f"{version} {spec.num_layers} {spec.num_kv_heads} {spec.head_dim} {spec.block_size}"
        f" {spec.dtype}\n"
    )
    data = shape.encode() + model
    return blake2b(data, digest_size=FINGERPRINT_BYTES, person=b"kvrelay-layout").digest()
