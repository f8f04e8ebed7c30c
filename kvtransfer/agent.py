"""Effects by which a worker node has KV copied, and the protocols of what copies it.

Verbs and nouns are NIXL's: an agent registers memory, exchanges metadata with a peer, prepares a
descriptor list once, and then a transfer is two lists of indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from kvrelay.engine.kv.tier import DiskRecord, Tier
from kvrelay.engine.node import NodeId


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """Effect: make `peer`'s pool readable; answered by `PeerConnected`. Replaces an older epoch."""

    peer: NodeId
    epoch: int
    num_blocks: int
    metadata: bytes


@dataclass(frozen=True, slots=True)
class PeerConnected:
    peer: NodeId
    epoch: int
    error: str | None = None
    bytes_per_s: float = 0.0  # measured by a small read at once; 0: not measured
    not_timed: str | None = None  # why not, where it was tried


@dataclass(frozen=True, slots=True)
class ReadId:
    """Names a copy into the blocks of one sequence, which the connector asked for."""

    number: int


@dataclass(frozen=True, slots=True)
class MoveId:
    """Names a copy between a worker's own tiers, ahead of requests, which `Tiers` asked for."""

    number: int


TransferId = ReadId | MoveId
"""Unique within one life of a worker. Its type says who asked, and gets the `CopyDone`."""


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Effect: READ block src[i] of `peer`'s `src_tier` into own block dst[i] of `dst_tier`. Always
    answered by `CopyDone`: after `timeout_s` it is given up, and `CopyDone` comes once nothing can
    write to dst.

    With the node's own name as `peer` (at its own epoch) blocks move between its own tiers; it need
    not be connected. Only then may one of the tiers be storage, the other being memory.

    Storage that has keys instead of slots finds blocks by `names`, which are their hashes; with
    what is written there goes the checksum of each block, as it was computed."""

    transfer_id: TransferId
    peer: NodeId
    epoch: int
    src: tuple[int, ...]
    dst: tuple[int, ...]
    timeout_s: float
    src_tier: Tier = Tier.DEVICE
    dst_tier: Tier = Tier.DEVICE
    names: tuple[bytes, ...] = ()
    checksums: tuple[int, ...] = ()
    approximate: tuple[int, ...] = ()  # slots of dst whose blocks may be stored in fewer bits

    @property
    def text(self) -> str:
        """What it does, for errors."""
        way = f"from {self.src_tier} to {self.dst_tier}"
        return f"move of {len(self.src)} blocks {way} of {self.peer}"


NOT_STORED = -1  # in place of a checksum


@dataclass(frozen=True, slots=True)
class StoreIndex:
    """Effect: change the index of a store of this worker, in the order in which it was asked for
    together with copies from and to it. `remove` goes first; a slot is removed before it is written
    again, and put after it was written. Answered by `StoreFailed` if it failed."""

    remove: tuple[int, ...] = ()  # slots
    put: tuple[DiskRecord, ...] = ()
    tier: Tier = Tier.DISK


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """A store cannot be written (any more). What it holds may still be read, unless it is
    `lost`: the store is empty."""

    error: str
    lost: bool = False
    tier: Tier = Tier.DISK


@dataclass(frozen=True, slots=True)
class StoreRoom:
    """To a node: the machine has memory for the first `num_slots` slots of `tier` now, as `why`
    says. The others are not to be written."""

    tier: Tier
    num_slots: int
    why: str


@dataclass(frozen=True, slots=True)
class StoreFound:
    """To a node: `num_slots` slots of `tier` from `first_slot` on can be read, and hold these. The
    tier is as large as its slots; more records of the same slots may follow."""

    tier: Tier
    first_slot: int
    num_slots: int
    records: tuple[DiskRecord, ...]  # with slots of the tier; those that were asked for go first
    place: str = ""  # what they lie in, as each rank calls its part
    has_more: bool = False  # more that was asked for follows
    was_asked_for: bool = True


@dataclass(frozen=True, slots=True)
class FindStored:
    """Effect: find blocks of these names, the first ones first. In what workers of this machine
    have left, before all others: answered by `StoreFound`s, of which the last has no more, if any
    are found within a second. In storage that has keys: answered by a `StoreListed` of those that
    are there without a gap, unless the storage cannot be asked."""

    names: tuple[bytes, ...]
    tier: Tier = Tier.LEFT


@dataclass(frozen=True, slots=True)
class AttachStore:
    """To the ranks above 0: attach your parts of `place` to these slots of `tier`, as rank 0 has.
    Answered by `StoreFound`, once it can be read."""

    tier: Tier
    place: str
    first_slot: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class StoreListed:
    """To a node: storage that has keys holds blocks of these names, among others."""

    tier: Tier
    names: tuple[bytes, ...]
    asked: bytes = b""  # the first one of a `FindStored`, whose answer it is


@dataclass(frozen=True, slots=True)
class StoreGone:
    """To a node: these slots of `tier` cannot be read any more."""

    tier: Tier
    first_slot: int
    num_slots: int


MISSING, DAMAGED = -1, -2
"""In place of a checksum: storage that has keys holds no such block, or another one's bytes."""
UNKNOWN = -3
"""In place of a checksum: storage that has keys compares it, and says which it was."""


@dataclass(frozen=True, slots=True)
class CopyDone:
    """The transfer has settled: no byte of dst will be written by it from now on."""

    transfer_id: TransferId
    error: str | None
    checksums: tuple[int, ...] = ()  # over the bytes in memory (dst, or src where dst is storage)
    elapsed_s: float = 0.0
    num_bytes: int = 0
    stored_bytes: tuple[int, ...] = ()  # that each block takes in storage; (): as any other does
    # What they will have when they are read from storage, where some are stored in fewer bits.
    # NOT_STORED: it was not, because it has numbers that are not finite. (): as in `checksums`.
    stored_checksums: tuple[int, ...] = ()
    # By a rank, from storage that has keys: what each block's says of the block of all ranks.
    whole_checksums: tuple[int, ...] = ()


class Mover(Protocol):
    """Copies whole blocks between tiers. Calls do not wait for a copy; one thread makes them.

    It is made with the worker's KV memory by tier: the device pool and perhaps a host arena, each
    `[num_blocks, ...]`, contiguous, blocks of one size; the device pool on the CPU or a GPU.
    """

    def copy(self, request: CopyBlocks) -> Any:
        """Begin; returns a handle at once. Raises AgentError: nothing of it was begun."""
        ...

    def poll(self, handle: Any) -> CopyDone | None:
        """How it has ended, once nothing writes to its destination any more, with what the mover
        knows of checksums and sizes; that is told once, and ends the handle. Before that None.
        Raises AgentError if it has failed and has not settled: it is canceled then."""
        ...

    def cancel(self, handle: Any) -> None:
        """Begin no more of it. What was begun settles: `poll` says when. Never raises."""
        ...

    def close(self) -> None:
        """Settle every copy, whatever it takes."""
        ...


class DoneAtOnce:
    """A mover whose copies are over when `copy` returns: it returns how they have ended."""

    def poll(self, handle: CopyDone) -> CopyDone:
        return handle

    def cancel(self, handle: CopyDone) -> None:
        """There is no more of it."""

    def close(self) -> None:
        """There is nothing to settle."""


class PeerAgent(Mover, Protocol):
    """A mover that also reads from other workers. Where the two hold different heads, only common
    ones are written."""

    def metadata(self) -> bytes:
        """What a peer needs to read this agent's memory; opaque."""
        ...

    def connect(self, peer: NodeId, epoch: int, num_blocks: int, metadata: bytes) -> None:
        """Prepare `peer` for reads. Raises AgentError."""
        ...

    def disconnect(self, peer: NodeId) -> None:
        """Forget `peer`; unknown names are ignored."""
        ...

    def post_probe(self, peer: NodeId, num_bytes: int) -> tuple[Any, int]:
        """Post a READ of as many blocks of `peer`'s device memory as have `num_bytes`, at least
        one, into memory of the agent that nothing else uses, and that is never read. Returns a
        handle, as of `copy`, and the bytes, which are fewer than asked for if there are no more.
        Raises AgentError."""
        ...


PROBE_BYTES = 16 << 20
"""A read that is timed has this at most, or one block: a few milliseconds where KV moves fast."""
GIVEN_UP = "it was given up"
NO_COPY = MoveId(0)
"""In place of an id: the read is a probe."""


class AgentError(Exception):
    """A transfer or a connection failed; the text says which peer and why."""
