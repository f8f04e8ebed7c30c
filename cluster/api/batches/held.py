"""A batch in the process that has its lease, and what all batches of a process share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from starlette.types import ASGIApp

from kvrelay.cluster.api.batches.due import is_due
from kvrelay.cluster.api.batches.metrics import BatchMetrics
from kvrelay.cluster.api.batches.store import Record
from kvrelay.cluster.api.batches.windows import Window, Windows
from kvrelay.cluster.api.limiter import ByteBudget, Turns
from kvrelay.cluster.api.tenants import Tenant

if TYPE_CHECKING:
    from kvrelay.cluster.api.context import AnyBatchStore, ApiContext

DISK_RETRY_S = 10.0
LOG_S = 60.0  # between two reports of what keeps a batch from being written

_log = logging.getLogger("kvrelay.api")
T = TypeVar("T")


@dataclass(frozen=True)
class Shared:
    """Owned by the runner. `endpoints`: those that serve rows, by path. `turns`: to read a whole
    file. `keeps`: whether rows of a batch that has just been checked are sent from here. `wake`:
    there is something new to do."""

    ctx: ApiContext
    owner: str
    endpoints: Mapping[str, ASGIApp]
    clock: Callable[[], float]
    windows: Windows
    budget: ByteBudget
    turns: Turns
    metrics: BatchMetrics
    keeps: Callable[[HeldBatch], bool]
    wake: Callable[[], None]

    @property
    def store(self) -> AnyBatchStore:
        return self.ctx.batches


class Sent:
    """A row that is under way. `stop` ends it; `is_again`: it is to be sent anew."""

    def __init__(self, sent_at: float, is_due: bool) -> None:
        self.sent_at, self.is_due = sent_at, is_due
        self.stop, self.is_again = asyncio.Event(), False


class HeldBatch:
    """A batch whose lease this process has: what is known of it, and whether it goes on. Owned by
    the runner, as long as the lease is."""

    def __init__(self, shared: Shared, tenant_name: str, record: Record) -> None:
        self.tenant_name, self.record, self.name = tenant_name, record, record["id"]
        self.stop = asyncio.Event()  # no more rows; those that run are cancelled
        self.is_due = False
        self.has_rows = False  # to be sent, or under way
        self.windows: list[Window] = []  # in which it has rows
        self.is_lost = False  # another process runs it now
        self.shared = shared
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
        needed_s = max((window.needed_s for window in self.windows), default=0.0)
        if self.is_due != is_due(left_s, needed_s):
            self.is_due, self._due_since = not self.is_due, now
        if self.is_over:
            self._stop()
        if not self.is_due:
            return
        # What waits in the lowest class would not be among what the cluster grows for.
        longest_s = self.shared.ctx.settings.request_timeout_s
        for sent in self.sent:
            if not sent.is_due and now - max(sent.sent_at, self._due_since) >= longest_s:
                sent.is_again = True
                sent.stop.set()

    def give_up(self) -> None:
        """It is another process's, or nobody's."""
        self.is_lost = True
        self._stop()

    def _stop(self) -> None:
        self.stop.set()
        for sent in self.sent:
            sent.stop.set()

    @property
    def is_over(self) -> bool:
        """Whether it ends, however many rows have no result."""
        is_late = self.shared.clock() >= float(self.record["expires_at"])
        return is_late or self.record["status"] == "cancelling"

    @property
    def left_s(self) -> float:
        return float(self.record["expires_at"]) - self.shared.clock()

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
        """None: there is none of that name any more, or the key was revoked."""
        ctx = self.shared.ctx
        return ctx.keys.again(ctx.tenants.named(self.tenant_name), self.record.get("key", ""))
