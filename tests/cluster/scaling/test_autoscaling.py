"""The controller carries out what the autoscaler decides: what becomes of workers that are ordered,
fail, are changed by hand, or outlive their controller."""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from kvrelay.cluster.control.autoscaling import STATES, LogScaling
from kvrelay.cluster.control.control_config import ControllerConfig
from kvrelay.cluster.control.controller import Controller
from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.messages import (
    AdoptRouter,
    AdoptWorker,
    Checkpoint,
    Machine,
    MachinesChanged,
    Record,
    RequestMachines,
    RestartWorker,
    RouterStarted,
    ScalingReport,
    SendPeers,
    StartWorker,
    StopWorker,
    WorkerLost,
)
from kvrelay.cluster.orders import SetRole
from kvrelay.cluster.processes import ray_access
from kvrelay.cluster.scaling.observations import ManagedWorker, State
from kvrelay.engine.backoff import Backoff
from kvrelay.engine.node import Note, Send, Wake, Woken
from kvrelay.engine.stats import Progress, ProgressReport, ProgressRequest, Role
from kvrelay.router.messages import DrainReport, RoleChanged, WorkerDown, WorkerDraining, WorkerUp
from kvrelay.router.scaling_config import ScalingConfig
from kvrelay.router.traffic import RouterSeen
from kvrelay.worker.messages import Peer, PeersUpdated, StartFailed, WorkerStarted
from tests.cluster.control.configs import changed, made
from tests.cluster.control.test_controller import info
from tests.cluster.scaling.scaling_kit import decided

ROUTER = Peer("router-0", "h0", 1, 1)
SCALING = ScalingConfig(
    enabled=True, min_workers=0, max_workers=8, tick_s=0.5, start_s=5.0, pending_timeout_s=20.0
)
CONFIG = made(first=(), routers=(ROUTER.node,), scaling=SCALING, backoff_s=1.0)


class ControlledWorld:
    """A controller, its workers and a router, in virtual time. Workers take `start_s` to start."""

    def __init__(self, config: ControllerConfig = CONFIG) -> None:
        self.now = 0.0
        self.start_s = 5.0
        self.adopted_s = 0.01  # until one that runs has answered
        self.took_s = 0.0  # as workers say it; 0: they do not
        self.live_requests: dict[str, int] = {}  # the router's, by worker
        self.busy: dict[str, int] = {}  # what workers still do
        self.fails: set[str] = set()  # these do not start
        self.effects: list[Any] = []
        self.kept = Checkpoint()
        self._events: list[tuple[float, int, int, Any]] = []
        self._count = 0
        self._life = 0  # the controller's epoch
        self.begin(config)

    def begin(self, config: ControllerConfig) -> None:
        """A controller comes, perhaps after another one."""
        self._life += 1
        self.controller = Controller(changed(config, kept=self.kept), wall=lambda: 1e9 + self.now)
        self.perform(self.controller.start(self.now))
        self.say(RouterStarted(ROUTER, 8000))
        self.say(MachinesChanged((Machine("m", "h", 8.0),)))

    def carry_out(self, **moves: Any) -> None:
        self.perform(self.controller.carry_out(self.now, decided(**moves)))

    def start(self, role: Role = Role.DECODE) -> str:
        self.carry_out(starts=(role,))
        return list(self.controller.workers)[-1]

    def drain(self, worker: str) -> None:
        self.carry_out(drains=(worker,))

    def seen(self) -> list[ManagedWorker]:
        """Workers as the autoscaler saw them last."""
        return list(self.controller.scaling[""].workers.values())

    def state(self, worker: str) -> State:
        return self.controller.scaling[""].workers[worker].state

    def why_gone(self, worker: str) -> str:
        """As operators read it; the worker is not there any more."""
        assert worker not in self.controller.workers
        notes: list[str] = [e.text for e in self.of(Note) if e.counter == "worker_gone"]
        return next(text for text in notes if text.startswith(f"{worker} "))

    def pass_time(self, seconds: float) -> None:
        self._do(self._life, Woken("scale"), again=False)  # what was just ordered begins
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            at, _, life, message = heapq.heappop(self._events)
            self.now = max(self.now, at)
            self._do(life, message)
        self.now = end
        self._do(self._life, Woken("scale"), again=False)

    def say(self, message: Any, after_s: float = 0.0) -> None:
        if after_s <= 0.0:
            self._do(self._life, message)
            return
        self._count += 1
        heapq.heappush(self._events, (self.now + after_s, self._count, self._life, message))

    def _do(self, life: int, message: Any, *, again: bool = True) -> None:
        if life != self._life:
            return
        effects = self.controller.receive(self.now, message)
        if not again:  # one chain of ticks is enough
            effects = [e for e in effects if not (isinstance(e, Wake) and e.tag == "scale")]
        self.perform(effects)

    def perform(self, effects: list[Any]) -> None:
        for effect in effects:
            self.effects.append(effect)
            match effect:
                case Record(kept):
                    self.kept = kept
                case StartWorker(worker, _, epoch) if worker in self.fails:
                    self.say(StartFailed(worker, epoch, "no such device", False), 0.1)
                case StartWorker(worker, _, epoch):
                    started = WorkerStarted(info(worker, epoch), "h", 100, took_s=self.took_s)
                    self.say(started, self.start_s)
                case AdoptRouter():
                    pass  # it says so anyway
                case AdoptWorker(worker, epoch, _, _, _):
                    started = WorkerStarted(info(worker, epoch), "h", 100, took_s=self.took_s)
                    self.say(started, self.adopted_s)
                case SendPeers(to, about, epoch):
                    self.say(PeersUpdated(to, about, epoch), 0.001)
                case Send(to, WorkerDraining(worker, epoch)):
                    left = self.live_requests.get(worker, 0)
                    self.say(DrainReport(to, worker, epoch, left), 0.001)
                case Send(to, ProgressRequest()):
                    epoch = self.controller.workers[to].epoch
                    busy = self.busy.get(to, 0)
                    self.say(ProgressReport(to, epoch, 1, Progress.MADE, busy), 0.001)
                case Wake(after_s, tag):
                    self.say(Woken(tag), after_s)
                case StopWorker() | Send() | Note() | LogScaling() | RequestMachines():
                    pass
                case _:
                    raise AssertionError(effect)

    def of(self, kind: type) -> list[Any]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def sent(self, kind: type) -> list[Any]:
        return [each for each in self.of(Send) if isinstance(each.message, kind)]

    def up(self, role: Role = Role.DECODE) -> str:
        worker = self.start(role)
        self.pass_time(self.start_s + 1)
        assert self.state(worker) is State.UP
        return worker


@pytest.fixture
def world() -> ControlledWorld:
    return ControlledWorld()


def test_every_state_of_a_worker_that_is_there_means_something_to_the_autoscaler() -> None:
    assert STATES.keys() == set(ProcessState) - {ProcessState.GONE}


def test_an_order_is_pending_until_it_has_a_place_and_comes_up_later(
    world: ControlledWorld,
) -> None:
    world.say(MachinesChanged(()))
    worker = world.start()
    world.pass_time(1)
    assert world.state(worker) is State.PENDING
    world.say(MachinesChanged((Machine("m", "h", 8.0),)))
    world.pass_time(0.5 * world.start_s)
    assert world.state(worker) is State.STARTING
    world.pass_time(world.start_s)
    (known,) = world.seen()
    assert (known.state, known.role) == (State.UP, Role.DECODE)
    assert known.took_s >= world.start_s


def test_one_that_is_not_up_yet_goes_at_once_and_its_name_is_not_used_again(
    world: ControlledWorld,
) -> None:
    first = world.start(Role.PREFILL)
    world.pass_time(0.2 * world.start_s)
    world.drain(first)
    assert "not needed" in world.why_gone(first)
    world.pass_time(2 * world.start_s)
    assert world.seen() == []
    assert world.start(Role.PREFILL) != first


def test_one_without_a_place_is_given_up_with_its_reason(world: ControlledWorld) -> None:
    world.say(MachinesChanged(()))
    worker = world.start(Role.PREFILL)
    world.pass_time(0.9 * SCALING.pending_timeout_s)
    assert world.state(worker) is State.PENDING
    world.pass_time(0.2 * SCALING.pending_timeout_s)
    assert "given up after 20 s: no machine has room" in world.why_gone(worker)
    shown = world.controller.scaling[""].view()
    assert [worker in each["removals"][0] for each in shown.decisions if each["removals"]] == [True]
    assert shown.actions["remove"] == 1


def test_a_worker_goes_when_no_router_needs_it_and_it_does_nothing(world: ControlledWorld) -> None:
    worker = world.up()
    world.live_requests[worker], world.busy[worker] = 2, 1
    world.drain(worker)
    world.pass_time(3)
    assert world.state(worker) is State.DRAINING
    world.live_requests[worker] = 0
    world.pass_time(3)
    assert world.state(worker) is State.DRAINING  # another reads its KV
    assert world.of(StopWorker) == []
    world.busy[worker] = 0
    world.pass_time(3)
    assert world.why_gone(worker)
    assert world.of(StopWorker) == [StopWorker(worker, 1, gently=True)]
    assert worker not in world.controller.workers
    (down,) = world.sent(WorkerDown)
    assert down == Send("router-0", WorkerDown(worker, 1, "drained"))


def test_one_that_goes_leaves_its_host_memory_to_another_of_its_machine(
    world: ControlledWorld,
) -> None:
    stays, goes = world.up(), world.up()
    one, other = (world.controller.workers[each] for each in (stays, goes))
    here = one.machine_id
    for machine, kind, is_kept in (
        (here, b"", True),
        ("elsewhere", b"", False),
        (here, b"another form of KV, or another model", False),
    ):
        other.machine_id = machine
        assert other.info is not None
        other.info = replace(other.info, store_kind=kind)
        world.drain(goes)
        world.pass_time(3)
        assert world.of(StopWorker)[-1] == StopWorker(goes, 1, gently=True, has_heir=is_kept)
        goes = world.up()
        other = world.controller.workers[goes]


def test_one_that_is_never_empty_goes_in_the_end(world: ControlledWorld) -> None:
    worker = world.up()
    world.live_requests[worker] = 1
    world.drain(worker)
    world.pass_time(CONFIG.models[""].drain_timeout_s + 1)
    assert "600" in world.why_gone(worker)


def test_one_that_dies_while_it_drains_is_not_started_again(world: ControlledWorld) -> None:
    worker = world.up()
    world.live_requests[worker] = 1
    world.drain(worker)
    world.pass_time(1)
    world.say(WorkerLost(worker, 1, "killed"))
    world.pass_time(10)
    assert world.why_gone(worker)
    assert [each.epoch for each in world.of(StartWorker) if each.worker == worker] == [1]


def test_one_that_dies_is_coming_again(world: ControlledWorld) -> None:
    worker = world.up()
    world.say(WorkerLost(worker, 1, "killed"))
    world.pass_time(1)
    assert world.state(worker) is State.STARTING
    world.pass_time(world.start_s + 3)
    assert world.controller.workers[worker].epoch == 2
    assert world.sent(WorkerUp)[-1].message.info.epoch == 2


def start_s_of_planner(world: ControlledWorld) -> float:
    start_s: float = world.controller.scaling[""].view().decisions[-1]["inputs"]["start_s"]
    return start_s


def test_a_start_takes_what_the_first_workers_took() -> None:
    """It was `start_s` until a worker was ordered; one that came up after the first tick counted
    from that tick on, and one that was adopted from its adoption."""
    scaling = structs.replace(SCALING, min_workers=1, start_s=60.0)
    first = (("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE))
    config = changed(CONFIG, scaling=scaling, first=first)
    world = ControlledWorld(config)
    world.pass_time(2 * world.start_s)
    assert world.seen()[0].state is State.UP
    assert start_s_of_planner(world) == 60.0, "they did not say"
    world.took_s, world.adopted_s = 3.0, 3 * SCALING.tick_s
    world.begin(config)
    world.pass_time(2 * world.start_s)
    assert start_s_of_planner(world) == 3.0, "they had when they were adopted"
    worker = world.start(Role.DECODE)
    world.pass_time(2 * world.start_s)
    known = world.controller.scaling[""].workers[worker]
    assert known.took_s > world.start_s
    assert start_s_of_planner(world) == known.took_s, "with its wait for a place"


def test_those_that_fail_again_and_again_go_and_the_next_waits(world: ControlledWorld) -> None:
    world.up()  # the cluster can serve at all
    world.fails = {f"decode-{number}" for number in range(10)}
    first = world.start(Role.DECODE)
    world.pass_time(10)
    assert "no such device" in world.why_gone(first)
    world.effects.clear()
    second = world.start(Role.DECODE)
    world.pass_time(1)
    assert world.state(second) is State.PENDING
    assert world.of(StartWorker) == []  # not at once
    world.fails.clear()
    world.pass_time(10 + world.start_s)
    assert world.state(second) is State.UP
    third = world.start(Role.DECODE)
    world.pass_time(0.1)
    assert world.state(third) is State.STARTING  # all is well again


def test_one_whose_machine_is_gone_is_given_up_in_the_end(world: ControlledWorld) -> None:
    worker = world.up()
    world.say(MachinesChanged(()))
    world.say(WorkerLost(worker, 1, "its machine is gone"))
    world.pass_time(0.5 * SCALING.pending_timeout_s)
    assert world.state(worker) is State.PENDING
    world.pass_time(SCALING.pending_timeout_s)
    assert "no machine has room" in world.why_gone(worker)


def test_a_role_that_an_operator_sets_is_known_in_the_next_tick(world: ControlledWorld) -> None:
    worker = world.up()
    world.say(SetRole(worker, Role.PREFILL))
    world.pass_time(SCALING.tick_s)
    assert [each.role for each in world.seen()] == [Role.PREFILL]


def test_a_flip_is_told_to_routers_and_nothing_is_stopped(world: ControlledWorld) -> None:
    worker = world.up()
    world.carry_out(flips=((worker, Role.PREFILL),))
    world.pass_time(0.1)
    assert world.sent(RoleChanged) == [Send("router-0", RoleChanged(worker, 1, Role.PREFILL))]
    assert world.of(StopWorker) == []


def test_the_next_controller_goes_on_with_all_of_it(world: ControlledWorld) -> None:
    staying, leaving = world.up(), world.up()
    world.live_requests[leaving] = 1
    world.drain(leaving)
    world.pass_time(1)
    world.effects.clear()
    world.begin(CONFIG)
    world.pass_time(2)
    assert world.state(staying) is State.UP
    assert world.state(leaving) is State.DRAINING
    announced = [each.message.info.worker for each in world.sent(WorkerUp)]
    assert announced == [staying]
    assert world.sent(WorkerDraining)
    world.live_requests[leaving] = 0
    world.pass_time(2)
    assert world.why_gone(leaving)
    assert world.of(StartWorker) == []
    assert world.start(Role.DECODE) not in (staying, leaving)


def test_a_request_wakes_a_cluster_of_no_workers(world: ControlledWorld) -> None:
    world.pass_time(5)
    assert world.of(StartWorker) == []
    seen = RouterSeen("router-0", 0.0, {40: 1}, {}, 0, 0, 0, 1)
    world.say(ScalingReport(seen, ()))
    world.pass_time(2 * SCALING.tick_s)
    (start,) = world.of(StartWorker)
    assert start.role is Role.DECODE
    view = world.controller.scaling[""].view()
    woke = [each for each in view.decisions if each["starts"]]
    assert [each["reason"] for each in woke] == ["wake"]
    assert woke[0]["at_s"] > 1e9  # by the wall's clock


def test_reports_of_routers_that_are_gone_do_not_make_measurements_old() -> None:
    world = ControlledWorld(changed(CONFIG, scaling=SCALING))
    gone = RouterSeen("router-9", 0.0, {40: 1}, {}, 0, 0, 0, 1)
    world.say(ScalingReport(gone, ()))
    for _ in range(20):
        seen = RouterSeen("router-0", 0.0, {}, {}, 0, 0, 0, 0)
        world.say(ScalingReport(seen, ()))
        world.pass_time(1.0)
    assert world.controller.scaling[""].view().reason == "idle"


def test_machines_are_asked_for_once_for_each_number() -> None:
    scaling = ScalingConfig(
        enabled=True, min_workers=3, max_workers=8, tick_s=0.5, workers_per_machine=2
    )
    world = ControlledWorld(changed(CONFIG, scaling=scaling, workers_per_machine=2))
    world.pass_time(3)
    assert world.of(RequestMachines) == [RequestMachines(2)]
    states = sorted(each.state for each in world.seen())
    assert states == [State.PENDING, State.STARTING, State.STARTING]
    world.say(MachinesChanged((Machine("m", "h", 8.0), Machine("n", "h2", 8.0))))
    world.pass_time(2 * world.start_s)
    assert {each.state for each in world.seen()} == {State.UP}


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
    assert world.of(StopWorker) == [StopWorker(worker, 1, gently=True, has_heir=True)]
    assert world.controller.workers[worker].epoch == 2
    assert world.controller.workers[worker].failures == 0
    assert world.state(worker) is State.UP
    assert world.sent(WorkerUp)[-1].message.info.epoch == 2


def test_one_that_is_restarted_waits_for_its_requests_only_so_long(world: ControlledWorld) -> None:
    world.up()
    worker = world.up()
    world.live_requests[worker] = 1
    world.say(RestartWorker(worker, "an operator asks"))
    world.pass_time(CONFIG.models[""].restart_drain_s + 3 + world.start_s)
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


def test_machines_are_given_back_with_the_last_worker_and_by_who_comes_after() -> None:
    scaling = ScalingConfig(
        enabled=True, min_workers=1, max_workers=8, tick_s=0.5, workers_per_machine=2
    )
    idle = structs.replace(scaling, min_workers=0)
    none = changed(CONFIG, scaling=idle, workers_per_machine=2)
    world = ControlledWorld(changed(none, scaling=scaling))
    world.pass_time(3)
    assert world.of(RequestMachines) == [RequestMachines(1)]
    world.effects.clear()
    world.begin(none)  # it wants none, and Ray still has the request of the one before
    for _ in range(200):
        world.say(ScalingReport(RouterSeen("router-0", 0.0, {}, {}, 0, 0, 0, 0), ()))
        world.pass_time(4.0)
    assert world.controller.workers == {}
    assert world.of(RequestMachines) == [RequestMachines(1), RequestMachines(0)]
    world.effects.clear()
    world.begin(none)
    world.pass_time(3)
    assert world.of(RequestMachines) == [RequestMachines(0)], "the first time in any case"


def test_who_comes_after_and_does_not_scale_gives_machines_back() -> None:
    scaling = ScalingConfig(
        enabled=True, min_workers=1, max_workers=8, tick_s=0.5, workers_per_machine=2
    )
    world = ControlledWorld(changed(CONFIG, scaling=scaling, workers_per_machine=2))
    world.pass_time(3)
    world.effects.clear()
    world.begin(changed(CONFIG, scaling=None))
    assert world.of(RequestMachines) == [RequestMachines(0)]


@pytest.mark.anyio
async def test_ray_is_asked_until_it_has_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_access, "RETRY", Backoff(0.001, 0.001))
    answers: list[Any] = [False, OSError("Ray does not answer"), True, True]
    asked: list[int] = []

    async def ask(number: int) -> bool:
        asked.append(number)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    machines = ray_access.AskedMachines(ask)
    await machines.settle()
    machines.wanted = 3
    await machines.settle()  # Ray is not there yet
    await machines.settle()
    await machines.settle()
    assert asked == [3, 3, 3]
    await machines.give_back(1.0)
    assert asked == [3, 3, 3, 0]
