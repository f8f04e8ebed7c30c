"""Whether what would fit is kept waiting by what does not, be it of the same tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvrelay.engine.node import NodeId
from kvrelay.engine.sequence import Sequence as EngineSequence
from kvrelay.lab.sim.inversion import MOST_STEPS
from kvrelay.lab.sim.runtime import SimNode, SimRuntime
from kvrelay.router.dispatch import fits
from kvrelay.router.record import RequestRecord
from kvrelay.router.router import Router
from kvrelay.worker.node import Worker

LATELY_S = 0.3  # since a worker was heard of
MOST_TRIES = 8  # a router looks at some of those that wait each time


class KeptAtRouter:
    """After the faults: while a router knows of memory for one of a tenant's requests that wait, it
    sends one of that tenant, unless memory is held for another one."""

    def __init__(
        self, router: NodeId, workers: Sequence[NodeId], may_decode: Callable[[NodeId], bool]
    ) -> None:
        """`may_decode`: whether the policy ever chooses the worker for an output."""
        self._router, self._workers, self._may_decode = router, workers, may_decode
        self._num_sent: Counter[str] = Counter()
        self._num_tries: dict[str, int] = {}  # while one of the tenant fits
        self._seen: tuple[int, ...] = ()

    def __call__(self, runtime: SimRuntime, life: SimNode) -> None:
        if runtime.faults.active or life.node_id != self._router:
            return
        router = life.node
        assert isinstance(router, Router)
        requests, totals = router._requests, router._requests.totals
        if not len(requests.queue) or router._config.ttft_target_s:
            self._num_tries.clear()
            return
        # Whenever one of these changes it tries those that wait.
        decoding = sum(each.num_decoding for each in router._dispatcher.endpoints if each.alive)
        seen = totals.submitted, totals.attempts, totals.requests.total(), decoding
        has_tried, self._seen = seen != self._seen, seen
        if not has_tried:
            return
        fitting: dict[str, RequestRecord] = {}
        if requests.dispatcher._waits is None:
            for record in requests.queue.in_order():
                if record.submit.tenant not in fitting and self._fits(runtime.now, router, record):
                    fitting[record.submit.tenant] = record
        sent = totals.sent_by_tenant
        kept = [tenant for tenant in fitting if sent[tenant] == self._num_sent[tenant]]
        self._num_tries = {tenant: self._num_tries.get(tenant, 0) + 1 for tenant in kept}
        self._num_sent = Counter(sent)
        for tenant, count in self._num_tries.items():
            if count == MOST_TRIES + 1:
                text = f"{fitting[tenant].request_id} waits, and a worker has memory for it"
                runtime.violate("kept waiting", f"{self._router}: {text}")

    def _fits(self, now: float, router: Router, record: RequestRecord) -> bool:
        requests = router._requests
        if record.attempts or record.submit.weights:
            return False
        if requests.queue.is_limited(requests.queue.entry(record).flow):
            return False
        return requests.admission.may_send(record) and any(
            self._has_room(now, router, worker, record) for worker in self._workers
        )

    def _has_room(self, now: float, router: Router, name: NodeId, record: RequestRecord) -> bool:
        endpoint = next((e for e in router._dispatcher.endpoints if e.worker == name), None)
        if endpoint is None or not endpoint.alive or not self._may_decode(name):
            return False
        config, info = router._config, endpoint.info
        is_away = endpoint.excluded_until > now or now - endpoint.struct.last_seen_at > LATELY_S
        slots = min(config.max_inflight_per_worker, endpoint.struct.max_booked)
        if is_away or endpoint.num_seqs >= slots:
            return False
        most = record.num_prompt_tokens + record.sampling.max_tokens
        return fits(info, most) and endpoint.num_free_blocks >= info.blocks_for(most)


class KeptAtWorker:
    """While nothing but decodes is computed at a worker, a prompt that fits is admitted, unless
    one that does not was passed too often."""

    def __init__(self, workers: Sequence[NodeId]) -> None:
        self._workers = frozenset(workers)
        self._since: dict[tuple[NodeId, str, int], float] = {}  # steps of the worker, till then

    def __call__(self, runtime: SimRuntime, life: SimNode) -> None:
        worker = life.node
        if not isinstance(worker, Worker) or worker.node_id not in self._workers:
            return
        core, scheduler = worker.core, worker.core.scheduler
        if len(scheduler.waiting) < 2 or runtime.faults.active:
            return
        steps = core.counters.get("steps", 0)
        is_open = self._admits(scheduler.waiting, worker, runtime.now)
        for seq in scheduler.waiting:
            key = (worker.node_id, *seq.key)
            if not is_open or not self._fits(worker, seq, runtime.now):
                self._since.pop(key, None)
            elif steps - self._since.setdefault(key, steps) > MOST_STEPS:
                self._since[key] = float("inf")
                runtime.violate("kept waiting", f"{key} waits, and the worker has room for it")

    def _admits(self, waiting: Sequence[EngineSequence], worker: Worker, now: float) -> bool:
        scheduler = worker.core.scheduler
        if scheduler.is_paused or scheduler._isolation.is_under_way or scheduler.remote:
            return False
        if any(seq.num_missing > 1 for seq in scheduler.running):
            return False
        if scheduler.num_admitted + 1 >= worker.config.max_num_seqs:
            return False
        return not any(
            seq.is_stream
            or seq.is_remote
            or seq.passes.are_over(now, seq.deadline - seq.arrived_at)
            or seq.service_class is not waiting[0].service_class
            for seq in waiting
        )

    def _fits(self, worker: Worker, seq: EngineSequence, now: float) -> bool:
        core, scheduler = worker.core, worker.core.scheduler
        if seq.is_low or now < seq.not_before or seq.arrived_at > scheduler.admits_until:
            return False
        windows = core.kv.windows
        headroom = (scheduler.num_admitted + 1) * windows.count
        return core.kv.pool.num_free > windows.max_blocks(len(seq.tokens)) + headroom
