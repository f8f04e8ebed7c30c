"""One seed from beginning to end: faults, then none, then quiet, then the last checks.

The controller is the production node; `SimControl` performs its effects on simulated workers.
Processes start and end at once or after a while; a process that is stopped is introduced to others
only when it goes on. The controller may die; the next one finds what that has kept.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import structs

from kvrelay.cluster.control.control_config import ControllerConfig, WorkersConfig
from kvrelay.cluster.control.controller import Controller
from kvrelay.cluster.control.messages import (
    AdoptRouter,
    AdoptWorker,
    Checkpoint,
    Machine,
    MachinesChanged,
    Record,
    RouterStarted,
    SendPeers,
    StartWorker,
    StopWorker,
    WorkerLost,
)
from kvrelay.cluster.orders import SetRole
from kvrelay.cluster.roles import make_worker
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.node import Effect, Exit, Node, NodeId
from kvrelay.engine.stats import Role
from kvrelay.engine.weights import LoadWeights, UseWeights, WeightVersion
from kvrelay.engine.wire.codec import PROTOCOL
from kvrelay.kvtransfer.tiers.blocks import StoreRecords
from kvrelay.lab.sim import checkers
from kvrelay.lab.sim.breakage import Break, break_worker, join_answers, make_controller, make_router
from kvrelay.lab.sim.checkers import NoProgress, Silence
from kvrelay.lab.sim.client import Outcome, SecondWave, SimClient
from kvrelay.lab.sim.faults import Rot, Sickness
from kvrelay.lab.sim.inversion import ClassInversion
from kvrelay.lab.sim.kept_waiting import KeptAtRouter, KeptAtWorker
from kvrelay.lab.sim.operator import OPERATOR, GiveOrder, Operator
from kvrelay.lab.sim.runtime import PoolShape, SimNode, SimRuntime, Violation
from kvrelay.lab.sim.scenario import (
    GROUPED,
    RoleChange,
    Scenario,
    draw_scenario,
    with_one_tenant,
)
from kvrelay.lab.sim.updates import (
    BASE,
    SimWeights,
    check_pairs,
    check_versions,
    draw_updates,
    mark_of,
)
from kvrelay.lab.sim.verdicts import IdleWorkers
from kvrelay.worker.messages import CONTROLLER, Peer, PeersUpdated, WorkerStarted
from kvrelay.worker.node import Worker

MACHINES = (Machine("m", "sim", 64.0),)
START_S = 0.3  # a worker takes up to so long to start again


class SimControl:
    """Owned by a run. Invariant: a worker has the epoch that a controller started last."""

    def __init__(
        self,
        runtime: SimRuntime,
        configs: Mapping[NodeId, WorkerConfig],
        routers: Sequence[NodeId],
        silent_grace_s: float,
        make: Callable[[ControllerConfig], Controller],
    ) -> None:
        """The workers have places in `runtime`, and do not run yet."""
        self._runtime = runtime
        self._configs = configs
        self._down_s: dict[NodeId, float] = {}  # workers that crashed: until they can start
        self._latest: dict[NodeId, int] = {}  # epochs that may still begin
        self._make, self._weights = make, SimWeights(runtime, runtime.seed)
        self.begins_with: dict[NodeId, WeightVersion] = {}  # what workers are started with
        self._config = ControllerConfig(
            {"": WorkersConfig(tuple((worker, each.role) for worker, each in configs.items()))},
            routers=tuple(routers),
            backoff_s=0.01,
            max_backoff_s=0.5,
            stable_s=1.0,
            silent_grace_s=silent_grace_s,
        )
        self._kept = Checkpoint()
        self.node = make(self._config)
        runtime.perform_other = self.perform
        runtime.add(CONTROLLER, lambda epoch, records: self.node)
        for router in routers:
            self._say_up(Peer(router, "sim", 1, 1, PROTOCOL))
        runtime.post("", CONTROLLER, MachinesChanged(MACHINES))

    def perform(self, life: SimNode, effect: Effect) -> None:
        runtime = self._runtime
        match effect:
            case Exit(reason):
                runtime.crash(life.node_id)
                runtime.faults.injected["exit"] += 1
                self._tell_lost(life.node_id, life.epoch, reason, 0.5 * runtime.rng.random())
            case LoadWeights() | UseWeights():
                self._weights.perform(life, effect)
            case StartWorker(worker, _, epoch):
                self.begins_with[worker] = effect.weights or BASE
                is_first = epoch == 1
                start_s = self._down_s.pop(worker, START_S * runtime.rng.random())
                at_s = runtime.now + (0.0 if is_first else start_s)
                self._latest[worker] = epoch
                runtime.call_at(at_s, lambda: self._start(worker, epoch))
            case StopWorker(worker, epoch):
                if self._latest.get(worker, 0) <= epoch:
                    self._latest.pop(worker, None)
                running = runtime.life(worker)
                if running is not None and running.epoch <= epoch:
                    runtime.crash(worker)
                    runtime.faults.injected["killed"] += 1
            case SendPeers(to, about, epoch):
                self._introduce(PeersUpdated(to, about, epoch))
            case Record(kept):
                self._kept = kept
            case AdoptWorker(worker, epoch):
                self._adopt(worker, epoch)
            case AdoptRouter(peer):
                self._say_up(peer)
            case _:
                raise AssertionError(f"unknown effect {effect!r}")

    def crash(self, worker: NodeId, down_s: float, notice_s: float) -> None:
        """A fault: the process dies. The controller notices, and can start it again, later."""
        runtime, life = self._runtime, self._runtime.life(worker)
        if life is None:
            return
        runtime.crash(worker)
        runtime.faults.injected["crash"] += 1
        self._down_s[worker] = down_s
        self._tell_lost(worker, life.epoch, "killed", notice_s)

    def hand_over(self, away_s: float) -> None:
        """A fault: the controller dies; all that it was told, or would be told, is lost."""
        runtime = self._runtime
        if runtime.life(CONTROLLER) is None:
            return
        runtime.crash(CONTROLLER)
        runtime.faults.injected["handover"] += 1
        runtime.call_at(runtime.now + away_s, self._take_over)

    def _take_over(self) -> None:
        runtime = self._runtime
        self.node = self._make(replace(self._config, kept=self._kept))
        runtime.restart(CONTROLLER)
        runtime.post("", CONTROLLER, MachinesChanged(MACHINES))

    def _adopt(self, worker: NodeId, epoch: int) -> None:
        """One that is stopped answers when it goes on."""
        runtime, life = self._runtime, self._runtime.life(worker)
        if life is not None and life.epoch == epoch:
            until_s = runtime.faults.paused_until(runtime.now, worker, epoch)
            after_s = max(0.0, until_s - runtime.now) + 0.01 * runtime.rng.random()
            assert isinstance(life.node, Worker)
            core = life.node.core
            info = replace(core.config.info(), fingerprint=core.fingerprint, weights=core.weights)
            started = WorkerStarted(info, "sim", 2, protocol=PROTOCOL)
            runtime.post("", CONTROLLER, started, after_s)

    def _say_up(self, router: Peer) -> None:
        until_s = self._runtime.faults.paused_until(self._runtime.now, router.node, router.epoch)
        after_s = max(0.0, until_s - self._runtime.now)
        self._runtime.post("", CONTROLLER, RouterStarted(router, 8000), after_s)

    def fall_sick(self, sickness: Sickness) -> None:
        """A fault: this life of the worker will not get well by itself."""
        life = self._runtime.life(sickness.worker)
        if life is not None:
            self._runtime.faults.fall_sick(life.epoch, sickness)

    def roles(self) -> dict[NodeId, Role]:
        return {worker.node: worker.role for worker in self.node.workers.values()}

    def up_since(self) -> dict[NodeId, float]:
        """Since when each worker that is up has been so."""
        return {worker.node: worker.up_at for worker in self.node.workers.values()}

    def all_up(self) -> bool:
        return all(w.is_serving for w in self.node.workers.values())

    def _start(self, worker: NodeId, epoch: int) -> None:
        runtime = self._runtime
        if self._latest.get(worker) != epoch:  # it was ended before it began
            return
        del self._latest[worker]
        node = runtime.restart(worker, epoch)
        life = runtime.life(worker)
        assert isinstance(node, Worker)
        assert life is not None
        life.executor.pool.mark = mark_of(node.config.weights)
        started = WorkerStarted(node.config.info(), "sim", 2, protocol=PROTOCOL)
        runtime.post("", CONTROLLER, started, 0.01 * runtime.rng.random())

    def _introduce(self, done: PeersUpdated) -> None:
        """Reliable, as a call is; one of a process that is dead never comes back."""
        runtime = self._runtime
        # Routers join before all else: that is not drawn.
        drawn_s = 0.005 * runtime.rng.random() if done.about in self._configs else 0.0
        life, after_s = runtime.life(done.to), drawn_s
        if life is not None:
            until_s = runtime.faults.paused_until(runtime.now, life.node_id, life.epoch)
            after_s += max(0.0, until_s - runtime.now)
            runtime.post("", CONTROLLER, done, after_s)

    def _tell_lost(self, worker: NodeId, epoch: int, reason: str, after_s: float) -> None:
        lost: Any = WorkerLost(worker, epoch, reason)
        self._runtime.post("", CONTROLLER, lost, after_s)


CLIENT: NodeId = "client"
FINISH_WITHIN_S = 60.0
"""Virtual seconds after the last fault in which everything must end."""


@dataclass(frozen=True, slots=True)
class Report:
    """What happened in one run. Equal seeds give equal reports."""

    seed: int
    num_events: int
    virtual_s: float
    outcomes: Counter[str]
    injected: Counter[str]
    notes: Counter[str]
    sources: Counter[str]  # blocks that were read rather than computed, by where they were
    violations: tuple[Violation, ...]
    event_hash: str


RANKS = (1, 1, 2, 4)
"""Of a worker. Not drawn, so that older seeds stay as they were where there is one."""

STEPS_AHEAD = (0, 1)
"""That a worker's executor takes; not drawn either."""

OUTLIVES = (False, True, True)
"""Whether host memory outlives its worker, and others read it then; not drawn either."""


def _not_drawn(config: WorkerConfig, seed: int, index: int) -> WorkerConfig:
    outlives = OUTLIVES[seed // 2 % len(OUTLIVES)]
    return structs.replace(
        config,
        steps_ahead=STEPS_AHEAD[(seed // 16 + index) % len(STEPS_AHEAD)],
        host_outlives=config.num_host_blocks > 0 and outlives,
        reads_left_kv=outlives,
    )


ONE_TENANT = 8
"""One run in so many has one tenant. Not drawn either."""


class SimCluster:
    """The nodes of one run, and when what goes wrong."""

    def __init__(self, seed: int, broken: Break | None, grouped: float = GROUPED) -> None:
        self.runtime = SimRuntime(seed)
        self._begins_with: dict[NodeId, WeightVersion] = {}
        more = random.Random(f"{seed}: more")
        last = random.Random(f"{seed}: last")
        scenario = draw_scenario(self.runtime.rng, more, last, grouped)
        if seed % ONE_TENANT == 1:
            scenario = with_one_tenant(scenario, random.Random(f"{seed}: one tenant"))
        self.scenario: Scenario = scenario
        until_s = self.scenario.faults.until_s
        self._updates = draw_updates(random.Random(f"{seed}: weights"), until_s)
        self._configs = {
            config.node_id: _not_drawn(config, seed, index)
            for index, config in enumerate(self.scenario.workers)
        }
        self.worker_ids = list(self._configs)
        runtime = self.runtime
        self.routers = self.scenario.routers
        runtime.trusted = {*self.routers, CLIENT, CONTROLLER}
        runtime.attention = self.scenario.attention
        runtime.poison = {j.request_id: j.poison for j in self.scenario.jobs if j.poison}
        self._idle = IdleWorkers(runtime, self.routers, self._may_decode)
        checks = self._checks()

        def check(runtime: SimRuntime, life: SimNode) -> None:
            for each in checks:
                each(runtime, life)
            if self._updates and life.node_id in self._configs:
                check_pairs(runtime, self.worker_ids)

        runtime.after_receive = check
        runtime.faults.plan = self.scenario.faults
        runtime.faults.active = True
        for router in self.routers:
            made = make_router(router, self.scenario.router, broken)
            runtime.add(router, lambda epoch, records, made=made: made)
        runtime.join_answers = join_answers(broken)
        self._prepare_workers(seed, broken)
        self.control = SimControl(
            runtime,
            self._configs,
            self.routers,
            self.scenario.silent_grace_s,
            lambda config: make_controller(config, broken),
        )
        self.control.begins_with = self._begins_with
        self.client = SimClient(
            CLIENT,
            self.routers,
            list(self.scenario.jobs),
            checkers.failure_judge(self.scenario, self._idle.find),
            runtime.violate,
            self.scenario.attention,
        )
        runtime.add(CLIENT, lambda epoch, records: self.client)
        self._plan_faults()
        self.operator = Operator(runtime.violate)
        runtime.trusted.add(OPERATOR)
        runtime.add(OPERATOR, lambda epoch, records: self.operator)
        self._give_orders(after_faults=False)

    def _checks(self) -> list[Callable[[SimRuntime, SimNode], None]]:
        checks: list[Callable[[SimRuntime, SimNode], None]] = [
            checkers.QueueBounds(self.scenario),
            NoProgress(self.worker_ids, self.scenario),
            ClassInversion(self.worker_ids, self.scenario),
            KeptAtWorker(self.worker_ids),
            self._idle,
        ]
        for router in self.routers:
            checks.append(checkers.Starvation(router, self.worker_ids, self._may_decode))
            checks.append(Silence(router, self.worker_ids, self._may_decode))
            checks.append(checkers.Fairness(router, self.scenario))
            checks.append(checkers.Fairness(router, self.scenario, of_callers=True))
            checks.append(KeptAtRouter(router, self.worker_ids, self._may_decode))
            workers = self.worker_ids if router == self.routers[0] else []
            checks.append(checkers.Overtaken(router, workers, self.scenario))
        return checks

    def _prepare_workers(self, seed: int, broken: Break | None) -> None:
        for index, config in enumerate(self._configs.values()):
            shape = PoolShape(
                config.num_blocks,
                config.block_size,
                self.scenario.checksums,
                config.num_host_blocks,
                config.num_disk_blocks,
                num_ranks=RANKS[(seed // 4 + index) % len(RANKS)],
                host_outlives=config.host_outlives,
            )
            self.runtime.prepare(
                config.node_id, _WorkerMaker(config, broken, self._begins_with), shape
            )

    def _may_decode(self, worker: NodeId) -> bool:
        """Baseline policies leave prefill workers alone while there are others."""
        is_baseline = self.scenario.router.policy != "prefix"
        return not is_baseline or self.control.roles()[worker] is not Role.PREFILL

    def _plan_faults(self) -> None:
        runtime, control, plan = self.runtime, self.control, self.scenario.faults
        for crash in plan.crashes:
            die = partial(control.crash, crash.worker, crash.down_s, crash.notice_s)
            runtime.call_at(crash.at_s, die)
        for sickness in plan.sicknesses:
            runtime.call_at(sickness.at_s, partial(control.fall_sick, sickness))
        for handover in plan.handovers:
            runtime.call_at(handover.at_s, partial(control.hand_over, handover.away_s))
        for rot in plan.rots:
            runtime.call_at(rot.at_s, partial(self._rot, rot))
        for update in self._updates:
            tell = partial(runtime.post, "", CONTROLLER, update.order)
            runtime.call_at(update.at_s, tell)
        for change in self.scenario.role_changes:
            runtime.call_at(change.at_s, partial(self._change_role, change))

    def run(self) -> None:
        runtime, scenario = self.runtime, self.scenario
        runtime.run_until(scenario.faults.until_s)
        runtime.faults.active = False
        bound_s = scenario.faults.until_s + FINISH_WITHIN_S
        runtime.run_until(bound_s, done=lambda: self.client.num_open == 0 and self._is_well())
        runtime.post("", CLIENT, SecondWave())
        self._give_orders(after_faults=True)
        runtime.run_until(runtime.now)
        runtime.run_until(runtime.now + FINISH_WITHIN_S, done=lambda: self.client.num_open == 0)
        checkers.check_prompt_outputs(runtime, self.client, self.scenario.attention)
        if not runtime.stopped:
            checkers.check_finished(runtime, self.client)
            runtime.run_until(runtime.now + FINISH_WITHIN_S, done=self.control.all_up)
            runtime.run_until(runtime.now + scenario.quiet_s)
        if not runtime.stopped:
            if not self.control.all_up():
                runtime.violate("down", "not every worker is up at the end")
                return
            checkers.check_idle(runtime, [*self.routers, *self.worker_ids])
            for router in self.routers:
                checkers.check_index(runtime, router, self.worker_ids)
                checkers.check_roles(runtime, router, self.control.roles())
            rollout = self.control.node.rollouts[""]
            check_versions(runtime, rollout, self.routers, self.worker_ids)
            self.operator.check(self.control.up_since())

    def _is_well(self) -> bool:
        """A sickness may outlast the other faults, and a worker be back some time after it."""
        lives = filter(None, map(self.runtime.life, self.worker_ids))
        faults, now = self.runtime.faults, self.runtime.now
        is_sick = any(faults.sickness(now, each.node_id, each.epoch) for each in lives)
        return self.control.all_up() and not is_sick

    def _change_role(self, change: RoleChange) -> None:
        self.runtime.faults.injected["role change"] += 1
        self.runtime.post("", CONTROLLER, SetRole(change.worker, change.role))

    def sources(self) -> Counter[str]:
        """Blocks that the workers that live at the end did not compute."""
        found: Counter[str] = Counter()
        for worker in self.worker_ids:
            node: Any = getattr(self.runtime.life(worker), "node", None)
            for source in ("host", "orphaned", "disk", "peer"):
                found[source] += node.core.counters.get(f"blocks_from_{source}", 0) if node else 0
        return +found

    def _give_orders(self, *, after_faults: bool) -> None:
        runtime = self.runtime
        for planned in self.scenario.orders:
            if planned.after_faults is after_faults:
                runtime.post("", OPERATOR, GiveOrder(planned), planned.at_s)

    def _rot(self, rot: Rot) -> None:
        life = self.runtime.life(rot.worker)
        blocks = [] if life is None else life.executor.pools[rot.tier].blocks
        if blocks:
            block = blocks[rot.block % len(blocks)]
            block[rot.slot % len(block)] ^= 1 << 23
            self.runtime.faults.injected[f"{rot.tier} rots"] += 1


@dataclass(frozen=True, slots=True)
class _WorkerMaker:
    config: WorkerConfig
    broken: Break | None
    begins_with: Mapping[NodeId, WeightVersion]

    def __call__(self, epoch: int, records: StoreRecords) -> Node:
        metadata = f"{self.config.node_id}:{epoch}".encode()
        weights = self.begins_with.get(self.config.node_id, BASE)
        about: dict[str, Any] = {"weights": weights, "base_weights": BASE.digest}
        config = structs.replace(self.config, epoch=epoch, agent_metadata=metadata, **about)
        worker = make_worker(config, records)
        if self.broken is not None:
            break_worker(worker, self.broken)
        return worker


def run_seed(seed: int, broken: Break | None = None, grouped: float = GROUPED) -> Report:
    """Run one seed. The same seed gives the same events, in every process. `grouped`: as of
    `draw_scenario`."""
    cluster = SimCluster(seed, broken, grouped)
    cluster.run()
    runtime = cluster.runtime
    outcomes: Counter[str] = Counter()
    for order in cluster.client.orders.values():
        reason = f": {order.failure.reason}" if order.failure else ""
        if order.outcome is Outcome.FINISHED:
            reason = f": {order.job.finish}"
        outcomes[f"{order.outcome}{reason}"] += 1
    return Report(
        seed,
        runtime.num_events,
        runtime.now,
        outcomes,
        runtime.faults.injected,
        runtime.notes,
        cluster.sources(),
        tuple(runtime.violations),
        runtime.event_hash(),
    )
