"""One batch in the process that has its lease: its lines are checked, its rows are sent, it ends.

Rows that name one model are a lane: lanes do not wait for each other, and each has one row at a
time among those that are to begin. A batch that was cancelled, or whose window is over, ends
whatever there is room for: what does not fit is left out, and that is said.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvrelay.cluster.api.batches.due import is_due
from kvrelay.cluster.api.batches.rows import (
    START,
    Answer,
    Call,
    Checker,
    Place,
    Row,
    ask,
    batch_tenant,
    custom_id_of,
    models_asked,
    next_page,
    places_of,
    read_line,
    read_row,
    result_of,
    row_id,
    unsent,
)
from kvrelay.cluster.api.batches.store import KEEP_S, Record, Result
from kvrelay.cluster.api.batches.windows import Waiter, Window
from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.incoming import SMALL_BODY_BYTES
from kvrelay.cluster.api.limiter import TENANT
from kvrelay.cluster.api.tenants import Tenant
from kvrelay.engine.logs import REQUEST

if TYPE_CHECKING:
    from kvrelay.cluster.api.batches.runner import Runner

MAX_TRIES = 3  # before a failure is final that has other causes than want of room
RETRY_S = 2.0
MAX_RETRY_S = 30.0
DISK_RETRY_S = 10.0
LOG_S = 60.0  # between two reports of what keeps a batch from being written
_ENDS = {
    "cancelled": "The batch was cancelled before this request could run",
    "expired": "This request could not run before the completion window ended",
}
_NO_ROOM = "insufficient_storage"

_log = logging.getLogger("kvrelay.api")
T = TypeVar("T")


class Sent:
    """A row that is under way. `stop` ends it; `is_again`: it is to be sent anew."""

    def __init__(self, sent_at: float, is_due: bool) -> None:
        self.sent_at, self.is_due = sent_at, is_due
        self.stop, self.is_again = asyncio.Event(), False


class BatchRun:
    """Owned by the runner, as long as the batch is."""

    def __init__(self, runner: Runner, tenant_name: str, record: Record) -> None:
        self.tenant_name, self.record, self.name = tenant_name, record, record["id"]
        self.stop = asyncio.Event()  # no more rows; those that run are cancelled
        self.is_due = False
        self.has_rows = False  # to be sent, or under way
        self.lanes: list[Lane] = []
        self._is_lost = False  # another process runs it now
        self.runner, self._store = runner, runner.store
        self._path = Path()  # where the input is
        self.sent: set[Sent] = set()
        self._due_since = 0.0
        # Workers and routers drop what has the name of a request that they know: whoever claims
        # rows, or sends one again, adds to it.
        self.suffix = "" if record["status"] == "validating" else f".{secrets.token_hex(4)}"
        self._logged_at = float("-inf")
        self.no_room_for: set[int] = set()  # rows whose answer the store did not take

    def look(self, record: Record | None, now: float) -> None:
        """record: as it is in the store; None: it is not ours any more."""
        if record is None:
            self.give_up()
            return
        for name in ("status", "cancelling_at"):
            self.record[name] = record.get(name)
        left_s = self.record["expires_at"] - now
        needed_s = max((lane.window.needed_s for lane in self.lanes), default=0.0)
        if self.is_due != is_due(left_s, needed_s):
            self.is_due, self._due_since = not self.is_due, now
        if self.is_over:
            self._stop()
        if not self.is_due:
            return
        # What waits in the lowest class would not be among what the cluster grows for.
        longest_s = self.runner.ctx.settings.request_timeout_s
        for sent in self.sent:
            if not sent.is_due and now - max(sent.sent_at, self._due_since) >= longest_s:
                sent.is_again = True
                sent.stop.set()

    def give_up(self) -> None:
        """It is another process's, or nobody's."""
        self._is_lost = True
        self._stop()

    def _stop(self) -> None:
        self.stop.set()
        for sent in self.sent:
            sent.stop.set()

    @property
    def is_over(self) -> bool:
        """Whether it ends, however many rows have no result."""
        is_late = self.runner.clock() >= float(self.record["expires_at"])
        return is_late or self.record["status"] == "cancelling"

    @property
    def left_s(self) -> float:
        return float(self.record["expires_at"]) - self.runner.clock()

    async def run(self) -> None:
        REQUEST.set(self.name)
        TENANT.set(self.tenant_name)
        try:
            if not self.is_over and await self._validated():
                if not self.runner.keeps(self):
                    self.give_up()
                    await asyncio.to_thread(self._store.release, self.runner.owner, self.name)
                    return
                await self._run_rows()
        except FileNotFoundError:
            self._fail("file_not_found", "The input file is not there any more")
        except Exception:  # the store is away, or a bug; whoever claims the batch tries again
            _log.exception("batch %s stops here", self.name)
            if not self.is_over:
                return
        finally:
            self.has_rows = False
        try:
            while not self._is_lost:
                if await self.tried(self._finish, lambda: self._is_lost):
                    return
        except Exception:
            _log.exception("batch %s does not end", self.name)

    async def tried(self, call: Callable[[], Awaitable[T]], is_over: Callable[[], bool]) -> bool:
        """False: the disk does not take it; a while has passed, or it is over."""
        try:
            await call()
        except (OSError, sqlite3.Error) as error:
            now = asyncio.get_running_loop().time
            if now() >= self._logged_at + LOG_S:
                self._logged_at = now()
                _log.warning("batch %s waits until it can be written: %r", self.name, error)
            until = now() + DISK_RETRY_S
            while now() < until and not is_over():
                await self.pause(min(1.0, DISK_RETRY_S))
            return False
        return True

    async def pause(self, seconds: float) -> None:
        """For a time, or until it is to end."""
        if self.stop.is_set():
            await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), seconds)

    @property
    def tenant(self) -> Tenant | None:
        """None: there is none of that name any more."""
        return self.runner.ctx.tenants.named(self.tenant_name)

    # Before its rows.

    async def _validated(self) -> bool:
        """Whether its rows are to be sent."""
        fetched = self._store.fetched
        self._path = await asyncio.to_thread(fetched, self.record["input_file_id"])
        if self.record["status"] != "validating":
            return bool(self.record["status"] == "in_progress")
        tenant = self.tenant
        if tenant is None:
            self._fail("tenant_unknown", "The API key of this batch is not one of this server's")
            return False
        checker = Checker(self.runner.ctx, tenant, self.record["endpoint"])
        async with self.runner.turns.turn():
            await asyncio.to_thread(checker.check_all, self._path)
        if checker.errors:
            self.record["errors"] = {"object": "list", "data": checker.errors}
            return False
        return await self._begin(checker.num_rows)

    def _fail(self, code: str, message: str) -> None:
        error = {"code": code, "message": message, "param": None, "line": None}
        self.record["errors"] = {"object": "list", "data": [error]}

    async def _begin(self, num_rows: int) -> bool:
        now = int(self.runner.clock())

        def begun(record: Record) -> Record:
            counts = {"total": num_rows, "completed": 0, "failed": 0}
            record["request_counts"] = counts
            if record["status"] == "validating":
                record |= {"status": "in_progress", "in_progress_at": now}
            return record

        record = await asyncio.to_thread(self._store.change_batch, self.name, begun)
        self._is_lost |= record is None
        self.record = record or self.record
        return bool(self.record["status"] == "in_progress")

    async def _run_rows(self) -> None:
        done = await asyncio.to_thread(self._store.rows_done, self.name)
        most = self.runner.ctx.settings.max_body_bytes
        async with self.runner.turns.turn():
            counted = await asyncio.to_thread(models_asked, self._path, most, done)
        lanes: dict[Window, Lane] = {}
        for model, num_rows in counted.items():
            window = self._window(model)
            lane = lanes.setdefault(window, Lane(self, self._path, window, done))
            lane.add(model, num_rows)
        self.lanes = [*lanes.values()]
        try:
            ended = await asyncio.gather(*(x.run() for x in self.lanes), return_exceptions=True)
        finally:
            for lane in self.lanes:
                lane.close()
            self.lanes = []
        for error in filter(None, ended):
            raise error

    def _window(self, model: str) -> Window:
        """model: as rows name it."""
        found = None
        if self.tenant is not None:
            with contextlib.suppress(ApiError):
                found = self.runner.ctx.chosen(model or None, self.tenant)
        return self.runner.windows.of(self.tenant_name, found)

    # Its end.

    async def _finish(self) -> None:
        """Results become files, and the batch ends as what its status says."""
        now = int(self.runner.clock())
        try:
            end = "failed" if self.record["errors"] else await asyncio.to_thread(self._close_rows)
            await self._end_as(end, now)
        except (OSError, sqlite3.Error) as error:
            if not (self.is_over and is_full(error)):
                raise
            _log.warning("batch %s ends though there is no room: %s", self.name, error)
            await asyncio.to_thread(self._end_without_room, now)
        except Exception:
            if not self.is_over:
                raise
            _log.exception("batch %s ends without its results", self.name)
            message = "The server failed to write the results: its log says why"
            await asyncio.to_thread(self._end_bare, now, "internal_error", message)
        self.runner.wake()

    async def _end_as(self, end: str, now: int) -> None:
        if end == "completed":
            await asyncio.to_thread(self._store.change_batch, self.name, _finalizing)
        record = self._ended(end, now)
        files: dict[Path, Record] = {}
        try:
            await asyncio.to_thread(self._write_files, record, now, files)
            finish = self._store.finish
            await asyncio.to_thread(finish, self.runner.owner, self.tenant_name, record, files)
        finally:
            for draft in files:
                draft.unlink(missing_ok=True)

    def _ended(self, end: str, now: int) -> Record:
        times = {"finalizing_at": self.record["finalizing_at"] or now, f"{end}_at": now}
        return self.record | times | {"status": end}

    def _close_rows(self) -> str:
        """Returns how the batch ends. Rows without a result get one that says why."""
        total = self.record["request_counts"]["total"]
        done = self._store.rows_done(self.name)
        if self.record["status"] != "cancelling" and total and len(done) >= total:
            return "completed"
        end = self._end()
        if total:  # else it has not been validated
            left = self._left(done, end)
            while part := list(islice(left, 32)):
                self._store.put_results(self.name, part)
            self.record["num_unsent"] = self._store.num_unsent(self.name)
        return end

    def _end(self) -> str:
        if not self.is_over:
            raise RuntimeError("rows have neither run nor a result")
        return "cancelled" if self.record["status"] == "cancelling" else "expired"

    def _left(self, done: set[int], end: str) -> Iterator[Result]:
        """Results of rows without one."""
        try:
            path = self._store.fetched(self.record["input_file_id"])
        except FileNotFoundError:
            return
        size = max(path.stat().st_size, 1)  # a line may be longer than lines may be now
        for place, line in places_of(path, size):
            if place.row in done:
                continue
            code, message = f"batch_{end}", _ENDS[end]
            if place.row in self.no_room_for:
                code, message = _NO_ROOM, "There was no room for the answer of this request"
            yield unsent(place.row, custom_id_of(line), self.name, code, message)

    def _write_files(self, record: Record, now: int, files: dict[Path, Record]) -> None:
        """Writes drafts to `files`, and names them in the record."""
        for kind, is_error in (("output", False), ("error", True)):
            draft = self._store.write_results(self.name, is_error)
            if draft is not None:
                self._add_file(record, now, kind, draft, files)

    def _add_file(
        self, record: Record, now: int, kind: str, draft: Path, files: dict[Path, Record]
    ) -> None:
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

    def _end_without_room(self, now: int) -> None:
        """Results are freed where the store has them, once this machine's disk does; where it has
        no room either, or what was freed is not enough, they are lost."""
        total, done = self.record["request_counts"]["total"], self._store.rows_done(self.name)
        is_cancelled = self.record["status"] == "cancelling"
        end = "completed" if total and len(done) >= total and not is_cancelled else self._end()
        found = self._store.batch(self.tenant_name, self.name) or self.record
        record = self._ended(end, now)
        record |= {name: found[name] for name in ("request_counts", "usage") if name in found}
        files: dict[Path, Record] = {}
        try:
            left = list(self._left(done, end)) if total else []
            num_unsent = sum(each.is_unsent for each in left)
            record["num_unsent"] = self._store.num_unsent(self.name) + num_unsent
            record["request_counts"] = _failed(record["request_counts"], len(left))
            self._write_files(record, now, files)
            self._append_errors(record, now, left, files)
            self._store.free_results(self.runner.owner, self.name)
            self._store.finish(self.runner.owner, self.tenant_name, record, files)
        except (OSError, sqlite3.Error) as error:
            if not is_full(error):
                raise
            message = f"The results of {total} requests found no room: {error}"
            self._end_bare(now, _NO_ROOM, message)
        finally:
            for draft in files:
                draft.unlink(missing_ok=True)

    def _append_errors(
        self, record: Record, now: int, left: list[Result], files: dict[Path, Record]
    ) -> None:
        if not left:
            return
        name = record.get("error_file_id")
        draft = next((draft for draft, file in files.items() if file["id"] == name), None)
        if draft is None:
            draft = self._store.draft()
        with draft.open("ab") as file:
            file.writelines(each.line + b"\n" for each in left)
        self._add_file(record, now, "error", draft, files)

    def _end_bare(self, now: int, code: str, message: str) -> None:
        end = self._end()
        record = self._ended(end, now) | {"output_file_id": None, "error_file_id": None}
        total = record["request_counts"]["total"]
        record["request_counts"] = {"total": total, "completed": 0, "failed": total}
        record["num_unsent"] = 0
        error = {"code": code, "message": message, "param": None, "line": None}
        record["errors"] = {"object": "list", "data": [error]}
        self._store.end(self.runner.owner, self.tenant_name, record)


class Lane:
    """Rows of a batch for one model, in the order of the input. Owned by its run."""

    def __init__(self, run: BatchRun, path: Path, window: Window, done: set[int]) -> None:
        self.run_of, self.window = run, window
        self._path, self._done, self._runner = path, done, run.runner
        self._models: set[str] = set()  # names that rows give it
        self._num_left = 0

    def add(self, model: str, num_rows: int) -> None:
        self._models.add(model)
        self._count(-num_rows)

    def _count(self, num_rows: int) -> None:
        self._num_left -= num_rows
        self.window.num_left -= num_rows

    def close(self) -> None:
        self._count(self._num_left)

    async def run(self) -> None:
        after: Place | None = START
        tasks: set[asyncio.Task[None]] = set()
        try:
            while after is not None and not self.run_of.stop.is_set():
                most = self._runner.ctx.settings.max_body_bytes
                page, after = await asyncio.to_thread(
                    next_page, self._path, most, after, self._models, self._done
                )
                for place in page:
                    has_begun = asyncio.Event()
                    task = asyncio.create_task(self._run_row(place, has_begun))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    await has_begun.wait()
                    if self.run_of.stop.is_set():
                        break
        finally:
            if tasks:
                await asyncio.wait(tasks)

    async def _run_row(self, place: Place, has_begun: asyncio.Event) -> None:
        try:
            tries = Tries(self, place)
            while not tries.is_over:
                wait_s = await self._tried(tries, has_begun)
                if not tries.is_over:
                    self.window.num_refused += 1
                    try:
                        await self.run_of.pause(wait_s)
                    finally:
                        self.window.num_refused -= 1
                        self.window.fill()
        finally:
            has_begun.set()

    async def _tried(self, tries: Tries, has_begun: asyncio.Event) -> float:
        """Sends the row once, when it may run. Returns for how long it waits then."""
        run, window, num_bytes = self.run_of, self.window, tries.place.num_bytes
        with self._runner.budget.share() as take:
            large = num_bytes if num_bytes > SMALL_BODY_BYTES else 0
            waiter = Waiter(lambda: run.is_due, run.stop.is_set, take, large, tries.is_again)
            if not await window.place(waiter):
                tries.is_over = True
                return 0.0
            has_begun.set()
            try:
                return await tries.send(self._path)
            finally:
                window.leave()

    async def put(self, result: Result) -> None:
        """Writes it, as often as needed. While that does not work the row has its place, so no
        more answers wait in memory than rows may run."""
        run, store = self.run_of, self._runner.store
        put = partial(asyncio.to_thread, store.put_results, run.name, [result])
        while not await run.tried(put, run.stop.is_set):
            if run.stop.is_set():
                run.no_room_for.add(result.row)
                return
        self._count(1)
        outcome = "failed" if result.is_error else "completed"
        self._runner.metrics.rows.labels(outcome).inc()


class Tries:
    """A row, from its first try to its result. Owned by its lane."""

    def __init__(self, lane: Lane, place: Place) -> None:
        self.place, self.is_over, self.is_again = place, False, False
        self._lane, self._run = lane, lane.run_of
        self._runner = lane.run_of.runner
        self._num_tries = self._num_refused = 0
        self._custom_id, self._request_id = "", ""

    async def send(self, path: Path) -> float:
        """Returns the seconds until it is sent again, if it is not over."""
        number = self.place.row
        try:
            row = await asyncio.to_thread(self._read, path)
            if isinstance(row, Result):
                return await self._end_with(row)
            answer = await self._ask(row)
            if answer is None:
                return 0.0
            wait_s = self._judged(answer)
            if wait_s is not None:
                return wait_s
            created = self._run.record["in_progress_at"]
            result = result_of(number, self._custom_id, self._request_id, answer, created)
        except Exception:
            _log.exception("line %d of %s fails", number, self._run.name)
            message = "The server failed at this request: its log says why"
            result = unsent(number, self._custom_id, self._run.name, "internal_error", message)
        return await self._end_with(result)

    async def _end_with(self, result: Result) -> float:
        self.is_over = True
        await self._lane.put(result)
        return 0.0

    def _read(self, path: Path) -> Row | Result:
        """The row; or, where it is none any more, a result that says so."""
        number, most = self.place.row, self._runner.ctx.settings.max_body_bytes
        line = read_line(path, self.place)
        try:
            if len(line) > most + 1:
                self._custom_id = custom_id_of(line)
                code, message = "request_too_large", f"The line has more than {most} bytes"
                return unsent(number, self._custom_id, self._run.name, code, message)
            row = read_row(line)
        except ValueError as error:
            self._custom_id = custom_id_of(line)
            code = "invalid_json_line"
            return unsent(number, self._custom_id, self._run.name, code, str(error))
        self._custom_id = row.custom_id
        self._request_id = row_id(self._run.name, row.custom_id)
        return row

    async def _ask(self, row: Row) -> Answer | None:
        """None: it was stopped."""
        run = self._run
        tenant = run.tenant
        if tenant is None:
            message = "The API key of this batch is not one of this server's any more"
            code = "tenant_unknown"
            await self._end_with(unsent(self.place.row, self._custom_id, run.name, code, message))
            return None
        again = f".{secrets.token_hex(4)}" if self.is_again else ""
        sent_as = f"{self._request_id}{run.suffix}{again}"
        endpoint, sent = self._runner.endpoints[row.url], Sent(self._runner.clock(), run.is_due)
        call = Call(self._request_id, sent_as, batch_tenant(tenant, run.is_due), run.left_s)
        run.sent.add(sent)
        if run.stop.is_set():
            sent.stop.set()
        try:
            answer = await ask(endpoint, row, call, sent.stop)
        finally:
            run.sent.discard(sent)
        self.is_again = True
        if answer.status == 0:
            self.is_over = not sent.is_again or run.stop.is_set()
            return None
        return answer

    def _judged(self, answer: Answer) -> float | None:
        """How long the row waits before it is sent again; None: that is its answer."""
        window = self._lane.window
        if answer.is_rate:
            wait_s = max(1.0, answer.retry_after_s)
            window.limited(wait_s)
            return wait_s
        if answer.has_no_room:
            window.refused()
            self._num_refused += 1
            wait_s = max(RETRY_S * 2.0 ** min(self._num_refused - 1, 8), answer.retry_after_s)
            return min(MAX_RETRY_S, wait_s)
        self._num_tries += 1
        if answer.is_final or self._num_tries >= MAX_TRIES:
            window.answered()
            return None
        return max(RETRY_S, answer.retry_after_s)


def is_full(error: Exception) -> bool:
    """Whether a disk, or Redis, takes no more."""
    if isinstance(error, sqlite3.OperationalError):
        return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _finalizing(record: Record) -> Record:
    return record | {"status": "finalizing"}


def _failed(counts: Record, more: int) -> Record:
    return counts | {"failed": counts["failed"] + more}
