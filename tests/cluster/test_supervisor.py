"""A supervisor goes on trying: a full disk, or no process to be had, ends nothing for ever."""

from __future__ import annotations

import asyncio
import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from kvrelay.cluster.config import Config, build_config
from kvrelay.cluster.control.messages import Checkpoint, Record, RouterFailed, StartRouter
from kvrelay.cluster.processes import control_process, life, ray_access, supervisor
from kvrelay.cluster.processes.control_process import ControlProcess, ScalingLog
from kvrelay.cluster.processes.handover import HandoverError
from kvrelay.cluster.processes.life import Installed, Life, LifeRecord, read_record
from kvrelay.cluster.processes.orders import AllUp, RestartWorkers, WorkersRestarted
from kvrelay.cluster.processes.supervisor import Supervisor
from kvrelay.engine.backoff import Backoff

pytestmark = pytest.mark.anyio
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
NO_FILES = OSError(errno.EMFILE, "Too many open files")


def no_space(*_: object, **__: object) -> None:
    raise NO_SPACE


@pytest.fixture
def running(tmp_path: Path) -> Life:
    return Life(tmp_path, LifeRecord("kvrelay-test", b"token", "settings"))


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
    assert life.keep(first.path / "controller", Checkpoint())
    assert (first.path / "controller.version-2").read_bytes() == newer
    assert "is of version 2, of a newer KVRelay, and this one reads up to 1" in caplog.text


class Child:
    """A process that is there once `failures` attempts to start one have failed."""

    failures = 0
    said: ClassVar[list[Any]] = []

    def __init__(self, name: str, on_message: Any, on_end: Any) -> None:
        self.name, self.is_alive, self.started_at = name, False, 0.0

    async def start(self, kind: str, first: Any, fds: tuple[int, ...] = ()) -> None:
        if Child.failures:
            Child.failures -= 1
            raise NO_FILES
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

    def make() -> Supervisor:
        sockets: Any = {"router-0": SimpleNamespace(fileno=lambda: 0)}
        none: Any = None
        return Supervisor(Config(), none, sockets, running, none, "h", lambda *_: None, None)

    return make


async def test_a_controller_is_started_again_until_it_runs(supervised: Any) -> None:
    """It was tried once: with no file to be had, there was no controller ever after."""
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


async def test_a_router_that_cannot_be_started_is_said_at_once(supervised: Any) -> None:
    """The controller waited for `cluster.start_timeout_s`, three minutes."""
    found = supervised()
    await found._start_controller()
    found._model = SimpleNamespace(path=Path(), served_name="m", max_model_len=1)
    Child.failures = 1
    await found._start_router(StartRouter("router-0", 3, 0))
    (failed,) = [each for each in Child.said if isinstance(each, RouterFailed)]
    assert (failed.router, failed.epoch, failed.permanent) == ("router-0", 3, False)
    assert "Too many open files" in failed.reason


class Model:
    """Stands for what is served."""

    path = Path("/no/model")
    served_name, max_model_len = "m", 1


def trial_says(monkeypatch: pytest.MonkeyPatch, outcome: str | HandoverError) -> None:
    async def try_out(*_: object) -> str:
        if isinstance(outcome, HandoverError):
            raise outcome
        return outcome

    monkeypatch.setattr(supervisor, "try_out", try_out)


async def test_a_program_that_cannot_take_over_stops_the_restart_in_words(
    supervised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = supervised()
    found._model = Model()
    await found._start_controller()
    trial_says(monkeypatch, HandoverError("k.toml: engine.num_blocks = -3: expected at least 0"))
    await asyncio.wait_for(found.restart(), 5)
    assert (found._restart.number, found._restart.state) == (1, "stopped")
    assert "num_blocks = -3" in Child.said[-1].why, "the controller shows it to operators"
    assert found._controller.is_alive
    await asyncio.wait_for(found.restart(), 5)
    assert found._restart.number == 2, "a restart that was stopped is not under way"


async def test_where_the_new_program_cannot_be_started_the_old_one_goes_on(
    supervised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = supervised()
    found._model = Model()
    await found._start_controller()
    first = found._controller
    trial_says(monkeypatch, "kvrelay 2.0")

    def become(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(supervisor, "become", become)
    await asyncio.wait_for(found.restart(), 5)
    assert not first.is_alive
    assert found._controller.is_alive, "another controller adopts what runs"
    assert "No such file or directory" in found._restart.why


async def test_a_rollback_tries_what_was_good_with_the_settings_of_then(
    supervised: Any, running: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = supervised()
    found._model = Model()
    await found._start_controller()
    await asyncio.wait_for(found.restart(is_rollback=True), 5)
    assert "nothing to go back to" in found._restart.why
    tried: list[Any] = []

    async def try_out(*args: Any) -> str:
        tried.append(args)
        raise HandoverError("enough")

    monkeypatch.setattr(supervisor, "try_out", try_out)
    (kvrelay := tmp_path / "kvrelay").touch(mode=0o755)
    running.is_good(Installed("1.0", (str(kvrelay), "serve"), "/old", "[api]\nport = 1\n"))
    await found.restart(is_rollback=True)
    kvrelay.unlink()
    await found.restart(is_rollback=True)
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
    doing = asyncio.create_task(found._finish_restart(found._restart_workers()))
    await asyncio.sleep(0)
    assert Child.said[-1] == RestartWorkers()
    found._on_end(0.0, -9)
    await asyncio.wait_for(doing, 5)
    assert (found._restart.state, found._restart.why) == ("stopped", "the controller has ended")


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
        while found._restart.state != "done":
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
    process.spec, process._loop = spec, asyncio.get_running_loop()
    process._checkpoint = process._keeping = process._leads = None
    monkeypatch.setattr(process, "_publish_soon", lambda: None)
    monkeypatch.setattr(control_process, "KEEP_RETRY_S", 0.02)
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
    assert caplog.text.count("No space left on device") == 3
    assert [path.name for path in tmp_path.iterdir()] == ["controller"], "no draft is left"


def test_a_log_of_decisions_goes_on_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = ScalingLog(tmp_path / "log.jsonl", 1 << 20)
    line: Any = {"at": 1.0}
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", no_space)
        log.write(line)
        log.write(line)
    assert len(caplog.records) == 1
    log.write(line)
    assert (tmp_path / "log.jsonl").read_text().count("\n") == 1
