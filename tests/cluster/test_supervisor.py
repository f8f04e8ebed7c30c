"""A supervisor goes on trying: a full disk, or no process to be had, ends nothing for ever."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import msgspec
import pytest

from kvrelay.cluster.config import ClusterSection, Config, build_config
from kvrelay.cluster.control.messages import Checkpoint, Record, RouterLost
from kvrelay.cluster.orders import Service, ServiceRequest
from kvrelay.cluster.prepare import PreparedModel, PreparedModels
from kvrelay.cluster.processes import (
    control_process,
    handover,
    life,
    ray_access,
    restarts,
    supervisor,
)
from kvrelay.cluster.processes.control_process import ControlProcess
from kvrelay.cluster.processes.handover import HandoverError
from kvrelay.cluster.processes.kept_models import KeptWeights
from kvrelay.cluster.processes.life import (
    NOT_OF_WORKERS,
    Installed,
    Keeper,
    Life,
    LifeRecord,
    read_record,
    workers_of,
)
from kvrelay.cluster.processes.orders import (
    AllUp,
    RestartWorkers,
    RouterLoaded,
    Serves,
    Stop,
    WorkersRestarted,
)
from kvrelay.cluster.processes.scaling_log import MAX_LINES, ScalingLog
from kvrelay.cluster.processes.supervisor import Supervisor
from kvrelay.engine.backoff import Backoff
from kvrelay.engine.config import EngineSection

pytestmark = pytest.mark.anyio
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
NO_FILES = OSError(errno.EMFILE, "Too many open files")
NO_THREAD = RuntimeError("can't start new thread")


def no_space(*_: object, **__: object) -> None:
    raise NO_SPACE


@pytest.fixture
def running(tmp_path: Path) -> Life:
    return Life(tmp_path, LifeRecord("kvrelay-test", b"token"))


def test_what_a_newer_version_keeps_is_left_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = build_config({"sessions": {"state_dir": str(tmp_path)}, "api": {"port": 8000}}, "test")
    first = life.open_life(config, 8000)
    first.next_controller()
    assert life.open_life(config, 8000).record == first.record
    newer = msgspec.msgpack.encode(msgspec.to_builtins(first.record, builtin_types=(bytes,)))
    newer = msgspec.msgpack.encode(msgspec.msgpack.decode(newer) | {"version": 2, "cluster": {}})
    for name in ("life", "controller"):
        (first.path / name).write_bytes(newer)
    second = life.open_life(config, 8000)
    assert second.path != first.path
    assert (first.path / "life").read_bytes() == newer
    assert read_record(first.path / "controller", Checkpoint) is None
    Keeper(first.path / "controller").keep(Checkpoint())
    assert (first.path / "controller.version-2").read_bytes() == newer
    assert "is of version 2, of a newer KVRelay, and this one reads up to 1" in caplog.text


class Child:
    """A process that is there once `failures` attempts to start one have failed."""

    failures = 0
    error: Exception = NO_FILES
    said: ClassVar[list[Any]] = []

    def __init__(self, name: str, on_message: Any, on_end: Any) -> None:
        self.name, self.is_alive, self.started_at = name, False, 0.0

    async def start(self, kind: str, first: Any, fds: tuple[int, ...] = ()) -> None:
        if Child.failures:
            Child.failures -= 1
            raise Child.error
        self.is_alive = True

    def send(self, message: Any) -> None:
        Child.said.append(message)

    def kill(self) -> None:
        self.is_alive = False

    async def ended(self, timeout_s: float) -> bool:
        return not self.is_alive


@pytest.fixture
def supervised(running: Life, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(supervisor, "Child", Child)
    monkeypatch.setattr(supervisor, "RESTART", Backoff(0.001, 0.01))
    Child.failures, Child.said = 0, []

    def make(config: Config = Config()) -> Supervisor:
        sockets: Any = {"router-0": SimpleNamespace(fileno=lambda: 0)}
        none: Any = None
        return Supervisor(config, none, sockets, running, none, "h", lambda *_: None, None)

    return make


@pytest.mark.parametrize("error", [NO_FILES, NO_THREAD, MemoryError()], ids=repr)
async def test_a_controller_is_started_again_until_it_runs(
    supervised: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It was tried once: with no file to be had, there was no controller ever after."""
    monkeypatch.setattr(Child, "error", error)
    found = supervised()
    await found._start_controller()
    Child.failures = 20
    found._on_end(0.0, -9)
    async with asyncio.timeout(5):
        while Child.failures or not found._controller.is_alive:
            await asyncio.sleep(0.01)
    assert found._life.record.controller_epoch == 22


async def test_a_full_disk_does_not_keep_a_controller_from_its_start(
    supervised: Any,
    running: Life,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(life, "write_private", no_space)
    found = supervised()
    await found._start_controller()
    assert found._controller.is_alive
    assert running.record.controller_epoch == 1
    assert "No space left on device" in caplog.text


MODELS = PreparedModels(
    {"": PreparedModel(Path("/no/model"), cast(Any, None), "m", 1, cast(Any, None))}
)


RESTART = ServiceRequest(Service.RESTART)


async def until(holds: Any) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.01)


async def test_a_router_is_started_again_until_it_runs_and_whenever_it_ends(
    supervised: Any, running: Life
) -> None:
    """With an epoch above all that workers may know, also of the server before this one."""
    Keeper(running.kept_file).keep(Checkpoint(routers={"router-0": 3}))
    found = supervised()
    Child.failures = 2
    found.use_models(MODELS)
    await until(lambda: found._routers and found._routers["router-0"].is_alive)
    assert Child.failures == 0
    assert found._epochs == {"router-0": 6}
    found._start_routers()
    await asyncio.sleep(0.01)
    assert found._epochs == {"router-0": 6}, "it runs"
    found._routers["router-0"].kill()
    found._on_router_end("router-0", 6, -9)
    await until(lambda: found._routers["router-0"].is_alive)
    assert found._epochs == {"router-0": 7}
    await found._start_controller()
    found._on_router_end("router-0", 7, -9)
    assert Child.said[-1] == RouterLost("router-0", 7, "its process has ended (SIGKILL)")
    found._is_ending = True
    found._routers["router-0"].kill()
    await asyncio.sleep(0.05)
    assert not found._routers["router-0"].is_alive, "the server ends"


async def restarted(found: Supervisor) -> tuple[Any, Any, asyncio.Task[None]]:
    """The router that serves, the process that loads, and what waits for both."""
    found.use_models(MODELS)
    await until(lambda: found._routers and found._routers["router-0"].is_alive)
    found._on_router_message(Serves("router-0"))
    doing = asyncio.create_task(found._restart_router("router-0"))
    await until(lambda: found._successors or doing.done())
    return found._routers["router-0"], found._successors.get("router-0"), doing


async def test_the_next_router_has_loaded_when_the_one_that_serves_is_stopped(
    supervised: Any,
) -> None:
    """Who connected waited for the imports of the next one."""
    found, stop = supervised(), Stop(Config().cluster.drain_s, refuse=False)
    old, successor, doing = await restarted(found)
    await until(lambda: successor.is_alive)
    assert old.is_alive
    assert "router-0" in found._serving
    assert stop not in Child.said
    found._on_router_message(RouterLoaded("router-0"))
    await until(lambda: not old.is_alive)
    assert stop in Child.said
    found._on_router_end("router-0", 1, 0)
    await until(lambda: found._routers["router-0"] is successor)
    order = Child.said[-1]
    assert (order.spec.router, order.spec.epoch) == ("router-0", 2)
    found._on_router_message(Serves("router-0"))
    await asyncio.wait_for(doing, 5)
    assert successor.is_alive
    assert not found._successors


async def test_a_router_that_cannot_load_leaves_the_one_that_serves(supervised: Any) -> None:
    found = supervised()
    old, successor, doing = await restarted(found)
    found._has_loaded("router-0", "it has ended (exit code 1)")
    with pytest.raises(HandoverError, match=r"router-0 .* code 1\); what runs goes on"):
        await asyncio.wait_for(doing, 5)
    assert not successor.is_alive
    Child.failures = 1
    with pytest.raises(HandoverError, match="what runs goes on"):
        await asyncio.wait_for(found._restart_router("router-0"), 5)
    assert old.is_alive
    assert found._routers["router-0"] is old
    assert "router-0" in found._serving


def trial_says(monkeypatch: pytest.MonkeyPatch, outcome: str | HandoverError) -> None:
    async def try_out(*_: object) -> str:
        if isinstance(outcome, HandoverError):
            raise outcome
        return outcome

    monkeypatch.setattr(handover, "try_out", try_out)


async def test_a_program_that_cannot_take_over_stops_the_restart_in_words(
    supervised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = supervised()
    found._models = MODELS
    await found._start_controller()
    trial_says(monkeypatch, HandoverError("k.toml: engine.num_blocks = -3: expected at least 0"))
    await asyncio.wait_for(found.obey(RESTART), 5)
    assert (found._restart.status.number, found._restart.status.state) == (1, "stopped")
    assert "num_blocks = -3" in Child.said[-1].why, "the controller shows it to operators"
    assert found._controller.is_alive
    await asyncio.wait_for(found.obey(RESTART), 5)
    assert found._restart.status.number == 2, "a restart that was stopped is not under way"


async def test_where_the_new_program_cannot_be_started_the_old_one_goes_on(
    supervised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = supervised()
    found._models = MODELS
    await found._start_controller()
    first = found._controller
    trial_says(monkeypatch, "kvrelay 2.0")

    def become(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(handover, "become", become)
    await asyncio.wait_for(found.obey(RESTART), 5)
    assert not first.is_alive
    assert found._controller.is_alive, "another controller adopts what runs"
    assert "No such file or directory" in found._restart.status.why


async def test_a_rollback_tries_what_was_good_with_the_settings_of_then(
    supervised: Any, running: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = supervised()
    found._models = MODELS
    await found._start_controller()
    await asyncio.wait_for(found.obey(ServiceRequest(Service.ROLLBACK)), 5)
    assert "nothing to go back to" in found._restart.status.why
    tried: list[Any] = []

    async def try_out(*args: Any) -> str:
        tried.append(args)
        raise HandoverError("enough")

    monkeypatch.setattr(handover, "try_out", try_out)
    (kvrelay := tmp_path / "kvrelay").touch(mode=0o755)
    running.is_good(Installed("1.0", (str(kvrelay), "serve"), "/old", "[api]\nport = 1\n"))
    await found.obey(ServiceRequest(Service.ROLLBACK))
    kvrelay.unlink()
    await found.obey(ServiceRequest(Service.ROLLBACK))
    (command, python_path, handed), (other, *_) = tried
    assert (command, python_path) == ((str(kvrelay), "serve"), "/old")
    assert handed.command == other == found._command, (
        "what the next restart starts, or what is there"
    )
    assert handed.settings.read_text() == "[api]\nport = 1\n"
    assert handed.settings.stat().st_mode & 0o777 == 0o600


async def test_a_controller_that_ends_in_the_middle_of_a_restart_stops_it(supervised: Any) -> None:
    """An order that was lost with a controller was waited for without end."""
    found = supervised()
    await found._start_controller()
    doing = asyncio.create_task(found._restart.finish(found._restart_workers()))
    await asyncio.sleep(0)
    assert Child.said[-1] == RestartWorkers()
    found._on_end(0.0, -9)
    await asyncio.wait_for(doing, 5)
    assert (found._restart.status.state, found._restart.status.why) == (
        "stopped",
        "the controller has ended",
    )


async def test_workers_of_other_settings_are_replaced_and_others_are_left(supervised: Any) -> None:
    found = supervised()
    await found._start_controller()
    found._on_controller_message(AllUp((), 0))
    assert not any(isinstance(said, RestartWorkers) for said in Child.said)
    found._on_controller_message(AllUp((), 2))
    await asyncio.sleep(0.01)
    assert RestartWorkers(only_outdated=True) in Child.said
    found._on_controller_message(WorkersRestarted(""))
    async with asyncio.timeout(5):
        while found._restart.status.state != "done":
            await asyncio.sleep(0.01)


async def test_a_ray_that_cannot_be_started_is_started_by_the_next_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only what it refused was caught: the controller was without Ray ever after."""

    def start_ray(*_: object) -> None:
        raise Exception("The current node timed out during startup.")

    def end_now(why: str) -> None:
        raise SystemError(why)

    process = object.__new__(ControlProcess)  # without its node, wire and guardians
    spec: Any = SimpleNamespace(config=Config())
    process.spec, process._loop = spec, asyncio.get_running_loop()
    process._ray_thread = ThreadPoolExecutor(1)
    up: Any = SimpleNamespace(has_been_up=True)
    process.controller = up
    monkeypatch.setattr(ray_access, "start_ray", start_ray)
    monkeypatch.setattr(process, "_end_now", end_now)
    with pytest.raises(SystemError, match="timed out during startup"):
        await process._use_ray()


async def test_a_checkpoint_that_cannot_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The controller's process ended, and so did its successor."""
    process = object.__new__(ControlProcess)  # without its node, wire and guardians
    spec: Any = SimpleNamespace(kept_file=tmp_path / "controller")
    monkeypatch.setattr(life, "RETRY_S", 0.02)
    process.spec, process._keeper = spec, Keeper(spec.kept_file)
    process._leads, process._weights = None, KeptWeights(tmp_path, {})
    monkeypatch.setattr(process, "_publish_soon", lambda: None)
    replace, full = Path.replace, [True] * 3

    def replace_or_fail(path: Path, target: Path) -> Path:
        if full and full.pop():
            raise NO_SPACE
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replace_or_fail)
    process.perform(Record(Checkpoint()))
    process.perform(Record(last := Checkpoint(routers={"router-0": 7})))
    async with asyncio.timeout(5):
        while read_record(tmp_path / "controller", Checkpoint) != last:
            await asyncio.sleep(0.01)
    assert caplog.text.count("No space left on device") == 3 == process._keeper.failed_writes
    assert [path.name for path in tmp_path.iterdir()] == ["controller"], "no draft is left"


async def test_a_task_of_the_controller_that_fails_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's start raised what was not expected: nobody ever joined it again."""
    process = object.__new__(ControlProcess)
    process._loop, process._tasks = asyncio.get_running_loop(), set()
    ends: list[str] = []
    monkeypatch.setattr(process, "_end_now", ends.append)

    async def fail() -> None:
        raise RuntimeError("Ray says no")

    process.spawn(fail())
    cancelled = process._loop.create_task(asyncio.sleep(60))
    cancelled.add_done_callback(process._on_task_end)
    cancelled.cancel()
    async with asyncio.timeout(5):
        while not cancelled.done() or process._tasks:
            await asyncio.sleep(0)
    (why,) = ends
    assert "fail" in why
    assert "RuntimeError: Ray says no" in why


@pytest.mark.parametrize(("address", "attempts"), [("", 2), ("head:6379", 1)])
async def test_a_ray_of_its_own_that_is_late_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch, address: str, attempts: int
) -> None:
    """Its raylet has 30 s, which a busy machine missed: the server ended. Where there is no Ray to
    join, a user knows at once."""
    process = object.__new__(ControlProcess)
    process._loop, process._ray_thread = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    process._tell_ray = lambda _: None  # type: ignore[method-assign]
    config = build_config({"cluster": {"address": address}}, "")
    process.spec = cast(Any, SimpleNamespace(running_routers=(), config=config))
    process.controller = cast(Any, SimpleNamespace(has_been_up=False))
    starts: list[Any] = []

    def start(*args: Any) -> None:
        starts.append(args)
        raise ray_access.RayRefused("cannot start Ray: it is late")

    failed: list[str] = []
    monkeypatch.setattr(ray_access, "start_ray", start)
    monkeypatch.setattr(control_process, "RAY_RETRY_S", 0.0)
    monkeypatch.setattr(process, "_fail", failed.append)
    await asyncio.wait_for(process._use_ray(), 10)
    assert (len(starts), failed) == (attempts, ["cannot start Ray: it is late"])


async def test_a_server_that_was_up_waits_for_a_ray_that_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With no worker to adopt, a controller that came after another one gave the server up."""
    process = object.__new__(ControlProcess)
    process._loop, process._ray_thread = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    config = build_config({"cluster": {"address": "head:6379"}}, "")
    process.spec = cast(Any, SimpleNamespace(running_routers=(None,), config=config))
    process.controller = cast(Any, SimpleNamespace(has_been_up=False))
    starts: list[Any] = []

    def start(*args: Any) -> None:
        starts.append(args)
        raise ray_access.RayRefused("cannot reach a Ray cluster at head:6379")

    monkeypatch.setattr(process, "_tell_ray", lambda _: None)
    monkeypatch.setattr(ray_access, "start_ray", start)
    monkeypatch.setattr(control_process, "RAY_RETRY_S", 0.0)
    joining = asyncio.create_task(process._use_ray())
    async with asyncio.timeout(10):
        while len(starts) < 10:
            await asyncio.sleep(0.01)
    assert not joining.done()
    joining.cancel()
    assert caplog.text.count("cannot reach a Ray cluster") == 1, "once, not each time"


def test_whatever_ray_raises_at_its_start_is_a_reason_to_try_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It raises Exception itself for a node that is late, which ended the attempts for ever; and an
    attempt that had come through made every later one fail."""
    ray = pytest.importorskip("kvrelay.cluster.processes.ray")
    is_there = [True]

    def init(**_: object) -> None:
        if is_there[0]:
            raise RuntimeError("Maybe you called ray.init twice by accident?")
        raise Exception("The current node timed out during startup.\nMore")

    monkeypatch.setattr(ray.ray, "init", init)
    monkeypatch.setattr(ray.ray, "is_initialized", lambda: is_there[0])
    monkeypatch.setattr(ray.ray, "shutdown", lambda: is_there.__setitem__(0, False))
    with pytest.raises(ray.RayUnavailable, match=r"start Ray: The current node timed out"):
        ray.connect("")


def test_a_disk_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The controller stood at its checkpoint, was ended after 20 s, and so was the next one."""
    answers = threading.Event()
    write = life.write_private

    def hang(file: Path, data: bytes) -> None:
        answers.wait(20)
        write(file, data)

    monkeypatch.setattr(life, "write_private", hang)
    monkeypatch.setattr(life, "WRITE_S", 0.2)
    keeper, started = Keeper(tmp_path / "controller"), time.monotonic()
    for number in range(50):
        keeper.keep(Checkpoint(num_named=number))
    assert time.monotonic() - started < 2
    assert keeper.late_s > 0.1
    assert caplog.text.count("the disk hangs") == 1 == keeper.failed_writes
    answers.set()
    while keeper.late_s:
        assert time.monotonic() - started < 20
        time.sleep(0.01)
    keeper.keep(last := Checkpoint(num_named=50))
    assert read_record(tmp_path / "controller", Checkpoint) == last, "it waits for the disk again"


class FastLoop(asyncio.SelectorEventLoop):
    """Its clock goes on to the next timer at once."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__()
        select = self._selector.select  # type: ignore[attr-defined]

        def skip(timeout: float | None) -> Any:
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = skip  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


def test_a_controller_that_ends_at_once_a_thousand_times_is_started_again(
    running: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the 1,024th the pause overflowed a float, and there was none ever after."""
    starts: list[float] = []

    class Dying(Child):
        def __init__(self, name: str, on_message: Any, on_end: Any) -> None:
            super().__init__(name, on_message, on_end)
            self.on_end = on_end

        async def start(self, kind: str, first: Any, fds: tuple[int, ...] = ()) -> None:
            loop = asyncio.get_running_loop()
            starts.append(loop.time())
            is_stable = len(starts) > 1200
            loop.call_later(restarts.STABLE_S if is_stable else 0.5, self.on_end, -6)

    async def run() -> None:
        none: Any = None
        found = Supervisor(Config(), none, {}, running, none, "h", lambda *_: None, None)
        await found._start_controller()
        while len(starts) < 1203:
            await asyncio.sleep(60)

    monkeypatch.setattr(supervisor, "Child", Dying)
    monkeypatch.setattr(life, "write_private", lambda *_: None)
    with asyncio.Runner(loop_factory=FastLoop) as runner:
        runner.run(run())
    pauses = [b - a for a, b in pairwise(starts)]
    assert pauses[0] == pytest.approx(0.6)
    assert pauses[20:1199] == pytest.approx([0.5 + supervisor.RESTART.max_s] * 1179)
    assert pauses[1201] == pytest.approx(restarts.STABLE_S + supervisor.RESTART.base_s)
    assert running.record.controller_epoch == len(starts)


def test_the_pause_grows_while_ray_does_not_start_however_long_each_try_takes() -> None:
    ends = restarts.Ends(supervisor.RESTART, longest_s=20.0)
    pauses = []
    for _ in range(8):
        ends.see("ray", False)
        pauses.append(ends.ended(lived_s=90.0))
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0]
    ends.see("ray", False)
    ends.see("ray", True)
    assert ends.ended(lived_s=90.0) == supervisor.RESTART.base_s, "it was another step"


def test_a_log_of_decisions_goes_on_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = ScalingLog(tmp_path / "log.jsonl", 1 << 20)
    line: Any = {"at": 1.0}
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", no_space)
        log.write(line)
        log.write(line)
        log._lines.join()
    assert len(caplog.records) == 1
    log.write(line)
    log._lines.join()
    assert (tmp_path / "log.jsonl").read_text().count("\n") == 1


def test_a_log_of_decisions_on_a_disk_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(ScalingLog, "_append", lambda *_: answers.wait(20))
    log, started = ScalingLog(tmp_path / "log.jsonl", 1 << 20), time.monotonic()
    line: Any = {"at": 1.0}
    for _ in range(3000):
        log.write(line)
    assert time.monotonic() - started < 5
    assert log._lines.qsize() <= MAX_LINES
    answers.set()
    log._lines.join()


@pytest.mark.parametrize(
    ("on_stop", "is_drained"),
    [("keep-workers", False), ("keep-workers", True), ("end-workers", False)],
)
async def test_workers_that_are_kept_can_be_found_but_not_after_a_drain(
    supervised: Any, running: Life, monkeypatch: pytest.MonkeyPatch, on_stop: Any, is_drained: bool
) -> None:
    killed: list[str] = []
    monkeypatch.setattr(supervisor, "kill_workers", killed.append)
    found = supervised(Config(cluster=ClusterSection(on_stop=on_stop)))
    await found._start_controller()
    if is_drained:
        found.asked_to_end.set()
    await found.end(0.0)
    keep_workers = on_stop == "keep-workers" and not is_drained
    (stop,) = [each for each in Child.said if isinstance(each, Stop)]
    assert stop.keep_workers is keep_workers
    assert killed == ([] if keep_workers else ["kvrelay-test"])
    assert (read_record(running.path / "life", LifeRecord) == running.record) is keep_workers


def test_workers_go_on_where_only_their_controller_has_changed(tmp_path: Path) -> None:
    """Any change of `[cluster]`, such as of its routers, ended all workers."""
    config, engine = Config(), Config(engine=EngineSection(max_num_seqs=7))
    more = ClusterSection(routers=3, decode=4, drain_s=90.0, on_stop="keep-workers")
    assert workers_of(Config(cluster=more)) == workers_of(config) != workers_of(engine)
    assert workers_of(Config(cluster=ClusterSection(orphan_s=90.0))) != workers_of(config)
    cluster = {field.name for field in msgspec.structs.fields(ClusterSection)}
    assert set(NOT_OF_WORKERS) < cluster
