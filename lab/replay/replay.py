"""One replay from beginning to end: the cluster is put together, the trace runs through it, and
what its clients saw becomes a `ReplayResult`.
"""

from __future__ import annotations

import gc
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from kvrelay.cluster.roles import make_worker
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.scope import UNSALTED, CacheScope
from kvrelay.engine.node import NodeId
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.stats import Role, RouterUp
from kvrelay.lab.replay.config import Fault, ReplayConfig
from kvrelay.lab.replay.runtime import FIRST_OUTPUT_TOKEN, ReplayRuntime
from kvrelay.lab.replay.trace import Trace, TraceRequest
from kvrelay.lab.replay.why import Watch, Why
from kvrelay.lab.timing.timing import overheads_of
from kvrelay.router.messages import Failed, Output, Submit, WorkerDown, WorkerUp
from kvrelay.router.router import Router


@dataclass(slots=True)
class Sample:
    """One request as its client saw it. Seconds count from its arrival; None: it never came."""

    request_id: str
    at_s: float
    input_length: int
    output_length: int  # asked for
    tenant: str = ""
    priority: int = 0
    ttft_s: float | None = None
    second_s: float | None = None  # the second token; None where there is one token only
    e2e_s: float | None = None
    num_output: int = 0
    cached: dict[str, int] = field(default_factory=dict)  # prompt tokens by source
    predicted_ttft_s: float | None = None
    prefill: str | None = None  # worker that computed the prompt; None: the decode worker did
    decode: str | None = None
    refused: str | None = None  # the reason
    refused_s: float | None = None
    retry_after_s: float | None = None
    why: Why | None = None  # if asked for
    session: str | None = None
    turn: int = 0
    reusable: int = 0  # prompt tokens that an earlier request of the session has


@dataclass(slots=True)
class LoadSeries:
    """Per-worker load over time, sampled at `times_s`. Arrays are [len(workers), len(times_s)]."""

    workers: tuple[str, ...]
    times_s: NDArray[np.float64]
    num_running: NDArray[np.float64]
    kv_used: NDArray[np.float64]  # fraction of the pool that requests hold
    pending_tokens: NDArray[np.float64]  # prompt tokens that wait for computation


@dataclass(slots=True)
class ReplayResult:
    """What one replay has shown. `itl_s` are gaps between tokens, `itl_counts` how often each was
    seen."""

    trace: str
    policy: str
    timing: str
    speedup: float
    samples: list[Sample]
    itl_s: NDArray[np.float32]
    itl_counts: NDArray[np.int32]
    load: LoadSeries
    virtual_s: float
    wall_s: float
    num_events: int
    peak_rss_bytes: int
    retries: dict[str, int] = field(default_factory=dict)  # by cause
    counters: dict[str, float] = field(default_factory=dict)  # summed over workers
    is_closed: bool = False  # requests waited for the answers of others
    num_unasked: int = 0  # requests of sessions that a refusal had ended


ROUTER: NodeId = "router-0"
CLIENT: NodeId = "client"
FINGERPRINT = b"replayed"
NOTICE_S = 0.5  # from the death of a worker to the router's knowing
NUM_LOAD_SAMPLES = 240
EVENTS_PER_SLICE = 5_000
INFINITE = 1e15  # bytes per second
UNSHARED = 1 << 30  # ids of blocks that nothing shares; those of traces are below

OnProgress = Callable[[float, float], None]
"""Called with the share of the requests that has ended, and the virtual time."""


class Replay:
    """Owned by `replay`. Invariant: a request is in `_open` from its arrival to its end."""

    def __init__(self, trace: Trace, config: ReplayConfig) -> None:
        self.trace = trace
        if config.oracle:
            config = _with_infinite_cache(trace, config)
        self.config = config
        self.runtime = ReplayRuntime(
            config.timing, config.block_size, self._on_answer, client=CLIENT
        )
        self.watch = Watch(config.block_size) if config.why else None
        self.runtime.on_send = self.watch.on_send if self.watch else None
        self.router = Router(ROUTER, config.router)
        self._request_s = overheads_of(config.timing).request_s
        self.samples: list[Sample] = []
        self._open: dict[str, Sample] = {}
        numbered = enumerate(trace.requests)
        self._arrivals: Iterator[tuple[int, TraceRequest]] = iter(
            [each for each in numbered if not each[1].after]
        )
        self._unanswered = {n: len(each.after) for n, each in enumerate(trace.requests)}
        self._next: defaultdict[int, list[int]] = defaultdict(list)  # by whom they wait for
        for number, request in enumerate(trace.requests):
            for before in request.after:
                self._next[before].append(number)
        self.num_unasked = 0
        self._left = Counter(request.session for request in trace.requests)  # by session
        self._num_sessions = 0  # under way
        # By session, the prompt that was made last: a turn's is made of the one before it.
        self._prompts: dict[str | None, tuple[Sequence[int], tuple[int, ...]]] = {}
        self._is_full = False  # the next session waits for the end of one
        self._num_ended = 0
        self._is_closed = trace.is_closed
        self._next_unshared = UNSHARED
        self._load_times: list[float] = []
        self._loads: list[list[tuple[float, float, float]]] = []
        longest = max((r.input_length + r.output_length for r in trace.requests), default=1)
        self._max_model_len = longest + 1
        self._workers = [
            *(self._worker_config(Role.PREFILL, i) for i in range(config.num_prefill)),
            *(self._worker_config(Role.DECODE, i) for i in range(config.num_decode)),
        ]

    def run(self, on_progress: OnProgress | None) -> ReplayResult:
        started = time.perf_counter()
        self.runtime.begin(self.router)
        for worker in self._workers:
            self._start(worker, 1)
        for fault in self.config.faults:
            self._plan(fault)
        self._submit_next()
        self._sample_load()
        total = len(self.trace.requests)
        while not self.runtime.run(lambda: self._num_ended >= total, EVENTS_PER_SLICE):
            if on_progress is not None:
                on_progress(self._num_ended / total, self.runtime.now)
        if on_progress is not None:
            on_progress(1.0, self.runtime.now)
        return self._result(time.perf_counter() - started)

    # -- the cluster -----------------------------------------------------------------------------

    def _worker_config(self, role: Role, number: int) -> WorkerConfig:
        config = self.config
        return WorkerConfig(
            node_id=f"{role}-{number}",
            role=role,
            epoch=0,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            bytes_per_block=config.block_size * config.timing.links.bytes_per_token,
            max_model_len=self._max_model_len,
            fingerprint=FINGERPRINT,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            num_host_blocks=config.num_host_blocks,
            num_disk_blocks=config.num_disk_blocks,
            stats_interval_s=config.stats_interval_s,
            step_timeout_s=0.0,
            itl_target_ms=1e3 * config.itl_target_s,
            num_speculative_tokens=0,
        )

    def _start(self, worker: WorkerConfig, epoch: int) -> None:
        config = structs.replace(worker, epoch=epoch)
        runtime = self.runtime
        runtime.begin(make_worker(config), epoch, config.num_blocks * config.block_size)
        runtime.post(worker.node_id, RouterUp(ROUTER))
        runtime.post(ROUTER, WorkerUp(config.info()))

    def _plan(self, fault: Fault) -> None:
        worker = next(w for w in self._workers if w.node_id == fault.worker)

        def kill() -> None:
            life = self.runtime.lives[fault.worker]
            if not life.alive:
                return
            epoch = self.runtime.end(fault.worker)
            down = WorkerDown(fault.worker, epoch, "killed")
            self.runtime.post(ROUTER, down, NOTICE_S)
            back_s = self.runtime.now + max(fault.down_s, 2 * NOTICE_S)
            self.runtime.call_at(back_s, lambda: self._start(worker, epoch + 1))

        self.runtime.call_at(fault.at_s, kill)

    # -- the clients -----------------------------------------------------------------------------

    def _submit_next(self) -> None:
        """Let the next request arrive in its time, and the one after it then."""
        number, request = next(self._arrivals, (0, None))
        if request is None:
            return
        at_s, most = request.at_s / self.config.speedup, self.config.at_once

        def submit() -> None:
            self._num_sessions += 1
            self._submit(number, request)
            self._is_full = 0 < most <= self._num_sessions
            if not self._is_full:
                self._submit_next()

        self.runtime.call_at(at_s, submit)

    def _submit(self, number: int, request: TraceRequest) -> None:
        request_id = f"r{number}"
        sample = Sample(
            request_id,
            self.runtime.now,
            request.input_length,
            request.output_length,
            request.tenant,
            request.priority,
            session=request.session,
            turn=request.turn,
            reusable=request.reusable,
        )
        self._open[request_id] = sample
        submit = Submit(
            request_id,
            SamplingParams(max_tokens=max(1, request.output_length), temperature=0.0, seed=number),
            CLIENT,
            self._tokens(request),
            self.config.timeout_s,
            priority=request.priority,
            scope=CacheScope(request.tenant.encode()) if request.tenant else UNSALTED,
            tenant=request.tenant,
            session=request.session,
            has_branches=self._is_closed,
        )
        self.runtime.post(ROUTER, submit, self._request_s)

    def _count_ended(self, request: TraceRequest) -> None:
        """After the last request of a session, one that was held back may start."""
        self._num_ended += 1
        self._left[request.session] -= 1
        if not self._left[request.session]:
            self._num_sessions -= 1
            self._prompts.pop(request.session, None)
            if self._is_full:
                self._is_full = False
                self._submit_next()

    def _go_on(self, number: int, answered: bool) -> None:
        """Whoever waited for request `number` sends its next one, after its think time. A session
        ends with a request that was refused."""
        runtime, requests = self.runtime, self.trace.requests
        for each in self._next.pop(number, ()):
            if each not in self._unanswered:
                continue
            self._unanswered[each] -= 1
            if not answered:
                del self._unanswered[each]
                self._count_ended(requests[each])
                self.num_unasked += 1
                self._go_on(each, False)
            elif not self._unanswered[each]:
                submit = partial(self._submit, each, requests[each])
                runtime.call_at(runtime.now + requests[each].think_s, submit)

    def _tokens(self, request: TraceRequest) -> tuple[int, ...]:
        """A block is its id, over and over: equal ids, equal tokens. Where an answer is part of it,
        there are that answer's tokens."""
        size, length = self.trace.block_tokens, request.input_length
        ids = request.block_ids
        if not ids:
            count = -(-length // size)
            ids = tuple(range(self._next_unshared, self._next_unshared + count))
            self._next_unshared += count
        before, known = self._prompts.get(request.session, ((), ()))
        shared = max(0, min(len(before), len(ids)) - 1)  # the last one of `before` may be partial
        if ids[:shared] != before[:shared]:
            shared = 0
        tokens = [*known[: shared * size]]
        answers = self.trace.answers
        for block in ids[shared:]:
            tokens += [block] * size
            for part in answers.get(block, ()):
                count, first = part.end - part.start, len(tokens) - size
                answer = [FIRST_OUTPUT_TOKEN + part.request] * count
                tokens[first + part.start : first + part.end] = answer
        del tokens[length:]
        made = tuple(tokens)
        if self._is_closed:
            self._prompts[request.session] = ids, made
        return made

    def _on_answer(self, now: float, answer: Any) -> None:
        sample = self._open.get(answer.request_id)
        if sample is None:
            return
        if isinstance(answer, Output):
            if sample.ttft_s is None and answer.tokens:
                sample.ttft_s = now - sample.at_s
            sample.num_output += len(answer.tokens)
            if answer.finish is not None:
                sample.cached = answer.cached_by_source
                self._end(now, sample)
                sample.e2e_s = now - sample.at_s
        elif isinstance(answer, Failed):
            sample.refused = str(answer.reason)
            sample.refused_s = now - sample.at_s
            sample.retry_after_s = answer.retry_after_s
            self._end(now, sample)

    def _end(self, now: float, sample: Sample) -> None:
        del self._open[sample.request_id]
        number = int(sample.request_id[1:])
        self._count_ended(self.trace.requests[number])
        self._go_on(number, sample.refused is None)
        second_at = self.runtime.log.forget(number)
        sample.second_s = None if second_at is None else second_at - sample.at_s
        decisions = self.router.explain(sample.request_id)
        if decisions:
            decision = decisions[-1]
            sample.prefill, sample.decode = (
                decision.options.best.prefill_from,
                decision.options.best.worker,
            )
            waited_s = decision.at_s - sample.at_s  # by then that was known
            sample.predicted_ttft_s = waited_s + decision.predicted_ttft_s
        if self.watch is not None and sample.ttft_s is not None:
            explanation = self.router.explanations.get(sample.request_id)
            cached = sum(sample.cached.values())
            sample.why = self.watch.explain(explanation, sample.ttft_s, cached)
        self.samples.append(sample)

    # -- the result ------------------------------------------------------------------------------

    def _sample_load(self) -> None:
        every_s = max(1.0, self.trace.duration_s / self.config.speedup / NUM_LOAD_SAMPLES)
        self._load_times.append(self.runtime.now)
        self._loads.append([self._load(worker.node_id) for worker in self._workers])
        self.runtime.call_at(self.runtime.now + every_s, self._sample_load)

    def _load(self, worker: NodeId) -> tuple[float, float, float]:
        life = self.runtime.lives[worker]
        if not life.alive:
            return (0.0, 0.0, 0.0)
        node: Any = life.node
        pool, scheduler = node.core.kv.pool, node.core.scheduler
        used = 1.0 - pool.num_free / pool.num_blocks
        return (float(len(scheduler.running)), used, float(scheduler.pending_tokens))

    def _result(self, wall_s: float) -> ReplayResult:
        log, config = self.runtime.log, self.config
        width = len(self._workers)  # workers that came later had no load before
        padded = [row + [(0.0, 0.0, 0.0)] * (width - len(row)) for row in self._loads]
        loads = np.asarray(padded, dtype=np.float64).transpose(2, 1, 0)
        counters: dict[str, float] = {}
        for worker in self._workers:
            node: Any = self.runtime.lives[worker.node_id].node
            for name, value in node.core.counters.items():
                counters[name] = counters.get(name, 0.0) + value
        status = self.router.status(self.runtime.now)
        return ReplayResult(
            trace=self.trace.name,
            policy=config.policy,
            timing=config.timing.name,
            speedup=config.speedup,
            samples=sorted(self.samples, key=lambda sample: sample.at_s),
            itl_s=np.frombuffer(log.gap_s, dtype=np.float32).copy(),
            itl_counts=np.frombuffer(log.gap_counts, dtype=np.int32).copy(),
            load=LoadSeries(
                tuple(worker.node_id for worker in self._workers),
                np.asarray(self._load_times),
                *loads,
            ),
            virtual_s=self.runtime.now,
            wall_s=wall_s,
            num_events=self.runtime.num_events,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            retries=dict(status.totals.retries),
            counters=counters,
            is_closed=self._is_closed,
            num_unasked=self.num_unasked,
        )


def _with_infinite_cache(trace: Trace, config: ReplayConfig) -> ReplayConfig:
    """The oracle: whatever was computed once is had for nothing, anywhere and for ever."""
    asked = trace.requests  # what is not in an earlier one, and a block that each begins
    tokens = sum(r.input_length - r.reusable + r.output_length + config.block_size for r in asked)
    links = replace(
        config.timing.links, transfer_s=0.0, peer_bytes_per_s=INFINITE, host_bytes_per_s=INFINITE
    )
    return replace(
        config,
        timing=replace(config.timing, links=links),  # type: ignore[type-var]
        num_host_blocks=tokens // config.block_size,
    )


def replay(
    trace: Trace, config: ReplayConfig, on_progress: OnProgress | None = None
) -> ReplayResult:
    """Run `trace` through the cluster of `config`. Equal arguments give equal results."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(200_000, 20, 100)  # most of what is made lives long; cycles are few
    try:
        return Replay(trace, config).run(on_progress)
    finally:
        gc.set_threshold(*thresholds)
