"""Audits for whoever waits for one: a coroutine asks, and gets what all workers hold as plain data.

Nothing is leaked if the sums of blocks come out even, no worker was silent and, unless requests are
live, no worker and no router holds on to anything.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from cluster.control.auditor import AuditAll, Auditor, AuditReport
from cluster.runtime.host import NodeHost
from engine.kv.tier import LOWER_TIERS
from engine.node import Effect, NodeId

TIMEOUT_S = 5.0
"""A worker answers between two messages; one that does not in this time hangs."""

PAUSES = 4.0  # after an audit, so many times as long as it has taken, within
MIN_PAUSE_S = 0.2
MAX_PAUSE_S = 5.0


class SharedAudit:
    """Audits for several askers at once. To audit is to look at every block of every worker, while
    it computes nothing: those who ask together share one, and audits take a bounded part of the
    time. Nobody is told what was found before it was asked. Used on one loop."""

    def __init__(self, audit: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._audit = audit
        self._next: asyncio.Task[dict[str, Any]] | None = None  # has not begun
        self._running = asyncio.Lock()
        self._not_before = 0.0  # loop time

    async def ask(self) -> dict[str, Any]:
        """Raises what the audit does."""
        if self._next is None:
            self._next = asyncio.create_task(self._run())
        return await asyncio.shield(self._next)

    async def _run(self) -> dict[str, Any]:
        clock = asyncio.get_running_loop().time
        async with self._running:
            await asyncio.sleep(self._not_before - clock())
            self._next = None
            began = clock()
            try:
                return await self._audit()
            finally:
                took_s = clock() - began
                self._not_before = clock() + min(max(MIN_PAUSE_S, PAUSES * took_s), MAX_PAUSE_S)


class AuditDesk:
    """Hosts an auditor and performs its effects. Used on the loop of `host` only.

    Invariant: a future is in `_waiting` until its report has come."""

    def __init__(self, host: NodeHost, auditor: Auditor) -> None:
        self._host = host
        self._auditor = auditor.node_id
        self._ids = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[AuditReport]] = {}
        host.add(auditor, self)

    async def ask(self, workers: Sequence[NodeId], timeout_s: float = TIMEOUT_S) -> AuditReport:
        """Raises TimeoutError if the auditor itself does not answer."""
        audit_id = f"audit-{next(self._ids)}"
        future: asyncio.Future[AuditReport] = self._host.loop.create_future()
        self._waiting[audit_id] = future
        self._host.deliver(self._auditor, AuditAll(audit_id, tuple(workers), timeout_s))
        try:
            async with asyncio.timeout(timeout_s + TIMEOUT_S):
                return await future
        finally:
            del self._waiting[audit_id]

    def perform(self, effect: Effect) -> None:
        assert isinstance(effect, AuditReport), effect
        future = self._waiting.get(effect.audit_id)
        if future is not None and not future.done():
            future.set_result(effect)

    def close(self) -> None:
        """Those who still wait get nothing more."""
        for future in list(self._waiting.values()):
            self._host.loop.call_soon_threadsafe(future.cancel)


def audit_dict(report: AuditReport, num_live: int, router_left: Sequence[str]) -> dict[str, Any]:
    """What `/audit` answers. `left` is only to be empty while `num_live` is 0; `wrong` always."""
    left = list(router_left)
    wrong = [f"{worker} did not answer" for worker in report.silent]
    workers = []
    for audit in report.audits:
        left += [f"{audit.worker}: {line}" for line in audit.left]
        wrong += [f"{audit.worker}: {line}" for line in (*audit.wrong, *uneven(audit.counts))]
        counts = dict(audit.counts)
        workers.append({"worker": audit.worker, "epoch": audit.epoch, "counts": counts})
    clean = not wrong and (num_live > 0 or not left)
    return {"clean": clean, "live": num_live, "left": left, "wrong": wrong, "workers": workers}


def uneven(counts: Mapping[str, int]) -> list[str]:
    """Sums of blocks that do not come out even."""
    lines = []
    parts = [counts.get(f"device.{part}", 0) for part in ("in_use", "evictable", "blank")]
    whole = counts.get("device.blocks", 0)
    if sum(parts) != whole:
        in_use, evictable, blank = parts
        lines.append(
            f"device blocks do not add up: {in_use} in use + {evictable} evictable"
            f" + {blank} blank, of {whole}"
        )
    for tier in LOWER_TIERS:
        blocks, used, pinned = (
            counts.get(f"{tier}.{part}", 0) for part in ("blocks", "used", "pinned")
        )
        if not (0 <= used <= blocks and 0 <= pinned <= blocks):
            lines.append(f"{tier} blocks do not add up: {pinned} pinned, {used} used, of {blocks}")
    return lines
