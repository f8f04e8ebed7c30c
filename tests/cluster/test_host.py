"""A host performs the effects of its nodes, in order, and trusts no node that raised."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster.processes.router_process import RouterProcess
from kvrelay.cluster.status import StateFolderStatus
from kvrelay.engine.backoff import Backoff
from kvrelay.engine.host import NodeExit, NodeHost, keep_running
from kvrelay.engine.messages import Abort
from kvrelay.engine.node import Effect, Exit, Note, Send, Unsendable, Wake, Woken
from kvrelay.engine.stats import Role, WorkerInfo
from kvrelay.engine.step import Step, StepDone
from kvrelay.worker.messages import CONTROLLER, Adopt, End, Peer, PeersUpdated, UpdatePeers
from kvrelay.worker.process import BuiltWorker, Listening, WorkerProcess
from kvrelay.worker.threads import StepThread
from tests.engine.wire.wire_peers import until

pytestmark = pytest.mark.anyio


class Toy:
    """A node that answers by a table, and keeps what it received."""

    def __init__(self, node_id: str, answer: Callable[[Any], list[Effect]]) -> None:
        self.node_id = node_id
        self.answer = answer
        self.received: list[Any] = []
        self.threads: set[int] = set()

    def start(self, now: float) -> list[Effect]:
        return self.answer("start")

    def receive(self, now: float, message: Any) -> list[Effect]:
        self.received.append(message)
        self.threads.add(threading.get_ident())
        return self.answer(message)


def silent(_message: Any) -> list[Effect]:
    return []


class Recorder:
    """An executor that keeps what it was asked for."""

    def __init__(self) -> None:
        self.performed: list[Any] = []
        self.closed = False

    def perform(self, effect: Effect) -> None:
        self.performed.append(effect)

    def close(self) -> None:
        self.closed = True


async def test_what_fits_into_no_message_comes_back_to_its_sender() -> None:
    node = Toy("a", lambda m: [Send("b", Abort("r", 1))] if m == "start" else [])
    host = NodeHost(asyncio.get_running_loop(), lambda _to, _message: "too large")
    host.add(node)
    await until(lambda: bool(node.received))
    assert node.received == [Unsendable("b", Abort("r", 1), "too large")]


async def test_effects_are_performed_in_order_here_there_and_by_the_executor() -> None:
    remote: list[tuple[str, Any]] = []
    recorder = Recorder()
    host = NodeHost(asyncio.get_running_loop(), lambda to, m: remote.append((to, m)))
    other = Toy("other", silent)

    def answer(message: Any) -> list[Effect]:
        if message != "go":
            return []
        return [
            Send("other", 1),
            Send("far", 2),
            "an effect of its own",
            Send("other", 3),
            Wake(0.0, "tag"),
            Note("info", "noted", "text"),
            Send("me", 4),
        ]

    me = Toy("me", answer)
    host.add(other)
    host.add(me, recorder)
    host.deliver("me", "go")
    assert other.received == []  # never while another node is being called
    await until(lambda: Woken("tag") in me.received)
    assert other.received == [1, 3]
    assert remote == [("far", 2)]
    assert recorder.performed == ["an effect of its own"]
    assert me.received == ["go", 4, Woken("tag")]
    assert host.counters == {"noted": 1}
    host.close()
    assert recorder.closed


async def test_messages_from_threads_are_delivered_on_the_loop_in_order() -> None:
    host = NodeHost(asyncio.get_running_loop())
    node = Toy("node", silent)
    host.add(node)
    inbox = host.inbox("node")
    thread = threading.Thread(target=lambda: [inbox(i) for i in range(500)])
    thread.start()
    await until(lambda: len(node.received) == 500)
    thread.join()
    assert node.received == list(range(500))
    assert node.threads == {threading.get_ident()}


async def test_a_node_that_raises_is_stopped_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[tuple[str, BaseException]] = []
    host = NodeHost(
        asyncio.get_running_loop(), on_failure=lambda node, e: failures.append((node, e))
    )

    def answer(message: Any) -> list[Effect]:
        if message == "bad":
            raise ValueError("a bug")
        return []

    node, sound = Toy("node", answer), Toy("sound", silent)
    host.add(node)
    host.add(sound)
    for message in ("good", "bad", "after"):
        host.deliver("node", message)
    host.deliver("sound", "still served")
    assert node.received == ["good", "bad"]
    assert sound.received == ["still served"]
    assert [(name, str(error)) for name, error in failures] == [("node", "a bug")]
    assert host.counters["node_failed"] == 1
    assert "node failed and is stopped" in caplog.text


async def test_a_message_for_nobody_is_counted() -> None:
    host = NodeHost(asyncio.get_running_loop())
    host.add(Toy("node", lambda m: [Send("nobody", 1)] if m == "go" else []))
    host.deliver("node", "go")
    host.deliver("nobody", 2)
    assert host.counters == {"unknown_node": 2}


async def test_a_closed_host_calls_no_node() -> None:
    host = NodeHost(asyncio.get_running_loop())
    node = Toy("node", lambda m: [Wake(0.0, "late")] if m == "start" else [])
    host.add(node)
    host.close()
    host.deliver("node", "late")
    await asyncio.sleep(0.02)
    assert node.received == []


def test_steps_run_one_after_the_other_on_their_thread() -> None:
    done: list[StepDone] = []
    threads: set[str] = set()

    def execute(step: Step) -> StepDone:
        threads.add(threading.current_thread().name)
        time.sleep(0.001)
        return StepDone(step.step_id, [])

    steps = StepThread(execute, done.append, "toy")
    for step_id in range(20):
        steps.submit(Step(step_id, []))
    steps.stop()
    steps.join()
    assert [d.step_id for d in done] == list(range(20))
    assert threads == {"toy"}


def process(node_id: str, answer: Callable[[Any], list[Effect]]) -> tuple[WorkerProcess, Toy]:
    node = Toy(node_id, answer)
    info = WorkerInfo(node_id, Role.DECODE, 1, 1, 1, 1, 1, 1, b"")
    built = BuiltWorker(node, info, lambda _deliver: Recorder())
    return WorkerProcess(built, Listening("127.0.0.1", b"token", 1 << 20)), node


async def greet(worker: WorkerProcess, peers: list[Peer], *more: Any) -> None:
    """As a controller, who says where the peers are, and `more`."""
    said: list[Any] = []
    listening = Listening("127.0.0.1", b"token", 1 << 20)
    wire = listening.wire(CONTROLLER, 1, lambda _, message: said.append(message))
    host, port = await wire.listen("127.0.0.1")
    assert worker._started is not None
    me, its = Peer(CONTROLLER, host, port, 1), worker._started
    wire.set_address(its.info.worker, its.host, its.port, 1)
    wire.send(its.info.worker, Adopt(me))
    wire.send(its.info.worker, UpdatePeers("someone", 5, tuple(peers)))
    for message in more:
        wire.send(its.info.worker, message)
    await until(lambda: len(said) == 2)
    assert said == [its, PeersUpdated(its.info.worker, "someone", 5)]
    await wire.close()


def test_workers_talk_over_the_wire_once_introduced() -> None:
    def passing_to(other: str) -> Callable[[Any], list[Effect]]:
        def answer(message: Any) -> list[Effect]:
            again = isinstance(message, Abort) and message.attempt < 100
            return [Send(other, Abort("r", message.attempt + 1))] if again else []

        return answer

    a, node_a = process("a", passing_to("b"))
    b, node_b = process("b", passing_to("a"))
    peers = [Peer(s.info.worker, s.host, s.port, 1) for s in (a.start(), b.start())]
    for each in (a, b):
        asyncio.run(greet(each, peers))
    a._host.deliver_soon("a", Abort("r", 0))
    asyncio.run(until(lambda: bool(node_a.received) and node_a.received[-1].attempt == 100))
    assert [m.attempt for m in node_a.received] == list(range(0, 101, 2))
    assert [m.attempt for m in node_b.received] == list(range(1, 101, 2))
    asyncio.run(greet(a, peers, End(1)))
    a.wait()  # returns: it was ended
    a.close()
    b.close()


def test_a_worker_whose_node_fails_says_so_to_whoever_waits() -> None:
    def answer(message: Any) -> list[Effect]:
        if message != "start":
            raise ValueError("a bug")
        return []

    worker, _node = process("a", answer)
    worker.start()
    worker._host.deliver_soon("a", "bad")
    with pytest.raises(ValueError, match="a bug"):
        worker.wait()
    worker.close()


async def test_a_task_that_must_live_begins_again_however_it_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.engine.host.RESTART", Backoff(0.001, 0.1))
    restarts: Counter[str] = Counter()
    runs = 0
    lives = asyncio.Event()

    async def watch() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise KeyError("a machine without an address")
        if runs == 3:
            lives.set()
            await asyncio.sleep(3600)

    task = asyncio.create_task(keep_running("watch", watch, restarts))
    await asyncio.wait_for(lives.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert runs == 3
    assert restarts == {"watch": 2}
    assert "watch failed; again in" in caplog.text
    assert "a machine without an address" in caplog.text


async def test_a_router_that_fails_to_report_once_reports_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrelay.engine.host.RESTART", Backoff(0.001, 0.1))
    process = object.__new__(RouterProcess)  # without its node, wire and API
    process._loop, process._tasks = asyncio.get_running_loop(), []
    process._restarted = Counter()
    reported, is_broken = asyncio.Event(), True

    def tell() -> None:
        nonlocal is_broken
        if is_broken:
            is_broken = False
            raise OSError("no space left on device")
        reported.set()

    monkeypatch.setattr(process, "_tell_load", tell)
    process._keep("report", process._report)
    await asyncio.wait_for(reported.wait(), 10)
    process._tasks[0].cancel()
    assert process._restarted == {"report": 1}


def test_a_router_says_once_what_runs_out_and_again_when_it_does_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router = object.__new__(RouterProcess)  # without its node and its API
    router._runs_out = set()
    little = StateFolderStatus(free_bytes=3 << 20, free_files=5)
    for room in (little, little, StateFolderStatus.of(tmp_path), little):
        router._say_what_runs_out(room, tmp_path)
    said = [record.getMessage() for record in caplog.records]
    assert (
        said
        == [
            f"3 MiB are free at {tmp_path}: make room",
            f"5 files are left at {tmp_path}: make room",
        ]
        * 2
    )
    assert StateFolderStatus.of(tmp_path / "nowhere") == StateFolderStatus()


def test_a_node_that_asks_for_the_end_of_its_process_gets_no_more_messages() -> None:
    def answer(message: Any) -> list[Effect]:
        return [Exit("a step has not ended after 30 s")] if message == "hung" else []

    worker, node = process("a", answer)
    worker.start()
    for message in ("hung", "after"):
        worker._host.deliver_soon("a", message)
    with pytest.raises(NodeExit, match="a step has not ended after 30 s"):
        worker.wait()
    worker.close()
    assert node.received == ["hung"]
