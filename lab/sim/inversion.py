"""Whether a lower class of service has what a higher one waits for."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.engine.node import NodeId
from kvrelay.engine.sequence import Sequence as EngineSequence
from kvrelay.engine.service_class import ServiceClass
from kvrelay.kvtransfer.peer.handoff import ConsumerState
from kvrelay.kvtransfer.peer.producer import ASK_BACK_S
from kvrelay.lab.sim.client import class_of
from kvrelay.lab.sim.runtime import SimNode, SimRuntime
from kvrelay.lab.sim.scenario import Scenario
from kvrelay.worker.node import Worker

MOST_STEPS = 8  # that a worker may take to make room: some have been planned
MOST_HELD_S = 3 * ASK_BACK_S  # until consumers that have not begun to read do without
UNREAD = (ConsumerState.WAITING, ConsumerState.HANDSHAKING)


class ClassInversion:
    """At a worker nobody goes without what a lower class has: none is preempted while one of a
    lower class runs, waits for memory that would be enough with that of lower ones while these are
    computed, or has a prompt left out of a step that has a low class in it."""

    def __init__(self, workers: Sequence[NodeId], scenario: Scenario) -> None:
        self._workers = frozenset(workers)
        self._classes = {job.request_id: class_of(job) for job in scenario.jobs}
        self._preempted: dict[tuple[NodeId, str, int], int] = {}
        self._since: dict[tuple[NodeId, str, int], float] = {}  # steps of the worker, till then
        self._held_since: dict[tuple[NodeId, str, int], float] = {}
        self._last_step: dict[NodeId, int] = {}
        self._running: dict[NodeId, set[tuple[str, int]]] = {}

    def __call__(self, runtime: SimRuntime, life: SimNode) -> None:
        worker = life.node
        if not isinstance(worker, Worker) or worker.node_id not in self._workers:
            return
        scheduler = worker.core.scheduler
        before = self._running.get(worker.node_id, set())
        self._running[worker.node_id] = {s.key for s in scheduler.running}
        # KV that was arriving could not be taken.
        stayed = [s for s in scheduler.running if s.key in before]
        least = min((self._classes[s.request_id] for s in stayed), default=ServiceClass.PRIORITY)
        if scheduler._isolation.is_under_way:
            return
        for seq in scheduler.waiting:
            key, own = (worker.node_id, *seq.key), self._classes[seq.request_id]
            lost, self._preempted[key] = self._preempted.get(key, 0), seq.num_preemptions
            if seq.num_preemptions > lost and own > least and "lost" not in seq.phases:
                text = f"{key} was preempted, {least!r} runs"
                runtime.violate("class inversion", text)
            if not own.is_low:
                self._look_at_waiting(runtime, worker, seq, own)
                self._look_at_held(runtime, worker, seq, own)
        if scheduler.in_flight:
            self._look_at_step(runtime, worker)

    def _look_at_waiting(
        self, runtime: SimRuntime, worker: Worker, seq: EngineSequence, own: ServiceClass
    ) -> None:
        core, key = worker.core, (worker.node_id, *seq.key)
        scheduler, windows = core.scheduler, core.kv.windows
        others = (*scheduler.running, *scheduler.waiting)
        rivals = [s for s in others if s is not seq and self._classes[s.request_id] >= own]
        lower = [s for s in scheduler.running if self._classes[s.request_id] < own]
        num_free = core.kv.pool.num_free + sum(len(s.block_ids) for s in lower if s.num_hits == 0)
        waits = seq.arrived_at > scheduler.admits_until  # while others end with their weights
        is_late = waits or runtime.now < seq.not_before or seq.awaits_producer or scheduler.remote
        if rivals or not lower or is_late or num_free < windows.max_blocks(len(seq.tokens)) + 1:
            self._since.pop(key, None)
            return
        steps = core.counters.get("steps", 0)
        if steps - self._since.setdefault(key, steps) > MOST_STEPS:
            self._since[key] = float("inf")
            runtime.violate("class inversion", f"{key} waits while a lower class is computed")

    def _look_at_held(
        self, runtime: SimRuntime, worker: Worker, seq: EngineSequence, own: ServiceClass
    ) -> None:
        """After the faults: messages are not lost, and consumers hear what they are asked."""
        core, key = worker.core, (worker.node_id, *seq.key)
        scheduler, windows = core.scheduler, core.kv.windows
        unread = [
            each
            for each in scheduler.held
            if self._classes[each.request_id] < own and self._is_unread(runtime, worker, each)
        ]
        lower = [s for s in scheduler.running if self._classes[s.request_id] < own]
        others = (*scheduler.running, *scheduler.waiting)
        rivals = [s for s in others if s is not seq and self._classes[s.request_id] >= own]
        could = core.kv.pool.num_free + sum(len(s.block_ids) for s in (*lower, *unread))
        needed = windows.max_blocks(len(seq.tokens)) + 1
        waits = seq.arrived_at > scheduler.admits_until or scheduler.is_paused
        is_late = waits or runtime.now < seq.not_before or seq.awaits_producer or scheduler.remote
        if runtime.faults.active or rivals or not unread or is_late or could < needed:
            self._held_since.pop(key, None)
        elif runtime.now - self._held_since.setdefault(key, runtime.now) > MOST_HELD_S:
            self._held_since[key] = float("inf")
            held = [each.key for each in unread]
            runtime.violate("class inversion", f"{key} waits, and {held} are held")

    def _is_unread(self, runtime: SimRuntime, worker: Worker, held: EngineSequence) -> bool:
        """Whether its consumer is well, and has not begun to read it."""
        life = runtime.life(worker.exchange.producer.handoff(held.key).consumer)
        if life is None or not isinstance(life.node, Worker):
            return False
        if runtime.faults.sickness(runtime.now, life.node_id, life.epoch) is not None:
            return False
        arrival = life.node.exchange.connector.arrivals.get(held.key)
        return arrival is not None and arrival.state in UNREAD

    def _look_at_step(self, runtime: SimRuntime, worker: Worker) -> None:
        scheduler = worker.core.scheduler
        step, seqs = scheduler.in_flight[-1]
        if step.step_id == scheduler._isolation._step_id:  # it runs again, apart
            return
        if step.is_health_check or self._last_step.get(worker.node_id) == step.step_id:
            return
        self._last_step[worker.node_id] = step.step_id
        low = [s for s in seqs if self._classes[s.request_id].is_low]
        prompts = [
            s
            for s in scheduler.running
            if s.num_missing > 1
            and not self._classes[s.request_id].is_low
            and worker.core.kv.num_covered(s) > s.num_computed
        ]
        if low and any(s not in seqs for s in prompts):
            text = f"{worker.node_id}: {low[0].key} is in a step, {prompts[0].key} is not"
            runtime.violate("class inversion", text)
