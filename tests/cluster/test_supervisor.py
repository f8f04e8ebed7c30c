"""A supervisor goes on trying: a full disk, or no process to be had, ends nothing for ever."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from kvrelay.cluster.config import ClusterSection, Config, EngineSection
from kvrelay.cluster.control.messages import Checkpoint, Record, RouterFailed, StartRouter
from kvrelay.cluster.processes import control_process, life, supervisor
from kvrelay.cluster.processes.control_process import ControlProcess, ScalingLog
from kvrelay.cluster.processes.life import (
    NOT_OF_WORKERS,
    Life,
    LifeRecord,
    read_record,
    workers_of,
)
from kvrelay.cluster.processes.orders import Stop
from kvrelay.cluster.processes.supervisor import Supervisor
from kvrelay.engine.backoff import Backoff

pytestmark = pytest.mark.anyio
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
NO_FILES = OSError(errno.EMFILE, "Too many open files")


def no_space(*_: object, **__: object) -> None:
    raise NO_SPACE


@pytest.fixture
def running(tmp_path: Path) -> Life:
    return Life(tmp_path, LifeRecord("kvrelay-test", b"token"))


class Child:
    """A process that is there once `failures` attempts to start one have failed."""

    failures = 0
    said: ClassVar[list[Any]] = []

    def __init__(self, name: str, on_message: Any, on_end: Any) -> None:
        self.name, self.is_alive = name, False

    async def start(self, kind: str, first: Any, fds: tuple[int, ...] = ()) -> None:
        if Child.failures:
            Child.failures -= 1
            raise NO_FILES
        self.is_alive = True

    async def ended(self, timeout_s: float) -> bool:
        return True

    def send(self, message: Any) -> None:
        Child.said.append(message)


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


async def test_an_order_to_restart_while_the_controller_is_away_is_refused(
    supervised: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It waited for ever, and every later one was refused because of it."""
    found = supervised()
    await asyncio.wait_for(found.restart(), 5)
    assert "the controller is away" in caplog.text
    await found._start_controller()
    found._controller.is_alive = False
    await asyncio.wait_for(found.restart(), 5)
    assert found._restarting is None


async def test_a_checkpoint_that_cannot_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The controller's process ended, and so did its successor."""
    process = object.__new__(ControlProcess)  # without its node, wire and guardians
    spec: Any = SimpleNamespace(kept_file=tmp_path / "controller")
    process.spec, process._loop = spec, asyncio.get_running_loop()
    process._checkpoint = process._keeping = None
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
