"""Messages between a consumer of KV (a decode worker) and a producer (a prefill worker).

Life of a handoff: KVConnect / KVConnected once per pair and epoch; KVReady after each chunk; the
consumer reads; KVConfirmRequest asks whether the blocks were held all the while; the answer is
KVConfirmed or KVRefused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.engine.request import TokenLogprobs
from kvrelay.engine.wire.codec import register


@dataclass(frozen=True, slots=True)
class KVConnect:
    """Consumer to producer: ask for agent metadata, to read the pool."""

    consumer: NodeId
    fingerprint: bytes
    compatibility: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class KVConnected:
    """Producer to consumer: agent metadata and the size of the pool of this epoch. Without metadata
    the two do not fit, and exchange nothing."""

    producer: NodeId
    epoch: int
    fingerprint: bytes
    num_blocks: int
    metadata: bytes
    compatibility: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class KVFetch:
    """Consumer to a worker that holds the prefix: export the blocks of these hashes, in order.
    Answered by `KVReady`s, the last of them `final`; together they may cover fewer blocks. Where
    layers are in groups, they are those of the first group, and `first` is an entry of it."""

    request_id: str
    attempt: int
    consumer: NodeId
    first: int  # index of block_hashes[0] in the sequence
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class KVReady:
    """Producer to consumer: blocks [first, first + len(block_ids)) of the request can be read.

    Of a prefix export, `final` says that no more blocks will come, and there is no
    `next_token`."""

    request_id: str
    attempt: int
    producer: NodeId
    epoch: int
    first: int
    block_ids: tuple[int, ...]  # -1: the consumer does not need it (where layers are in groups)
    checksums: tuple[int, ...]
    num_tokens: int  # positions covered by blocks [0, first + len)
    final: bool  # True: all of the prompt is covered, and `next_token` was sampled
    next_token: int | None = None
    next_logprobs: TokenLogprobs | None = None
    lease: int = 0  # number of the producer's lease: the same request may be computed twice
    tier: Tier = Tier.DEVICE  # where the blocks are; device or host
    # The end of all blocks that a prefix export covers, where layers attend to windows: there the
    # consumer continues, and reads what the windows show.
    covers: int = 0


@dataclass(frozen=True, slots=True)
class KVConfirmRequest:
    """Consumer to producer: all blocks were read; was the lease held throughout?"""

    request_id: str
    attempt: int
    consumer: NodeId
    lease: int = 0


@dataclass(frozen=True, slots=True)
class KVRelease:
    """Consumer to producer: end the lease; there is nothing to confirm."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class KVConfirmed:
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class KVRefused:
    """The lease was lost, or never was: whatever was read must not be used. To one that has not
    begun to read: the producer's memory is wanted for a higher class, so it does without."""

    request_id: str
    attempt: int
    reason: str


class CacheAction(StrEnum):
    """What to do with KV that no request uses at the moment."""

    PARK = "park"  # out of device memory, into the lower tiers
    RESUME = "resume"  # back into device memory, ahead of the next request
    PIN = "pin"  # keep it rather than other KV, within the quota of pins
    UNPIN = "unpin"
    DROP = "drop"  # forget it in every tier


@dataclass(frozen=True, slots=True)
class CacheOrder:
    """Router to a worker, about a session's blocks. Best effort: blocks that are in use or not
    cached are left alone. Answered by `CacheOrderDone` when no more blocks will follow."""

    order_id: str
    router: NodeId
    action: CacheAction
    block_hashes: tuple[bytes, ...]  # in the order of the sequence
    lazy: bool = False  # PARK: what is on the device stays there until its memory is wanted


@dataclass(frozen=True, slots=True)
class CacheOrderDone:
    """`num_blocks`: how many of them the order was carried out for."""

    worker: NodeId
    order_id: str
    num_blocks: int


register(
    KVConnect,
    KVConnected,
    KVFetch,
    KVReady,
    KVConfirmRequest,
    KVRelease,
    KVConfirmed,
    KVRefused,
    CacheOrder,
    CacheOrderDone,
)
