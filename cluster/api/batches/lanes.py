"""Rows that are sent: one after the other in their lane, each until it has a result.

Lanes of a batch are those of the models that its rows name, and do not wait for each other. Each
has one row at a time among those that are to begin, so batches take turns.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from functools import partial
from pathlib import Path

from kvrelay.cluster.api.batches.held import HeldBatch, Sent
from kvrelay.cluster.api.batches.rows import (
    START,
    Answer,
    Call,
    Place,
    Row,
    ask,
    batch_tenant,
    custom_id_of,
    next_page,
    read_line,
    read_row,
    result_of,
    row_id,
    unsent,
)
from kvrelay.cluster.api.batches.store import Result
from kvrelay.cluster.api.batches.windows import Waiter, Window
from kvrelay.cluster.api.incoming import SMALL_BODY_BYTES

MAX_TRIES = 3  # before a failure is final that has other causes than want of room
RETRY_S = 2.0
MAX_RETRY_S = 30.0

_log = logging.getLogger("kvrelay.api")


class Lane:
    """Rows of a batch for one model, in the order of the input. Owned by its run."""

    def __init__(self, batch: HeldBatch, path: Path, window: Window, done: set[int]) -> None:
        self.batch, self.window = batch, window
        self._path, self._done, self._shared = path, done, batch.shared
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
            while after is not None and not self.batch.stop.is_set():
                most = self._shared.ctx.settings.max_body_bytes
                page, after = await asyncio.to_thread(
                    next_page, self._path, most, after, self._models, self._done
                )
                for place in page:
                    has_begun = asyncio.Event()
                    task = asyncio.create_task(self._run_row(place, has_begun))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    await has_begun.wait()
                    if self.batch.stop.is_set():
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
                        await self.batch.pause(wait_s)
                    finally:
                        self.window.num_refused -= 1
                        self.window.fill()
        finally:
            has_begun.set()

    async def _tried(self, tries: Tries, has_begun: asyncio.Event) -> float:
        """Sends the row once, when it may run. Returns for how long it waits then."""
        batch, window, num_bytes = self.batch, self.window, tries.place.num_bytes
        has_place = False
        try:
            with self._shared.budget.share() as take:
                large = num_bytes if num_bytes > SMALL_BODY_BYTES else 0
                is_over = batch.stop.is_set
                waiter = Waiter(lambda: batch.is_due, is_over, take, large, tries.is_again)
                has_place = await window.place(waiter)
                if not has_place:
                    tries.is_over = True
                    return 0.0
                has_begun.set()
                return await tries.send(self._path)
        finally:
            if has_place:  # whoever gets it needs the bytes too
                window.leave()

    async def put(self, result: Result) -> None:
        """Writes it, as often as needed. While that does not work the row has its place, so no
        more answers wait in memory than rows may run."""
        batch, store = self.batch, self._shared.store
        put = partial(asyncio.to_thread, store.put_results, batch.name, [result])
        while not await batch.tried(put, batch.stop.is_set):
            if batch.stop.is_set():
                batch.no_room_for.add(result.row)
                return
        self._count(1)
        outcome = "failed" if result.is_error else "completed"
        self._shared.metrics.rows.labels(outcome).inc()


class Tries:
    """A row, from its first try to its result. Owned by its lane."""

    def __init__(self, lane: Lane, place: Place) -> None:
        self.place, self.is_over, self.is_again = place, False, False
        self._lane, self._batch = lane, lane.batch
        self._shared = lane.batch.shared
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
            created = self._batch.record["in_progress_at"]
            result = result_of(number, self._custom_id, self._request_id, answer, created)
        except Exception:
            _log.exception("line %d of %s fails", number, self._batch.name)
            message = "The server failed at this request: its log says why"
            result = unsent(number, self._custom_id, self._batch.name, "internal_error", message)
        return await self._end_with(result)

    async def _end_with(self, result: Result) -> float:
        self.is_over = True
        await self._lane.put(result)
        return 0.0

    def _read(self, path: Path) -> Row | Result:
        """The row; or, where it is none any more, a result that says so."""
        number, most = self.place.row, self._shared.ctx.settings.max_body_bytes
        line = read_line(path, self.place)
        try:
            if len(line) > most + 1:
                self._custom_id = custom_id_of(line)
                code, message = "request_too_large", f"The line has more than {most} bytes"
                return unsent(number, self._custom_id, self._batch.name, code, message)
            row = read_row(line)
        except ValueError as error:
            self._custom_id = custom_id_of(line)
            code = "invalid_json_line"
            return unsent(number, self._custom_id, self._batch.name, code, str(error))
        self._custom_id = row.custom_id
        self._request_id = row_id(self._batch.name, row.custom_id)
        return row

    async def _ask(self, row: Row) -> Answer | None:
        """None where it was stopped."""
        batch = self._batch
        tenant = batch.tenant
        if tenant is None:
            message = "The API key of this batch is not one of this server's any more"
            code = "tenant_unknown"
            await self._end_with(unsent(self.place.row, self._custom_id, batch.name, code, message))
            return None
        again = f".{secrets.token_hex(4)}" if self.is_again else ""
        sent_as = f"{self._request_id}{batch.suffix}{again}"
        endpoint, sent = self._shared.endpoints[row.url], Sent(self._shared.clock(), batch.is_due)
        call = Call(self._request_id, sent_as, batch_tenant(tenant, batch.is_due), batch.left_s)
        batch.sent.add(sent)
        if batch.stop.is_set():
            sent.stop.set()
        try:
            answer = await ask(endpoint, row, call, sent.stop)
        finally:
            batch.sent.discard(sent)
        self.is_again = True
        if answer.status == 0:
            self.is_over = not sent.is_again or batch.stop.is_set()
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
