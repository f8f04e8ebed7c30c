"""What one agent tells another, through the control plane, so that its pool can be read.

A digest stands in front: NIXL and UCX parse their part in C++, and are given only what arrived
whole. (It is no defence against a forger; control connections are authenticated.)
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from engine.node import NodeId
from kvtransfer.agent import AgentError

DIGEST_BYTES = 8


class AgentMetadata(msgspec.Struct, frozen=True, array_like=True):
    """Immutable facts about one incarnation of an agent."""

    transport: str  # "local", "nixl/UCX", ...: agents of different transports cannot talk
    agent: str  # unique to the incarnation
    num_blocks: int
    bytes_per_block: int
    address: int = 0  # of block 0, in the peer's address space
    memory: str = "DRAM"  # NIXL's name of the memory's kind: "DRAM" or "VRAM"
    device: int = 0  # CUDA device index; 0 for DRAM
    connection: bytes = b""  # the transport's own metadata

    def pack(self) -> bytes:
        body = msgspec.msgpack.encode(self)
        return _digest(body) + body


def unpack(
    peer: NodeId, data: bytes, *, transport: str, num_blocks: int, bytes_per_block: int
) -> AgentMetadata:
    """Metadata of `peer`. Raises AgentError that names what cannot be read or does not fit."""
    digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if digest != _digest(body):
        raise AgentError(f"agent metadata of {peer} is damaged ({len(data)} bytes)")
    try:
        facts = msgspec.msgpack.decode(body, type=AgentMetadata)
    except msgspec.DecodeError as error:
        raise AgentError(f"agent metadata of {peer} cannot be read: {error}") from error
    for what, theirs, ours in (
        ("transport", facts.transport, transport),
        ("number of blocks", facts.num_blocks, num_blocks),
        ("bytes per block", facts.bytes_per_block, bytes_per_block),
    ):
        if theirs != ours:
            raise AgentError(f"{peer} differs in {what}: it says {theirs}, expected {ours}")
    return facts


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=DIGEST_BYTES, person=b"kvrelay-agent").digest()
