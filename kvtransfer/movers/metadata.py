"""What one agent tells another, through the control plane, so that its memory can be read.

A digest stands in front: NIXL and UCX parse their part in C++, and are given only what arrived
whole. (It is no defence against a forger; control connections are authenticated.)
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.agent import AgentError
from kvrelay.kvtransfer.layout import CopySpan, HeadShare, head_overlap

DIGEST_BYTES = 8


class Space(msgspec.Struct, frozen=True, array_like=True):
    """Blocks in one run of registered memory."""

    num_blocks: int
    address: int = 0  # where block 0 begins, in its owner's address space
    memory: str = "DRAM"  # NIXL's name of the memory's kind: "DRAM" or "VRAM"
    device: int = 0  # CUDA device index; 0 for DRAM


class AgentMetadata(msgspec.Struct, frozen=True, array_like=True):
    """Immutable facts about one incarnation of an agent."""

    transport: str  # say "nixl/UCX": agents of different transports cannot talk
    agent: str  # unique to the incarnation
    bytes_per_block: int
    spaces: dict[Tier, Space]  # the device pool, and the host arena if there is one
    share: HeadShare | None = None  # which heads its blocks hold; None: a block is just bytes
    connection: bytes = b""  # the transport's own metadata

    def pack(self) -> bytes:
        body = msgspec.msgpack.encode(self)
        return _digest(body) + body


def pack_ranks(each: Sequence[bytes]) -> bytes:
    """Metadata of a worker: of the agents of all its ranks, in their order."""
    return msgspec.msgpack.encode(each)


def unpack_ranks(peer: NodeId, data: bytes) -> list[bytes]:
    """Returns the metadata of each rank. Raises AgentError."""
    try:
        return msgspec.msgpack.decode(data, type=list[bytes])
    except msgspec.DecodeError as error:
        raise AgentError(f"agent metadata of {peer} cannot be read: {error}") from error


def read(peer: NodeId, data: bytes) -> AgentMetadata:
    """Reads what one agent of `peer` says, whatever that is. Raises AgentError."""
    digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if digest != _digest(body):
        raise AgentError(f"agent metadata of {peer} is damaged ({len(data)} bytes)")
    try:
        return msgspec.msgpack.decode(body, type=AgentMetadata)
    except msgspec.DecodeError as error:
        raise AgentError(f"agent metadata of {peer} cannot be read: {error}") from error


def unpack(peer: NodeId, data: bytes, own: AgentMetadata, *, num_blocks: int) -> AgentMetadata:
    """Metadata of `peer`, whose pool has `num_blocks`. Raises AgentError that names what cannot be
    read or does not fit to `own`."""
    facts = read(peer, data)
    pool = facts.spaces.get(Tier.DEVICE)
    compared: list[tuple[str, object, object]] = [
        ("transport", facts.transport, own.transport),
        ("number of blocks", pool.num_blocks if pool else 0, num_blocks),
    ]
    theirs, ours = facts.share, own.share
    if theirs is None or ours is None:
        compared.append(("bytes per block", facts.bytes_per_block, own.bytes_per_block))
    else:
        compared += [
            ("KV heads", theirs.num_heads, ours.num_heads),
            ("planes per block", theirs.num_planes, ours.num_planes),
            ("bytes per head", theirs.bytes_per_head, ours.bytes_per_head),
        ]
    for what, they_say, expected in compared:
        if they_say != expected:
            raise AgentError(f"{peer} differs in {what}: it says {they_say}, expected {expected}")
    if theirs and not (theirs.is_valid and theirs.bytes_per_block == facts.bytes_per_block):
        raise AgentError(
            f"{peer} has blocks of {facts.bytes_per_block} bytes, not those of {theirs}"
        )
    return facts


def copy_spans(peer: NodeId, src: AgentMetadata, dst: AgentMetadata) -> tuple[CopySpan, ...]:
    """Which bytes of a block of `src` go where in a block of `dst`. Raises AgentError if there are
    none: the two have no head in common."""
    if src.share is None or dst.share is None:
        return (CopySpan(0, 0, dst.bytes_per_block),)
    spans = head_overlap(src.share, dst.share)
    if not spans:
        raise AgentError(
            f"{peer} has KV heads {src.share.heads.start} to {src.share.heads.stop - 1},"
            f" and none of {dst.share.heads.start} to {dst.share.heads.stop - 1}"
        )
    return spans


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=DIGEST_BYTES, person=b"kvrelay-agent").digest()
