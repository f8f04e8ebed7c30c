"""What a router shares with other routers and with its next life, as effects and messages.

A router decides from its own memory alone, always. Behind it, a *store* (an executor: see
`cluster.state`) may hold copies: of the prefix index, of sessions, and of what each tenant has
running. The router says what is to be kept by effects, and hears by messages what is there: at the
start, whenever another router has changed something, and after the store was away.

Of several routers one, the *writer*, keeps the index: each worker's blocks as of an event, and the
events since. A worker is written anew once the events have changed a share of its blocks. What is
read back counts only for a worker of the same epoch that is up; what it does not know yet comes
with the worker's own events, or its snapshot where they leave a gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.kv.block_hash import HASH_BYTES
from engine.kv.events import KVEvents, KVSnapshot, KVSnapshotRequest
from engine.kv.tier import Tier
from engine.node import Effect, NodeId, Send, Wake
from router.index.prefix_index import PrefixIndex

TICK = "state"
PAUSE_S = 0.05  # between views that are written one after the other
MIN_CHANGED = 1024  # blocks: a smaller view is not written anew for less


@dataclass(frozen=True, slots=True)
class StateConfig:
    """What a router shares; nothing by default."""

    index: bool = False
    loads: bool = False
    tick_s: float = 0.5  # how often tenants' loads are told
    index_interval_s: float = 5.0  # how often it is looked at what has to be written
    rewrite_share: float = 0.05  # of a worker's blocks that events have changed
    rewrite_after_s: float = 60.0  # however little they have


@dataclass(frozen=True, slots=True)
class IndexView:
    """The blocks of one worker as of its event `seq`. Hashes are packed: 16 bytes a block."""

    worker: NodeId
    epoch: int
    seq: int
    block_hashes: dict[Tier, bytes]

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.block_hashes.values())) // HASH_BYTES


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """Requests of a tenant at a router."""

    num_running: int  # that a worker has
    num_queued: int


@dataclass(frozen=True, slots=True)
class SaveView:
    """Effect: keep this view, instead of an earlier one of the worker."""

    view: IndexView


@dataclass(frozen=True, slots=True)
class ForgetView:
    """Effect: the worker is gone; keep nothing of it."""

    worker: NodeId


@dataclass(frozen=True, slots=True)
class SaveEvents:
    """Effect: keep these events beside the views."""

    events: KVEvents


@dataclass(frozen=True, slots=True)
class SaveLoads:
    """Effect: tell the other routers what this one has, by tenant. Forgotten soon by itself."""

    tenants: dict[str, TenantLoad]


@dataclass(frozen=True, slots=True)
class StateUp:
    """The store can be reached (again), and has told what it holds. It may have lost anything."""


@dataclass(frozen=True, slots=True)
class IndexWriter:
    """Whether this router keeps the index from now on. Told again: what was kept was lost."""

    writes: bool


@dataclass(frozen=True, slots=True)
class IndexLoaded:
    """What is kept of the index. `events` are in the order in which they came."""

    views: tuple[IndexView, ...]
    events: tuple[KVEvents, ...]


@dataclass(frozen=True, slots=True)
class OthersLoads:
    """What the other routers have, all together; as of a second ago, about."""

    tenants: dict[str, TenantLoad]


@dataclass(slots=True)
class _Written:
    """What the store has of one worker."""

    at: float
    num_blocks: int
    changed: int = 0  # blocks by events since


@dataclass(slots=True)
class _Loaded:
    view: IndexView | None = None
    events: list[KVEvents] = field(default_factory=list)


class SharedState:
    """Owned by a router. Invariant: while it writes, the store has been told of each worker either
    a view and every event since, or nothing that would be taken for one; `_loaded` has only what is
    to be used when its worker comes up; one wake-up is under way if anything is shared."""

    def __init__(self, router: NodeId, config: StateConfig, index: PrefixIndex) -> None:
        self._router = router
        self._config = config
        self._index = index
        self._effects: list[Effect] = []
        self._loaded: dict[NodeId, _Loaded] = {}
        self._epochs: dict[NodeId, int] = {}  # of the workers that are up
        self._written: dict[NodeId, _Written] = {}
        self._next_look = 0.0
        self._next_loads = 0.0
        self.writes = False
        self.num_restored = 0  # blocks that were taken from the store

    def start(self) -> list[Effect]:
        shares = self._config.index or self._config.loads
        return [Wake(self._config.tick_s, TICK)] if shares else []

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def load(self, now: float, loaded: IndexLoaded) -> None:
        """Use what the store has for the workers that are up, and keep the rest for the others."""
        self._loaded = {view.worker: _Loaded(view) for view in loaded.views}
        for events in loaded.events:
            if events.worker in self._loaded:
                self._loaded[events.worker].events.append(events)
        for worker, epoch in self._epochs.items():
            self._restore(now, worker, epoch)

    def up(self, now: float, worker: NodeId, epoch: int) -> None:
        """The index has begun to follow this worker."""
        self._epochs[worker] = epoch
        self._written.pop(worker, None)
        self._restore(now, worker, epoch)

    def down(self, worker: NodeId) -> None:
        self._epochs.pop(worker, None)
        self._loaded.pop(worker, None)
        if self._written.pop(worker, None) is not None and self.writes:
            self._effects.append(ForgetView(worker))

    def heed(self, news: KVEvents | KVSnapshot) -> None:
        """The index has heard `news`."""
        written = self._written.get(news.worker)
        if not self.writes or written is None:
            return  # it will be written whole
        if news.epoch != self._epochs[news.worker]:
            return
        if isinstance(news, KVSnapshot):
            del self._written[news.worker]
            return
        written.changed += len(news.stored) + len(news.removed)
        written.changed += sum(len(tier.stored) + len(tier.removed) for tier in news.tiers)
        self._effects.append(SaveEvents(news))

    def become_writer(self, writes: bool) -> None:
        self.writes = writes and self._config.index
        self._written.clear()
        self._next_look = 0.0

    def tick(self, now: float, loads: dict[str, TenantLoad]) -> None:
        """A wake-up has come. `loads`: what this router has."""
        self._effects.append(Wake(self._write_one(now), TICK))
        if self._config.loads and now >= self._next_loads:
            self._next_loads = now + self._config.tick_s
            self._effects.append(SaveLoads(loads))

    def _write_one(self, now: float) -> float:
        """Write a worker that needs it. Returns when to look again, in seconds."""
        if not self.writes or now < self._next_look:
            return self._config.tick_s
        for worker, epoch in self._epochs.items():
            if self._is_due(now, worker):
                exported = self._index.export(worker)
                if exported is not None and exported.epoch == epoch:
                    view = IndexView(worker, epoch, exported.seq, exported.tiers)
                    self._effects.append(SaveView(view))
                    self._written[worker] = _Written(now, view.num_blocks)
                    return PAUSE_S
        self._next_look = now + self._config.index_interval_s
        return self._config.tick_s

    def _is_due(self, now: float, worker: NodeId) -> bool:
        written = self._written.get(worker)
        if written is None:
            return True
        if written.changed == 0:
            return False
        enough = self._config.rewrite_share * written.num_blocks
        is_old = now - written.at >= self._config.rewrite_after_s
        return is_old or written.changed > max(MIN_CHANGED, enough)

    def _restore(self, now: float, worker: NodeId, epoch: int) -> None:
        loaded = self._loaded.pop(worker, None)
        if loaded is None or loaded.view is None or loaded.view.epoch != epoch:
            return
        view = loaded.view
        self._index.restore(now, worker, epoch, view.seq, view.block_hashes)
        for events in loaded.events:
            is_new = events.epoch == epoch and events.seq > view.seq
            if is_new and self._index.apply(now, events):  # some are missing
                self._effects.append(Send(worker, KVSnapshotRequest(self._router)))
        self.num_restored += view.num_blocks


def total_loads(loads: Iterable[Mapping[str, TenantLoad]]) -> dict[str, TenantLoad]:
    """Their sums by tenant."""
    total: dict[str, TenantLoad] = {}
    for load in loads:
        for tenant, one in load.items():
            sofar = total.get(tenant, TenantLoad(0, 0))
            total[tenant] = TenantLoad(
                sofar.num_running + one.num_running, sofar.num_queued + one.num_queued
            )
    return total
