"""The controller with workers of several models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvrelay.cluster.control.autoscaling import LogScaling
from kvrelay.cluster.control.control_config import ControllerConfig, WorkersConfig
from kvrelay.cluster.control.controller import Controller
from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.messages import (
    Checkpoint,
    RestartWorker,
    ScalingReport,
    SendPeers,
    StartWorker,
    StopWorker,
    WorkerLost,
)
from kvrelay.cluster.control.view import cluster_view
from kvrelay.cluster.control.workers import worker_name
from kvrelay.cluster.status import ControllerStatus
from kvrelay.engine.node import Wake, Woken
from kvrelay.engine.stats import Role
from kvrelay.router.messages import WorkerDown, WorkerUp
from kvrelay.router.scaling_config import ScalingConfig
from kvrelay.router.traffic import RouterSeen
from kvrelay.worker.messages import PeersUpdated
from tests.cluster.control.test_controller import ROUTER, Script, of
from tests.cluster.scaling.scaling_kit import decided

LARGE, SMALL = "large", "small"


def workers_of(model: str, **changes: Any) -> WorkersConfig:
    roles = (Role.PREFILL, Role.DECODE)
    first = tuple((worker_name(role, model, 0), role) for role in roles)
    made = WorkersConfig(first=first, fixed={"model": model}, built=f"of {model}")
    return replace(made, **changes)


def config_of(large: WorkersConfig, small: WorkersConfig, **changes: Any) -> ControllerConfig:
    return ControllerConfig({LARGE: large, SMALL: small}, routers=(ROUTER.node,), **changes)


CONFIG = config_of(workers_of(LARGE), workers_of(SMALL))


def test_each_model_has_its_workers_and_routers_learn_which() -> None:
    script = Script(CONFIG)
    starts = {start.worker: start.model for start in of(StartWorker, script.first)}
    assert starts == {
        "prefill-large-0": LARGE,
        "decode-large-0": LARGE,
        "prefill-small-0": SMALL,
        "decode-small-0": SMALL,
    }
    said = [
        effect
        for worker in starts
        for sent in of(SendPeers, script.started(worker, 1))
        for effect in script.say(PeersUpdated(sent.to, sent.about, sent.epoch))
    ]
    ups = [each.message.info for each in said if _is(each, WorkerUp)]
    assert {info.worker: info.model for info in ups} == starts
    assert script.controller.all_up()
    view = cluster_view(script.controller, ControllerStatus(known=True), {}, "h", "http")
    assert {each.worker: each.model for each in view.workers} == starts


def test_one_that_hangs_keeps_no_other_models_workers_down() -> None:
    """Workers of two models never talk to each other about KV."""
    script = Script(CONFIG)
    script.bring_up("prefill-small-0", 1)
    for effect in of(SendPeers, script.started("decode-large-0", 1)):
        if effect.to != "prefill-small-0":
            script.say(PeersUpdated(effect.to, effect.about, effect.epoch))
    assert script.state("decode-large-0") is ProcessState.UP


def test_a_worker_that_is_lost_comes_back_for_its_model() -> None:
    script = Script(CONFIG)
    for worker in list(script.controller.workers):
        script.bring_up(worker, 1)
    effects = script.say(WorkerLost("decode-small-0", 1, "killed"))
    assert [each.message.worker for each in effects if _is(each, WorkerDown)] == ["decode-small-0"]
    (wake,) = of(Wake, effects)
    (start,) = of(StartWorker, script.say(Woken(wake.tag), at=wake.after_s))
    assert (start.worker, start.model, start.epoch) == ("decode-small-0", SMALL, 2)


def _is(effect: object, kind: type) -> bool:
    return isinstance(getattr(effect, "message", None), kind)


def kept_of(script: Script) -> Checkpoint:
    return Checkpoint(tuple(worker.checkpoint() for worker in script.controller.workers.values()))


def test_the_next_controller_adopts_those_whose_model_is_still_served() -> None:
    script = Script(CONFIG)
    for worker in list(script.controller.workers):
        script.bring_up(worker, 1)
    kept = kept_of(script)
    same = Controller(replace(CONFIG, kept=kept)).start(0.0)
    assert of(StopWorker, same) == []
    other_weights = workers_of(SMALL, fixed={"model": "other"})
    changed = Controller(config_of(workers_of(LARGE), other_weights, kept=kept))
    stopped = {stop.worker for stop in of(StopWorker, changed.start(0.0))}
    assert stopped == {"prefill-small-0", "decode-small-0"}
    alone = Controller(replace(CONFIG, models={LARGE: workers_of(LARGE)}, kept=kept))
    assert {stop.worker for stop in of(StopWorker, alone.start(0.0))} == stopped
    assert list(alone.workers) == ["prefill-large-0", "decode-large-0"]


def test_those_of_one_model_are_outdated_when_its_settings_are() -> None:
    script = Script(CONFIG)
    for worker in list(script.controller.workers):
        script.bring_up(worker, 1)
    newer = workers_of(SMALL, built="newer")
    script.controller.worker_set.config = config_of(workers_of(LARGE), newer)
    assert set(script.controller.worker_set.outdated()) == {"prefill-small-0", "decode-small-0"}


SCALING = ScalingConfig(enabled=True, min_workers=0, max_workers=4)


def seen(number: int) -> RouterSeen:
    """So many requests have come to the router, and wait."""
    return RouterSeen("router-0", 0.0, {20: number}, {}, 0, 0, 0, number)


def test_each_model_scales_by_its_own_requests_to_none_and_back() -> None:
    """A request for one wakes it, and not the other."""
    script = Script(
        config_of(
            workers_of(LARGE, first=(), scaling=SCALING),
            workers_of(SMALL, first=(), scaling=SCALING),
        )
    )
    assert {each.model for each in of(LogScaling, script.first)} == {LARGE, SMALL}
    tags = [wake.tag for wake in of(Wake, script.first)]
    assert tags == ["scale large", "scale small"]
    for tag in tags:
        assert of(StartWorker, script.say(Woken(tag), at=SCALING.tick_s)) == []
    script.say(ScalingReport(seen(3), (), SMALL))
    started = {tag: of(StartWorker, script.say(Woken(tag), at=2 * SCALING.tick_s)) for tag in tags}
    assert started["scale large"] == []
    names = [start.worker for start in started["scale small"]]
    assert names
    assert all("-small-" in name for name in names)
    assert {start.model for start in started["scale small"]} == {SMALL}


def test_a_model_that_wakes_takes_a_machine_of_one_that_has_all() -> None:
    """Three workers at most, of both; the first has them, and requests that it works at."""
    both = config_of(
        workers_of(LARGE, first=(), scaling=replace_scaling(min_workers=0, max_workers=3)),
        workers_of(SMALL, first=(), scaling=replace_scaling(min_workers=0)),
        max_workers=3,
    )
    script = Script(both)
    script.controller.carry_out(0.0, decided(starts=(Role.DECODE,) * 3), LARGE)
    names = list(script.controller.workers)
    for name in names:
        script.bring_up(name, 1)
    now = 10.0

    def tick() -> dict[str, list[str]]:
        """Both report, and both look; returns what was started and what drains, by model."""
        nonlocal now
        done: dict[str, list[str]] = {}
        for model, number in ((LARGE, 5), (SMALL, waiting)):
            script.say(ScalingReport(seen(number), (), model), at=now)
            effects = script.say(Woken(f"scale {model}"), at=now)
            done[model] = [start.worker for start in of(StartWorker, effects)]
        now += SCALING.tick_s
        return done

    waiting = 0
    assert tick() == tick() == {LARGE: [], SMALL: []}
    waiting = 1
    woken = tick()
    assert (woken[LARGE], len(woken[SMALL])) == ([], 1)
    tick()
    states = [script.state(name) for name in names]
    assert sorted(map(str, states)) == ["draining", "up", "up"]


def replace_scaling(**changes: int) -> ScalingConfig:
    return ScalingConfig(enabled=True, **{"max_workers": 4, **changes})  # type: ignore[arg-type]


def test_the_only_worker_of_a_model_is_restarted_at_once() -> None:
    """Workers of the other model could not take its requests."""
    decode = workers_of(SMALL, first=(("decode-small-0", Role.DECODE),))
    script = Script(config_of(workers_of(LARGE), decode))
    for worker in list(script.controller.workers):
        script.bring_up(worker, 1)
    stops = of(StopWorker, script.say(RestartWorker("decode-small-0", "for a test")))
    assert [stop.worker for stop in stops] == ["decode-small-0"]
    assert of(StopWorker, script.say(RestartWorker("decode-large-0", "for a test"))) == []
    assert script.state("decode-large-0") is ProcessState.DRAINING
