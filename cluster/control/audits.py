"""Audits for whoever waits for one: what all workers hold, as plain data.

Nothing is leaked if the sums of blocks come out even, no worker was silent and, unless requests are
live, no worker and no router holds on to anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kvrelay.engine.kv.tier import LOWER_TIERS
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Audit

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


def audit_dict(
    audits: Mapping[NodeId, Audit | None], num_live: int, router_left: Sequence[str]
) -> dict[str, Any]:
    """What `/audit` answers. `audits`: of the workers; None: it did not answer. `left` is only to
    be empty while `num_live` is 0; `wrong` always."""
    left = list(router_left)
    wrong = [f"{worker} did not answer" for worker, audit in audits.items() if audit is None]
    workers = []
    for audit in filter(None, audits.values()):
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
