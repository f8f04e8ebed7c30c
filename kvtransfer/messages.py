"""What a consumer (decode worker) and a producer (prefill worker) say to each other.

Life of a handoff: KVConnect / KVConnected once per pair and epoch; KVReady after each chunk; the
consumer reads; KVRead asks whether the blocks were held all the while; KVConfirmed or KVRefused.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.node import NodeId
from engine.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class KVConnect:
    """Consumer to producer: tell me how to read your pool."""

    consumer: NodeId
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class KVConnected:
    """Producer to consumer: agent metadata and the size of the pool of this epoch."""

    producer: NodeId
    epoch: int
    fingerprint: bytes
    num_blocks: int
    metadata: bytes


@dataclass(frozen=True, slots=True)
class KVReady:
    """Producer to consumer: blocks [first, first + len(block_ids)) of the request can be read."""

    request_id: str
    attempt: int
    producer: NodeId
    epoch: int
    first: int
    block_ids: tuple[int, ...]
    checksums: tuple[int, ...]
    num_tokens: int  # positions covered by blocks [0, first + len)
    final: bool  # True: all of the prompt is covered, and `next_token` was sampled
    next_token: int | None = None
    next_logprobs: TokenLogprobs | None = None
    lease: int = 0  # number of the producer's lease: the same request may be computed twice


@dataclass(frozen=True, slots=True)
class KVRead:
    """Consumer to producer: I have read them all; was the lease held throughout?"""

    request_id: str
    attempt: int
    consumer: NodeId
    lease: int = 0


@dataclass(frozen=True, slots=True)
class KVRelease:
    """Consumer to producer: I shall not read (any more); nothing is to be confirmed."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class KVConfirmed:
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class KVRefused:
    """The lease was lost, or never was: whatever was read must not be used."""

    request_id: str
    attempt: int
    reason: str
