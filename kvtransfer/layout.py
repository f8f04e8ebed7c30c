"""The bytes of a KV block: one block, one span, one descriptor.

The pool is `[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]`, so a block
is one contiguous run of bytes in device memory, host memory, a file and on the wire, and the heads
of a tensor-parallel rank are one contiguous run inside each (layer, k or v) plane of the block.

Where some blocks hold states of recurrent layers, KV heads come first in all of them, and a rank's
share of any block is one run: of `num_units` parts of the same bytes, of keys and values or of a
state alike. These are the heads of a `HeadShare` then, in one plane.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from kvrelay.engine.kv.spec import KVSpec

LAYOUT_VERSION = 4
"""Raised whenever the same KVSpec comes to mean other bytes, or their checksum another number."""

FINGERPRINT_BYTES = 16


@dataclass(frozen=True, slots=True)
class HeadShare:
    """What the blocks of one tensor-parallel rank hold: of each plane, one run of heads.

    Valid if `size` divides `num_heads` and `rank` is below it."""

    rank: int
    size: int  # tensor-parallel size
    num_heads: int  # KV heads of the model, over all ranks
    num_planes: int  # k and v of each layer
    bytes_per_head: int  # in one plane of one block
    # Which even part of these heads is good here, where ranks with the same keys and values have
    # different states. Others have the other parts.
    part: int = 0
    num_parts: int = 1

    @property
    def is_valid(self) -> bool:
        sizes = (self.size, self.num_heads, self.num_planes, self.bytes_per_head, self.num_parts)
        divided = min(sizes) > 0 and self.num_heads % (self.size * self.num_parts) == 0
        return divided and 0 <= self.rank < self.size and 0 <= self.part < self.num_parts

    @property
    def heads(self) -> range:
        share = self.num_heads // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    @property
    def own_heads(self) -> range:
        """Those of its heads that others read here, and that its checksums tell."""
        count = len(self.heads) // self.num_parts
        return self.heads[self.part * count :][:count]

    @property
    def bytes_per_block(self) -> int:
        return self.num_planes * len(self.heads) * self.bytes_per_head


@dataclass(frozen=True, slots=True)
class CopySpan:
    """A run of bytes that two ranks share: offsets in a block of each."""

    src: int
    dst: int
    length: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Byte offsets in a pool of `spec`."""

    spec: KVSpec

    @property
    def bytes_per_block(self) -> int:
        return self.spec.bytes_per_block

    def span(self, block_id: int) -> tuple[int, int]:
        """`(offset, length)` of the block, from the start of the pool."""
        assert block_id >= 0, block_id
        return block_id * self.bytes_per_block, self.bytes_per_block

    def share(self, rank: int, tp_size: int) -> HeadShare:
        """What a tensor-parallel rank has. One of `num_kv_heads` and `tp_size` is a multiple of the
        other."""
        spec = self.spec
        size = min(tp_size, spec.num_kv_heads)
        assert size > 0, tp_size
        assert tp_size % size == 0, tp_size
        copies = tp_size // size
        copy = rank % copies
        if spec.draft_bytes:  # it has no parts by heads
            share = HeadShare(0, tp_size, 1, 1, spec.bytes_per_block)
        elif spec.num_state_groups:
            each = spec.bytes_per_block // spec.num_units
            share = HeadShare(rank // copies, size, spec.num_units, 1, each, copy, copies)
        else:
            planes = spec.num_planes * spec.num_layers
            share = HeadShare(rank // copies, size, spec.num_kv_heads, planes, spec.bytes_per_head)
        assert share.is_valid, share
        return share


def head_overlap(src: HeadShare, dst: HeadShare) -> tuple[CopySpan, ...]:
    """What a block of `src` has that a block of `dst` wants, in ascending order: the whole block
    if both hold the same heads, else one span per plane, and nothing if no head is common.

    Both are of one model: same planes, same heads, same bytes per head."""
    assert (src.num_heads, src.num_planes, src.bytes_per_head) == (
        dst.num_heads,
        dst.num_planes,
        dst.bytes_per_head,
    ), (src, dst)
    if src.own_heads == dst.heads:
        return (CopySpan(0, 0, src.bytes_per_block),)
    first = max(src.own_heads.start, dst.heads.start)
    count = min(src.own_heads.stop, dst.heads.stop) - first
    if count <= 0:
        return ()
    head = src.bytes_per_head
    return tuple(
        CopySpan(
            src=(plane * len(src.heads) + first - src.heads.start) * head,
            dst=(plane * len(dst.heads) + first - dst.heads.start) * head,
            length=count * head,
        )
        for plane in range(src.num_planes)
    )


def fingerprint(model: bytes, spec: KVSpec, version: int = LAYOUT_VERSION) -> bytes:
    """Names what KV bytes mean: the model (a digest of its config and weights), shape and layout.

    Two workers exchange KV, and two block hashes can be equal, only if this is.
    """
    shape = (
        f"{version} {spec.num_layers} {spec.num_kv_heads} {spec.head_dim} {spec.block_size}"
        f" {spec.dtype} {spec.num_planes}\n"
    )
    if spec.num_groups > 1:
        shape = f"{shape}groups {spec.windows} {spec.num_state_groups}\n"
    if spec.num_state_groups:
        shape = f"{shape}units {spec.num_units}\n"
    if spec.heads:
        shape += " ".join(f"{h.num_heads} {h.key_dim} {h.value_dim}" for h in spec.heads) + "\n"
    if spec.draft_bytes:
        shape += f"drafter {spec.draft_bytes} {spec.drafter}\n"
    data = shape.encode() + model
    return blake2b(data, digest_size=FINGERPRINT_BYTES, person=b"kvrelay-layout").digest()


def compatibility(model: bytes, spec: KVSpec) -> tuple[tuple[str, str], ...]:
    """What `fingerprint` is made of, field by field, to say how two workers differ."""
    fields = ("dtype", "num_layers", "num_planes", "num_kv_heads", "head_dim", "block_size")
    return (
        ("model", model.hex()[:12]),
        ("layout", str(LAYOUT_VERSION)),
        *((name, str(getattr(spec, name))) for name in fields),
        ("windows", str(spec.windows)),
        *((("heads", str(spec.heads)),) if spec.heads else ()),
        *((("drafter", spec.drafter[:12]),) if spec.drafter else ()),
    )
