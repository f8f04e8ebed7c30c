"""A controller that comes after another one: what runs goes on, and what does not is started."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster.config import build_config
from kvrelay.cluster.control.control_config import ControllerConfig
from kvrelay.cluster.control.controller import Controller
from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.messages import (
    AdoptWorker,
    Checkpoint,
    GiveUp,
    Machine,
    MachinesChanged,
    Record,
    RouterStarted,
    SendPeers,
    StartWorker,
    StopWorker,
    WorkerLost,
)
from kvrelay.cluster.control.process_messages import LinkLost
from kvrelay.cluster.orders import SetRole
from kvrelay.cluster.prepare import prepare_model
from kvrelay.cluster.processes.life import fixed_of_workers
from kvrelay.engine.node import Note, Send, Woken
from kvrelay.engine.stats import (
    Progress,
    ProgressReport,
    ProgressRequest,
    Role,
    RouterDown,
    RouterUp,
)
from kvrelay.router.messages import DrainReport, WorkerDown, WorkerUp
from kvrelay.worker.messages import Peer, PeersUpdated, StartFailed, WorkerStarted
from tests.cluster.control.configs import changed, made
from tests.cluster.control.test_controller import ONE, info, of
from tests.engine.model.tiny import make_checkpoint
from tests.support.identity_tries import change_byte, tensor_bytes

ROUTER = Peer("router-0", "h", 6, 3)
CONFIG = made(
    first=(("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE)),
    routers=("router-0",),
    backoff_s=1.0,
)


GPUS = made(
    first=tuple((f"decode-{number}", Role.DECODE) for number in range(3)),
    routers=("router-0",),
    backoff_s=1.0,
)


class Lives:
    """Controllers one after the other. Introductions are made at once; `sent` is all that was sent
    to nodes, `done` all other effects."""

    def __init__(self) -> None:
        self.now = 0.0
        self.kept = Checkpoint()
        self.sent: list[Any] = []
        self.done: list[Any] = []
        self.deaf: set[str] = set()  # these say nothing
        self.begin(())

    def begin(self, running: tuple[RouterStarted, ...], config: ControllerConfig = CONFIG) -> None:
        self.sent.clear()
        self.done.clear()
        own = {each.peer.node: each for each in (*self.kept.own, *running)}
        kept = replace(self.kept, own=tuple(own.values()))
        self.controller = Controller(changed(config, kept=kept))
        self.perform(self.controller.start(self.now))
        for router in running:
            self.say(router)

    def say(self, message: Any) -> None:
        self.perform(self.controller.receive(self.now, message))

    def perform(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Record(kept):
                    self.kept = kept
                case Send():
                    self.sent.append(effect)
                case SendPeers(to, about, epoch):
                    self.say(PeersUpdated(to, about, epoch))
                case AdoptWorker(worker, epoch) if worker not in self.deaf:
                    self.say(WorkerStarted(info(worker, epoch), "h", 100, 7))
                case Note():
                    pass
                case _:
                    self.done.append(effect)

    def bring_up(self) -> None:
        self.say(MachinesChanged(ONE))
        self.say(RouterStarted(replace(ROUTER, epoch=1), 8000, 9))
        for worker in ("prefill-0", "decode-0"):
            self.say(WorkerStarted(info(worker, 1), "h", 100, 7))
        assert self.controller.all_up()


@pytest.fixture
def lives() -> Lives:
    lives = Lives()
    lives.bring_up()
    return lives


RUNNING = (RouterStarted(replace(ROUTER, epoch=1), 8000, 9),)


def test_what_runs_is_up_again_at_once_and_nothing_is_started(lives: Lives) -> None:
    lives.begin(RUNNING)
    assert lives.controller.all_up()
    assert of(StartWorker, lives.done) == []
    assert of(StopWorker, lives.done) == []
    assert not [s for s in lives.sent if isinstance(s.message, WorkerDown | RouterDown)]
    for worker in ("prefill-0", "decode-0"):
        assert Send("router-0", WorkerUp(info(worker, 1))) in lives.sent
        assert Send(worker, RouterUp("router-0")) in lives.sent
    assert [w.pid for w in lives.controller.workers.values()] == [7, 7]


def test_a_worker_that_does_not_answer_is_started_again_and_its_router_is_told(
    lives: Lives,
) -> None:
    lives.deaf.add("decode-0")
    lives.begin(RUNNING)
    lives.say(MachinesChanged(ONE))
    assert lives.controller.workers["decode-0"].state is ProcessState.ADOPTING
    lives.say(Woken("adopting 1 decode-0"))
    assert of(StopWorker, lives.done) == [StopWorker("decode-0", 1)]
    (down,) = [s for s in lives.sent if isinstance(s.message, WorkerDown)]
    assert (down.to, down.message.worker, down.message.epoch) == ("router-0", "decode-0", 1)
    lives.say(Woken("backoff 1 decode-0"))
    assert [(s.worker, s.epoch) for s in of(StartWorker, lives.done)] == [("decode-0", 2)]


def test_a_server_that_was_up_is_not_given_up_for_workers_that_do_not_start() -> None:
    """A controller that found none to adopt, as while all were lost or at rest, gave it up."""
    lives = Lives()
    lives.begin(RUNNING)
    lives.say(MachinesChanged(ONE))
    lives.say(StartFailed("decode-0", 2, "no memory", True))
    assert of(GiveUp, lives.done) == []
    lives = Lives()
    lives.say(MachinesChanged(ONE))
    lives.say(StartFailed("decode-0", 1, "no such model", True))
    assert of(GiveUp, lives.done) == [GiveUp("no such model")]


def test_a_worker_with_other_weights_ends_and_is_started_with_those_of_now(lives: Lives) -> None:
    lives.begin(RUNNING, changed(CONFIG, fixed={"weights": "before", "no more": "1"}))
    assert of(StopWorker, lives.done) == [], "a version before said nothing of it"
    config = changed(CONFIG, fixed={"weights": "of now", "new": "1"})
    lives.begin(RUNNING, config)
    lives.say(MachinesChanged(ONE))
    stopped, started = of(StopWorker, lives.done), of(StartWorker, lives.done)
    assert {(s.worker, s.epoch) for s in stopped} == {("prefill-0", 1), ("decode-0", 1)}
    assert {(s.worker, s.epoch) for s in started} == {("prefill-0", 2), ("decode-0", 2)}
    for worker in ("prefill-0", "decode-0"):
        lives.say(WorkerStarted(info(worker, 2), "h", 100, 8))
    for fixed in (config.models[""].fixed, {"weights": "of now", "newer": "2"}):
        lives.begin(RUNNING, changed(config, fixed=fixed))
        assert lives.controller.all_up()
        assert of(StopWorker, lives.done) == []


def test_a_leader_with_a_cache_of_its_own_adopts_what_computes_the_same(tmp_path: Path) -> None:
    """Another path and other times ended all workers, and all streams."""
    first, second = tmp_path / "first", tmp_path / "second" / "snapshots" / "main"
    make_checkpoint("llama", first)
    (first / "tokenizer.json").write_text("{}")
    shutil.copytree(first, second, copy_function=shutil.copyfile)
    os.utime(second / "model.safetensors", (1, 1))

    def config_with(folder: Path) -> ControllerConfig:
        own = build_config({"model": {"name": str(folder)}, "engine": {"num_blocks": 64}}, "")
        model = prepare_model(own, 0, lambda _: None)
        return changed(CONFIG, fixed=fixed_of_workers(own, model.checkpoint.hex()))

    lives = Lives()
    lives.kept = Checkpoint()
    lives.begin((), config_with(first))
    lives.bring_up()
    for folder in (second, first):
        lives.begin(RUNNING, config_with(folder))
        assert lives.controller.all_up()
        assert of(StopWorker, lives.done) == of(StartWorker, lives.done) == []
        assert not [s for s in lives.sent if isinstance(s.message, WorkerDown)]
    change_byte(second / "model.safetensors", tensor_bytes(second / "model.safetensors")[-1])
    lives.begin(RUNNING, config_with(second))
    assert {stop.worker for stop in of(StopWorker, lives.done)} == {"prefill-0", "decode-0"}


def test_one_whose_process_is_gone_is_not_waited_for(lives: Lives) -> None:
    lives.deaf.add("decode-0")
    lives.begin(RUNNING)
    lives.say(WorkerLost("decode-0", 1, "its process has ended"))
    assert lives.controller.workers["decode-0"].state is ProcessState.BACKOFF


def test_one_that_was_starting_is_ended_and_started_under_a_new_epoch() -> None:
    lives = Lives()
    lives.say(MachinesChanged(ONE))
    lives.begin(())
    assert of(StopWorker, lives.done) == [StopWorker("prefill-0", 1), StopWorker("decode-0", 1)]
    lives.say(MachinesChanged(ONE))
    assert [(s.worker, s.epoch) for s in of(StartWorker, lives.done)] == [
        ("prefill-0", 2),
        ("decode-0", 2),
    ]


def test_a_router_that_died_meanwhile_is_forgotten_by_workers_before_its_next_life(
    lives: Lives,
) -> None:
    lives.begin(())
    gone = Send("decode-0", RouterDown("router-0"))
    lives.say(RouterStarted(replace(ROUTER, epoch=2), 8000, 10))
    assert lives.sent.count(gone) == 1
    assert lives.sent.index(gone) < lives.sent.index(Send("decode-0", RouterUp("router-0")))


def test_a_role_that_was_changed_is_kept(lives: Lives) -> None:
    lives.say(SetRole("prefill-0", Role.BOTH))
    lives.begin(RUNNING)
    both = replace(info("prefill-0", 1), role=Role.BOTH)
    assert Send("router-0", WorkerUp(both)) in lives.sent


def test_a_router_that_lost_messages_meets_the_worker_again_once_that_has_answered(
    lives: Lives,
) -> None:
    lives.sent.clear()
    lives.say(LinkLost("router-0", "decode-0", 1))
    assert lives.sent == [
        Send("decode-0", RouterDown("router-0")),
        Send("decode-0", ProgressRequest("controller")),
    ]
    lives.sent.clear()
    lives.say(ProgressReport("decode-0", 1, 5, Progress.MADE))
    assert Send("router-0", WorkerUp(info("decode-0", 1))) in lives.sent
    assert Send("decode-0", RouterUp("router-0")) in lives.sent
    assert lives.controller.all_up()


def test_gpus_of_adopted_workers_are_not_free_where_ray_has_begun_anew() -> None:
    """Ray has other names for the same machines then, and believes all of their GPUs free."""
    lives = Lives()
    lives.begin((), GPUS)
    lives.say(MachinesChanged((Machine("a", "10.0.0.1", 8.0, 2.0), Machine("b", "10.0.0.2", 8.0))))
    for number in range(2):
        lives.say(WorkerStarted(info(f"decode-{number}", 1), "10.0.0.1", 100 + number, 7))
    assert lives.controller.workers["decode-2"].state is ProcessState.DOWN  # there are two GPUs
    lives.begin((), GPUS)
    new = (Machine("c", "10.0.0.2", 8.0), Machine("d", "10.0.0.1", 8.0, 2.0))
    lives.say(MachinesChanged(new))
    assert of(StartWorker, lives.done) == []
    assert {w.machine_id for w in lives.controller.workers.values()} == {"d", None}
    assert [kept.machine_id for kept in lives.kept.workers] == ["d", "d"]
    # One more machine has room; and where one of them ends, its place is for the next.
    lives.say(MachinesChanged((*new, Machine("e", "10.0.0.3", 8.0, 1.0))))
    assert [(s.worker, s.machine_id) for s in of(StartWorker, lives.done)] == [("decode-2", "e")]


def test_who_knows_no_hosts_goes_by_where_its_workers_listen() -> None:
    """What was kept by a version before."""
    lives = Lives()
    lives.begin((), GPUS)
    lives.say(MachinesChanged((Machine("a", "h", 8.0, 1.0),)))
    lives.say(WorkerStarted(info("decode-0", 1), "h", 100, 7))
    lives.kept = replace(
        lives.kept, workers=tuple(replace(kept, hosts=()) for kept in lives.kept.workers)
    )
    lives.begin((), GPUS)
    lives.say(MachinesChanged((Machine("b", "h", 8.0, 1.0),)))
    assert of(StartWorker, lives.done) == []
    assert lives.controller.workers["decode-0"].machine_id == "b"


def test_workers_that_other_settings_have_started_are_adopted_and_known(lives: Lives) -> None:
    """They were ended all at once."""
    lives.begin(RUNNING, changed(CONFIG, built="2.0 abc"))
    assert lives.controller.all_up()
    assert of(StopWorker, lives.done) == []
    assert lives.controller.worker_set.outdated() == ["prefill-0", "decode-0"]
    lives.say(MachinesChanged(ONE))
    lives.say(WorkerLost("decode-0", 1, "it was killed"))
    lives.say(Woken("backoff 1 decode-0"))
    lives.say(WorkerStarted(info("decode-0", 2), "h", 100, 7))
    assert lives.controller.worker_set.outdated() == ["prefill-0"]
    lives.begin(RUNNING, changed(CONFIG, built="2.0 abc"))
    assert lives.controller.worker_set.outdated() == ["prefill-0"], "the next controller knows too"


def test_workers_count_by_the_version_that_came_and_stay_where_a_start_would_bring_it_again(
    lives: Lives,
) -> None:
    config = changed(CONFIG, built="2.0 abc")
    for life in range(2):  # the next controller does not begin again
        lives.begin(RUNNING, config)
        lives.say(MachinesChanged(ONE))
        workers = lives.controller.worker_set
        if not life:  # the pod of one has the old version, that of the other the new one
            for worker, package in (("prefill-0", "2.0"), ("decode-0", "1.0")):
                lives.say(WorkerLost(worker, 1, "an operator restarts all workers"))
                lives.say(Woken(f"backoff 1 {worker}"))
                new = WorkerStarted(info(worker, 2), "h", 100, 7, package=package)
                lives.say(new)
        assert workers.by_name["prefill-0"].built == config.models[""].built
        assert workers.by_name["decode-0"].built == "1.0 abc"
        assert workers.outdated() == ["decode-0"]
        (machine,) = workers.by_name["decode-0"].machines
        assert workers.held_back({machine: "1.0"}) == {"decode-0": "1.0"}
        assert workers.held_back({machine: "2.0"}) == {}, "it has been installed there"
    lives.begin(RUNNING, changed(CONFIG, built="2.0 other"))
    workers = lives.controller.worker_set
    (machine,) = workers.by_name["decode-0"].machines
    assert workers.held_back({machine: "1.0"}) == {}, "other settings come in the old version too"


def test_a_worker_that_is_not_wanted_any_more_is_drained_before_it_ends(lives: Lives) -> None:
    """It was ended at once, with its streams."""
    lives.begin(RUNNING, changed(CONFIG, first=(("prefill-0", Role.PREFILL),)))
    worker = lives.controller.workers["decode-0"]
    assert worker.state is ProcessState.DRAINING
    assert of(StopWorker, lives.done) == []
    for _ in range(3):
        lives.say(ProgressReport("decode-0", 1, 5, Progress.MADE))
        lives.say(DrainReport("router-0", "decode-0", 1, 0))
        lives.say(Woken("drain 1 decode-0"))
    assert of(StopWorker, lives.done) == [StopWorker("decode-0", 1, gently=True, has_heir=True)]
    assert [*lives.controller.workers] == ["prefill-0"]
