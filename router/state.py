"""What a router shares with other routers, and with itself after a restart.

A router decides from its own memory alone, always. Behind it, a *store* (an executor: see
`cluster.state`) may hold copies: of the prefix index, of sessions, and of what each tenant has
running. The router writes to it by effects, and gets messages with what it has: at the start,
when another router has changed something, and after the store was away.

Of several routers one, the *writer*, keeps the index: each worker's blocks as of an event, and the
events since. A worker is rewritten once events have changed a share of its blocks. What is
read back counts only for a worker of the same epoch that is up; what it does not know yet comes
with the worker's own events, or its snapshot where they leave a gap.

Besides, routers tell each other where they have routed prompts (`ReplicaSync`). A router
knows at once which blocks its prompts will bring into a worker's memory; the others would get the
events only when they are computed, and meanwhile send prompts that begin alike to other workers. A
message has the blocks that are new to one worker. It may be lost: the worker's own events follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvrelay.engine.kv.block_hash import HASH_BYTES, group_hash
from kvrelay.engine.kv.events import KVEvents, KVSnapshot, KVSnapshotRequest
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import Effect, NodeId, Send, Wake
from kvrelay.engine.stats import RouterDown, RouterUp, WorkerInfo
from kvrelay.router.index.prefix_index import Hashes, PrefixIndex
from kvrelay.router.messages import PromptRouted

TICK = "state"
PAUSE_S = 0.05  # between views that are written one after the other
MIN_CHANGED = 1024  # blocks: a small view is not rewritten for fewer
MAX_ANNOUNCED = 4096  # blocks of one prompt; those after them are announced by the worker alone


@dataclass(frozen=True, slots=True)
class StateConfig:
    """What a router shares; nothing by default."""

    index: bool = False
    loads: bool = False
    tick_s: float = 0.5  # how often tenants' loads are shared
    index_interval_s: float = 5.0  # how often changed workers are looked for
    rewrite_share: float = 0.05  # part of a worker's blocks: rewritten when events changed more
    rewrite_after_s: float = 60.0  # however few blocks they have changed


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
    num_low_running: int = 0  # among them, of low classes of service
    num_low_queued: int = 0

    def seen_by(self, is_low: bool) -> tuple[int, int]:
        """How many run and wait that count against a request of the tenant: those of low classes
        do for low ones alone."""
        if is_low:
            return self.num_running, self.num_queued
        return self.num_running - self.num_low_running, self.num_queued - self.num_low_queued


@dataclass(frozen=True, slots=True)
class SaveView:
    """Effect: save this view, in place of an earlier one of the worker."""

    view: IndexView


@dataclass(frozen=True, slots=True)
class ForgetView:
    """Effect: the worker is gone; delete its view and events."""

    worker: NodeId


@dataclass(frozen=True, slots=True)
class SaveEvents:
    """Effect: save these events beside the views."""

    events: KVEvents


@dataclass(frozen=True, slots=True)
class SaveLoads:
    """Effect: share what this router has with the others, by tenant. It expires by itself."""

    tenants: dict[str, TenantLoad]


@dataclass(frozen=True, slots=True)
class StateUp:
    """The store can be reached (again), and has sent what it has. It may have lost anything."""


@dataclass(frozen=True, slots=True)
class IndexWriter:
    """Whether this router saves the index from now on. Sent again: what was saved is lost."""

    writes: bool


@dataclass(frozen=True, slots=True)
class IndexLoaded:
    """The saved index. `events` are in the order in which they came."""

    views: tuple[IndexView, ...]
    events: tuple[KVEvents, ...]


@dataclass(frozen=True, slots=True)
class OthersLoads:
    """What the other routers have, all together, as of about a second ago."""

    tenants: dict[str, TenantLoad]


@dataclass(slots=True)
class _Written:
    """What the store has of one worker."""

    at: float
    num_blocks: int
    changed: int = 0  # blocks by events since


@dataclass(slots=True)
class _Loaded:
    view: IndexView
    events: list[KVEvents] = field(default_factory=list)


class SharedState:
    """Owned by a router. Invariant: while it writes, the store has of each worker either a view and
    every event since, or nothing; `_loaded` has only what is to be used when its worker comes up;
    one wake-up is under way if anything is shared."""

    def __init__(self, router: NodeId, config: StateConfig, index: PrefixIndex) -> None:
        self._router = router
        self._config = config
        self._index = index
        self._effects: list[Effect] = []
        self._loaded: dict[NodeId, _Loaded] = {}
        self._epochs: dict[NodeId, int] = {}  # workers that are up
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

    def on_index_loaded(self, now: float, loaded: IndexLoaded) -> None:
        """Use what the store has of the workers that are up, and keep the rest for the others."""
        self._loaded = {view.worker: _Loaded(view) for view in loaded.views}
        for events in loaded.events:
            if events.worker in self._loaded:
                self._loaded[events.worker].events.append(events)
        for worker, epoch in self._epochs.items():
            self._restore(now, worker, epoch)

    def on_worker_up(self, now: float, worker: NodeId, epoch: int) -> None:
        """The index has begun to follow this worker."""
        self._epochs[worker] = epoch
        self._written.pop(worker, None)
        self._restore(now, worker, epoch)

    def on_worker_down(self, worker: NodeId) -> None:
        self._epochs.pop(worker, None)
        self._loaded.pop(worker, None)
        if self._written.pop(worker, None) is not None and self.writes:
            self._effects.append(ForgetView(worker))

    def on_kv_events(self, events: KVEvents | KVSnapshot) -> None:
        """The index has them already."""
        written = self._written.get(events.worker)
        if not self.writes or written is None:
            return  # it will be saved whole
        if events.epoch != self._epochs[events.worker]:
            return
        if isinstance(events, KVSnapshot):
            del self._written[events.worker]
            return
        written.changed += len(events.stored) + len(events.removed)
        written.changed += sum(len(tier.stored) + len(tier.removed) for tier in events.tiers)
        self._effects.append(SaveEvents(events))

    def on_index_writer(self, now: float, message: IndexWriter) -> None:
        self.writes = message.writes and self._config.index
        self._written.clear()
        self._next_look = 0.0

    def tick(self, now: float, loads: dict[str, TenantLoad]) -> None:
        """A wake-up has come. `loads`: what this router has."""
        self._effects.append(Wake(self._write_one(now), TICK))
        if self._config.loads and now >= self._next_loads:
            self._next_loads = now + self._config.tick_s
            self._effects.append(SaveLoads(loads))

    def _write_one(self, now: float) -> float:
        """Save one worker that is due. Returns when to look again, in seconds."""
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
        if loaded is None or loaded.view.epoch != epoch:
            return
        view = loaded.view
        self._index.restore(now, worker, epoch, view.seq, view.block_hashes)
        for events in loaded.events:
            is_new = events.epoch == epoch and events.seq > view.seq
            if is_new and self._index.apply(now, events):  # some are missing
                self._effects.append(Send(worker, KVSnapshotRequest(self._router)))
        self.num_restored += view.num_blocks


class ReplicaSync:
    """Owned by a router. `routers` are the others that the controller has named."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.routers: list[NodeId] = []

    def on_router_up(self, now: float, up: RouterUp) -> None:
        if up.router not in self.routers:
            self.routers.append(up.router)

    def on_router_down(self, now: float, down: RouterDown) -> None:
        if down.router in self.routers:
            self.routers.remove(down.router)

    def on_prompt_routed(self, now: float, routed: PromptRouted) -> None:
        view = self._index.views.get(routed.worker)
        if view is not None and view.epoch == routed.epoch:
            self._index.expect(now, routed.worker, routed.block_hashes)

    def announce(self, now: float, worker: WorkerInfo, block_hashes: Hashes) -> list[Send]:
        """To the other routers: those blocks of a prompt sent to `worker` that are new there."""
        if not self.routers:
            return []
        held = self._index.lookup(now, block_hashes).held(worker.worker).said
        new = bytes(block_hashes[held * HASH_BYTES : (held + MAX_ANNOUNCED) * HASH_BYTES])
        if new and worker.mark_group:
            new += group_hash(bytes(block_hashes[-HASH_BYTES:]), worker.mark_group)
        routed = PromptRouted(worker.worker, worker.epoch, new)
        return [Send(router, routed) for router in self.routers] if new else []


def total_loads(loads: Iterable[Mapping[str, TenantLoad]]) -> dict[str, TenantLoad]:
    """Sums up their loads by tenant."""
    total: dict[str, TenantLoad] = {}
    for load in loads:
        for tenant, one in load.items():
            sofar = total.get(tenant, TenantLoad(0, 0))
            total[tenant] = TenantLoad(
                sofar.num_running + one.num_running,
                sofar.num_queued + one.num_queued,
                sofar.num_low_running + one.num_low_running,
                sofar.num_low_queued + one.num_low_queued,
            )
    return total
