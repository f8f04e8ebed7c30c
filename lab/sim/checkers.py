"""What must hold in every run, beyond what the executor, the agent and the client see for
themselves.

During the run: no queue above its bound, no stream that waits for memory while others have some,
tenants that share by weight, and no request that is passed too often. At its end, with all faults
over and every lease run out: nothing is left on any node, and the router's prefix index says what
the workers hold. At all times, what makes no progress must not stay: streams that are silent, and
workers that hang, fail in every step or are stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.core import EngineCore
from kvrelay.engine.cost import order_of
from kvrelay.engine.kv.tier import ANNOUNCED_TIERS, Tier
from kvrelay.engine.node import NodeId
from kvrelay.engine.progress import FIRST_SLACK, SLACK
from kvrelay.engine.request import NO_OUTPUTS, Refusal
from kvrelay.engine.sequence import Sequence as EngineSequence
from kvrelay.engine.stats import Progress, Role
from kvrelay.engine.waiting import MAX_PASSED
from kvrelay.lab.sim.client import ClientRequest, JudgeFailure, SimClient, tenant_of
from kvrelay.lab.sim.faults import SicknessKind
from kvrelay.lab.sim.model import FULL, Attention, prompt_outputs
from kvrelay.lab.sim.runtime import SimNode, SimRuntime
from kvrelay.lab.sim.scenario import BLOCK_SIZE, Scenario
from kvrelay.router.admission.admission import OUTPUT_UNITS
from kvrelay.router.admission.fair_queue import FairQueue
from kvrelay.router.admission.flow import QueueEntry
from kvrelay.router.messages import Failed
from kvrelay.router.record import RequestRecord
from kvrelay.router.router import Router
from kvrelay.worker.node import Worker

STARVATION_S = 2.0
FAIR_WITHIN = 2.0  # times the largest request of each: estimates of what runs may be off
MARGIN = 4  # blocks that may be taken before a request that moves comes
AMPLE_S = 1.0  # a timeout in which an idle worker serves any request
ROUTER_SAMPLING = 8
"""One event in so many: its status costs more to make than a message to decide."""


def failure_judge(scenario: Scenario, find_idle: Callable[[], NodeId | None]) -> JudgeFailure:
    """Which refusals are honest: each has a condition that the run has to meet. `find_idle`: a
    worker that would have begun the request at once."""
    plan = scenario.faults
    lengths = [w.max_model_len for w in scenario.workers]
    pools = [BLOCK_SIZE * w.num_blocks // w.kv_windows.count for w in scenario.workers]

    def judge(order: ClientRequest, failed: Failed, now: float) -> str | None:
        job, reason = order.job, failed.reason
        assert order.submitted_at is not None
        if reason is Refusal.CONTEXT_LENGTH:
            most = max(lengths) if job.after_faults else min(lengths)
            return None if job.num_tokens > most else "it fits into the context"
        if reason is Refusal.NEVER_FITS:
            # While there are faults, the workers with the larger pools may be down.
            pool_tokens = max(pools) if job.after_faults else min(pools)
            return None if job.num_tokens > pool_tokens else "it fits into the pool"
        if reason is Refusal.DEADLINE:
            late = now >= order.submitted_at + job.timeout_s
            return None if late else "its deadline has not passed"
        is_ample = job.timeout_s >= AMPLE_S and not tenant_of(job)[1].max_concurrent
        if reason is Refusal.OVERLOADED and is_ample and (idle := find_idle()):
            return f"{idle} has nothing to do"
        if job.after_faults:
            # Workers that failed are left alone for a while.
            is_early = now < plan.until_s + scenario.router.max_backoff_s
            is_full = reason in (Refusal.QUEUE_FULL, Refusal.OVERLOADED)
            return None if is_full and is_early else "the faults are over"
        if reason in (Refusal.QUEUE_FULL, Refusal.OVERLOADED):
            return None
        if reason in (Refusal.NO_WORKERS, Refusal.ATTEMPTS):
            return None if plan.breaks_attempts else "no fault explains it"
        if reason in (Refusal.EXECUTION, Refusal.SAMPLING):
            return None if job.poison or plan.step_error else "it makes no step fail"
        return f"a client must not be told {reason}"

    return judge


class QueueBounds:
    """After every event of a node: no queue is above its bound.

    Preempted sequences wait again on a worker: they had a place already. Requests that come back to
    the router were dispatched: each time that workers are lost, or give no sign of life, at most as
    many as these had slots for. New ones may be served before them, where they avoid a worker."""

    LOSSES = ("crash", "exit", "killed", *map(str, (SicknessKind.STOPPED, SicknessKind.HANGS)))

    def __init__(self, scenario: Scenario) -> None:
        config = scenario.router
        num_workers = len(scenario.workers)
        self._max_new = config.max_queue
        self._slots = num_workers * config.max_inflight_per_worker

    def __call__(self, runtime: SimRuntime, life: SimNode) -> None:
        node = life.node
        if isinstance(node, Worker):
            config, waiting = node.config, len(node.core.scheduler.waiting)
            if waiting > config.max_waiting + config.max_num_seqs:
                runtime.violate("queue above its bound", f"{node.node_id}: {waiting} waiting")
        elif isinstance(node, Router) and runtime.num_events % ROUTER_SAMPLING == 0:
            queue, injected = node._requests.queue, runtime.faults.injected
            num_losses = sum(injected[name] for name in self.LOSSES)
            if queue.num_new > self._max_new:
                runtime.violate("queue above its bound", f"{node.node_id}: {queue.num_new} are new")
            if len(queue) > self._max_new + self._slots * (1 + num_losses):
                runtime.violate("queue above its bound", f"{node.node_id}: {len(queue)} queued")


class Starvation:
    """After the faults: no stream waits for memory for long, while a worker that may serve it has
    room for all of it. One such wait is one violation."""

    def __init__(
        self, router: NodeId, workers: list[NodeId], may_decode: Callable[[NodeId], bool]
    ) -> None:
        """`may_decode`: whether the policy ever chooses the worker for it."""
        self._router = router
        self._workers = workers
        self._may_decode = may_decode
        self._reads_left = False
        self._since: dict[tuple[NodeId, str, int], float] = {}
        self._due_at = 0.0

    def __call__(self, runtime: SimRuntime, life: SimNode) -> None:
        if runtime.faults.active or runtime.now < self._due_at:
            return
        self._due_at = runtime.now + STARVATION_S / 8
        lives = [runtime.life(name) for name in self._workers]
        nodes = [each.node for each in lives if each is not None]
        workers = [node for node in nodes if isinstance(node, Worker)]
        self._reads_left = any(worker.exchange.unsettled.num_blocks for worker in workers)
        starving = {
            (worker.node_id, *seq.key): seq
            for worker in workers
            for seq in worker.core.scheduler.waiting
            if seq.num_preemptions
            and seq.request_id not in runtime.poison  # which no worker takes for long
            and any(self._has_room(runtime, w, seq) for w in workers)
        }
        self._since = {key: self._since.get(key, runtime.now) for key in starving}
        for key, since in self._since.items():
            if runtime.now - since > STARVATION_S:
                self._since[key] = float("inf")
                runtime.violate("starved", f"{key} waits for memory while others have some")

    def _has_room(self, runtime: SimRuntime, worker: Worker, seq: EngineSequence) -> bool:
        """Room for all that it may become, beside what is there; and its router may choose it."""
        life = runtime.life(self._router)
        assert life is not None
        assert isinstance(life.node, Router)
        record = life.node.live.get(seq.request_id)
        # Blocks that are left to reads are missing for long: until then others are in the way.
        if self._reads_left and not self._may_decode(worker.node_id):
            return False
        if record is None or worker.node_id in {each.worker for each in record.avoid}:
            return False
        if record.current is not None and record.current.number > seq.attempt:
            return False  # it was moved, to a worker that may be lost: `Silence` looks at that
        config = worker.config
        endpoint = life.node._requests.dispatcher.endpoint(config.node_id, config.epoch)
        if endpoint is None or runtime.now < endpoint.excluded_until:
            return False  # it has just failed, or does not get on
        return has_room(worker, seq.num_prompt_tokens + seq.sampling.max_tokens)


def has_room(worker: Worker, num_tokens: int) -> bool:
    """Whether a sequence that may come to `num_tokens` fits beside what the worker has."""
    core, config, busy = worker.core, worker.config, len(worker.core.seqs)
    windows = core.kv.windows
    needed = windows.max_blocks(num_tokens) + (busy + 1) * windows.count
    return busy + 1 < config.max_num_seqs and core.kv.pool.num_free >= needed + MARGIN


class Fairness:
    """The crowd at a router shares, from when all its tenants have requests waiting until one has
    none: what they are sent for, divided by their weights, differs by no more than start-time fair
    queueing allows, and by what was sent past those that lacked memory. How often that may be is
    what `Overtaken` looks at. So do callers of one tenant: whose requests come one at a time waits
    for no more than that of the others."""

    def __init__(self, router: NodeId, scenario: Scenario, *, of_callers: bool = False) -> None:
        """`of_callers`: not tenants are looked at, but the callers of the only one."""
        self._crowd = _Crowd(router, scenario, of_callers=of_callers)
        self._kind = "unfair to a caller" if of_callers else "unfair"
        self._units: dict[str, float] = {}  # each request's, by its tenant's weight
        self._largest: dict[str, float] = {}  # each tenant's
        for job in scenario.jobs:
            if job.request_id in self._crowd.tenants:
                assert job.tenant is not None
                tenant = self._crowd.tenants[job.request_id]
                units = len(job.prompt) + OUTPUT_UNITS * len(job.expected)
                units /= 1.0 if of_callers else job.tenant[1].weight
                self._units[job.request_id] = units
                self._largest[tenant] = max(self._largest.get(tenant, 0.0), units)
        self._passes: dict[str, int] = {}
        self._sent: dict[str, float] = {}  # for each tenant, while all of them wait
        self._excused: dict[str, float] = {}  # what was sent past one of another tenant
        self._starts: dict[str, float] = {}  # in virtual time: who was owed service before
        self._is_reported = False

    def __call__(self, runtime: SimRuntime, life: SimNode) -> None:
        if not self._crowd.look(runtime, life):
            return
        waiting = self._crowd.waiting
        passes = {name: entry.passes.count for name, entry in waiting.items()}
        passed = {
            self._crowd.tenants[name]
            for name, count in passes.items()
            if count > self._passes.get(name, 0)
        }
        self._passes = passes
        tenants = {self._crowd.tenants[name] for name in waiting}
        if self._crowd.was_hidden or self._is_reported or tenants != set(self._largest):
            self._sent = {}  # one of them may have run out of requests since
        elif self._sent:
            self._count(runtime, passed)
        else:
            self._sent = dict.fromkeys(sorted(tenants), 0.0)
            self._excused = dict.fromkeys(self._sent, 0.0)
            self._starts = self._crowd.starts()

    def _count(self, runtime: SimRuntime, passed: set[str]) -> None:
        for name in self._crowd.sent:
            tenant, units = self._crowd.tenants[name], self._units[name]
            self._sent[tenant] += units
            if passed - {tenant}:
                self._excused[tenant] += units
        for (one, its), (other, others) in combinations(self._sent.items(), 2):
            most = FAIR_WITHIN * (self._largest[one] + self._largest[other])
            most += self._excused[one] + self._excused[other]
            most += abs(self._starts.get(one, 0.0) - self._starts.get(other, 0.0))
            if abs(its - others) > most:
                text = f"{one} was sent {its:.0f} units by its weight, {other} {others:.0f}"
                text = f"{text}, at most {most:.0f} apart"
                runtime.violate(self._kind, f"{self._crowd.router}: {text}")
                self._is_reported = True
                return


class Overtaken:
    """No more requests of the crowd that came later go before one that waits for memory than
    `engine.waiting` says. At a router these are its own caller's, while memory is held for no
    other; at a worker those that belong behind it in its order."""

    def __init__(self, router: NodeId, workers: Sequence[NodeId], scenario: Scenario) -> None:
        self._crowd = _Crowd(router, scenario)
        self._holds = False  # the router holds memory for one
        self._workers = frozenset(workers)
        self._admitted: dict[NodeId, set[tuple[str, int]]] = {}
        self._passes: Counter[tuple[NodeId, str]] = Counter()

    def __call__(self, runtime: SimRuntime, life: SimNode) -> None:
        if self._crowd.look(runtime, life):
            self._look_at_router(runtime)
        elif self._crowd.tenants and life.node_id in self._workers:
            assert isinstance(life.node, Worker)
            self._look_at_worker(runtime, life.node)

    def _look_at_router(self, runtime: SimRuntime) -> None:
        crowd = self._crowd
        if not (self._holds or crowd.holds):
            for name, entry in crowd.waiting.items():
                for other in crowd.sent.values():
                    is_later = other.record.arrival > entry.record.arrival
                    if is_later and other.caller is entry.caller:
                        self._count(runtime, crowd.router, name)
        self._holds = crowd.holds

    def _look_at_worker(self, runtime: SimRuntime, worker: Worker) -> None:
        scheduler, core = worker.core.scheduler, worker.core
        admitted = {seq.key: seq for seq in (*scheduler.running, *scheduler.remote)}
        before = self._admitted.get(worker.node_id, set())
        self._admitted[worker.node_id] = set(admitted)
        if runtime.faults.active or before >= admitted.keys():
            return
        new = [
            seq
            for key, seq in admitted.items()
            if key not in before and not (seq.is_stream or seq.is_remote)
        ]
        for seq in scheduler.waiting:
            if seq.is_stream or seq.is_remote or seq.num_preemptions:
                continue
            for other in new:
                is_behind = _order(core, seq) < _order(core, other)
                if is_behind and other.arrived_at > seq.arrived_at:
                    self._count(runtime, worker.node_id, seq.request_id)

    def _count(self, runtime: SimRuntime, where: NodeId, name: str) -> None:
        self._passes[where, name] += 1
        if self._passes[where, name] == MAX_PASSED + 1:
            text = f"{name} waits at {where}, and more than {MAX_PASSED} that came later do not"
            runtime.violate("overtaken", text)


def _order(core: EngineCore, seq: EngineSequence) -> tuple[int, float]:
    """The order of `engine.scheduling.selection`, by class and what there is to compute, not what
    routers thought."""
    compute_s = seq.num_missing * core.timing.token_s
    return -seq.service_class, order_of(compute_s, core.now - seq.arrived_at)


class _Crowd:
    """The requests of a crowd at one router, those that wait, and those that were just sent."""

    def __init__(self, router: NodeId, scenario: Scenario, *, of_callers: bool = False) -> None:
        """`of_callers`: of a tenant, which are looked at as tenants are."""
        self.router = router
        self._of_callers = of_callers
        self.tenants = {
            job.request_id: job.caller if of_callers else job.tenant[0]
            for job in scenario.jobs
            if job.tenant is not None
            and (job.caller or not of_callers)
            and scenario.router_of(job.request_id) == router
        }
        self.waiting: dict[str, QueueEntry] = {}
        self.sent: dict[str, QueueEntry] = {}
        self.holds = False  # memory for one that waits at a worker
        self._queue: FairQueue | None = None
        self.was_hidden = False  # faults were active between this look and the last
        self._is_hidden = False
        self._known: set[str] = set()  # that were sent
        self._counts = (0, 0)

    def starts(self) -> dict[str, float]:
        """Returns the virtual start of each tenant's next request, by its weight; or of each
        caller's that is known."""
        assert self._queue is not None
        flows = [flow for level in self._queue.levels for flow in level.flows.values()]
        if self._of_callers:
            callers = [each for flow in flows for each in flow.members.values() if each]
            return {each.name: each.start for each in callers}
        return {flow.tenant: flow.start for flow in flows}

    def look(self, runtime: SimRuntime, life: SimNode) -> bool:
        """Whether it may have changed."""
        router = life.node
        if not self.tenants or router.node_id != self.router:
            return False
        if runtime.faults.active:
            self._is_hidden = True
            return False
        assert isinstance(router, Router)
        requests = router._requests
        self._queue = requests.queue
        counts = requests.totals.submitted, requests.totals.attempts
        if counts == self._counts:
            return False
        self._counts, self.holds = counts, requests.dispatcher._waits is not None
        entries = {
            name: requests.queue.entry(record)
            for name, record in router.live.items()
            if name in self.tenants
        }
        self.waiting = {name: entry for name, entry in entries.items() if not entry.is_charged}
        self.sent = {
            name: entry
            for name, entry in entries.items()
            if entry.is_charged and name not in self._known
        }
        self._known |= self.sent.keys()
        self.was_hidden, self._is_hidden = self._is_hidden, False
        return True


def check_roles(runtime: SimRuntime, router: NodeId, given: Mapping[NodeId, Role]) -> None:
    """The router prefers each worker for the role that it was last given."""
    life = runtime.life(router)
    assert life is not None
    assert isinstance(life.node, Router)
    for status in life.node.status(runtime.now).workers:
        if status.role is not given[status.worker]:
            known = f"{status.worker} is {status.role} to the router"
            runtime.violate("role differs", f"{known}, and was made {given[status.worker]}")


def check_idle(runtime: SimRuntime, nodes: Sequence[NodeId]) -> None:
    """Nothing is leaked on any node."""
    for node_id in nodes:
        life = runtime.life(node_id)
        assert life is not None
        for left in life.node.check_idle():  # type: ignore[attr-defined]
            runtime.violate("left over", f"{node_id}: {left}")
        if life.agent.num_live:
            runtime.violate("left over", f"{node_id}: {life.agent.num_live} live transfers")


def check_index(runtime: SimRuntime, router_id: NodeId, workers: list[NodeId]) -> None:
    """The router's index is what the workers hold, worker by worker."""
    router_life = runtime.life(router_id)
    assert router_life is not None
    router = router_life.node
    assert isinstance(router, Router)
    for node_id in workers:
        life = runtime.life(node_id)
        assert life is not None
        worker = life.node
        assert isinstance(worker, Worker)
        held = {Tier.DEVICE: set(worker.core.kv.pool.block_hashes())}
        held |= {part.tier: set(part.stored) for part in worker.exchange.tiers.snapshot()}
        for tier in ANNOUNCED_TIERS:
            here, known = held.get(tier, set()), router.index.block_hashes(node_id, tier)
            if here != known:
                runtime.violate(
                    "index differs",
                    f"{node_id}, {tier}: {len(here - known)} blocks unknown to the router,"
                    f" {len(known - here)} that the worker has no more",
                )
        for tier, store in runtime.stores(node_id).items():
            indexed = {record.block_hash for record, _ in store.index.values()}
            _check_store(runtime, node_id, tier, held.get(tier, set()), indexed)


def _check_store(
    runtime: SimRuntime, node_id: NodeId, tier: Tier, held: set[bytes], indexed: set[bytes]
) -> None:
    """The index of a store has what the worker has there, unless a change of it failed or, after
    the store failed otherwise, is put off."""
    missing, surplus = held - indexed, indexed - held
    failed = runtime.faults.injected["store error"] or runtime.notes["disk_store_failed"]
    if (missing or surplus) and not (failed and tier is Tier.DISK):
        runtime.violate(
            f"{tier} index differs",
            f"{node_id}: {len(missing)} blocks are not in it, {len(surplus)} are that should not",
        )


def check_prompt_outputs(
    runtime: SimRuntime, client: SimClient, attention: Attention = FULL
) -> None:
    """What a prompt gives has come once, whole, with the first token and with no other; whatever
    has become of the request since."""
    for order in client.orders.values():
        job = order.job
        wanted = prompt_outputs(job.prompt, job.sampling, attention)
        expected = [(0, wanted)] if order.tokens and wanted != NO_OUTPUTS else []
        if order.prompts != expected:
            sent = [(index, len(got.logprobs), got.embedding.hex()) for index, got in order.prompts]
            runtime.violate(
                "wrong prompt outputs",
                f"{job.request_id}: (index, log-probabilities, embedding) are {sent}, wanted"
                f" {len(wanted.logprobs)}, {wanted.embedding.hex()} of {len(job.prompt)} tokens",
            )


def check_finished(runtime: SimRuntime, client: SimClient) -> None:
    for left in client.describe_open():
        runtime.violate("stuck", left)


LOOK_S = 0.25
SILENT_S = 12.0
STOPPED_S = 14.0  # one that was being introduced when it was stopped is waited for 10 s
MARGIN_S = 4.0


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

    def __call__(self, runtime: SimRuntime, life: SimNode) -> None:
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
    whole = record.num_prompt_tokens + record.sampling.max_tokens
    is_avoided = name in {each.worker for each in record.avoid}
    makes_progress = worker.core.watch.progress is Progress.MADE
    fits = whole <= worker.config.max_model_len and has_room(worker, whole)
    return fits and makes_progress and not is_avoided


class NoProgress:
    """At all times: no worker that makes no progress stays up for long. One whose steps have
    seemed to take longer than they did waits for one accordingly."""

    def __init__(self, workers: Sequence[NodeId], scenario: Scenario) -> None:
        self._workers = workers
        self._first_s = {w.node_id: FIRST_SLACK * w.step_timeout_s for w in scenario.workers}
        self._since: dict[tuple[NodeId, int], float] = {}  # when something went wrong with a life
        self._due_at = 0.0

    def __call__(self, runtime: SimRuntime, life: SimNode) -> None:
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

    def _limit_s(self, runtime: SimRuntime, life: SimNode) -> float | None:
        """How long this may go on; None: there is nothing wrong that shows."""
        kind, executor = (
            runtime.faults.sickness(runtime.now, life.node_id, life.epoch),
            life.executor,
        )
        assert isinstance(life.node, Worker)
        if kind is SicknessKind.STOPPED:
            return STOPPED_S
        if kind is SicknessKind.HANGS and executor.is_busy:
            num_tokens = life.node.config.max_num_batched_tokens
            seemed_s = runtime.faults.longest_s(life.node_id, num_tokens)
            return max(self._first_s[life.node_id], SLACK * seemed_s) + MARGIN_S
        if kind is SicknessKind.FAILS and executor.failed_in_a_row > _most_failed(life.node.config):
            return 0.0
        return None


def _most_failed(config: WorkerConfig) -> int:
    """Steps in a row: down to who failed alone, and the health checks after that."""
    return config.max_num_seqs.bit_length() + 1 + config.max_failed_steps
