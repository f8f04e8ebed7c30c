"""One batch in the process that has its lease: its lines are checked, its rows are sent, it ends.

A batch that was cancelled, or whose window is over, ends whatever there is room for: what does not
fit is left out, and that is said.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kvrelay.cluster.api.batches.folder import private_file
from kvrelay.cluster.api.batches.held import HeldBatch, Shared
from kvrelay.cluster.api.batches.lanes import Lane
from kvrelay.cluster.api.batches.rows import (
    Checker,
    custom_id_of,
    models_asked,
    places_of,
    row_id,
    unsent,
)
from kvrelay.cluster.api.batches.store import KEEP_S, Record, Result, is_full
from kvrelay.cluster.api.batches.windows import Window
from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.limiter import CALLER, TENANT
from kvrelay.engine.logs import REQUEST

_ENDS = {
    "cancelled": "The batch was cancelled before this request could run",
    "expired": "This request could not run before the completion window ended",
}
_NO_ROOM = "insufficient_storage"
GRACE_S = 600.0  # in which somebody may make room for answers that would be lost

_log = logging.getLogger("kvrelay.api")


class BatchRun(HeldBatch):
    """What is done with a batch, from its claim to its end."""

    def __init__(self, shared: Shared, tenant_name: str, record: Record) -> None:
        super().__init__(shared, tenant_name, record)
        self._store = shared.store
        self._path = Path()  # where the input is

    async def run(self) -> None:
        REQUEST.set(self.name)
        TENANT.set(self.tenant_name)
        CALLER.set((self.tenant_name,))
        try:
            if not self.is_over and await self._validated():
                if not self.shared.keeps(self):
                    self.give_up()
                    await asyncio.to_thread(self._store.release, self.shared.owner, self.name)
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
            while not self.is_lost:
                if await self.tried(self._finish, lambda: self.is_lost):
                    return
        except Exception:
            _log.exception("batch %s does not end", self.name)

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
        checker = Checker(self.shared.ctx, tenant, self.record["endpoint"])
        async with self.shared.turns.turn():
            await asyncio.to_thread(checker.check_all, self._path)
        if checker.errors:
            self.record["errors"] = {"object": "list", "data": checker.errors}
            return False
        return await self._begin(checker.num_rows)

    def _fail(self, code: str, message: str) -> None:
        self.record["errors"] = _errors(code, message)

    async def _begin(self, num_rows: int) -> bool:
        now = int(self.shared.clock())

        def begun(record: Record) -> Record:
            counts = {"total": num_rows, "completed": 0, "failed": 0}
            record["request_counts"] = counts
            if record["status"] == "validating":
                record |= {"status": "in_progress", "in_progress_at": now}
            return record

        record = await asyncio.to_thread(self._store.change_batch, self.name, begun)
        self.is_lost |= record is None
        self.record = record or self.record
        return bool(self.record["status"] == "in_progress")

    async def _run_rows(self) -> None:
        done = await asyncio.to_thread(self._store.rows_done, self.name)
        most = self.shared.ctx.settings.max_body_bytes
        async with self.shared.turns.turn():
            counted = await asyncio.to_thread(models_asked, self._path, most, done)
        lanes: dict[Window, Lane] = {}
        for model, num_rows in counted.items():
            window = self._window(model)
            lane = lanes.setdefault(window, Lane(self, self._path, window, done))
            lane.add(model, num_rows)
        self.windows = [*lanes]
        try:
            runs = [lane.run() for lane in lanes.values()]
            ended = await asyncio.gather(*runs, return_exceptions=True)
        finally:
            for lane in lanes.values():
                lane.close()
            self.windows = []
        for error in filter(None, ended):
            raise error

    def _window(self, model: str) -> Window:
        """model: as rows name it."""
        found = None
        if self.tenant is not None:
            with contextlib.suppress(ApiError):
                found = self.shared.ctx.chosen(model or None, self.tenant)
        return self.shared.windows.of(self.tenant_name, found)

    # Its end.

    async def _finish(self) -> None:
        """Results become files, and the batch ends as what its status says."""
        now = int(self.shared.clock())
        try:
            end = "failed" if self.record["errors"] else await asyncio.to_thread(self._close_rows)
            await self._end_as(end, now)
        except (OSError, sqlite3.Error) as error:
            if not (self.is_over and is_full(error)):
                raise
            await asyncio.to_thread(self._end_without_room, now)
            _log.warning("batch %s has ended though there is no room: %s", self.name, error)
        except Exception:
            if not self.is_over:
                raise
            _log.exception("batch %s ends without its results", self.name)
            message = "The server failed to write the results: its log says why"
            await asyncio.to_thread(self._end_bare, now, "internal_error", message)
        self.shared.wake()

    async def _end_as(self, end: str, now: int) -> None:
        if end == "completed":
            await asyncio.to_thread(self._store.change_batch, self.name, _finalizing)
        record = self._ended(end, now)
        files: dict[Path, Record] = {}
        try:
            await asyncio.to_thread(self._write_files, record, now, files)
            finish = self._store.finish
            await asyncio.to_thread(finish, self.shared.owner, self.tenant_name, record, files)
        finally:
            for draft in files:
                draft.unlink(missing_ok=True)

    def _ended(self, end: str, now: int) -> Record:
        times = {"finalizing_at": self.record["finalizing_at"] or now, f"{end}_at": now}
        return self.record | times | {"status": end}

    def _close_rows(self) -> str:
        """Returns how the batch ends. Rows without a result get one that says why."""
        total, done = self._total, self._store.rows_done(self.name)
        end = self._end(len(done))
        if end != "completed" and total:  # else it has not been validated
            left = self._left(done, end)
            while part := list(islice(left, 32)):
                self._store.put_results(self.name, part)
            self.record["num_unsent"] = self._store.num_unsent(self.name)
        return end

    def _end(self, num_done: int = 0) -> str:
        """num_done: rows that have a result, perhaps by an end that was tried before."""
        is_cancelled, total = self.record["status"] == "cancelling", self._total
        have_all = total and num_done >= total and not (is_cancelled or self.no_room_for)
        if have_all and not self._store.num_unsent(self.name):
            return "completed"
        if not self.is_over:
            raise RuntimeError("rows have neither run nor a result")
        return "cancelled" if is_cancelled else "expired"

    @property
    def _total(self) -> int:
        return int(self.record["request_counts"]["total"])

    def _left(self, done: set[int], end: str) -> Iterator[Result]:
        """Results of rows without one."""
        try:
            path = self._store.fetched(self.record["input_file_id"])
            size = path.stat().st_size  # a line may be longer than lines may be now
        except FileNotFoundError:
            return
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
        no room either, or what was freed is not enough, they are lost after a while."""
        total, done = self._total, self._store.rows_done(self.name)
        end = self._end(len(done))
        found = self._store.batch(self.tenant_name, self.name) or self.record
        record = self._ended(end, now)
        record |= {name: found[name] for name in ("request_counts", "usage") if name in found}
        files: dict[Path, Record] = {}
        is_freed = False
        try:
            left = list(self._left(done, end)) if total else []
            num_unsent = sum(each.is_unsent for each in left)
            record["num_unsent"] = self._store.num_unsent(self.name) + num_unsent
            counts = record["request_counts"]
            record["request_counts"] = counts | {"failed": counts["failed"] + len(left)}
            self._write_files(record, now, files)
            self._append_errors(record, now, left, files)
            is_freed = True
            self._store.free_results(self.shared.owner, self.name)
            self._store.finish(self.shared.owner, self.tenant_name, record, files)
        except (OSError, sqlite3.Error) as error:
            waits = not is_freed and found["request_counts"]["completed"] and end != "cancelled"
            if not is_full(error) or (waits and self.left_s > -GRACE_S):
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
            files[draft] = {}  # it is removed however this ends
        with open(draft, "ab", opener=private_file) as file:
            file.writelines(each.line + b"\n" for each in left)
            file.flush()
            os.fsync(file.fileno())
        self._add_file(record, now, "error", draft, files)

    def _end_bare(self, now: int, code: str, message: str) -> None:
        end = self._end()
        record = self._ended(end, now) | {"output_file_id": None, "error_file_id": None}
        total = record["request_counts"]["total"]
        record["request_counts"] = {"total": total, "completed": 0, "failed": total}
        record["num_unsent"] = 0
        record["errors"] = _errors(code, message)
        self._store.end(self.shared.owner, self.tenant_name, record)


def _finalizing(record: Record) -> Record:
    return record | {"status": "finalizing"}


def _errors(code: str, message: str) -> Record:
    """What is wrong with a batch as a whole."""
    error = {"code": code, "message": message, "param": None, "line": None}
    return {"object": "list", "data": [error]}
