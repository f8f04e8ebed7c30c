"""A worker that an operator restarts: its requests move first."""

from __future__ import annotations

from kvrelay.cluster.control.messages import RestartWorker, StopWorker
from kvrelay.cluster.scaling.provider import State
from kvrelay.router.messages import WorkerDraining, WorkerUp
from tests.cluster.scaling.provider_contract import state_of
from tests.cluster.scaling.test_controlled_fleet import CONFIG, ControlledWorld, world

__all__ = ["world"]


def test_a_worker_is_restarted_when_its_requests_have_moved(world: ControlledWorld) -> None:
    world.up()
    worker = world.up()
    world.live_requests[worker] = 1
    world.say(RestartWorker(worker, "an operator asks"))
    world.pass_time(2)
    assert world.sent(WorkerDraining)
    assert world.of(StopWorker) == []
    world.live_requests[worker] = 0
    world.pass_time(3 + world.start_s)
    assert world.of(StopWorker) == [StopWorker(worker, 1, gently=True)]
    assert world.controller.workers[worker].epoch == 2
    assert world.controller.workers[worker].failures == 0
    assert state_of(world, worker).state is State.UP
    assert world.sent(WorkerUp)[-1].message.info.epoch == 2


def test_one_that_is_restarted_waits_for_its_requests_only_so_long(world: ControlledWorld) -> None:
    world.up()
    worker = world.up()
    world.live_requests[worker] = 1
    world.say(RestartWorker(worker, "an operator asks"))
    world.pass_time(CONFIG.restart_drain_s + 3 + world.start_s)
    assert world.controller.workers[worker].epoch == 2


def test_the_last_worker_is_restarted_at_once(world: ControlledWorld) -> None:
    worker = world.up()
    world.say(RestartWorker(worker, "an operator asks"))
    assert world.of(StopWorker) == [StopWorker(worker, 1)]


def test_the_next_controller_takes_back_what_was_to_be_restarted(world: ControlledWorld) -> None:
    world.up()
    worker = world.up()
    world.live_requests[worker] = 1
    world.say(RestartWorker(worker, "an operator asks"))
    world.pass_time(1)
    world.effects.clear()
    world.begin(CONFIG)
    world.pass_time(2)
    assert worker in [each.message.info.worker for each in world.sent(WorkerUp)]
    assert not world.controller.workers[worker].is_draining
