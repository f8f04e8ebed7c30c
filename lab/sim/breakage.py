"""Nodes with a safeguard taken out, to show that the checkers notice. Only the simulator can build
them.

- `confirm`: a read that has finished is used without asking whether the blocks were still held.
- `drain`: destination blocks are given back while a transfer may still write to them.
- `checksum`: the bytes that were read are not compared with those that were stored or sent.
- `leave`: the attempt that another has taken over from is not ended.
- `rescue`: requests that wait for memory are not moved to where there is some.
- `role`: the router does not listen to what a worker is to be preferred for.
- `unsettled`: the blocks of reads that do not settle are freed when they are left behind.
- `wait`: reads that do not settle are waited for.
- `watch`: workers that hang, or fail in every step, go on.
- `suspect`: the controller listens to no complaints of workers that are silent.
- `ranks`: a transfer is done when one rank of a worker says so.
- `ahead`: blocks of what has ended are freed while the step behind its last one writes to them.
- `apart`: all sequences of a failed step are at fault.
- `turns`: the router sends requests in order of arrival, whosever they are.
- `callers`: to a router all callers of a tenant are one.
- `fits`: four requests that lack memory stop those of their tenant that do not; at a worker, eight.
- `passes`: one that memory is missing for is passed without end.
- `states`: a prefix that is read from a peer counts as read without the states of its end.
- `again`: a step that failed is run again from where it began, though it may have changed states.
- `left`: a stream waits without end for the KV that its dead worker has left.
- `versions`: a worker names its blocks as before when it has other weights.
- `pairs`: a worker says nothing of its new weights, and takes requests that mean others.
- `classes`: a worker takes all requests for such of the default class.
- `held`: computed prompts keep their blocks until their consumers have read them, whoever waits.
- `verdict`: a router takes all its workers for full and slow, whatever it has measured.
- `outputs`: a prompt that has to give outputs is taken from the prefix cache like any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from math import inf
from typing import Any

from msgspec import structs

from kvrelay.cluster.control.control_config import ControllerConfig
from kvrelay.cluster.control.controller import Controller
from kvrelay.engine.kv.spec import STATE_WINDOW
from kvrelay.engine.messages import Preempted
from kvrelay.engine.node import Effect, NodeId, Note, Send
from kvrelay.engine.progress import StepWatch
from kvrelay.engine.request import Refusal
from kvrelay.engine.sequence import Sequence as Seq
from kvrelay.engine.service_class import ServiceClass
from kvrelay.engine.stats import Progress
from kvrelay.engine.step import StepDone
from kvrelay.engine.waiting import Passes
from kvrelay.kvtransfer.agent import CopyDone, TransferId
from kvrelay.kvtransfer.messages import KVRelease
from kvrelay.kvtransfer.peer.arrival import Arrival
from kvrelay.kvtransfer.peer.connector import Connector, UnsettledReads
from kvrelay.kvtransfer.peer.handoff import ConsumerEvent
from kvrelay.kvtransfer.ranks import RankAnswers
from kvrelay.kvtransfer.tiers.blocks import Source
from kvrelay.kvtransfer.transfer_loop import Answer
from kvrelay.router.admission.blocked import MAX_HELD_BACK, Blocked
from kvrelay.router.admission.flow import Level, QueueEntry
from kvrelay.router.config import RouterConfig
from kvrelay.router.messages import RoleChanged, Submit, WorkerSuspected
from kvrelay.router.record import Cause, RequestRecord
from kvrelay.router.router import Router
from kvrelay.worker.left_kv import LeftKV
from kvrelay.worker.messages import CONTROLLER
from kvrelay.worker.node import Worker
from kvrelay.worker.weights import weight_updates


class Break(StrEnum):
    CONFIRM = "confirm"
    DRAIN = "drain"
    CHECKSUM = "checksum"
    LEAVE = "leave"
    RESCUE = "rescue"
    ROLE = "role"
    UNSETTLED = "unsettled"
    WAIT = "wait"
    WATCH = "watch"
    SUSPECT = "suspect"
    RANKS = "ranks"
    TURNS = "turns"
    FITS = "fits"
    PASSES = "passes"
    CLASSES = "classes"
    HELD = "held"
    OUTPUTS = "outputs"
    LEFT = "left"
    AHEAD = "ahead"
    STATES = "states"
    AGAIN = "again"
    APART = "apart"
    VERSIONS = "versions"
    PAIRS = "pairs"
    VERDICT = "verdict"
    CALLERS = "callers"


class TrustingConnector(Connector):
    """Takes every finished read for a good one."""

    def _ask_confirmation(self, now: float, arrival: Arrival) -> list[Effect]:
        self._settle(arrival, ConsumerEvent.CONFIRMED)
        assert arrival.producer is not None
        return [Send(arrival.producer, KVRelease(*arrival.key))]


class HastyConnector(Connector):
    """Forgets the transfers of a handoff that is given up, and so frees their destination."""

    def fail(self, arrival: Arrival, why: str) -> list[Effect]:
        for transfer_id in arrival.reads:
            del self._by_transfer[transfer_id]
        arrival.reads.clear()
        arrival.seq.num_reads = 0
        return super().fail(arrival, why)

    def on_copy_done(self, now: float, done: CopyDone) -> list[Effect]:
        known = done.transfer_id in self._by_transfer
        return super().on_copy_done(now, done) if known else []


class HastyAnswers(RankAnswers):
    """Takes the first rank's answer for that of all."""

    def add(self, rank: int, answer: Answer) -> None:
        if isinstance(answer, CopyDone) and self.audit():
            for each in range(len(self._counted)):
                super().add(each, answer)


def join_answers(broken: Break | None) -> type[RankAnswers]:
    return HastyAnswers if broken is Break.RANKS else RankAnswers


class CredulousConnector(Connector):
    """Takes what it has read for what was stored."""

    def on_copy_done(self, now: float, done: CopyDone) -> list[Effect]:
        arrival = self._by_transfer[done.transfer_id]
        indices = arrival.reads[done.transfer_id].indices
        checksums = tuple(arrival.checksum(index) for index in indices)
        return super().on_copy_done(now, replace(done, checksums=checksums))


class StatelessConnector(Connector):
    """Takes states that were offered for states that have come."""

    def _post_offers(self, now: float, arrival: Arrival) -> list[Effect]:
        groups = self._kv.windows.groups
        offered = filter(arrival.takes_offer, arrival.offers)
        states = {index for index in offered if groups[index % len(groups)].size == STATE_WINDOW}
        arrival.posted |= states
        arrival.good |= states
        return super()._post_offers(now, arrival)


class PatientConnector(Connector):
    """Waits for every read to settle."""

    def _leave_behind(self, arrival: Arrival) -> Note:
        return Note("info", "kv_read_waited_for", arrival.key[0])


class _BlindWatch(StepWatch):
    @property
    def progress(self) -> Progress:
        return Progress.MADE


class _EndlessPasses(Passes):
    def are_over(self, now: float, timeout_s: float) -> bool:
        return False


class HastyReads(UnsettledReads):
    """Keeps nothing for reads that may still write."""

    def take(
        self, transfer_id: TransferId, blocks: Sequence[int], sources: Sequence[Source]
    ) -> None:
        super().take(transfer_id, (), sources)


class EndlessLeftKV(LeftKV):
    """Waits until something is found."""

    def begin(self, now: float, seq: Seq) -> list[Effect]:
        effects = super().begin(now, seq)
        if effects:
            seq.not_before = float("inf")
        return effects


_CONNECTORS: dict[Break, type[Connector]] = {
    Break.CONFIRM: TrustingConnector,
    Break.DRAIN: HastyConnector,
    Break.CHECKSUM: CredulousConnector,
    Break.STATES: StatelessConnector,
    Break.WAIT: PatientConnector,
}


def break_worker(worker: Worker, broken: Break) -> None:
    """Replace one method of its connector, before it has received anything."""
    core, exchange, kv = worker.core, worker.exchange, worker.core.kv
    if broken is Break.UNSETTLED:
        exchange.unsettled = HastyReads(kv.pool, exchange.tiers)
        exchange.connector.unsettled = exchange.unsettled
    if broken is Break.LEFT:
        exchange.left_kv = EndlessLeftKV(worker.core, exchange.tiers)
    if broken is Break.VERSIONS:

        def compute_with(fingerprint: bytes, weights: str) -> None:
            core.weights = weights

        core.compute_with = compute_with  # type: ignore[method-assign]
    if broken is Break.PAIRS:
        worker.core.is_for_others = lambda work: False  # type: ignore[method-assign]
        weight_updates(worker.plugs).announce = lambda to: Note("info", "unsaid", to)  # type: ignore
        stats = worker.core.stats
        worker.core.stats = lambda *about: replace(stats(*about), num_weight_changes=0)  # type: ignore
    if broken is Break.WATCH:
        worker.core.watch = _BlindWatch(worker.config)
    if broken is Break.OUTPUTS:

        def usable_hashes(seq: Seq) -> Sequence[bytes]:
            return seq.block_hashes[: (len(seq.tokens) - 1) // kv.block_size]

        kv.usable_hashes = usable_hashes  # type: ignore[method-assign]
    if broken is Break.AHEAD:
        scheduler, finish_step = worker.core.scheduler, worker.core.scheduler.finish_step

        def forget_the_next(done: StepDone) -> list[tuple[Seq, int]]:
            survivors = finish_step(done)
            for seq, _ in survivors:
                seq.num_steps = 0
            return survivors

        scheduler.finish_step = forget_the_next  # type: ignore[method-assign]
    if broken is Break.AGAIN:
        scheduler = worker.core.scheduler
        scheduler.config = structs.replace(scheduler.config, has_states=False)
    if broken is Break.APART:
        scheduler = worker.core.scheduler

        def blame_all(step_id: int, seqs: Sequence[Seq], error: str) -> None:
            scheduler.faults += [(seq, Refusal.EXECUTION, error) for seq in seqs]

        scheduler._isolation.on_failed = blame_all  # type: ignore[method-assign]
    if broken is Break.FITS:
        kv.lacks = lambda seq, num_blocks: False  # type: ignore[method-assign]
    if broken is Break.PASSES:
        scheduler, add = worker.core.scheduler, worker.core.scheduler.add

        def add_to_be_passed(seq: Seq) -> None:
            seq.passes = _EndlessPasses()
            add(seq)

        scheduler.add = add_to_be_passed  # type: ignore[method-assign]
    if broken is Break.CLASSES:
        scheduler, add_known = worker.core.scheduler, worker.core.scheduler.add

        def add_alike(seq: Seq) -> None:
            seq.service_class = ServiceClass.DEFAULT
            add_known(seq)

        scheduler.add = add_alike  # type: ignore[method-assign]
    if broken is Break.HELD:
        worker.core.scheduler._held_before = lambda seq: []  # type: ignore[method-assign]
    if broken in _CONNECTORS:
        owned = worker.config, kv, exchange.tiers, exchange.unsettled
        exchange.connector = _CONNECTORS[broken](*owned)


class _BrokenRouter(Router):
    broken: Break

    def receive(self, now: float, message: Any) -> list[Effect]:
        if self.broken is Break.CALLERS and isinstance(message, Submit):
            message = replace(message, caller="")
        if self.broken is Break.ROLE and isinstance(message, RoleChanged):
            return []
        if self.broken is Break.RESCUE:
            for record in self.live.values():
                for attempt in record.under_way:
                    attempt.preempted = False
            if isinstance(message, Preempted):
                return []
        return super().receive(now, message)


def _forget_left(now: float, record: RequestRecord, cause: Cause) -> None:
    record.leaving = None


class _DeafController(Controller):
    def receive(self, now: float, message: Any) -> list[Effect]:
        return [] if isinstance(message, WorkerSuspected) else super().receive(now, message)


def make_controller(config: ControllerConfig, broken: Break | None) -> Controller:
    return (_DeafController if broken is Break.SUSPECT else Controller)(config)


def make_router(node_id: NodeId, config: RouterConfig, broken: Break | None) -> Router:
    if broken is None:
        return Router(node_id, config, controller=CONTROLLER)
    router = _BrokenRouter(node_id, config, controller=CONTROLLER)
    router.broken = broken
    queue = router._requests.queue
    if broken is Break.TURNS:

        def oldest(level: Level, blocked: Blocked) -> QueueEntry | None:
            returned = [each for _, each in level.returned]
            flows = [flow for flow in level.flows.values() if not queue.is_limited(flow)]
            limits = {flow: blocked.limit(flow) for flow in flows}
            found = [each for each in returned if each.record.request_id not in blocked]
            found = found or [
                entry
                for flow, limit in limits.items()
                for entry in flow.entries()
                if entry.record.request_id not in blocked and entry.needs < limit
            ]
            return min(found, key=lambda each: each.record.arrival, default=None)

        queue._head = oldest  # type: ignore[method-assign]
    if broken is Break.FITS:
        next_of = queue.next

        def next_of_few(blocked: Blocked) -> QueueEntry | None:
            blocked.limit = lambda flow: inf  # type: ignore[method-assign]
            blocked.lacks_memory = lambda entry: False  # type: ignore[method-assign]
            counts = Counter(entry.flow.tenant for entry in blocked.entries.values())
            blocked.held_back_tenants = {name for name in counts if counts[name] >= MAX_HELD_BACK}
            return next_of(blocked)

        queue.next = next_of_few  # type: ignore[method-assign]
    if broken is Break.PASSES:
        push = queue.push

        def push_to_be_passed(record: RequestRecord, units: float, num_held: int = 0) -> None:
            push(record, units, num_held)
            queue.entry(record).passes = _EndlessPasses()

        queue.push = push_to_be_passed  # type: ignore[method-assign]
    if broken is Break.VERDICT:
        admission = router._requests.admission
        admission.may_send = lambda record: not queue.num_running  # type: ignore[method-assign]
        admission._estimates.service_s = lambda *sizes, is_low: 3600.0  # type: ignore
    if broken is Break.LEAVE:
        router._requests.leave = _forget_left  # type: ignore[method-assign]
    return router
