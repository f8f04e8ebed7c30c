"""The first workers of a machine whose Ray is its own are there before it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvrelay.cluster.config import Config, build_config
from kvrelay.cluster.control.messages import Machine, MachinesChanged, StartWorker, WorkerLost
from kvrelay.cluster.processes import control_process, here
from kvrelay.cluster.processes.control_process import ControlProcess
from kvrelay.cluster.processes.here import HERE, num_cpus, run_here, this_machine
from kvrelay.engine.stats import Role
from kvrelay.worker.messages import StartFailed, WorkerStarted
from kvrelay.worker.process import Listening
from kvrelay.worker.spec import WorkerOrder
from tests.cluster.control.test_controller import info

pytestmark = pytest.mark.anyio
MACHINE = Machine(HERE, "10.0.0.5", 4.0)


def test_workers_wait_for_ray_where_ray_knows_more_than_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(**cluster: Any) -> Machine | None:
        return this_machine(build_config({"cluster": cluster}, "test"))

    machine = found()
    assert machine is not None
    assert (machine.machine_id, machine.num_cpus, machine.num_gpus) == (HERE, num_cpus(), 0.0)
    assert found(address="10.0.0.1:6379") is None
    monkeypatch.setattr(here, "num_gpus", lambda: 2)
    assert found() is None, "it is Ray that holds them"
    assert this_machine(build_config({"model": {"device": "cpu"}}, "test")) is not None


@pytest.mark.parametrize(("quota", "cores"), [("max", 64), ("350000", 3), ("50000", 1)])
def test_cores_are_those_of_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(here.os, "sched_getaffinity", lambda _: set(range(64)))
    assert num_cpus(tmp_path) == 64, "there are no control groups"
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_text(f"{quota} 100000\n")
    assert num_cpus(tmp_path) == cores


class Guardian:
    """Its worker starts, or does not, and then ends."""

    outcome: Any = None

    def __init__(self, node: str, stdout: int) -> None:
        assert stdout > 2, "what reads our stdout waits for no worker's end"

    def run(self, order: WorkerOrder) -> Any:
        if isinstance(Guardian.outcome, Exception):
            raise Guardian.outcome
        return Guardian.outcome

    def wait(self) -> str:
        return "it was killed"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(here, "_Guardian", Guardian)
    return []


def order() -> WorkerOrder:
    spec: Any = SimpleNamespace(worker="decode-0", epoch=3)
    return WorkerOrder(spec, Listening("127.0.0.1", b"0" * 32, 1 << 20))


@pytest.mark.parametrize("outcome", [OSError("no process\nleft"), None], ids=repr)
async def test_the_controller_hears_why_a_worker_does_not_start(
    told: list[Any], outcome: Exception | None
) -> None:
    failed = StartFailed("decode-0", 3, "no process", permanent=False)
    Guardian.outcome = outcome or failed
    await run_here(order(), told.append)
    assert told == [failed]


async def test_the_controller_hears_of_the_end_of_a_worker(told: list[Any]) -> None:
    Guardian.outcome = WorkerStarted(info("decode-0", 3), "h", 100, 7)
    await run_here(order(), told.append)
    assert told == [Guardian.outcome, WorkerLost("decode-0", 3, "it was killed")]


def control() -> Any:
    """Without its node, wire and guardians."""
    made: Any = object.__new__(ControlProcess)
    made._loop, made._tasks = asyncio.get_running_loop(), set()
    made.spec = SimpleNamespace(here=MACHINE, cluster="c", config=Config())
    made._workers, made._lacks_ray = None, False
    made._are_up = asyncio.Event()
    made._listening = order().listening
    made._models = made._loop.create_future()
    found = SimpleNamespace(path=Path("m"), checkpoint=b"", commit="")
    made._models.set_result(SimpleNamespace(by_name={"": found}))
    made.controller = SimpleNamespace(machines=(MACHINE,), workers={})
    return made


async def test_ray_starts_after_the_first_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, process = asyncio.Event(), control()

    async def use_ray() -> None:
        begun.set()

    process._use_ray = use_ray
    waiting = asyncio.create_task(process._use_ray_in_time())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not begun.is_set()
    process._are_up.set()
    await waiting
    assert begun.is_set()
    process._are_up.clear()  # workers that do not come up do not keep it away for ever
    monkeypatch.setattr(control_process, "RAY_LATEST_S", 0.01)
    await asyncio.wait_for(process._use_ray_in_time(), 10)
    process.spec.here = None
    monkeypatch.setattr(control_process, "RAY_LATEST_S", 60.0)
    await asyncio.wait_for(process._use_ray_in_time(), 10)


async def test_workers_are_started_here_until_ray_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Any] = []
    process = control()

    async def run(order: WorkerOrder, tell: Any) -> None:
        begun.append(("here", order.spec.worker, order.spec.machine))

    monkeypatch.setattr(control_process, "run_here", run)
    start = StartWorker("decode-0", Role.DECODE, 1, HERE)
    process._start_worker(start)
    await asyncio.gather(*process._tasks)
    ray: Any = SimpleNamespace(start=lambda spec: begun.append(("by Ray", spec.worker)))
    process._workers = ray
    process._start_worker(start)
    assert begun == [("here", "decode-0", HERE), ("by Ray", "decode-0")]


def test_a_ray_that_nobody_needs_yet_is_not_said_to_be_away() -> None:
    made: Any = object.__new__(ControlProcess)
    made.spec = SimpleNamespace(here=MACHINE)
    made._workers, made._lacks_ray = None, False
    assert made.has_ray is None
    made._lacks_ray = True
    assert made.has_ray is False
    made._workers = SimpleNamespace(is_answered=True)
    assert made.has_ray is True
    made.spec.here, made._workers = None, None
    assert made.has_ray is False, "workers wait for it"


async def test_this_machine_keeps_its_name_when_ray_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Routers count workers together that have one machine: of two names they would make two."""
    ray = pytest.importorskip("kvrelay.cluster.processes.ray")
    node = {
        "NodeID": "f67d",
        "NodeManagerAddress": "10.0.0.9",
        "NodeManagerPort": 7,
        "Resources": {"CPU": 8.0},
    }
    monkeypatch.setattr(ray, "alive_nodes", lambda: [node])
    monkeypatch.setattr(ray, "own_machine", lambda: "f67d")
    for machine, expected in (
        (MACHINE, MACHINE),
        (None, Machine("f67d", "10.0.0.9", 8.0)),
    ):
        told: asyncio.Queue[Any] = asyncio.Queue()
        workers = ray.RayWorkers(order().listening, told.put_nowait, machine)
        watching = asyncio.create_task(workers.watch_machines(use_gpus=True))
        assert await asyncio.wait_for(told.get(), 10) == MachinesChanged((expected,))
        watching.cancel()
        assert cast(Any, workers)._raylets == {expected.machine_id: ("10.0.0.9", 7, "f67d")}
