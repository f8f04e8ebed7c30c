"""New weights for four workers, among traffic and late messages, with a death in each phase."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

import pytest
from msgspec import structs

from kvrelay.cluster.orders import UpdateModel
from kvrelay.engine.node import Effect, NodeId
from kvrelay.engine.stats import Role
from kvrelay.engine.weights import UpdateMode
from kvrelay.lab.sim import run, updates
from kvrelay.lab.sim.breakage import Break
from kvrelay.lab.sim.faults import FaultPlan
from kvrelay.lab.sim.run import SimCluster
from kvrelay.lab.sim.runtime import SimNode, SimRuntime
from kvrelay.lab.sim.scenario import Scenario, draw_scenario
from kvrelay.lab.sim.updates import BASE, VERSIONS, Update
from kvrelay.worker.messages import CONTROLLER
from kvrelay.worker.node import Worker
from kvrelay.worker.weights import Phase, WeightUpdates, weight_updates

WORKERS = {f"{role}-{n}": role for role in (Role.PREFILL, Role.DECODE) for n in range(2)}
LATE = FaultPlan(until_s=5.0, delay=0.2, delay_s=0.5, step_slow=0.1)


def four_workers(*args: object) -> Scenario:
    """The first one that is drawn whose layout and memory are alike, made one of four workers."""
    for seed in count():
        rngs = (random.Random(f"{seed}{each}") for each in range(3))
        drawn = draw_scenario(*rngs, 0.0)
        if not any(job.tenant for job in drawn.jobs) and drawn.router.policy == "prefix":
            break
    base = structs.replace(drawn.workers[-1], num_blocks=200, cores="")
    workers = [structs.replace(base, node_id=name, role=role) for name, role in WORKERS.items()]
    jobs = [
        job if job.after_faults else replace(job, arrive_s=0.05 * number)
        for number, job in enumerate(drawn.jobs)
    ]
    made = replace(drawn, workers=tuple(workers), jobs=tuple(jobs), faults=LATE)
    return replace(made, orders=(), role_changes=())


def updated(
    monkeypatch: pytest.MonkeyPatch,
    dies: NodeId | None = None,
    phase: Phase = Phase.IDLE,
    broken: Break | None = None,
    seed: int = 5,
) -> SimCluster:
    """A run with one update. `dies` is killed when a worker, or it itself if it is one, is in
    `phase`, which it does not leave before."""
    mode = UpdateMode.DRAIN if phase is Phase.ENDING else UpdateMode.RECOMPUTE
    order = UpdateModel("", BASE, VERSIONS[1], mode)
    monkeypatch.setattr(run, "draw_scenario", four_workers)
    monkeypatch.setattr(updates, "FAILS", 0.0)
    monkeypatch.setattr(run, "draw_updates", lambda *_: (Update(0.5, order),))
    cluster = SimCluster(seed, broken)
    runtime, check, left = cluster.runtime, cluster.runtime.after_receive, [dies]

    def kill(runtime: SimRuntime, life: SimNode) -> None:
        check(runtime, life)
        node = life.node
        if not isinstance(node, Worker) or weight_updates(node.plugs).phase is not phase:
            return
        if left == [node.node_id]:
            runtime.call_at(runtime.now, lambda: cluster.control.crash(left.pop(), 0.2, 0.1))
        elif left == [CONTROLLER]:
            runtime.call_at(runtime.now, lambda: cluster.control.hand_over(0.2))
            left.clear()

    def stay(weights: WeightUpdates, now: float) -> list[Effect]:
        """Without requests it would end within one message."""
        is_it = weights.phase is phase and left == [weights._core.config.node_id]
        return [] if is_it else advance(weights, now)

    advance = WeightUpdates.advance
    monkeypatch.setattr(WeightUpdates, "advance", stay)
    runtime.after_receive = kill
    cluster.run()
    return cluster


PHASES = (Phase.LOADING, Phase.ENDING, Phase.PROBING)
DYING = ("prefill-0", "decode-1", CONTROLLER)
EACH = [
    pytest.param(dies, phase, marks=() if number == turn else pytest.mark.long)
    for number, dies in enumerate(DYING)
    for turn, phase in enumerate(PHASES)
]


@pytest.mark.slow
@pytest.mark.parametrize(("dies", "phase"), EACH)
def test_whoever_dies_in_an_update_all_have_one_version_and_no_request_two(
    monkeypatch: pytest.MonkeyPatch, dies: NodeId, phase: Phase
) -> None:
    cluster = updated(monkeypatch, dies, phase)
    assert cluster.runtime.violations == []
    injected = cluster.runtime.faults.injected
    assert injected["handover" if dies == CONTROLLER else "crash"] == 1
    assert injected["message delayed"] > 0
    current = cluster.control.node.rollouts[""].kept.current
    assert current.digest == VERSIONS[1].digest


def test_the_checkers_notice_requests_of_two_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = updated(monkeypatch, broken=Break.PAIRS, seed=0)
    kinds = {violation.kind for violation in cluster.runtime.violations}
    assert kinds >= {"versions differ", "block used with wrong content", "update"}
