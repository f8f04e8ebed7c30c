"""The simulated runtime: production nodes under virtual time, with faults chosen by a seed.

An event is a message that arrives or something that an executor does. There is one random source,
so a seed decides everything, and `event_hash` (over time, source, destination and content of every
message delivered) tells whether two runs were the same.

A worker has lives: each has an epoch, a pool, an executor and a transfer agent. A crash ends a life
and all that belonged to it: steps, transfers, wake-ups, and messages on their way to it.

Its disk, blocks and an index, survives its death. A block is written slot by slot at moments of its
own, so a death in the middle leaves it half written; the index changes at once or not at all, as a
transaction does. So does its host memory, in some runs; others with as many ranks read it until the
next life begins, each rank its part, at a time of its own.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from kvrelay.engine.kv.tier import DiskRecord, Tier
from kvrelay.engine.node import Effect, Node, NodeId, Note, Send, Wake, Woken
from kvrelay.engine.step import (
    AbandonStep,
    AskProgress,
    Execute,
    PrepareGrammar,
    StepDone,
    StepProgress,
)
from kvrelay.kvtransfer.agent import (
    ConnectPeer,
    CopyBlocks,
    CopyDone,
    FindStored,
    StoreFailed,
    StoreFound,
    StoreGone,
    StoreIndex,
)
from kvrelay.kvtransfer.ranks import RankAnswers
from kvrelay.kvtransfer.tiers.blocks import StoreRecords
from kvrelay.lab.sim.executor import POISON, SimAgent, SimExecutor, SimPool
from kvrelay.lab.sim.faults import Faults
from kvrelay.lab.sim.model import FULL, Attention
from kvrelay.lab.virtual_time import VirtualTime
from kvrelay.worker.node import Worker


@dataclass(slots=True)
class SimStore:
    """A disk, or host memory that outlives its worker. Owned by its place.
    Invariant: one record a slot, one slot a name."""

    pool: SimPool
    index: dict[int, tuple[DiskRecord, float]] = field(default_factory=dict)  # with when it was put

    def update(self, now: float, change: StoreIndex, *, lossless: bool) -> str | None:
        """Apply `change`; returns what is wrong with it, if anything is. `lossless`: no change was
        lost before, so none may put what is there already."""
        wrong = None
        for slot in change.remove:
            self.index.pop(slot, None)
        slots = {record.block_hash: slot for slot, (record, _) in self.index.items()}
        for record in change.put:
            if not 0 <= record.slot < len(self.pool.blocks):
                return f"slot {record.slot} of {len(self.pool.blocks)}"
            there = self.index.get(record.slot)  # if it is this block, its retention is renewed
            if lossless and there is not None and there[0].block_hash != record.block_hash:
                wrong = f"slot {record.slot} is in the index"
            if lossless and slots.get(record.block_hash, record.slot) != record.slot:
                wrong = f"{record.block_hash.hex()} is in the index twice"
            self.index.pop(slots.get(record.block_hash, -1), None)
            self.index[record.slot] = (record, now)
            slots[record.block_hash] = record.slot
        return wrong

    def records(self, now: float) -> list[DiskRecord]:
        """What a worker that opens it finds."""
        found = []
        for record, put_at in self.index.values():
            keep_s = record.keep_s - (now - put_at)
            if keep_s > 0:
                found.append(replace(record, keep_s=keep_s))
        kept = {record.slot for record in found}
        self.index = {slot: entry for slot, entry in self.index.items() if slot in kept}
        return found


LEFT_S = 0.02  # so long after a worker has died, others read what it had in host memory
_MAX_EVENTS = 400_000
"""A run that makes more than this is taken for a livelock."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must never happen did. `at_s` is virtual time."""

    at_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class PoolShape:
    num_blocks: int
    block_size: int
    with_checksums: bool = True
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    num_ranks: int = 1  # a divisor of block_size
    host_outlives: bool = False  # its host memory

    @property
    def reads_left(self) -> bool:
        """Whether it looks for host memory of others, which have to be of its form."""
        return self.num_blocks > 0

    def pool(self, num_blocks: int, attention: Attention = FULL) -> SimPool:
        return SimPool(
            num_blocks, self.block_size, with_checksums=self.with_checksums, attention=attention
        )


@dataclass(eq=False, slots=True)
class SimNode:
    """One incarnation of a node. Nothing of it happens after `alive` is False."""

    node_id: NodeId
    epoch: int
    node: Node
    executor: SimExecutor
    agent: SimAgent
    clock_s: float  # what its clock shows at virtual time 0: no two processes agree
    alive: bool = True
    left: dict[NodeId, StoreGone] = field(default_factory=dict)  # whose host memory it reads
    found: RankAnswers | None = None  # joins what its ranks find


class MakeNode(Protocol):
    def __call__(self, epoch: int, records: StoreRecords) -> Node:
        """`records`: what the node's stores held when they were opened."""
        ...


@dataclass(slots=True)
class _Place:
    """Where a node lives: how to make one, what outlives it, and the current life, if any."""

    make: MakeNode
    shape: PoolShape
    stores: dict[Tier, SimStore]
    life: SimNode | None = None
    next_epoch: int = 1


@dataclass(slots=True)
class SimRuntime(VirtualTime[SimNode, Callable[[], None]]):
    """Owns every node. Nodes in `trusted` share a process, and its clock: what they send each other
    always arrives, in order."""

    seed: int
    rng: random.Random = field(init=False)
    faults: Faults = field(init=False)
    violations: list[Violation] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    trusted: set[NodeId] = field(default_factory=set)
    stopped: bool = False  # a node raised: its state means nothing any more
    after_receive: Callable[[SimRuntime, SimNode], None] | None = None  # a check on every event
    perform_other: Callable[[SimNode, Effect], None] | None = (
        None  # effects that are not known here
    )
    join_answers: type[RankAnswers] = RankAnswers
    attention: Attention = FULL  # what the model of all workers has
    poison: dict[str, str] = field(default_factory=dict)  # request -> what it does to its steps
    _places: dict[NodeId, _Place] = field(default_factory=dict)
    _last_arrival: dict[tuple[NodeId, NodeId], float] = field(default_factory=dict)
    _hash: Any = field(default_factory=lambda: blake2b(digest_size=16))
    _encoder: msgspec.msgpack.Encoder = field(
        default_factory=lambda: msgspec.msgpack.Encoder(order="deterministic")
    )

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.faults = Faults(self.rng)

    # -- nodes ---------------------------------------------------------------------------------

    def add(self, node_id: NodeId, make: MakeNode, shape: PoolShape | None = None) -> Node:
        """Start a node now. Nodes without a pool (`shape`) must not ask for steps or reads."""
        self.prepare(node_id, make, shape)
        return self.restart(node_id)

    def prepare(self, node_id: NodeId, make: MakeNode, shape: PoolShape | None = None) -> None:
        """A place for a node that does not run yet: `restart` begins its first life."""
        assert node_id not in self._places
        shape = shape or PoolShape(0, 1)
        stores = {Tier.DISK: SimStore(shape.pool(shape.num_disk_blocks))}
        if shape.host_outlives:
            stores[Tier.HOST] = SimStore(shape.pool(shape.num_host_blocks))
        self._places[node_id] = _Place(make, shape, stores)

    def stores(self, node_id: NodeId) -> dict[Tier, SimStore]:
        return self._places[node_id].stores

    def life(self, node_id: NodeId) -> SimNode | None:
        """The current life of a node; None while it is down or if there never was one."""
        place = self._places.get(node_id)
        return place.life if place else None

    def crash(self, node_id: NodeId) -> int:
        """End the current life of a node at once. Returns its epoch."""
        life = self.life(node_id)
        assert life is not None
        life.alive = False
        place = self._places[node_id]
        place.life = None
        if Tier.HOST in place.stores:
            self.call_at(self.now + LEFT_S, lambda: self._find_left(node_id))
        return life.epoch

    def _find_left(self, owner: NodeId) -> None:
        """Workers of the machine, which is one, see that nobody has this host memory any more."""
        place = self._places[owner]
        if place.life is None and place.shape.reads_left:
            for other in self._places.values():
                life, num_ranks = other.life, other.shape.num_ranks
                if life is None or not other.shape.reads_left:
                    continue
                if num_ranks == place.shape.num_ranks and owner not in life.left:
                    self._attach(life, owner, place.stores[Tier.HOST])

    def _attach(self, life: SimNode, owner: NodeId, store: SimStore) -> None:
        blocks, records = life.executor.pools[Tier.LEFT].blocks, store.records(self.now)
        first, num_slots = len(blocks), len(store.pool.blocks)
        blocks += store.pool.blocks
        gone = life.left[owner] = StoreGone(Tier.LEFT, first, num_slots)
        moved = tuple(replace(record, slot=first + record.slot) for record in records)
        found = StoreFound(Tier.LEFT, first, num_slots, moved, owner)
        self.faults.injected["host KV left"] += 1

        def find(rank: int) -> None:
            if life.left.get(owner) is gone:
                assert life.found is not None
                # It was killed when not all of its ranks had listed the last block.
                num_known = max(0, len(moved) - (self.seed + rank) % 2)
                life.found.add(rank, replace(found, records=moved[:num_known]))

        for rank in range(life.agent.num_ranks):
            self._push(0.001 + 0.1 * rank, life, partial(find, rank))

    def _detach(self, owner: NodeId) -> None:
        """It is back: nobody else reads its host memory."""
        for other in self._places.values():
            if other.life is not None and (gone := other.life.left.pop(owner, None)):
                blocks = other.life.executor.pools[Tier.LEFT].blocks
                for slot in range(gone.first_slot, gone.first_slot + gone.num_slots):
                    left = blocks[slot]
                    blocks[slot] = [~v for v in left] if other.shape.with_checksums else [*left]
                assert other.life.found is not None
                for rank in range(other.shape.num_ranks):
                    tell = partial(other.life.found.add, rank, gone)
                    self._push(0.001 + 0.1 * rank, other.life, tell)

    def restart(self, node_id: NodeId, epoch: int | None = None) -> Node:
        """Begin the next life of a node that is down: an empty pool, a new epoch."""
        place = self._places[node_id]
        assert place.life is None
        epoch, shape = place.next_epoch if epoch is None else epoch, place.shape
        place.next_epoch = epoch + 1
        pools = {
            Tier.DEVICE: shape.pool(shape.num_blocks, self.attention),
            Tier.HOST: shape.pool(shape.num_host_blocks),
            Tier.LEFT: shape.pool(0),
            **{tier: store.pool for tier, store in place.stores.items()},
        }
        self._detach(node_id)

        def violated(kind: str, text: str) -> None:
            self.violate(kind, f"{node_id} epoch {epoch}: {text}")

        executor = SimExecutor(pools, violated, self.attention, self._row_fault, self._step_fault)
        agent = SimAgent(
            node_id,
            executor,
            self.life,
            lambda after_s, call: self._push(after_s, life, call),
            violated,
            shape.num_ranks,
            self.join_answers,
        )
        clock_s = 0.0 if node_id in self.trusted else self.rng.uniform(0.0, 1000.0)
        records = {tier: store.records(self.now) for tier, store in place.stores.items()}
        node = place.make(epoch, records)
        life = SimNode(node_id, epoch, node, executor, agent, clock_s)
        place.life = life
        deliver = partial(self._deliver, node_id, life)
        life.found = RankAnswers([True] * shape.num_ranks, lambda asked: None, deliver)
        self._guard(life, lambda: life.node.start(clock_s + self.now))
        for owner, other in self._places.items():
            if Tier.HOST in other.stores and other.life is None:
                self._find_left(owner)
        return life.node

    def violate(self, kind: str, text: str) -> None:
        self.violations.append(Violation(self.now, kind, text))

    # -- time ----------------------------------------------------------------------------------

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        """Do something at a virtual time that belongs to no node."""
        self._push(at_s - self.now, None, call)

    def post(self, source: NodeId, to: NodeId, message: Any, after_s: float = 0.0) -> None:
        """Deliver `message`, reliably, after that many seconds."""
        life = self.life(to)
        if life is not None:
            self._push(after_s, life, lambda: self._deliver(source, life, message))

    def run_until(self, until_s: float, done: Callable[[], bool] | None = None) -> bool:
        """Run events up to a virtual time, or until `done`. False if `done` never came true."""
        while not self.stopped and not (done is not None and done()):
            event = self.advance(until_s)
            if event is None:
                self.now = max(self.now, until_s)
                return done is None
            if self.num_events > _MAX_EVENTS:
                self.violate("livelock", f"{_MAX_EVENTS} events")
                self.stopped = True
            event[1]()
        return not self.stopped

    def event_hash(self) -> str:
        return str(self._hash.hexdigest())

    # -- effects -------------------------------------------------------------------------------

    def _perform(self, life: SimNode, effect: Effect) -> None:
        match effect:
            case Send(to, message):
                self._send(life.node_id, to, message)
            case Wake(after_s, tag):
                self.to_self(life, after_s, Woken(tag))
            case Execute(step):
                if life.executor.begin(step):
                    self._run_step(life)
            case CopyBlocks():
                peer = life.agent.source(effect)
                fates = [
                    self.faults.read(
                        effect,
                        life.executor.pool.block_size,
                        now=self.now,
                        peer_alive=peer is not None and peer.alive,
                        reader=life.node_id,
                    )
                    for _ in range(life.agent.num_ranks)
                ]
                life.agent.read(effect, fates, lambda done: self._read_done(life, done))
            case StoreIndex():
                self._store(life, effect)
            case FindStored():  # what is left is found whole
                pass
            case ConnectPeer():
                error = self.faults.connect()
                after_s = 0.001 + 0.01 * self.rng.random()
                self._push(after_s, life, lambda: self._connect(life, effect, error))
            case AbandonStep(step_id):
                life.executor.abandon(step_id)
            case AskProgress():
                self.to_self(life, 0.0, StepProgress(life.executor.num_passed(self.now)))
            case PrepareGrammar():  # this model has no vocabulary to compile one for
                pass
            case Note(_, counter, _):
                self.notes[counter] += 1
            case _:
                assert self.perform_other is not None, f"unknown effect {effect!r}"
                self.perform_other(life, effect)

    def _send(self, source: NodeId, to: NodeId, message: Any) -> None:
        life = self.life(to)
        if source in self.trusted and to in self.trusted:
            self.post(source, to, message)
            return
        for latency_s, in_order in self.faults.latencies(self.now, source, to):
            arrival = self.now + latency_s
            if in_order:
                arrival = max(arrival, self._last_arrival.get((source, to), 0.0))
                self._last_arrival[source, to] = arrival
            if life is not None:  # else the connection is gone, and the message with it
                self._push(arrival - self.now, life, lambda: self._deliver(source, life, message))

    def _store(self, life: SimNode, change: StoreIndex) -> None:
        error = self.faults.store() if change.tier is Tier.DISK else None
        if error is not None:
            self.to_self(life, 0.001, StoreFailed(error))
            return
        wrong = self.stores(life.node_id)[change.tier].update(
            self.now, change, lossless=not self.faults.injected["store error"]
        )
        if wrong is not None:
            self.violate(f"{change.tier} index", f"{life.node_id} epoch {life.epoch}: {wrong}")

    def _row_fault(self, attempt: str) -> str | None:
        if self.poison.get(attempt.partition("#")[0]) == "row":
            self.faults.injected["poisoned row"] += 1
            return POISON
        return self.faults.row()

    def _step_fault(self, attempt: str) -> str | None:
        if self.poison.get(attempt.partition("#")[0]) == "step":
            self.faults.injected["poisoned step"] += 1
            return POISON
        return None

    def _run_step(self, life: SimNode) -> None:
        num_tokens = life.executor.num_tokens
        duration_s, error = self.faults.step(life.node_id, life.epoch, num_tokens)
        life.executor.runs_since = None if duration_s is None else self.now
        if duration_s is not None:
            taken_s = duration_s
            self._push(taken_s, life, lambda: self._finish_step(life, taken_s, error))

    def _finish_step(self, life: SimNode, duration_s: float, error: str | None) -> None:
        if isinstance(worker := life.node, Worker):
            is_own = worker.core.kv.pool.are_private
            if freed := [block for block in life.executor.written() if not is_own([block])]:
                self.violate("block freed while a step writes to it", f"{life.node_id}: {freed}")
        done: StepDone = life.executor.finish(self.faults.measured(life.node_id, duration_s), error)
        if life.executor.is_busy:
            self._run_step(life)
        self._deliver(life.node_id, life, done)

    def _read_done(self, life: SimNode, done: CopyDone) -> None:
        self._deliver(life.node_id, life, done)

    def _connect(self, life: SimNode, effect: ConnectPeer, error: str | None) -> None:
        self._deliver(life.node_id, life, life.agent.connect(effect, error))

    def to_self(self, life: SimNode, after_s: float, message: Any) -> None:
        self._push(after_s, life, lambda: self._deliver(life.node_id, life, message))

    def _push(self, after_s: float, life: SimNode | None, call: Callable[[], None]) -> None:
        assert after_s >= 0
        self.schedule(self.now + after_s, life, call)

    def _deliver(self, source: NodeId, life: SimNode, message: Any) -> None:
        paused_until = self.faults.paused_until(self.now, life.node_id, life.epoch)
        if paused_until > self.now:
            self._push(paused_until - self.now, life, lambda: self._deliver(source, life, message))
            return
        head = f"{self.now!r} {source} {life.node_id} {life.epoch} {type(message).__name__} "
        self._hash.update(head.encode())
        self._hash.update(self._encoded(message))
        self._guard(life, lambda: life.node.receive(life.clock_s + self.now, message))

    def _encoded(self, message: Any) -> bytes:
        if isinstance(message, StepDone):  # keys that msgspec does not sort
            parts = [sorted(message.prompts.items()), sorted(message.failed.items())]
            parts.append(sorted(message.unsampled.items()))
            rest = replace(message, prompts={}, failed={}, unsampled={})
            return self._encoder.encode([rest, *parts])
        return self._encoder.encode(message)

    def _guard(self, life: SimNode, act: Callable[[], list[Effect]]) -> None:
        """A node that raises has broken its own assertions: that is a finding, and the end."""
        try:
            for effect in act():
                if life.alive:  # it may have ended itself
                    self._perform(life, effect)
            if self.after_receive is not None:
                self.after_receive(self, life)
        except Exception:
            self.violate("node raised", f"{life.node_id}: {traceback.format_exc(limit=-6)}")
            self.stopped = True
