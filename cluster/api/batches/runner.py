"""Runs batches while the cluster has time for them.

It owns nothing: what is to be done is in the store, and a batch is another process's as soon as
this one does not renew its lease. Batches that are to be checked, or to end, are claimed whatever
runs; those with rows to send side by side, some of each tenant. When rows begin is said by
`windows`: while nobody else waits, unless their batch is due.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from kvrelay.cluster.api.batches.batch_run import BatchRun
from kvrelay.cluster.api.batches.due import is_due
from kvrelay.cluster.api.batches.held import HeldBatch, Shared
from kvrelay.cluster.api.batches.metrics import BatchMetrics
from kvrelay.cluster.api.batches.store import Backlog
from kvrelay.cluster.api.batches.windows import Windows
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.limiter import ByteBudget, Turns

if TYPE_CHECKING:
    from kvrelay.cluster.api.context import AnyBatchStore

POLL_S = 1.0
LEASE_S = 20.0
SWEEP_S = 3600.0
COUNT_S = 10.0  # between two looks at all that waits
LOG_S = 60.0  # between two reports of what keeps batches from running
MAX_OF_TENANT = 16  # its batches whose rows run side by side
MAX_ASIDE = 4  # a tenant's batches that are being checked, or end
MAX_READ = 2  # files that are read at once, each another tenant's
STOP_TIMEOUT_S = 5.0
_NUM_ROWS = 4  # as long as lines may be, that may be in memory at once

_log = logging.getLogger("kvrelay.api")


class Runner:
    """Owned by the application. Lives in its loop."""

    def __init__(
        self,
        ctx: ApiContext,
        endpoints: Mapping[str, ASGIApp],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """endpoints: those that serve rows, by path."""
        self.ctx, self.clock, self.windows = ctx, clock, Windows(ctx)
        self.owner = secrets.token_hex(8)
        self.metrics = BatchMetrics(ctx.metrics.registry)
        self.shared = Shared(
            ctx,
            self.owner,
            endpoints,
            clock,
            self.windows,
            ByteBudget(_NUM_ROWS * ctx.settings.max_body_bytes),
            Turns(MAX_READ, MAX_OF_TENANT + MAX_ASIDE),
            self.metrics,
            self._keeps,
            self.wake,
        )
        self.stopping = asyncio.Event()
        self._wake = asyncio.Event()
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._looked_at = clock()
        self._claimed_at: dict[str, float] = {}  # a batch with rows, by tenant
        self.backlog = Backlog(0, (), ())
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
        if self._task:
            await _ended([self._task])
        try:
            await self._give_back()
        except (OSError, sqlite3.Error) as error:  # the leases end by themselves
            _log.warning("batches are not given back: %s", error)

    async def _give_back(self) -> None:
        """Whoever comes next runs what ran here; rows that were under way are sent again."""
        for run, _ in self._runs.values():
            run.give_up()
        self.windows.fill()
        await _ended([task for _, task in self._runs.values()])
        self._runs.clear()
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
        for name in [name for name, (_, task) in self._runs.items() if task.done()]:
            del self._runs[name]
        if self.ctx.operations.draining:
            if self._runs:
                await self._give_back()
        else:
            self._look(now)
            await self._renew(now)
            await self._claim(now)
        self.windows.fill()
        await self._count(now)
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_S
            await asyncio.to_thread(self.store.sweep, now)

    def _look(self, now: float) -> None:
        if self._runs:
            self.windows.look(self.ctx.operations.status(), max(0.0, now - self._looked_at))
        self._looked_at = now

    async def _renew(self, now: float) -> None:
        if not self._runs:
            return
        renew = partial(self.store.renew, self.owner, now, LEASE_S, list(self._runs))
        mine = await asyncio.to_thread(renew)
        for name, (run, _) in self._runs.items():
            run.look(mine.get(name), now)

    async def _claim(self, now: float) -> None:
        """Takes what nobody runs. Of each tenant one batch with rows a second, so that other
        processes find some."""
        since = now - POLL_S
        self._claimed_at = {name: at for name, at in self._claimed_at.items() if at > since}
        while not self.stopping.is_set():
            runs = [run for run, _ in self._runs.values()]
            with_rows = Counter(run.tenant_name for run in runs if run.has_rows)
            aside = Counter(run.tenant_name for run in runs if not run.has_rows)
            busy = [tenant for tenant, num in aside.items() if num >= MAX_ASIDE]
            full = {tenant for tenant, num in with_rows.items() if num >= MAX_OF_TENANT}
            full |= self._claimed_at.keys()
            claim = partial(self.store.claim, self.owner, now, LEASE_S, busy, full)
            found = await asyncio.to_thread(claim)
            if found is None:
                return
            if not runs:
                self.windows.look(self.ctx.operations.status(), 0.0)
            run = BatchRun(self.shared, *found)
            run.look(run.record, now)
            if run.record["status"] == "in_progress" and not run.is_over:
                run.has_rows = True
                self._claimed_at[run.tenant_name] = now
            self._runs[run.name] = run, asyncio.create_task(run.run())

    def _keeps(self, run: HeldBatch) -> bool:
        """Whether rows of a batch that has just been checked are sent from here. Where others of
        its tenant are, it waits for its turn, or for another process."""
        runs = (other for other, _ in self._runs.values() if other.tenant_name == run.tenant_name)
        run.has_rows = run.has_rows or not any(other.has_rows for other in runs)
        self.wake()  # another one may be checked
        return run.has_rows

    async def _count(self, now: float) -> None:
        if now >= self._next_count:
            self._next_count = now + COUNT_S
            self.backlog = await asyncio.to_thread(self.store.backlog)
        near = [ends_at for ends_at in self.backlog.ends_at if is_due(ends_at - now, 0.0)]
        runs = (run for run, _ in self._runs.values() if run.is_due)
        early = [run for run in runs if not is_due(run.left_s, 0.0)]
        self.metrics.show(now, self.backlog, len(near) + len(early))


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    """Waits for them; what takes too long is cancelled."""
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
        for task in late:
            task.cancel()
