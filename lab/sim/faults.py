"""Faults: which kinds, how strong and when, drawn from the seed before the run.

Half of the kinds are off in any one run, so that each is also seen alone. All stop at `until_s`:
from then on the network only has latency, reads succeed and no node dies. What is stuck by then
stays so for long: reads that do not settle, and workers that hang, fail in every step or are
stopped.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.agent import CopyBlocks
from kvrelay.lab.sim.executor import ReadFate


@dataclass(frozen=True, slots=True)
class Crash:
    """A worker dies at `at_s` and is back after `down_s`; the controller notices after a while."""

    worker: NodeId
    at_s: float
    down_s: float
    notice_s: float


@dataclass(frozen=True, slots=True)
class Partition:
    """No message between the two nodes, in either direction, is delivered in this time."""

    ends: frozenset[NodeId]
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """A worker that is alive and does nothing: what it should hear waits until the end."""

    worker: NodeId
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class BrokenLink:
    """No KV of `source` comes to `reader` in this time: its reads time out."""

    source: NodeId
    reader: NodeId
    from_s: float
    until_s: float


class SicknessKind(StrEnum):
    HANGS = "step hangs"
    FAILS = "steps all fail"
    STOPPED = "stopped"  # SIGSTOP


@dataclass(frozen=True, slots=True)
class Sickness:
    """From `at_s` on, in one life of a worker: its next step never ends, all its steps fail, or the
    process is stopped, for `for_s`."""

    worker: NodeId
    at_s: float
    kind: SicknessKind
    for_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class Rot:
    """Bytes of a block at rest change: one slot of one block of a tier, if it has so many."""

    worker: NodeId
    tier: Tier
    at_s: float
    block: int
    slot: int


@dataclass(frozen=True, slots=True)
class Handover:
    """The controller dies; the next one, later, begins with what that has kept."""

    at_s: float
    away_s: float


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Probabilities are per message, read, connection or step. Plain data, printed with a seed."""

    until_s: float = 0.0
    lose: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.0  # at most; a delayed message is overtaken by later ones
    read_error: float = 0.0
    read_stall: float = 0.0
    read_slow: float = 0.0
    read_slow_s: float = 0.0  # at most
    flip: float = 0.0
    connect_error: float = 0.0
    step_error: float = 0.0
    row_error: float = 0.0  # per row that is sampled
    step_slow: float = 0.0
    crashes: tuple[Crash, ...] = ()
    partitions: tuple[Partition, ...] = ()
    pauses: tuple[Pause, ...] = ()
    disk_error: float = 0.0
    disk_slow: float = 0.0
    disk_slow_s: float = 0.0  # at most
    store_error: float = 0.0
    rots: tuple[Rot, ...] = ()
    read_hang: float = 0.0
    hang_s: float = 0.0  # reads that hang settle so long after the faults are over, at most
    sicknesses: tuple[Sickness, ...] = ()
    handovers: tuple[Handover, ...] = ()
    broken_links: tuple[BrokenLink, ...] = ()
    clocks: tuple[tuple[NodeId, float], ...] = ()  # times by which a worker's steps seem longer
    clock_noise: float = 1.0  # and each is measured up to so many times too long or too short

    @property
    def breaks_attempts(self) -> bool:
        """Whether a request can honestly run out of attempts."""
        return any(
            (self.crashes, self.partitions, self.pauses, self.sicknesses, self.handovers)
        ) or any(
            (
                self.lose,
                self.delay,
                self.step_error,
                self.row_error,
                self.step_slow,
                self.read_stall,
                self.read_hang,
            )
        )


LONGER = 1.5  # times, at most, that a step takes as long as it should
SLOW_S = 1.0  # at most, that a slow one takes longer


def _step_s(num_tokens: int) -> float:
    return 0.002 + 0.0001 * num_tokens


@dataclass(slots=True)
class Faults:
    """Draws what happens to each message, read and step, and counts what it injected."""

    rng: random.Random
    plan: FaultPlan = field(default_factory=FaultPlan)
    injected: Counter[str] = field(default_factory=Counter)
    active: bool = False
    _sick: dict[tuple[NodeId, int], tuple[SicknessKind, float]] = field(default_factory=dict)

    def fall_sick(self, epoch: int, sickness: Sickness) -> None:
        """The life of this epoch falls sick; one that is sick does not fall sick again."""
        if (sickness.worker, epoch) in self._sick:
            return
        self.injected[str(sickness.kind)] += 1
        self._sick[sickness.worker, epoch] = (sickness.kind, sickness.at_s + sickness.for_s)

    def sickness(self, now: float, node_id: NodeId, epoch: int) -> SicknessKind | None:
        """That this life has now. One that is stopped gets well; the others do not."""
        kind, until_s = self._sick.get((node_id, epoch), (None, 0.0))
        return None if kind is SicknessKind.STOPPED and now >= until_s else kind

    def _hits(self, kind: str, probability: float) -> bool:
        if not self.active or probability == 0.0 or self.rng.random() >= probability:
            return False
        self.injected[kind] += 1
        return True

    def latencies(self, now: float, source: NodeId, to: NodeId) -> list[tuple[float, bool]]:
        """(latency, in order?) of each copy of a message that arrives; empty if it is lost."""
        plan, rng = self.plan, self.rng
        if self.active:
            for cut in plan.partitions:
                if cut.from_s <= now < cut.until_s and source in cut.ends and to in cut.ends:
                    self.injected["message cut off"] += 1
                    return []
        if self._hits("message lost", plan.lose):
            return []
        copies = [(0.0002 + 0.0008 * rng.random(), True)]
        if self._hits("message delayed", plan.delay):
            copies[0] = (copies[0][0] + rng.uniform(0.0, plan.delay_s), False)
        if self._hits("message duplicated", plan.duplicate):
            copies.append((copies[0][0] + rng.uniform(0.0, max(plan.delay_s, 0.01)), False))
        return copies

    def paused_until(self, now: float, node_id: NodeId, epoch: int) -> float:
        """When a node that is paused or stopped now goes on; 0 if it is not."""
        kind, until_s = self._sick.get((node_id, epoch), (None, 0.0))
        if kind is SicknessKind.STOPPED and now < until_s:
            return until_s
        if self.active:
            for pause in self.plan.pauses:
                if pause.worker == node_id and pause.from_s <= now < pause.until_s:
                    self.injected["paused"] += 1
                    return pause.until_s
        return 0.0

    def connect(self) -> str | None:
        """Why a connection fails, or None."""
        return "injected" if self._hits("connect error", self.plan.connect_error) else None

    def step(self, node_id: NodeId, epoch: int, num_tokens: int) -> tuple[float | None, str | None]:
        """(duration of a step, None if it never ends; why it fails, or None)."""
        kind, _ = self._sick.get((node_id, epoch), (None, 0.0))
        if kind is SicknessKind.HANGS:
            return None, None
        if kind is SicknessKind.FAILS:
            return 0.002, "injected, as in every step"
        duration = _step_s(num_tokens) * self.rng.uniform(0.8, LONGER)
        if self._hits("step slow", self.plan.step_slow):
            duration += self.rng.uniform(0.1, SLOW_S)
        return duration, "injected" if self._hits("step error", self.plan.step_error) else None

    def longest_s(self, worker: NodeId, num_tokens: int) -> float:
        """That a step of so many tokens may seem to have taken."""
        plan = self.plan
        longest_s = _step_s(num_tokens) * LONGER + (SLOW_S if plan.step_slow else 0.0)
        return longest_s * plan.clock_noise * dict(plan.clocks).get(worker, 1.0)

    def measured(self, worker: NodeId, duration_s: float) -> float:
        """How long a step seems to have taken. That changes what is expected, and nothing else."""
        if not self.plan.clocks:
            return duration_s
        self.injected["clock wrong"] += 1
        noise: float = self.plan.clock_noise ** self.rng.uniform(-1.0, 1.0)
        return duration_s * noise * dict(self.plan.clocks).get(worker, 1.0)

    def row(self) -> str | None:
        """Why a row is left out of its step, or None."""
        return "injected" if self._hits("row error", self.plan.row_error) else None

    def read(
        self, effect: CopyBlocks, block_size: int, *, now: float, peer_alive: bool, reader: NodeId
    ) -> ReadFate:
        """What becomes of a read that `reader` posts now."""
        rng, plan, count = self.rng, self.plan, len(effect.src)
        if effect.src_tier is Tier.DISK or effect.dst_tier is Tier.DISK:
            return self._disk(effect)
        duration = 0.0005 + 0.0003 * count * rng.uniform(0.5, 2.0)
        if effect.dst_tier is Tier.DEVICE and self._hits("read hangs", plan.read_hang):
            settle = plan.until_s - now + rng.uniform(0.0, plan.hang_s)
            return ReadFate(settle, "given up", self._moments(count, settle, copied=0.9))
        if self._hits("read slow", plan.read_slow):
            duration += rng.uniform(0.0, plan.read_slow_s)
        stalled = self._hits("read stalled", plan.read_stall)
        stalled |= self._is_broken(effect.peer, reader, now)
        if stalled or (not peer_alive and rng.random() < 0.5) or duration >= effect.timeout_s:
            settle = effect.timeout_s + 0.002 * rng.random()
            return ReadFate(settle, "timed out", self._moments(count, settle, copied=0.8))
        if self._hits("read error", plan.read_error) or not peer_alive:
            duration *= rng.random()
            return ReadFate(duration, "failed", self._moments(count, duration, copied=0.5))
        flip = None
        if self._hits("slot flipped", plan.flip):
            flip = (rng.randrange(count), rng.randrange(block_size))
        return ReadFate(duration, None, self._moments(count, duration, copied=1.0), flip)

    def _is_broken(self, source: NodeId, reader: NodeId, now: float) -> bool:
        is_broken = self.active and any(
            (link.source, link.reader) == (source, reader) and link.from_s <= now < link.until_s
            for link in self.plan.broken_links
        )
        if is_broken:
            self.injected["link broken"] += 1
        return is_broken

    def _disk(self, effect: CopyBlocks) -> ReadFate:
        """What becomes of a move from or to the disk."""
        rng, plan, count = self.rng, self.plan, len(effect.src)
        duration = 0.001 + 0.001 * count * rng.uniform(0.5, 2.0)
        if self._hits("disk slow", plan.disk_slow):
            duration += rng.uniform(0.0, plan.disk_slow_s)
        if self._hits("disk error", plan.disk_error) or duration >= effect.timeout_s:
            settle = min(duration * rng.random(), effect.timeout_s)
            return ReadFate(settle, "failed", self._moments(count, settle, copied=0.5))
        return ReadFate(duration, None, self._moments(count, duration, copied=1.0))

    def store(self) -> str | None:
        """Why the index cannot be changed, or None."""
        return "injected" if self._hits("store error", self.plan.store_error) else None

    def _moments(self, count: int, duration_s: float, *, copied: float) -> tuple[float | None, ...]:
        """One moment for each block within `[0, duration]`, or None for those never copied."""
        rng = self.rng
        return tuple(
            rng.uniform(0.0, duration_s) if copied == 1.0 or rng.random() < copied else None
            for _ in range(count)
        )
