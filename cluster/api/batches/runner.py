"""Runs batches while the cluster has time for them.

It owns nothing: what is to be done is in the store, and a batch is another process's as soon as
this one does not renew its lease. Rows begin while nobody else waits, unless their batch is due;
each refusal for want of room halves how many may run at once, and each answer adds one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from starlette.types import ASGIApp

from kvrelay.cluster.api.batches.due import Pace, is_due
from kvrelay.cluster.api.batches.metrics import BatchMetrics
from kvrelay.cluster.api.batches.rows import (
    Answer,
    Checker,
    ask,
    batch_tenant,
    lines_of,
    read_row,
    result_of,
    row_id,
    unsent,
)
from kvrelay.cluster.api.batches.store import KEEP_S, Backlog, Record, Result
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.tenants import Tenant
from kvrelay.engine.logs import REQUEST

if TYPE_CHECKING:
    from kvrelay.cluster.api.context import AnyBatchStore

POLL_S = 1.0
LEASE_S = 20.0
SWEEP_S = 3600.0
COUNT_S = 10.0  # between two looks at all that waits
LOG_S = 60.0  # between two reports of what keeps batches from running
MAX_RUNNING = 8  # batches of one process, each of another tenant
MAX_TRIES = 3  # before a failure is final that has other causes than want of room
RETRY_S = 2.0
DISK_RETRY_S = 10.0
STOP_TIMEOUT_S = 5.0
_ROWS_AT_ONCE = 32  # that are read
# A row waits for these as long as its batch may: nothing is wrong with it.
_NO_ROOM = (429, 504)
_AWAY = ("no_workers", "draining", "")
_ENDS = {
    "cancelled": "The batch was cancelled before this request could run",
    "expired": "This request could not run before the completion window ended",
}

_log = logging.getLogger("kvrelay.api")
T = TypeVar("T")


class Window:
    """How many rows may run at once. Invariant: 1 <= size <= most."""

    def __init__(self, most: int) -> None:
        self.most, self.size, self.num_running = most, float(min(4, most)), 0
        self.num_answered = 0
        self.is_crowded = False  # others wait

    def is_open(self, is_due: bool) -> bool:
        return (is_due or not self.is_crowded) and self.num_running < int(self.size)

    def answered(self) -> None:
        self.num_answered += 1
        self.size = min(float(self.most), self.size + 1.0)

    def refused(self) -> None:
        self.size = max(1.0, self.size / 2)


class Runner:
    """Owned by the application. Lives in its loop."""

    def __init__(
        self,
        ctx: ApiContext,
        endpoints: Mapping[str, ASGIApp],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """endpoints: those that serve rows, by path."""
        self.ctx, self.endpoints, self.clock = ctx, endpoints, clock
        self.window = Window(ctx.settings.max_batch_rows_at_once)
        self.owner = secrets.token_hex(8)
        self.stopping = asyncio.Event()
        self._wake = asyncio.Event()
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._task: asyncio.Task[None] | None = None
        self.pace, self._paced_at, self._num_answered = Pace(), clock(), 0
        self.backlog, self.metrics = Backlog(0, (), ()), BatchMetrics(ctx.metrics.registry)
        self._next_sweep = self._next_count = 0.0
        self._logged_at = float("-inf")

    @property
    def store(self) -> AnyBatchStore:
        return self.ctx.batches

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """There is something new to do."""
        self._wake.set()

    async def close(self) -> None:
        """What runs is sent again by whoever comes next."""
        self.stopping.set()
        self.wake()
        for run, _ in self._runs.values():
            run.stop.set()
        tasks = [task for _, task in self._runs.values()]
        tasks += [self._task] if self._task else []
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
            for task in late:
                task.cancel()
        with contextlib.suppress(sqlite3.Error):
            await asyncio.to_thread(self.store.release, self.owner)

    async def _run(self) -> None:
        while not self.stopping.is_set():
            try:
                await self.tick()
            except Exception:  # such as a full disk: the next time may go better
                if self._logged_at + LOG_S <= time.monotonic():
                    self._logged_at = time.monotonic()
                    _log.exception("batches wait")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL_S)
            self._wake.clear()

    async def tick(self) -> None:
        """Looks once at all that there is."""
        now = self.clock()
        if now >= self._next_sweep:
            await asyncio.to_thread(self.store.sweep, now)
            self._next_sweep = now + SWEEP_S
        if now >= self._next_count:
            self.backlog = await asyncio.to_thread(self.store.backlog)
            self._next_count = now + COUNT_S
        self._measure(now)
        self.window.is_crowded = not self._runs or self._is_crowded()
        for name in [name for name, (_, task) in self._runs.items() if task.done()]:
            del self._runs[name]
        if self._runs:
            renew = partial(self.store.renew, self.owner, now, LEASE_S, list(self._runs))
            mine = await asyncio.to_thread(renew)
            for name, (run, _) in self._runs.items():
                run.look(mine.get(name), now)
        while len(self._runs) < MAX_RUNNING and not self.ctx.is_draining():
            busy = {run.tenant_name for run, _ in self._runs.values()}
            claim = partial(self.store.claim, self.owner, now, LEASE_S, busy)
            found = await asyncio.to_thread(claim)
            if found is None:
                break
            run = BatchRun(self, *found)
            run.look(run.record, now)
            self._runs[run.name] = run, asyncio.create_task(run.run())
        if self._runs:
            self.window.is_crowded = self._is_crowded()

    def _measure(self, now: float) -> None:
        if self.window.num_running:
            num_rows = self.window.num_answered - self._num_answered
            self.pace.add(num_rows, max(0.0, now - self._paced_at))
        self._paced_at, self._num_answered = now, self.window.num_answered
        num_due = sum(self.is_due(end, now) for end in self.backlog.ends_at)
        self.metrics.show(now, self.backlog, num_due)

    def is_due(self, ends_at: float, now: float) -> bool:
        return is_due(ends_at - now, self.pace.needed_s(self.backlog.num_rows))

    def _is_crowded(self) -> bool:
        """Whether requests of others wait."""
        live = self.ctx.live
        is_full = 2 * live.num_taken > live.limit
        return is_full or self.ctx.status().num_queued > self.window.num_running


class BatchRun:
    """One batch in this process, as long as it is its owner's."""

    def __init__(self, runner: Runner, tenant_name: str, record: Record) -> None:
        self.tenant_name, self.record, self.name = tenant_name, record, record["id"]
        self.stop = asyncio.Event()  # no more rows; those that run are cancelled
        self.is_due = False
        self._is_lost = False  # another process runs it now
        self._runner, self._store = runner, runner.store
        self._path = Path()  # where the input is
        # Workers drop what has the name of a request that they know: who takes rows over, or sends
        # one again, adds to it.
        is_new = record["status"] == "validating"
        self._suffix = "" if is_new else f".{runner.owner}"

    def look(self, record: Record | None, now: float) -> None:
        """record: as it is in the store; None: it is not ours any more."""
        self._is_lost = record is None
        self.is_due = self._runner.is_due(self.record["expires_at"], now)
        if record is not None:
            self.record["status"] = record["status"]
        ends = record is None or record["status"] == "cancelling" or self._is_late(now)
        if ends or self._runner.stopping.is_set():
            self.stop.set()

    def _is_late(self, now: float) -> bool:
        return now >= float(self.record["expires_at"])

    async def run(self) -> None:
        REQUEST.set(self.name)
        try:
            fetched = self._store.fetched
            self._path = await asyncio.to_thread(fetched, self.record["input_file_id"])
            if await self._validated():
                await self._run_rows()
        except FileNotFoundError:
            self._fail("file_not_found", "The input file is not there any more")
        except Exception:  # the store is away, or a bug; whoever claims the batch tries again
            _log.exception("batch %s stops here", self.name)
            return
        try:
            while not (self._is_lost or self._runner.stopping.is_set()):
                if await self._tried(self._finish):
                    return
        except Exception:
            _log.exception("batch %s does not end", self.name)

    async def _tried(self, call: Callable[[], Awaitable[T]]) -> bool:
        """False: the disk does not take it; a while has passed."""
        try:
            await call()
        except (OSError, sqlite3.Error):
            _log.exception("batch %s waits until its results can be written", self.name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._runner.stopping.wait(), DISK_RETRY_S)
            return False
        return True

    @property
    def _tenant(self) -> Tenant | None:
        """None: there is none of that name any more."""
        tenant = self._runner.ctx.tenants.named(self.tenant_name)
        return None if tenant is None else batch_tenant(tenant, self.is_due)

    async def _validated(self) -> bool:
        """Whether its rows are to be sent."""
        if self.record["status"] != "validating":
            return bool(self.record["status"] == "in_progress")
        tenant = self._tenant
        if tenant is None:
            self._fail("tenant_unknown", "The API key of this batch is not one of this server's")
            return False
        checker = Checker(self._runner.ctx, tenant, self.record["endpoint"])
        await asyncio.to_thread(checker.check_all, self._path)
        if checker.errors:
            self.record["errors"] = {"object": "list", "data": checker.errors}
            return False
        return await self._begin(checker.num_rows)

    def _fail(self, code: str, message: str) -> None:
        error = {"code": code, "message": message, "param": None, "line": None}
        self.record["errors"] = {"object": "list", "data": [error]}

    async def _begin(self, num_rows: int) -> bool:
        now = int(self._runner.clock())

        def begun(record: Record) -> Record:
            counts = {"total": num_rows, "completed": 0, "failed": 0}
            record["request_counts"] = counts
            if record["status"] == "validating":
                record |= {"status": "in_progress", "in_progress_at": now}
            return record

        record = await asyncio.to_thread(self._store.change_batch, self.name, begun)
        self._is_lost = record is None
        self.record = record or self.record
        return bool(self.record["status"] == "in_progress")

    async def _run_rows(self) -> None:
        done = await asyncio.to_thread(self._store.rows_done, self.name)
        lines = lines_of(self._path, self._runner.ctx.settings.max_body_bytes)
        tasks: set[asyncio.Task[None]] = set()
        window = self._runner.window
        while not self.stop.is_set():
            part = await asyncio.to_thread(_next, lines)
            if not part:
                break
            for number, line in part:
                if number in done:
                    continue
                while not (window.is_open(self.is_due) or self.stop.is_set()):
                    await self._pause(0.05)
                if self.stop.is_set():
                    break
                window.num_running += 1
                task = asyncio.create_task(self._run_row(number, line))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(tasks)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), seconds)

    async def _run_row(self, number: int, line: bytes) -> None:
        try:
            result = await self._result(number, line)
            while result is not None and not self._runner.stopping.is_set():
                put = partial(asyncio.to_thread, self._store.put_results, self.name, [result])
                if await self._tried(put):
                    outcome = "failed" if result.is_error else "completed"
                    self._runner.metrics.rows.labels(outcome).inc()
                    break
        finally:
            self._runner.window.num_running -= 1

    async def _result(self, number: int, line: bytes) -> Result | None:
        """Returns None where it was stopped."""
        row, runner, num_tries = read_row(line), self._runner, 0
        request_id = row_id(self.name, row.custom_id)
        sent_as = request_id + self._suffix
        while not self.stop.is_set():
            tenant = self._tenant
            if tenant is None:
                message = "The API key of this batch is not one of this server's any more"
                return unsent(number, row, self.name, "tenant_unknown", message)
            endpoint = runner.endpoints[row.url]
            answer = await ask(endpoint, row, request_id, sent_as, tenant, self.stop)
            if answer.status == 0:
                return None
            waits = has_no_room(answer)
            num_tries += not waits
            if is_final(answer) or num_tries >= MAX_TRIES:
                runner.window.answered()
                return result_of(number, row, request_id, answer, self.record["in_progress_at"])
            if waits:
                runner.window.refused()
            sent_as = f"{request_id}.{secrets.token_hex(4)}"
            given = answer.headers.get("retry-after", "")
            await self._pause(float(given) if given.isdigit() else RETRY_S)
        return None

    async def _finish(self) -> None:
        """Results become files, and the batch ends as what its status says."""
        now = int(self._runner.clock())
        end = "failed"
        if not self.record["errors"]:
            end = await asyncio.to_thread(self._close_rows)
        record = self.record | {"finalizing_at": self.record["finalizing_at"] or now}
        record |= {"status": end, f"{end}_at": now}
        if end == "completed":
            await asyncio.to_thread(self._store.change_batch, self.name, _finalizing)
        files = await asyncio.to_thread(self._files, record, now)
        finish = self._store.finish
        await asyncio.to_thread(finish, self._runner.owner, self.tenant_name, record, files)
        self._runner.wake()

    def _close_rows(self) -> str:
        """Returns how the batch ends. Rows without a result get one that says why."""
        total, status = self.record["request_counts"]["total"], self.record["status"]
        done = self._store.rows_done(self.name)
        if status != "cancelling" and total and len(done) == total:
            return "completed"
        end = "cancelled" if status == "cancelling" else "expired"
        assert end == "cancelled" or self._is_late(self._runner.clock())
        if not total:
            return end  # it has not been validated
        lines = lines_of(self._path, self._runner.ctx.settings.max_body_bytes)
        while part := _next(lines):
            left = [(number, read_row(line)) for number, line in part if number not in done]
            code = f"batch_{end}"
            results = [unsent(number, row, self.name, code, _ENDS[end]) for number, row in left]
            self._store.put_results(self.name, results)
        self.record["num_unsent"] = self._store.num_unsent(self.name)
        return end

    def _files(self, record: Record, now: int) -> dict[Path, Record]:
        """Writes drafts, and names them in the record."""
        files: dict[Path, Record] = {}
        for kind, is_error in (("output", False), ("error", True)):
            draft = self._store.write_results(self.name, is_error)
            if draft is None:
                continue
            name = f"file-{row_id(self.name, kind)[:24]}"
            record[f"{kind}_file_id"] = name
            files[draft] = {
                "id": name,
                "object": "file",
                "bytes": draft.stat().st_size,
                "created_at": now,
                "expires_at": now + int(record.get("keep_s") or KEEP_S),
                "filename": f"{self.name}_{kind}.jsonl",
                "purpose": "batch_output",
                "status": "processed",
            }
        return files


def is_final(answer: Answer) -> bool:
    """Whether it would be the same if the row were sent again."""
    return answer.status == 200 or answer.status in set(range(400, 500)) - {408, 409, 429}


def has_no_room(answer: Answer) -> bool:
    """Whether a row is refused for what others do, not for what it is."""
    return answer.status in _NO_ROOM or (answer.status == 503 and answer.code in _AWAY)


def _finalizing(record: Record) -> Record:
    return record | {"status": "finalizing"}


def _next(lines: Iterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    return list(itertools.islice(lines, _ROWS_AT_ONCE))
