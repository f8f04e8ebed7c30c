"""What becomes of a batch when processes die, clocks run and disks are full."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.cluster.api.batches import held as module
from kvrelay.cluster.api.batches.due import NEAR_S, Pace, is_due
from kvrelay.cluster.api.batches.rows import ENDPOINTS
from kvrelay.cluster.api.batches.runner import COUNT_S, Runner
from kvrelay.cluster.api.batches.store import KEEP_S, BatchStore
from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.keys.keys import Keys
from kvrelay.cluster.api.metrics import ApiMetrics
from kvrelay.cluster.api.pages import PageQuery
from kvrelay.cluster.api.tenants import Tenant, Tenants
from kvrelay.engine.service_class import ServiceClass

CHAT = ENDPOINTS[0]


class Endpoint:
    """Answers with what it was asked, as often as it is let."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.bodies: list[Any] = []
        self.tenants: list[Tenant] = []
        self.names: list[str] = []
        self.most = most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        asked = json.loads((await receive())["body"])
        if len(self.bodies) >= self.most:
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        self.bodies.append(asked)
        self.tenants.append(scope["state"]["tenant"])
        self.names.append(scope["state"]["request_id"])
        answer = {"id": scope["state"]["request_id"], "created": time.time_ns(), "asked": asked}
        body = json.dumps(answer | {"usage": {"prompt_tokens": 2, "completion_tokens": 1}})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body.encode()})


def make_runner(store: Any, endpoint: Any, clock: Callable[[], float] = time.time) -> Runner:
    ctx: Any = SimpleNamespace(
        keys=Keys(),
        settings=ApiSettings(),
        batches=store,
        tenants=Tenants(),
        live=SimpleNamespace(num_taken=0, limit=100),
        operations=SimpleNamespace(
            status=lambda: SimpleNamespace(num_queued=0, models=()), draining=False
        ),
        chosen=lambda model, tenant: None,
        metrics=ApiMetrics(CollectorRegistry()),
    )
    return Runner(ctx, {CHAT: endpoint}, clock)


def add_batch(
    store: Any, count: int, now: float = 0.0, name: str = "batch_a", tenant: str = ""
) -> None:
    draft = store.draft()
    rows = (
        {"custom_id": f"r{i}", "method": "POST", "url": CHAT, "body": {"i": i}}
        for i in range(count)
    )
    draft.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = {"id": f"file-{name}", "bytes": 1, "expires_at": now + KEEP_S, "purpose": "batch"}
    store.add_file(tenant, file, draft, 1 << 30)
    record = {"id": name, "input_file_id": file["id"], "endpoint": CHAT, "status": "validating"}
    record |= {"errors": None, "created_at": now, "expires_at": now + 86_400}
    record |= {"finalizing_at": None, "request_counts": {"total": 0, "completed": 0, "failed": 0}}
    store.add_batch(tenant, record)


async def until(condition: Callable[[], Any], tick: Callable[[], Any] | None = None) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not become true"
        if tick is not None:
            await tick()
        await asyncio.sleep(0.01)


def status(store: Any, name: str = "batch_a") -> str:
    found = store.batch("", name)
    assert found is not None
    return str(found["status"])


def results(store: Any, kind: str) -> list[Any]:
    record = store.batch("", "batch_a")
    assert record is not None
    name = record.get(f"{kind}_file_id")
    return (
        [json.loads(line) for line in store.fetched(name).read_bytes().splitlines()] if name else []
    )


def run_all(store: Any, endpoint: Any) -> None:
    async def run() -> None:
        runner = make_runner(store, endpoint)
        await until(lambda: status(store) in ("completed", "expired"), runner.tick)
        await runner.close()

    asyncio.run(run())


KILLED = """
import asyncio, sys
from pathlib import Path
from tests.cluster.api.batches.test_runner import *
async def run():
    store = BatchStore(Path(sys.argv[1]))
    runner = make_runner(store, Endpoint(int(sys.argv[2])))
    while True:
        await runner.tick()
        print(len(store.rows_done("batch_a")), flush=True)
        await asyncio.sleep(0.01)
asyncio.run(run())
"""


@pytest.mark.slow
def test_each_row_has_one_answer_whoever_is_killed(tmp_path: Path) -> None:
    """Killed twice in the middle, with rows under way: the files are as without it."""
    undisturbed, store = BatchStore(tmp_path / "a"), BatchStore(tmp_path / "b")
    for each in (undisturbed, store):
        add_batch(each, 60, time.time())
    for answers, least in ((5, 5), (20, 25)):
        command = [sys.executable, "-c", KILLED, str(tmp_path / "b"), str(answers)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert any(int(line) >= least for line in process.stdout)
            process.send_signal(signal.SIGKILL)
        store._database.connection.execute("UPDATE batches SET lease_until = 0")
        store._database.connection.commit()
    sent, first = Endpoint(), Endpoint()
    run_all(store, sent)
    run_all(undisturbed, first)
    assert len(sent.bodies) == 35
    # None has a name that a worker may know from who was killed, which was as these.
    assert not set(sent.names) & set(first.names)
    assert {name.split(".")[0] for name in sent.names} < set(first.names)
    found, expected = results(store, "output"), results(undisturbed, "output")
    assert [each["custom_id"] for each in found] == [f"r{i}" for i in range(60)]
    for each in (*found, *expected):  # the second at which they began
        del each["response"]["body"]["created"]
    assert found == expected
    assert list(store.path("x").parent.glob(".*")) == []


class Slow(Endpoint):
    """Answers one request for each turn that there is."""

    def __init__(self, turns: asyncio.Queue[None]) -> None:
        super().__init__()
        self.turns, self.num_begun = turns, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_begun += 1
        asked = await receive()
        gone, turn = asyncio.ensure_future(receive()), asyncio.ensure_future(self.turns.get())
        await asyncio.wait({gone, turn}, return_when=asyncio.FIRST_COMPLETED)
        if turn.done():
            await super().__call__(scope, AsyncMock(return_value=asked), send)
        gone.cancel()
        turn.cancel()


def test_a_batch_that_needs_thrice_its_window_keeps_what_it_has_when_that_ends(
    tmp_path: Path,
) -> None:
    """30 rows could run in it, one after the other, and there are 90."""
    now = [1000.0]

    async def run() -> None:
        turns: asyncio.Queue[None] = asyncio.Queue()
        add_batch(store, 90, now[0])
        endpoint = Slow(turns)
        runner = make_runner(store, endpoint, lambda: now[0])
        await until(lambda: status(store) == "in_progress", runner.tick)
        for number in range(1, 30):
            now[0] += 86_400 / 30
            turns.put_nowait(None)
            await until(lambda n=number: len(store.rows_done("batch_a")) == n, runner.tick)
        now[0] += 86_400 / 30 - 1
        await runner.tick()
        assert status(store) == "in_progress"
        now[0] += 1
        await until(lambda: status(store) == "expired", runner.tick)
        num_begun = endpoint.num_begun
        for _ in range(90):
            turns.put_nowait(None)
            await runner.tick()
        assert (len(endpoint.bodies), endpoint.num_begun) == (29, num_begun)
        output, errors = results(store, "output"), results(store, "error")
        assert {each["error"]["code"] for each in errors} == {"batch_expired"}
        names = [each["custom_id"] for each in (*output, *errors)]
        assert (len(output), sorted(names)) == (29, sorted(f"r{i}" for i in range(90)))
        counts = {"total": 90, "completed": 29, "failed": 61}
        assert store.batch("", "batch_a")["request_counts"] == counts
        now[0] += KEEP_S + 86_400
        await runner.tick()
        every = PageQuery(True, None, 10)
        assert (store.batches("", every), store.files("", every)) == (([], False), ([], False))
        assert list(store.path("x").parent.iterdir()) == []
        await runner.close()

    store: Any = BatchStore(tmp_path)
    asyncio.run(run())


def test_a_full_disk_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where a result nor where a file cannot be written."""
    monkeypatch.setattr(module, "DISK_RETRY_S", 0.01)
    store, put, write = BatchStore(tmp_path), BatchStore.put_results, BatchStore.write_results
    failures = iter([*range(8)])

    def failing(call: Any, error: BaseException) -> Any:
        def instead(*args: Any) -> Any:
            if next(failures, None) in (1, 2, 5, 7):
                raise error
            return call(*args)

        return instead

    full = sqlite3.OperationalError("database or disk is full")
    monkeypatch.setattr(BatchStore, "put_results", failing(put, full))
    monkeypatch.setattr(
        BatchStore, "write_results", failing(write, OSError(errno.ENOSPC, "No space left"))
    )
    add_batch(store, 3, time.time())
    endpoint = Endpoint()
    run_all(store, endpoint)
    assert len(endpoint.bodies) == 3
    assert next(failures, None) is None
    assert [each["custom_id"] for each in results(store, "output")] == ["r0", "r1", "r2"]


def test_rows_give_way(tmp_path: Path) -> None:
    async def run() -> None:
        store = BatchStore(tmp_path)
        add_batch(store, 5, time.time())
        endpoint = Endpoint()
        runner = make_runner(store, endpoint)
        waiting = [3]
        runner.ctx.operations.status = lambda: SimpleNamespace(num_queued=waiting[0], models=())  # type: ignore
        await runner.tick()
        await until(lambda: status(store) == "in_progress", runner.tick)
        for _ in range(5):
            await runner.tick()
        assert endpoint.bodies == []
        waiting[0] = 0
        await until(lambda: status(store) == "completed", runner.tick)
        await runner.close()

    asyncio.run(run())


def test_a_batch_waits_for_idle_workers_until_its_window_is_near(tmp_path: Path) -> None:
    now = [1000.0]

    async def run() -> None:
        add_batch(store, 3, now[0])
        endpoint = Endpoint()
        runner = make_runner(store, endpoint, lambda: now[0])
        runner.ctx.operations.status = lambda: SimpleNamespace(num_queued=3, models=())  # type: ignore

        def metric(name: str) -> float | None:
            return runner.ctx.metrics.registry.get_sample_value(f"kvrelay_{name}")

        await until(lambda: status(store) == "in_progress", runner.tick)
        now[0] += 86_400 - NEAR_S - 1
        for _ in range(3):
            await runner.tick()
            await asyncio.sleep(0.1)
        assert endpoint.bodies == []
        assert (metric("batches"), metric("batches_due"), metric("batch_rows_waiting")) == (1, 0, 3)
        now[0] += 1
        await until(lambda: status(store) == "completed", runner.tick)
        now[0] += COUNT_S
        await runner.tick()
        assert {each.service_class for each in endpoint.tenants} == {ServiceClass.FLEX}
        assert (metric("batches"), metric("batch_window_seconds")) == (0, float("inf"))
        await runner.close()

    store = BatchStore(tmp_path)
    asyncio.run(run())


def test_many_rows_are_due_before_few() -> None:
    pace = Pace()
    assert not is_due(NEAR_S + 1, pace.needed_s(50_000))
    pace.add(60, 60.0)
    assert pace.needed_s(100) == pytest.approx(100)
    assert not is_due(NEAR_S + 1, pace.needed_s(3600))
    assert is_due(NEAR_S + 1, pace.needed_s(3601))
    for _ in range(600):
        pace.add(10, 10.0)
        pace.add(0, 10.0)
    assert pace.needed_s(1) == pytest.approx(2, rel=0.02)
