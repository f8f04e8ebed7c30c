"""The controller gives the workers of a model other weights, one after the other; whatever fails or
is killed on the way, all have one version in the end."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster.control.control_config import ControllerConfig
from kvrelay.cluster.control.controller import Controller
from kvrelay.cluster.control.messages import (
    Checkpoint,
    MachinesChanged,
    ModelWeights,
    Record,
    StartWorker,
    WorkerLost,
)
from kvrelay.cluster.control.view import cluster_view
from kvrelay.cluster.orders import PauseModel, UpdateModel
from kvrelay.cluster.processes.kept_models import KeptWeights
from kvrelay.cluster.status import ControllerStatus, WeightsStatus
from kvrelay.engine.model.checkpoint.version import read_version
from kvrelay.engine.node import Send, Wake, Woken
from kvrelay.engine.weights import (
    PauseMode,
    PauseWorker,
    UpdateMode,
    UpdateWeights,
    WeightsUpdated,
    WeightVersion,
)
from kvrelay.router.messages import WorkerUp
from kvrelay.worker.messages import PeersUpdated, StartFailed, WorkerStarted
from tests.cluster.control.configs import changed
from tests.cluster.control.test_controller import CONFIG, ONE, Script, info, of

BASE, NEW, NEWER = (WeightVersion(n, n.encode(), f"/{n}") for n in ("base", "new", "newer"))


class Rollouts(Script):
    """Two workers that are up, and the one that is asked."""

    protocol = 3

    def __init__(self, config: ControllerConfig = CONFIG) -> None:
        self.asked: list[tuple[str, UpdateWeights]] = []
        self.kept = Checkpoint()
        super().__init__(config)
        for worker in ("prefill-0", "decode-0"):
            self.bring_up(worker, 1)

    def started(self, worker: str, epoch: int) -> list[Any]:
        return self.say(WorkerStarted(info(worker, epoch), "h", 100 + epoch, protocol=3))

    def say(self, message: Any, at: float | None = None) -> list[Any]:
        self.now = self.now if at is None else at
        effects = self.controller.receive(self.now, message)
        for effect in effects:
            if isinstance(effect, Record):
                self.kept = effect.kept
            if isinstance(effect, Send) and isinstance(effect.message, UpdateWeights):
                self.asked.append((effect.to, effect.message))
        return effects

    def order(self, version: WeightVersion = NEW, **fields: Any) -> list[Any]:
        fields = {"mode": UpdateMode.DRAIN, **fields}
        return self.say(UpdateModel("", BASE, version, **fields))

    def answer(self, why: str = "", old: WeightVersion = BASE) -> str:
        """The worker that is asked has done so, or has failed and kept `old`."""
        worker, update = self.asked[-1]
        version = old if why else update.version
        epoch = self.controller.workers[worker].epoch
        wanted = update.version.digest
        self.say(WeightsUpdated(worker, epoch, version, version.digest, wanted, why))
        return worker

    @property
    def view(self) -> WeightsStatus:
        me = ControllerStatus(known=True)
        (shown,) = cluster_view(self.controller, me, {}, "h", "http").weights
        return shown


class Earlier(Rollouts):
    protocol = 1


def test_one_worker_after_the_other_has_the_new_weights_and_then_they_are_current() -> None:
    script = Rollouts()
    script.order()
    assert [worker for worker, _ in script.asked] == ["decode-0"]
    assert (script.view.state, script.view.target) == ("updating", "new")
    assert script.answer() == "decode-0"
    assert [worker for worker, _ in script.asked] == ["decode-0", "prefill-0"]
    script.answer()
    assert (script.view.state, script.view.current, script.view.previous) == ("done", "new", "base")
    assert len(script.asked) == 2
    effects = script.say(WorkerLost("decode-0", 1, "killed"))
    (wake,) = [each for each in effects if isinstance(each, Wake) and "backoff" in each.tag]
    (start,) = of(StartWorker, script.say(Woken(wake.tag)))
    assert start.weights == NEW
    script.order(back=True)
    script.answer()
    assert (script.view.current, script.view.previous) == ("base", "new")


def test_a_router_that_comes_later_knows_the_weights_of_each_worker() -> None:
    script = Rollouts()
    script.order()
    script.answer()
    found = script.controller.worker_set.up()
    assert (found["decode-0"].weights, found["decode-0"].fingerprint) == ("new", b"new")
    assert found["prefill-0"].weights == ""


@pytest.mark.parametrize("num_done", [0, 1])
def test_where_one_fails_those_that_had_changed_go_back(num_done: int) -> None:
    script = Rollouts()
    script.order()
    for _ in range(num_done):
        script.answer()
    failed = script.answer(why="too little memory")
    assert (script.view.state, script.view.target) == ("stopped", None)
    assert f"{failed}: too little memory" in script.view.why
    del script.asked[:]
    script.say(Woken("weights "), at=10.0)
    assert [(w, u.version) for w, u in script.asked] == [("decode-0", BASE)] * num_done
    if num_done:
        script.answer()
    assert len(script.asked) == num_done
    script.order(NEWER)
    assert script.view.state == "updating"


def test_what_a_worker_has_done_for_an_earlier_order_is_known() -> None:
    script = Rollouts()
    script.order()
    script.answer()
    script.answer(why="too little memory")
    script.say(Woken("weights "), at=10.0)  # decode-0 is to go back
    script.order(NEWER)
    script.say(Woken("weights "), at=12.0)
    script.answer(why="base is being loaded", old=NEW)
    script.say(WeightsUpdated("decode-0", 1, BASE, BASE.digest, BASE.digest, ""))
    del script.asked[:]
    script.order(NEW)
    script.say(Woken("weights "), at=20.0)
    assert [(worker, update.version) for worker, update in script.asked] == [("decode-0", NEW)]


def test_a_worker_that_does_not_answer_is_asked_again_and_then_given_up() -> None:
    script = Rollouts()
    script.order()
    script.say(Woken("weights "), at=2.0)
    assert len(script.asked) == 2
    script.say(Woken("weights "), at=1e4)
    assert "decode-0 has not answered" in script.view.why


def test_a_worker_that_is_lost_on_the_way_holds_nobody_up() -> None:
    script = Rollouts()
    script.order()
    script.say(WorkerLost("decode-0", 1, "killed"))
    assert [worker for worker, _ in script.asked] == ["decode-0", "prefill-0"]
    script.answer()
    assert script.view.state == "done"


def test_the_next_controller_goes_on_and_asks_all_that_it_adopts() -> None:
    before = Rollouts()
    before.order()
    before.answer()
    script = Rollouts.__new__(Rollouts)
    script.now, script.asked, script.kept = 0.0, [], before.kept
    script.controller = Controller(changed(CONFIG, kept=before.kept))
    script.controller.start(0.0)
    script.say(MachinesChanged(ONE))
    for worker in ("prefill-0", "decode-0"):
        script.bring_up(worker, 1)
    assert {script.answer(), script.answer()} == {"decode-0", "prefill-0"}
    assert (script.view.state, script.view.current) == ("done", "new")


def test_orders_that_cannot_be_followed_are_refused_in_words() -> None:
    script = Rollouts()
    script.order(back=True)
    assert "none were changed yet" in script.view.why
    script.order(WeightVersion("base", b"other", "/other"))
    assert "that of other weights" in script.view.why
    earlier = Earlier()
    earlier.order()
    assert earlier.view.why == "router-0: of an earlier version; restart them first"
    assert earlier.asked == []


def test_a_refused_order_changes_nothing_of_the_one_that_runs() -> None:
    """A rollout by drain went on with keep, and its success was shown as stopped."""
    script = Rollouts()
    script.order(mode=UpdateMode.DRAIN)
    for mode in (UpdateMode.DRAIN, UpdateMode.KEEP):
        script.order(NEWER, mode=mode)
        assert script.view.refused is not None
        assert "new is being rolled out: wait for its end" in script.view.refused.why
        assert script.view.refused.number == script.view.number
    script.order(mode=UpdateMode.DRAIN)  # as a job that is tried again
    assert (script.view.state, script.view.target, script.view.mode) == ("updating", "new", "drain")
    script.answer()
    script.answer()
    assert {update.mode for _, update in script.asked} == {UpdateMode.DRAIN}
    assert (script.view.state, script.view.current, script.view.why) == ("done", "new", "")


def test_the_same_update_twice_leaves_the_way_back_as_it_is() -> None:
    script = Rollouts()
    script.order(BASE)
    assert (script.view.state, script.view.current) == ("done", "base")
    for _ in range(2):
        script.order()
        while script.view.state == "updating":
            script.answer()
        assert (script.view.current, script.view.previous) == ("new", "base")
    script.order(back=True)
    assert script.view.target == "base"


def test_weights_that_are_nowhere_any_more_end_no_cluster() -> None:
    """A trainer had removed them: the cluster became smaller with every worker that died."""
    script = Rollouts()
    script.order()
    script.answer()
    script.answer()

    def fails(epoch: int) -> list[Any]:
        effects = script.say(StartFailed("decode-0", epoch, "/new is no folder", False, NEW.digest))
        (wake,) = [each for each in effects if isinstance(each, Wake) and "backoff" in each.tag]
        started = of(StartWorker, script.say(Woken(wake.tag)))
        return [each.weights for each in started]

    (wake,) = [
        each
        for each in script.say(WorkerLost("decode-0", 1, "killed"))
        if isinstance(each, Wake) and "backoff" in each.tag
    ]
    [started] = of(StartWorker, script.say(Woken(wake.tag)))
    assert started.weights == NEW
    assert fails(2) == [NEW], "another machine may have them"
    assert fails(3) == [None], "it has not: workers have the model's own again"
    assert script.view.current == "base"
    assert "new is lost, workers have base from now on: /new is no folder" in script.view.why
    assert [update.version for _, update in script.asked][-1] == BASE, "those that are up, too"


def test_a_pause_reaches_workers_that_come_later_too() -> None:
    script = Rollouts()

    def orders(effects: list[Any]) -> list[tuple[str, PauseMode | None]]:
        sent = [each for each in of(Send, effects) if isinstance(each.message, PauseWorker)]
        return sorted((each.to, each.message.mode) for each in sent)

    both = ["decode-0", "prefill-0"]
    effects = script.say(PauseModel("", PauseMode.KEEP))
    assert orders(effects) == [(worker, PauseMode.KEEP) for worker in both]
    assert script.view.paused == "keep"
    effects = script.say(WorkerLost("decode-0", 1, "killed"))
    (wake,) = [each for each in effects if isinstance(each, Wake) and "backoff" in each.tag]
    script.say(Woken(wake.tag))
    last: list[Any] = []
    for effect in script.started("decode-0", 2):
        if hasattr(effect, "peers"):
            last += script.say(PeersUpdated(effect.to, effect.about, effect.epoch))
    assert orders(last) == [("decode-0", PauseMode.KEEP)]
    assert any(isinstance(each.message, WorkerUp) for each in of(Send, last))
    effects = script.say(PauseModel("", None))
    assert [to for to, mode in orders(effects) if mode is None] == both


def test_a_server_that_starts_anew_has_the_weights_that_were_current(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where its files are in another folder, with other times."""
    state, copied = tmp_path / "state", tmp_path / "copied"
    for folder in (model := tmp_path / "model", copied):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"1")
    os.utime(copied / "model.safetensors", (1, 1))
    base = read_version(model, "base")
    weights = ModelWeights("", base, NEW, base, number=3, paused=PauseMode.WAIT)
    KeptWeights(state, {"": model}).keep((weights,))
    anew = Checkpoint(weights=(replace(weights, paused=None),))
    for folder in (model, copied):
        assert KeptWeights(state, {"": folder}).add_to(Checkpoint()) == anew
    younger = Checkpoint(weights=(replace(weights, number=4),))
    assert KeptWeights(state, {"": model}).add_to(younger) == younger
    assert not caplog.messages
    (model / "model.safetensors").write_bytes(b"22")
    assert KeptWeights(state, {"": model}).add_to(Checkpoint()) == Checkpoint()
    assert "holds other weights than when new took their place" in caplog.text
    (state / "weights.json").write_bytes(b"{")
    assert KeptWeights(state, {"": model}).add_to(Checkpoint()) == Checkpoint()


def test_a_pause_outlives_its_controller_without_any_update(tmp_path: Path) -> None:
    """Its workers stayed paused, it said that nothing was, and one that started computed."""
    paused = ModelWeights("b", paused=PauseMode.KEEP, has_paused=True)
    kept = Checkpoint(weights=(paused, ModelWeights("a")))
    assert KeptWeights(tmp_path, {}).add_to(kept).weights == (paused,)
