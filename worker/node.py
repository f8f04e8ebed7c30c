"""The worker: one node for both roles, over the engine and its KV traffic.

Any worker computes prompts for others and decodes; its role is what routers prefer it for. What it
does with a request is up to a `RoleHandler`, one for each role: `prefill_worker.prefills` for
prompts that are computed for another worker, `decode_worker.decodes` for requests that are
generated here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.core import EngineCore
from kvrelay.engine.kv.events import KVSnapshotRequest
from kvrelay.engine.messages import Abort, Preempted, Probe, Refused, TokenDeltas, WorkRequest
from kvrelay.engine.node import Effect, Exit, NodeId, Note, Send, Unsendable, Wake, Woken
from kvrelay.engine.request import Refusal
from kvrelay.engine.sequence import SeqState, Sequence
from kvrelay.engine.stats import (
    Audit,
    AuditRequest,
    ProgressReport,
    ProgressRequest,
    RouterDown,
    RouterUp,
)
from kvrelay.engine.step import Execute, PrepareGrammar, StepDone
from kvrelay.kvtransfer.peer.arrival import Settled
from kvrelay.kvtransfer.tiers.blocks import StoreRecords
from kvrelay.worker.exchange import Handler, KVExchange

MAX_REPORTED = 8  # sequences that wait for memory, which are reported to routers at a time
MAX_LEFT_SHARE = 0.5
"""So much of its KV blocks may be left to reads that do not settle. Beyond it a worker ends if they
have not settled within `WorkerConfig.left_reads_s`: their peer may be the one that is stopped, and
is ended then."""
MEMORY_WAIT_S = 0.5  # so long it may wait for its first blocks before that is reported


class RoleHandler(ABC):
    """What a worker does with the requests of one role. Owned by the worker, and shares its core
    and exchange with the other one; each sequence belongs to exactly one."""

    request: ClassVar[type]  # the message that asks for it
    needs_growth: ClassVar[bool]  # tokens are generated here, after the first
    goal: ClassVar[str]  # what one that missed its deadline was not, for the refusal

    def __init__(self, core: EngineCore, exchange: KVExchange) -> None:
        self.core = core
        self.exchange = exchange

    @abstractmethod
    def begin(self, now: float, seq: Sequence, request: Any) -> list[Effect]:
        """`seq` has been accepted for `request`, and waits."""

    def on_admitted(self, seq: Sequence) -> list[Effect]:
        """It has its blocks; those that were cache hits are sealed."""
        return []

    @abstractmethod
    def on_arrived(self, now: float, settled: Settled) -> list[Effect]:
        """Its KV has come from elsewhere, as far as it has; the rest is computed."""

    @abstractmethod
    def on_computed(self, seq: Sequence) -> list[Effect]:
        """A step has computed more of its KV, and perhaps sampled tokens."""


class Worker:
    """Node. Invariants: blocks of an ended sequence are freed only once neither the step in flight
    nor a transfer writes to them; a sequence is REMOTE iff the connector has an arrival for it that
    has begun; one that is computed for another worker has a handoff with the producer."""

    def __init__(
        self,
        config: WorkerConfig,
        roles: Iterable[type[RoleHandler]],
        records: StoreRecords | None = None,
    ) -> None:
        """`records`: what its stores held when they were opened."""
        self.config = config
        self.node_id = config.node_id
        self.core = EngineCore(config)
        self.exchange = KVExchange(config, self.core)
        self._roles = {role.needs_growth: role(self.core, self.exchange) for role in roles}
        self._handlers = self._make_handlers()
        self._records = records or {}
        self._has_ended = False
        self._lacks_blocks_s = 0.0  # reads that do not settle have had too many, tick by tick
        self._ticked_at = 0.0

    def start(self, now: float) -> list[Effect]:
        self.exchange.tiers.start(now, self._records)
        self._records = {}
        return [Wake(self.config.stats_interval_s, "tick")]

    def receive(self, now: float, message: Any) -> list[Effect]:
        self.core.now = now
        effects = self._handlers.get(type(message), _on_unexpected)(now, message)
        effects += self._use_arrived(now)
        effects += self._schedule(now)
        effects += self.exchange.advance(now)
        effects += self.core.flush()
        why = "" if self._has_ended else self._why_not_go_on()
        if why:
            self._has_ended = True
            effects += self.core.give_up(why)
            effects += [Note("error", "worker_gives_up", why), Exit(why, self.core.watch.hangs)]
        return effects

    def _why_not_go_on(self) -> str:
        """Why another process would serve better than this one; "": it would not."""
        num_left, num_blocks = self.exchange.orphans.num_blocks, self.config.num_blocks
        if self._lacks_blocks_s > self.config.left_reads_s:
            return f"{num_left} of {num_blocks} KV blocks are left to reads that do not settle"
        return self.core.watch.why

    def _role_of(self, seq: Sequence) -> RoleHandler:
        return self._roles[seq.reserve_growth]

    def _make_handlers(self) -> dict[type, Handler]:
        core, publisher = self.core, self.core.publisher
        return {
            **self.exchange.handlers,
            **{role.request: partial(self._begin, role) for role in self._roles.values()},
            StepDone: lambda now, message: self._on_step_done(message),
            Woken: lambda now, message: self._on_tick(now),
            Abort: lambda now, message: self._on_abort(message),
            RouterUp: lambda now, message: publisher.subscribe(message.router),
            RouterDown: lambda now, message: self._on_router_down(message.router),
            KVSnapshotRequest: lambda now, message: publisher.snapshot(message.router),
            Probe: lambda now, message: [core.answer_probe(message)],
            AuditRequest: lambda now, message: [Send(message.reply_to, self.audit())],
            ProgressRequest: lambda now, message: [Send(message.reply_to, self.progress())],
            Unsendable: lambda now, message: self._on_unsendable(message),
        }

    def _begin(self, role: RoleHandler, now: float, request: WorkRequest) -> list[Effect]:
        accepted = self.core.accept(now, request, role_needs_growth=role.needs_growth)
        if isinstance(accepted, Refused):
            return [Send(request.router, accepted)]
        if accepted is None:
            return []
        grammar = accepted.sampling.grammar
        prepared: list[Effect] = [PrepareGrammar(grammar)] if grammar else []
        return [*prepared, *role.begin(now, accepted, request)]

    def _on_abort(self, abort: Abort) -> list[Effect]:
        mine = [seq for seq in self.core.seqs.values() if seq.request_id == abort.request_id]
        return self._end([seq for seq in mine if seq.attempt <= abort.attempt])

    def _on_router_down(self, router: NodeId) -> list[Effect]:
        """Its clients are gone with it."""
        self.core.publisher.unsubscribe(router)
        return self._end([seq for seq in self.core.seqs.values() if seq.router == router])

    def _use_arrived(self, now: float) -> list[Effect]:
        """Go on with the sequences whose arrivals have settled."""
        effects: list[Effect] = []
        for settled in self.exchange.take_arrived(now):
            effects += self._role_of(settled.arrival.seq).on_arrived(now, settled)
        return effects

    def _schedule(self, now: float) -> list[Effect]:
        effects = self._end_faults()
        exchange = self.exchange
        token_s = self.core.timing.token_s
        for seq in self.core.scheduler.admit_waiting(now, exchange.has_external_kv, token_s):
            self.core.mark_used(seq)
            if seq.state is SeqState.REMOTE:
                effects += exchange.connector.start(now, seq)
            effects += self._role_of(seq).on_admitted(seq)
        effects += self._use_arrived(now)
        steps: list[Effect] = []
        while (step := self.core.next_step()) is not None:
            steps.append(Execute(step))
        effects += self._end_faults()
        effects += self._report_preempted(self.core.scheduler.take_preempted())
        return [*effects, *steps]

    def _end_faults(self) -> list[Effect]:
        """End the sequences that were left out of a step, or made one fail."""
        for seq, *_ in self.core.scheduler.faults:
            self.exchange.producer.forget_handoff(seq)
        return self.core.fail_left_out()

    def _report_preempted(self, preempted: Iterable[Sequence]) -> list[Effect]:
        """Their routers learn that they wait for memory."""
        node_id, epoch = self.config.node_id, self.config.epoch
        return [
            Send(seq.router, Preempted(node_id, epoch, *seq.key, awaits_prefill=seq.is_remote))
            for seq in preempted
            if seq.state is SeqState.WAITING and seq.reserve_growth
        ]

    def _on_step_done(self, done: StepDone) -> list[Effect]:
        effects: list[Effect] = []
        if done.error is not None:
            effects.append(Note("error", "step_failed", done.error))
        for seq, _ in self.core.finish_step(done):
            effects += self._role_of(seq).on_computed(seq)
        return effects

    def _on_unsendable(self, lost: Unsendable) -> list[Effect]:
        """Tokens of several requests go again apart; of one, they end it."""
        if not isinstance(lost.message, TokenDeltas):
            return [Note("error", "unsendable", f"{type(lost.message).__name__}: {lost.why}")]
        deltas = lost.message.deltas
        if len(deltas) > 1:
            return [Send(lost.to, replace(lost.message, deltas=(each,))) for each in deltas]
        key = deltas[0].request_id, deltas[0].attempt
        ended = self._end([seq for seq in self.core.seqs.values() if seq.key == key])
        refused = self.core.refusal(*key, Refusal.UNENCODABLE, lost.why)
        return [*ended, Send(lost.to, refused)]

    def _on_tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = [Wake(self.config.stats_interval_s, "tick")]
        self.core.watch.tick(now)
        self._count_left(now)
        for seq in self.core.expired(now):
            detail = f"not {self._role_of(seq).goal} by {self.node_id} before the deadline"
            refused = self.core.refusal(seq.request_id, seq.attempt, Refusal.DEADLINE, detail)
            effects += [*self.exchange.end(seq), Send(seq.router, refused)]
        # Again, in case that a router has not heard of it.
        waiting = filter(self._is_stuck, self.core.scheduler.waiting)
        effects += self._report_preempted(islice(waiting, MAX_REPORTED))
        effects += self.exchange.tick(now)
        stats = replace(
            self.core.stats(self._num_handoffs, self.exchange.rates()),
            links=self.exchange.connector.peers.links(),
        )
        publisher = self.core.publisher
        publisher.tick()
        return effects + [Send(router, stats) for router in publisher.routers]

    def _count_left(self, now: float) -> None:
        """Time counts as it passes here: that of a process that was stopped itself does not."""
        passed_s = min(now - self._ticked_at, 2 * self.config.stats_interval_s)
        self._ticked_at = now
        is_much = self.exchange.orphans.num_blocks > MAX_LEFT_SHARE * self.config.num_blocks
        self._lacks_blocks_s = self._lacks_blocks_s + passed_s if is_much else 0.0

    def _is_stuck(self, seq: Sequence) -> bool:
        """Whether it would rather be elsewhere: it has lost its blocks, or waits for the first.
        Where others share these cores a long prompt would only be computed at the same time."""
        if seq.num_preemptions:
            return True
        core = self.core
        if not core.scheduler.lacks_room or seq.awaits_producer:
            return False
        compute_s = seq.num_to_compute * core.timing.token_s
        is_short = not self.config.cores or compute_s <= MEMORY_WAIT_S
        return is_short and core.now - seq.arrived_at > MEMORY_WAIT_S

    def _end(self, seqs: list[Sequence]) -> list[Effect]:
        return [effect for seq in seqs for effect in self.exchange.end(seq)]

    @property
    def _num_handoffs(self) -> int:
        return len(self.exchange.producer.leases) + len(self.exchange.connector.arrivals)

    def progress(self) -> ProgressReport:
        watch, scheduler = self.core.watch, self.core.scheduler
        num_requests = len(scheduler.waiting) + scheduler.num_admitted
        return ProgressReport(
            self.node_id,
            self.config.epoch,
            watch.num_done,
            watch.progress,
            num_requests + self._num_handoffs,
        )

    def audit(self) -> Audit:
        """What does not add up is reported. It is no reason to end the worker, which has found
        nothing wrong in what it computes with: that is checked before every step."""
        left: list[str] = []
        wrong: list[str] = []
        for check in (self.exchange.check_idle, self.core.check_idle):
            try:
                left += check()
            except Exception as error:
                wrong.append(f"blocks do not add up: {_what_failed(error)}")
        return replace(self.exchange.audit(left), wrong=tuple(wrong))

    def check_idle(self) -> list[str]:
        """What an idle worker must not have; empty if all is well."""
        return self.exchange.check_idle() + self.core.check_idle()


def _on_unexpected(now: float, message: object) -> list[Effect]:
    return [Note("warning", "unexpected_message", type(message).__name__)]


def _what_failed(error: Exception) -> str:
    """And where: most assertions have no text."""
    at = error.__traceback__
    assert at is not None
    while at.tb_next is not None:
        at = at.tb_next
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__} {text} in {at.tb_frame.f_code.co_name}, line {at.tb_lineno}"
