"""The runtime of a replay: production nodes under virtual time, made to be fast.

Forward passes and transfers are replaced by how long they take. Many decode steps in a row of the
same sequences are one event, as `Step.repeats` allows; whatever changes the running sequences ends
them at the step that is under way.

Every output token of request number i is the same number, which no prompt has, so that the blocks
of answers have hashes of their own.

Where workers share the cores of one machine, passes slow those of the other role down
(`Contention`). Life of a pass: begun with the seconds that it takes alone; while a worker of the
other role has a pass too, it runs at 1 / slowdown of its speed; ended by its worker. After each
change the runtime asks when the passes will end now.

Equal passes do not take equally long: interruptions come at random, so the relative spread of a
pass is the smaller the longer it takes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, exp, sqrt
from random import Random
from typing import Any

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import Effect, Node, NodeId, Note, Send, Wake, Woken
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.stats import Role
from kvrelay.engine.step import (
    AbandonStep,
    AskProgress,
    Execute,
    Sampled,
    ScheduledSeq,
    Step,
    StepDone,
)
from kvrelay.kvtransfer.agent import ConnectPeer, CopyBlocks, CopyDone, PeerConnected, StoreIndex
from kvrelay.lab.timing.timing import Overheads, Timing, overheads_of
from kvrelay.lab.virtual_time import VirtualTime

SPREAD_S = 0.01  # a pass of this length is spread by Overheads.spread


@dataclass(slots=True)
class _Pass:
    role: Role
    has_prompts: bool
    left_s: float  # if it were alone from now on


@dataclass(slots=True)
class Contention:
    """The passes under way on one machine. Owned by who replays.

    Invariant: at most one pass a worker, and `left_s` of each is true at `_now`."""

    overheads: Overheads
    _now: float = 0.0
    _passes: dict[NodeId, _Pass] = field(default_factory=dict)
    _random: Random = field(default_factory=lambda: Random(0))

    def begin(
        self, now: float, worker: NodeId, role: Role, has_prompts: bool, seconds: float
    ) -> None:
        assert worker not in self._passes, f"{worker} has a pass already"
        self._advance(now)
        self._passes[worker] = _Pass(role, has_prompts, seconds * self._luck(seconds))

    def end(self, now: float, worker: NodeId) -> None:
        """The pass of `worker` is over, or its worker is gone."""
        self._advance(now)
        del self._passes[worker]

    def ends(self) -> dict[NodeId, float]:
        """When each pass will end if no other begins or ends before."""
        return {
            worker: self._now + each.left_s * self._slowdown(each)
            for worker, each in self._passes.items()
        }

    def _advance(self, now: float) -> None:
        elapsed_s, self._now = now - self._now, now
        for each in self._passes.values():
            each.left_s = max(0.0, each.left_s - elapsed_s / self._slowdown(each))

    def _luck(self, seconds: float) -> float:
        """Draws a factor that is 1 in the median."""
        spread = self.overheads.spread
        if not spread:
            return 1.0
        return exp(spread * sqrt(min(1.0, SPREAD_S / seconds)) * self._random.gauss())

    def _slowdown(self, one: _Pass) -> float:
        """How much a pass is slowed by those that are under way. Alone, what it computes is what
        counts: a prompt takes as long on a decode worker."""
        costs = self.overheads
        if all(each.role is one.role for each in self._passes.values()):
            return costs.prefill_alone_slowdown if one.has_prompts else costs.decode_alone_slowdown
        return costs.prefill_slowdown if one.role is Role.PREFILL else costs.decode_slowdown


FIRST_OUTPUT_TOKEN = 1 << 31
"""Plus the number of the request. Block ids of traces are below."""


@dataclass(slots=True, eq=False)
class Burst:
    """Decode steps in a row that are under way. Step j (from 1) ends `ends_s(j)` after the start;
    each takes a little longer than the one before, because there is more KV to read."""

    step: Step
    start_s: float
    first_s: float
    growth_s: float
    repeats: int
    running: list[Sequence]  # when it began

    def ends_s(self, count: int) -> float:
        return count * (self.first_s + self.growth_s * (count - 1) / 2)

    def count_at(self, now: float) -> int:
        """Steps that have to end before the burst may: those that have begun by now."""
        elapsed_s = now - self.start_s
        linear = self.first_s - self.growth_s / 2
        if self.growth_s > 1e-12:
            root = sqrt(linear * linear + 2 * self.growth_s * elapsed_s)
            count = (root - linear) / self.growth_s
        else:
            count = elapsed_s / self.first_s
        return min(self.repeats, max(1, ceil(count - 1e-9)))


@dataclass(slots=True)
class TokenLog:
    """When tokens came. Owned by a runtime; a request is known by its number."""

    gap_s: array[float] = field(default_factory=lambda: array("f"))
    gap_counts: array[int] = field(default_factory=lambda: array("i"))
    last_at: dict[int, float] = field(default_factory=dict)  # request -> its last token
    num_tokens: dict[int, int] = field(default_factory=dict)  # request -> tokens so far
    second_at: dict[int, float] = field(default_factory=dict)

    def note(self, request: int, first_at: float, last_at: float, count: int) -> None:
        """`count` tokens more of `request`, the first and last of them at these times."""
        before = self.last_at.get(request)
        known = self.num_tokens.get(request, 0)
        if before is not None:
            self.gap_s.append(first_at - before)
            self.gap_counts.append(1)
        if known == 1:
            self.second_at[request] = first_at
        elif known == 0 and count > 1:
            self.second_at[request] = first_at + (last_at - first_at) / (count - 1)
        self.last_at[request] = last_at
        self.num_tokens[request] = known + count

    def forget(self, request: int) -> float | None:
        """`request` is over. Returns when its second token came."""
        self.last_at.pop(request, None)
        self.num_tokens.pop(request, None)
        return self.second_at.pop(request, None)


class TimedPasses:
    """Stands for the model of every worker. Holds nothing of its own but the log."""

    def __init__(self, timing: Timing, log: TokenLog) -> None:
        self._timing = timing
        self._log = log

    def seconds(self, step: Step, pool_tokens: int) -> tuple[float, float]:
        """How long `step` takes, and how much longer each repeat takes than the one before."""
        prompt_tokens, pairs, num_prompts = 0, 0.0, 0
        num_decodes, kv_tokens = 0, 0
        for share in step.seqs:
            count = len(share.tokens)
            if count == 1:
                num_decodes += 1
                kv_tokens += share.start + 1
            else:
                num_prompts += 1
                prompt_tokens += count
                pairs += count * (share.start + count / 2)
        pass_s = self._timing.pass_s
        first_s = pass_s(prompt_tokens, pairs, num_prompts, num_decodes, kv_tokens, pool_tokens)
        if step.repeats == 1:
            return first_s, 0.0
        last = step.repeats - 1
        grown = kv_tokens + last * num_decodes
        last_s = pass_s(0, 0.0, 0, num_decodes, grown, pool_tokens)
        return first_s, max(0.0, last_s - first_s) / last

    def finish(self, burst: Burst, count: int, now: float) -> StepDone:
        """`burst` has ended now, after `count` steps."""
        step, log = burst.step, self._log
        first_at = burst.start_s + burst.first_s if count > 1 else now
        sampled = [self._sample(share, count, first_at, now) for share in step.seqs]
        if count > 1:
            log.gap_s.append((now - first_at) / (count - 1))
            log.gap_counts.append((count - 1) * len(step.seqs))
        checksums = [0] * len(step.checksum_blocks)
        return StepDone(step.step_id, sampled, checksums, now - burst.start_s)

    def _sample(
        self, share: ScheduledSeq, count: int, first_at: float, last_at: float
    ) -> Sampled | None:
        if not share.sample:
            return None
        request = share.sampling.seed
        self._log.note(request, first_at, last_at, count)
        token = FIRST_OUTPUT_TOKEN + request
        return Sampled(token, None, (token,) * (count - 1))


MAX_BURST_S = 2.0
"""Longest run of decode steps that is one event: tokens come to the router in time."""


@dataclass(slots=True, eq=False)
class ReplayNode:
    """One incarnation of a node. Nothing of it happens after `alive` is False."""

    node: Node
    epoch: int
    scheduler: Scheduler | None  # a worker's
    pool_tokens: int = 0
    alive: bool = True
    burst: Burst | None = None
    busy_until: dict[str, float] = field(default_factory=dict)  # by link: "in", "out", "disk", ...


@dataclass(frozen=True, slots=True)
class BurstEnd:
    burst: Burst
    count: int


@dataclass(slots=True)
class ReplayRuntime(VirtualTime[ReplayNode, Any]):
    """Owns the lives. An event is a message, or for no life a call."""

    timing: Timing
    block_size: int
    to_client: Callable[[float, Any], None]
    lives: dict[NodeId, ReplayNode] = field(default_factory=dict)
    log: TokenLog = field(default_factory=TokenLog)
    notes: dict[str, int] = field(default_factory=dict)
    client: NodeId = "client"
    on_send: Callable[[float, Any], None] | None = None  # told of every message between nodes
    _passes: TimedPasses = field(init=False)
    _contention: Contention | None = None  # None: no two workers share anything but links

    def __post_init__(self) -> None:
        self._passes = TimedPasses(self.timing, self.log)
        overheads = overheads_of(self.timing)
        if overheads.shares_cores:
            self._contention = Contention(overheads)

    def begin(self, node: Node, epoch: int = 0, pool_tokens: int = 0) -> ReplayNode:
        """Start a node, or the next life of one whose last has ended."""
        old = self.lives.get(node.node_id)
        assert old is None or not old.alive
        scheduler = node.core.scheduler if hasattr(node, "core") else None
        life = self.lives[node.node_id] = ReplayNode(node, epoch, scheduler, pool_tokens)
        self._perform(life, node.start(self.now))
        return life

    def end(self, node_id: NodeId) -> int:
        """End the life of a node at once. Returns its epoch."""
        life = self.lives[node_id]
        life.alive = False
        if self._contention is not None and life.burst is not None:
            self._contention.end(self.now, node_id)
            self._retime(self._contention)
        return life.epoch

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        self.schedule(max(at_s, self.now), None, call)

    def post(self, to: NodeId, message: Any, after_s: float = 0.0) -> None:
        life = self.lives.get(to)
        if life is not None and life.alive:
            self.schedule(self.now + after_s, life, message)

    def run(self, until: Callable[[], bool], num_events: int) -> bool:
        """Up to `num_events` events, or until `until`. True: there is nothing left to do."""
        for _ in range(num_events):
            if until() or (event := self.advance()) is None:
                return True
            life, message = event
            if life is None:
                message()
                continue
            if type(message) is BurstEnd:
                if message.burst is not life.burst:
                    continue  # it ended earlier
                life.burst = None
                if self._contention is not None:
                    self._contention.end(self.now, life.node.node_id)
                    self._retime(self._contention)
                message = self._passes.finish(message.burst, message.count, self.now)
            self._deliver(life, message)
        return False

    def _deliver(self, life: ReplayNode, message: Any) -> None:
        self._perform(life, life.node.receive(self.now, message))
        burst = life.burst
        if burst is None or burst.repeats == 1:
            return
        assert life.scheduler is not None
        if life.scheduler.running != burst.running:
            count = burst.count_at(self.now)
            if count < burst.repeats:
                self._start(life, burst, count)

    def _perform(self, life: ReplayNode, effects: list[Effect]) -> None:
        message_s = self.timing.links.message_s
        for effect in effects:
            kind = type(effect)
            if kind is Send:
                if self.on_send is not None:
                    self.on_send(self.now, effect.message)
                if effect.to == self.client:
                    self.to_client(self.now, effect.message)
                else:
                    peer = self.lives.get(effect.to)
                    if peer is not None and peer.alive:
                        self.schedule(self.now + message_s, peer, effect.message)
            elif kind is Execute:
                self._execute(life, effect.step)
            elif kind is CopyBlocks:
                self._read(life, effect)
            elif kind is Wake:
                self.schedule(self.now + effect.after_s, life, Woken(effect.tag))
            elif kind is ConnectPeer:
                self._connect(life, effect)
            elif kind is Note:
                self.notes[effect.counter] = self.notes.get(effect.counter, 0) + 1
            elif kind is AskProgress or kind is AbandonStep:
                pass  # no pass of the replayed hardware hangs, or ends early
            else:
                assert kind is StoreIndex, f"unknown effect {effect!r}"

    def _execute(self, life: ReplayNode, step: Step) -> None:
        assert life.scheduler is not None
        first_s, growth_s = self._passes.seconds(step, life.pool_tokens)
        repeats = step.repeats
        if repeats > 1:
            repeats = max(1, min(repeats, int(MAX_BURST_S / first_s)))
        running = life.scheduler.running.copy()
        if self._contention is not None:
            life.burst = Burst(step, self.now, first_s, 0.0, 1, running)
            role = life.node.config.role  # type: ignore[attr-defined]
            has_prompts = any(len(share.tokens) > 1 for share in step.seqs)
            self._contention.begin(self.now, life.node.node_id, role, has_prompts, first_s)
            self._retime(self._contention)
            return
        burst = Burst(step, self.now, first_s, growth_s, repeats, running)
        self._start(life, burst, repeats)

    def _retime(self, contention: Contention) -> None:
        """Forward passes under way end at other times than before."""
        for node_id, at_s in contention.ends().items():
            life = self.lives[node_id]
            assert life.burst is not None
            life.burst = replace(life.burst)
            self.schedule(max(at_s, self.now), life, BurstEnd(life.burst, 1))

    def _start(self, life: ReplayNode, burst: Burst, count: int) -> None:
        """Let the burst end after `count` steps."""
        shorter = Burst(
            burst.step, burst.start_s, burst.first_s, burst.growth_s, count, burst.running
        )
        life.burst = shorter
        ends_s = max(burst.start_s + shorter.ends_s(count), self.now)  # but for what rounding takes
        self.schedule(ends_s, life, BurstEnd(shorter, count))

    def _connect(self, life: ReplayNode, effect: ConnectPeer) -> None:
        peer = self.lives.get(effect.peer)
        there = peer is not None and peer.alive and peer.epoch == effect.epoch
        error = None if there else f"{effect.peer} epoch {effect.epoch} is not there"
        done = PeerConnected(effect.peer, effect.epoch, error)
        self.schedule(self.now + 2 * self.timing.links.message_s, life, done)

    def _read(self, life: ReplayNode, effect: CopyBlocks) -> None:
        """A transfer waits for the ends of the links that it takes."""
        links, own = self.timing.links, effect.peer == life.node.node_id
        source = self.lives.get(effect.peer)
        num_bytes = len(effect.dst) * self.block_size * links.bytes_per_token
        error = None
        if source is None or not source.alive or source.epoch != effect.epoch:
            error = f"{effect.peer} epoch {effect.epoch} is gone"
            ends_s = self.now + links.transfer_s
        else:
            if not own:
                rate, ends = links.peer_bytes_per_s, ((source, "out"), (life, "in"))
            elif Tier.DISK in (effect.src_tier, effect.dst_tier):
                rate, ends = links.disk_bytes_per_s, ((life, "disk"), (life, "disk"))
            else:
                lane = "up" if effect.dst_tier is Tier.DEVICE else "down"
                rate, ends = links.host_bytes_per_s, ((life, lane), (life, lane))
            begins_s = max(self.now, *(end.busy_until.get(link, 0.0) for end, link in ends))
            ends_s = begins_s + links.transfer_s + num_bytes / rate
            for end, link in ends:
                end.busy_until[link] = ends_s
        checksums = (0,) * len(effect.dst) if error is None else ()
        done = CopyDone(effect.transfer_id, error, checksums, ends_s - self.now, num_bytes)
        self.schedule(ends_s, life, done)
