"""Performs a worker's effects on a mover and on the store of its tier.

Life of a copy: begun; polled until nothing writes to its destination any more, canceled meanwhile
if it has failed or is out of time; checksummed if it was good; answered. `TransferExecutor` holds
the copies of one mover, `kvtransfer.transfer_loop` is the thread that drives them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.agent import (
    AgentError,
    ConnectPeer,
    CopyBlocks,
    CopyDone,
    Mover,
    PeerAgent,
    PeerConnected,
    StoreFailed,
    StoreFound,
    StoreGone,
    StoreIndex,
    StoreListed,
    StoreRoom,
    TransferId,
)
from kvrelay.kvtransfer.checksum import BlockBytes, checksum_blocks
from kvrelay.kvtransfer.layout import HeadShare
from kvrelay.kvtransfer.probes import Probes
from kvrelay.kvtransfer.store import DiskStore, StoreError
from kvrelay.kvtransfer.store.arena import HostArena
from kvrelay.kvtransfer.tiers.registry import is_storage

logger = logging.getLogger(__name__)

StoreChange = StoreFailed | StoreFound | StoreGone | StoreListed | StoreRoom
Clock = Callable[[], float]
Corrupt = Callable[[CopyBlocks, Any], None]

SETTLE_POLL_S = 500e-6
IDLE_WAIT_S = 1.0  # between two polls of a thread that has nothing to do
STORE_CHECK_BUSY_S = 1.0
STORE_CHECK_IDLE_S = 5.0
SHUTS_DOWN = "the worker shuts down"


@dataclass(slots=True)
class _Copy:
    request: CopyBlocks
    handle: Any
    started: float
    checksums: tuple[int, ...] | None  # taken before it was begun: of what goes to storage
    error: str | None = None  # given up for this reason, and not settled yet


class TransferExecutor:
    """Calls on one mover, from the one thread that owns it.

    Invariant: a copy is in `_copies` from `post` until its mover says that it has settled, and
    leaves with its only CopyDone.
    """

    def __init__(
        self,
        node: NodeId,
        epoch: int,
        mover: Mover,
        pools: Mapping[Tier, BlockBytes],
        *,
        share: HeadShare | None = None,
        reserve: Callable[[Sequence[int]], None] | None = None,
        corrupt: Corrupt | None = None,
        probes: Probes | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`pools`: the worker's own memory, tier by tier, `[num_blocks, bytes_per_block]` each;
        `share`: the heads that blocks there hold. `reserve`: called with slots of host memory
        before they are written; raises AgentError. `corrupt` is called with every good copy into
        memory, and the pool that it went to, before its checksums are taken: to inject faults.
        `probes`, over the same mover, time a read from each peer, which only a PeerAgent has;
        None: that is not done."""
        self._node = node
        self._mover = mover
        self._pools = pools
        self._share = share
        self._reserve = reserve
        self._corrupt = corrupt
        self._probes = probes
        self._clock = clock
        self._own_epoch = epoch
        self._epochs: dict[NodeId, int] = {}
        self._copies: dict[TransferId, _Copy] = {}
        self._answered: list[CopyDone] = []  # for the next `poll_copies` to return

    def connect(self, request: ConnectPeer) -> PeerConnected | None:
        """The answer; None if `poll_copies` returns it, once a read from the peer was timed."""
        self._epochs.pop(request.peer, None)
        try:
            agent = cast(PeerAgent, self._mover)
            agent.connect(request.peer, request.epoch, request.num_blocks, request.metadata)
        except Exception as error:
            return PeerConnected(request.peer, request.epoch, one_line(error))
        self._epochs[request.peer] = request.epoch
        connected = PeerConnected(request.peer, request.epoch)
        if self._probes is None:
            return connected
        self._probes.begin(connected)
        return None

    def post(self, request: CopyBlocks) -> None:
        """Begin a copy; `poll_copies` returns its end."""
        assert request.transfer_id not in self._copies, request.transfer_id
        started = self._clock()
        try:
            copy = self._begin(request, started)
        except Exception as error:
            self._answered.append(failed_copy(request, one_line(error), self._clock() - started))
            return
        if copy is None:
            self._answered.append(CopyDone(request.transfer_id, None))
        else:
            self._copies[request.transfer_id] = copy

    def poll_copies(self) -> list[CopyDone | PeerConnected]:
        """The copies that have settled since the last call, and the peers that were timed. Does not
        wait. Where the mover cannot say that a copy has settled it is asked again: its destination
        belongs to nothing else before."""
        for transfer_id, copy in list(self._copies.items()):
            answer = self._advance(copy)
            if answer is not None:
                del self._copies[transfer_id]
                self._answered.append(answer)
        connected = self._probes.poll() if self._probes is not None else []
        done: list[CopyDone | PeerConnected] = [*connected, *self._answered]
        self._answered = []
        return done

    def audit(self) -> int:
        """Live transfer handles and answers not fetched: 0 when idle."""
        num_probes = self._probes.num_live if self._probes is not None else 0
        return len(self._copies) + len(self._answered) + num_probes

    @property
    def is_timing(self) -> bool:
        """`poll_copies` should be called often."""
        return self._probes is not None and self._probes.is_timing

    def close(self, timeout_s: float) -> list[CopyDone | PeerConnected]:
        """Give up every copy, wait up to `timeout_s` for them to settle, then close the mover,
        which settles the rest. Returns the answers."""
        for copy in self._copies.values():
            self._give_up(copy, copy.error or SHUTS_DOWN)
        done = self.poll_copies()
        deadline = self._clock() + timeout_s
        while self._copies and self._clock() < deadline:
            time.sleep(SETTLE_POLL_S)
            done += self.poll_copies()
        if self._probes is not None:
            done += self._probes.close(SHUTS_DOWN)
        try:
            self._mover.close()
        except Exception as error:
            logger.warning("what copies KV was not closed: %s", one_line(error))
        done += [self._failed(copy, copy.error or SHUTS_DOWN) for copy in self._copies.values()]
        self._copies.clear()
        return done

    def _begin(self, request: CopyBlocks, started: float) -> _Copy | None:
        """None if there is nothing to move."""
        own = request.peer == self._node
        epoch = self._own_epoch if own else self._epochs.get(request.peer)
        if epoch != request.epoch:
            raise AgentError(
                f"read from {request.peer} at epoch {request.epoch}:"
                f" {'this is' if own else 'connected to'} epoch {epoch}"
            )
        self._check_tiers(request, own)
        if not request.src and not request.dst:
            return None
        checksums = None
        if request.dst_tier is Tier.HOST and self._reserve is not None:
            self._reserve(request.dst)
        if is_storage(request.dst_tier):
            checksums = self._checksums(self._pools[request.src_tier], request.src)
            request = replace(request, checksums=request.checksums or checksums)
        return _Copy(request, self._mover.copy(request), started, checksums)

    def _check_tiers(self, request: CopyBlocks, own: bool) -> None:
        """Raises AgentError for tiers between which this executor cannot move anything."""
        tiers = (request.src_tier, request.dst_tier)
        num_storage = sum(map(is_storage, tiers))
        if num_storage > (1 if own else 0):
            raise AgentError(f"read from {request.peer}: {tiers[0]} to {tiers[1]} is not possible")
        for tier in tiers if own else tiers[1:]:
            if not is_storage(tier) and tier not in self._pools:
                raise AgentError(f"read from {request.peer}: {self._node} has no {tier} memory")

    def _advance(self, copy: _Copy) -> CopyDone | None:
        """The answer, once the copy has settled."""
        request = copy.request
        try:
            moved = self._mover.poll(copy.handle)
        except Exception as error:
            self._give_up(copy, one_line(error))
            return None
        if moved is None:
            if copy.error is None and self._clock() - copy.started >= request.timeout_s:
                text = f"read of {len(request.src)} blocks from {request.peer} not done"
                self._give_up(copy, f"{text} after {request.timeout_s:g} s")
            return None
        why = copy.error or moved.error
        if why is None:
            try:
                return self._good(copy, moved)
            except Exception as error:
                why = one_line(error)
        return self._failed(copy, why)

    def _give_up(self, copy: _Copy, why: str) -> None:
        """It is answered once it has settled. Whether it has, its mover may not be able to say."""
        if copy.error is None:
            self._mover.cancel(copy.handle)
        elif copy.error != why:
            logger.warning("a copy of %d blocks: %s", len(copy.request.dst), why)
        copy.error = why

    def _good(self, copy: _Copy, moved: CopyDone) -> CopyDone:
        """The answer, with what the mover says of its blocks."""
        request, checksums = copy.request, copy.checksums
        memory = request.src_tier if is_storage(request.dst_tier) else request.dst_tier
        pool = self._pools[memory]
        if checksums is None:
            checksums = moved.checksums
            if self._corrupt is not None:
                self._corrupt(request, pool)
                checksums = ()
            checksums = checksums or self._checksums(pool, request.dst)
        return replace(
            moved,
            checksums=checksums,
            elapsed_s=self._clock() - copy.started,
            num_bytes=len(request.dst) * pool.shape[1],
        )

    def _checksums(self, pool: BlockBytes, block_ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(checksum_blocks(pool, block_ids, self._share))

    def _failed(self, copy: _Copy, why: str) -> CopyDone:
        return failed_copy(copy.request, why, self._clock() - copy.started)


class Store(Protocol):
    """What a thread that copies does besides, for the tier that it copies to and from."""

    @property
    def wait_s(self) -> float:
        """Until `check` at the latest, where nothing else happens."""
        ...

    def update(self, change: Any) -> None:
        """A `StoreIndex`, an `AttachStore` or a `FindStored`, in the order of the copies to and
        from the tier. What it raises is told to the node, as a `StoreFailed`."""
        ...

    def check(self, busy: bool) -> Sequence[StoreChange]:
        """Called often; what the node has to know that is new."""
        ...

    def close(self) -> None: ...


class ArenaExecutor:
    """Calls on host memory that outlives its worker."""

    wait_s = IDLE_WAIT_S

    def __init__(self, arena: HostArena, tier: Tier = Tier.HOST) -> None:
        self._arena = arena
        self._tier = tier

    def update(self, change: StoreIndex) -> None:
        self._arena.update(change)

    def check(self, busy: bool) -> Sequence[StoreRoom]:
        found = self._arena.find_room()
        return () if found is None else (StoreRoom(self._tier, *found),)

    def close(self) -> None:
        self._arena.close(remove=not self._arena.has_heir)


class StoreExecutor:
    """Looks after the store on disk, from the one thread that owns it."""

    wait_s = IDLE_WAIT_S

    def __init__(
        self, store: DiskStore, *, tier: Tier = Tier.DISK, clock: Clock = time.monotonic
    ) -> None:
        self._store = store
        self._tier = tier
        self._clock = clock
        self._check_at = clock() + STORE_CHECK_IDLE_S

    def update(self, change: StoreIndex) -> None:
        self._store.update(change)

    def check(self, busy: bool) -> list[StoreFailed]:
        """Check the store if it is time to, sooner while it is `busy`. What is wrong is reported
        once, and again only after it has changed."""
        now = self._clock()
        if busy:
            self._check_at = min(self._check_at, now + STORE_CHECK_BUSY_S)
        if now < self._check_at:
            return []
        self._check_at = now + STORE_CHECK_IDLE_S
        recreated = self._store.counters["recreated"]
        try:
            report = self._store.check()
        except Exception as error:
            return [self._failed(one_line(error))]
        if report is None:
            return []
        logger.warning("%s", report)
        if self._store.counters["recreated"] > recreated:
            return [self._failed(report, lost=True)]
        return [self._failed(report)] if self._store.in_trouble else []

    def close(self) -> None:
        self._store.close()

    def _failed(self, error: str, *, lost: bool = False) -> StoreFailed:
        return StoreFailed(error, lost, self._tier)


def failed_copy(request: CopyBlocks, error: str, elapsed_s: float = 0.0) -> CopyDone:
    return CopyDone(request.transfer_id, error, elapsed_s=elapsed_s)


def one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    if isinstance(error, AgentError | StoreError) and lines:
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
