"""What makes no progress must not stay: streams that are silent, and workers that hang, fail in
every step or are stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.node import NodeId
from kvrelay.engine.progress import FIRST_SLACK
from kvrelay.engine.stats import Progress
from kvrelay.lab.sim.faults import Kind
from kvrelay.lab.sim.runtime import Life, SimRuntime
from kvrelay.lab.sim.scenario import Scenario
from kvrelay.router.record import RequestRecord
from kvrelay.router.router import Router
from kvrelay.worker.node import Worker

LOOK_S = 0.25
SILENT_S = 12.0
STOPPED_S = 14.0  # one that was being introduced when it was stopped is waited for 10 s
MARGIN = 4  # blocks, and a margin of time in seconds


class Silence:
    """After the faults: no stream is silent for long while a worker that makes progress has room
    for all of it. One such silence is one violation."""

    def __init__(
        self, router: NodeId, workers: Sequence[NodeId], may_decode: Callable[[NodeId], bool]
    ) -> None:
        """`may_decode`: whether the policy ever chooses the worker for it."""
        self._router = router
        self._workers = workers
        self._may_decode = may_decode
        self._seen: dict[str, tuple[int, float]] = {}  # request -> tokens that it had, since when
        self._due_at = 0.0

    def __call__(self, runtime: SimRuntime, life: Life) -> None:
        if runtime.faults.active or runtime.now < self._due_at:
            return
        self._due_at = runtime.now + LOOK_S
        router_life = runtime.life(self._router)
        assert router_life is not None
        router = router_life.node
        assert isinstance(router, Router)
        begun = [r for r in router.live.values() if r.current is not None or r.num_output_tokens]
        seen: dict[str, tuple[int, float]] = {}
        for record in begun:
            count, since = self._seen.get(record.request_id, (-1, 0.0))
            if count != len(record.tokens):
                count, since = len(record.tokens), runtime.now
            decodes = filter(self._may_decode, self._workers)
            could = [worker for worker in decodes if could_serve(runtime, worker, record)]
            if runtime.now - since > SILENT_S and could:
                text = f"{record.request_id} has got no token for {SILENT_S:g} s, and {could} live"
                runtime.violate("silent", text)
                since = float("inf")
            seen[record.request_id] = (count, since)
        self._seen = seen


def could_serve(runtime: SimRuntime, name: NodeId, record: RequestRecord) -> bool:
    """The worker is well, and has room for all that the request may become beside what it has."""
    life = runtime.life(name)
    if life is None or runtime.faults.sickness(runtime.now, name, life.epoch) is not None:
        return False
    worker = life.node
    assert isinstance(worker, Worker)
    core, config = worker.core, worker.config
    whole, busy = record.num_prompt_tokens + record.sampling.max_tokens, len(core.seqs)
    needed = -(-whole // config.block_size) + busy + 1
    has_room = busy + 1 < config.max_num_seqs and core.kv.pool.num_free >= needed + MARGIN
    is_avoided = name in {each.worker for each in record.avoid}
    makes_progress = core.watch.progress is Progress.MADE
    return has_room and makes_progress and not is_avoided and whole <= config.max_model_len


class NoProgress:
    """At all times: no worker that makes no progress stays up for long."""

    def __init__(self, workers: Sequence[NodeId], scenario: Scenario) -> None:
        self._workers = workers
        first_s = {w.node_id: FIRST_SLACK * w.step_timeout_s for w in scenario.workers}
        self._hang_s = {worker: seconds + MARGIN for worker, seconds in first_s.items()}
        self._since: dict[tuple[NodeId, int], float] = {}  # of what is wrong with a life
        self._due_at = 0.0

    def __call__(self, runtime: SimRuntime, life: Life) -> None:
        if runtime.now < self._due_at:
            return
        self._due_at = runtime.now + LOOK_S
        lives = [each for each in map(runtime.life, self._workers) if each is not None]
        since: dict[tuple[NodeId, int], float] = {}
        for each in lives:
            limit_s = self._limit_s(runtime, each)
            if limit_s is None:
                continue
            key = (each.node_id, each.epoch)
            since[key] = self._since.get(key, runtime.now)
            if runtime.now - since[key] > limit_s:
                kind = runtime.faults.sickness(runtime.now, *key)
                runtime.violate("no progress", f"{each.node_id} stays up: {kind}")
                since[key] = float("inf")
        self._since = since

    def _limit_s(self, runtime: SimRuntime, life: Life) -> float | None:
        """How long this may go on; None: there is nothing wrong that shows."""
        kind, executor = (
            runtime.faults.sickness(runtime.now, life.node_id, life.epoch),
            life.executor,
        )
        assert isinstance(life.node, Worker)
        if kind is Kind.STOPPED:
            return STOPPED_S
        if kind is Kind.HANGS and executor.is_busy:
            return self._hang_s[life.node_id]
        if kind is Kind.FAILS and executor.failed_in_a_row > _most_failed(life.node.config):
            return 0.0
        return None


def _most_failed(config: WorkerConfig) -> int:
    """Steps in a row: down to who failed alone, and the health checks after that."""
    return config.max_num_seqs.bit_length() + 1 + config.max_failed_steps
