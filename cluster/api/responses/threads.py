"""Threads in which the store of responses is read and written, beside the event loop.

Tenants take turns, so one that asks for much waits behind its own calls, and neither it nor a slow
disk takes the threads that other work of the server runs in.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from kvrelay.cluster.api.errors import ApiError, overloaded
from kvrelay.cluster.api.limiter import LimitReached, Turns

NUM_READERS = 4  # threads; of one tenant one
MAX_WAITING = 512  # calls of one tenant
WAIT_S = 30.0  # for a turn
_log = logging.getLogger("kvrelay.responses")

P = ParamSpec("P")
T = TypeVar("T")


class StoreThreads:
    """Owned by the API's context. Invariant: reads never wait for writes."""

    def __init__(self) -> None:
        self._reads = _Line(NUM_READERS, "responses-read")
        self._writes = _Line(1, "responses-write")  # SQLite has one writer at a time

    async def read(self, call: Callable[P, T], *args: P.args, **kw: P.kwargs) -> T:
        """Raises `ApiError` (429, 503), and what `call` does."""
        return await self._reads.run(lambda: call(*args, **kw))

    async def write(self, call: Callable[P, T], *args: P.args, **kw: P.kwargs) -> T:
        """Raises `ApiError` (429, 503), and what `call` does."""
        return await self._writes.run(lambda: call(*args, **kw))

    def close(self) -> None:
        for line in (self._reads, self._writes):
            line.pool.shutdown(wait=False, cancel_futures=True)


class _Line:
    def __init__(self, num_threads: int, name: str) -> None:
        self.pool = ThreadPoolExecutor(num_threads, name)
        self._turns = Turns(num_threads, MAX_WAITING)

    async def run(self, call: Callable[[], T]) -> T:
        try:
            async with self._turns.turn(WAIT_S):
                return await asyncio.get_running_loop().run_in_executor(self.pool, call)
        except LimitReached as reached:
            message = "Calls about stored answers wait for those before them"
            raise overloaded(message, reached.retry_after_s) from None
        except sqlite3.Error as error:
            _log.exception("the store of responses")
            message = f"What is stored cannot be read or changed now: {error}"
            raise ApiError(503, message, type="server_error", code="store_failed") from None
