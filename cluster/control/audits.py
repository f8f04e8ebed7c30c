"""Audits: a router asks all workers and routers what they hold.

Nothing is leaked if the sums of blocks come out even, no worker was silent and, unless requests are
live, no worker and no router holds on to anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvrelay.engine.kv.tier import LOWER_TIERS
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Audit, AuditRequest

PAUSES = 4.0  # after an audit, so many times as long as it has taken, within
MIN_PAUSE_S = 0.2
MAX_PAUSE_S = 5.0
ANSWER_TIMEOUT_S = 5.0
"""Workers and routers answer an audit between two messages; one that does not by then hangs."""


class AuditService:
    """Audits for several askers at once. To audit is to look at every block of every worker, while
    it computes nothing: those who ask together share one, and audits take a bounded part of the
    time. Nobody gets what was found before they asked. Owned by a router's process; on its loop."""

    def __init__(
        self,
        router: NodeId,
        up: Callable[[], tuple[list[NodeId], list[NodeId]]],
        own: Callable[[], Audit],
        send: Callable[[NodeId, AuditRequest], Any],
    ) -> None:
        """`up`: workers and routers that are; `own`: what `router` itself holds."""
        self._router = router
        self._up = up
        self._own = own
        self._send = send
        self._asked: dict[NodeId, asyncio.Future[Audit]] = {}  # by the audit that runs
        self._next: asyncio.Task[dict[str, Any]] | None = None  # has not begun
        self._running = asyncio.Lock()
        self._not_before = 0.0  # loop time

    async def ask(self) -> dict[str, Any]:
        """What `/audit` answers; see `audit_dict`."""
        if self._next is None:
            self._next = asyncio.create_task(self._run())
        return await asyncio.shield(self._next)

    def receive(self, audit: Audit) -> None:
        """Take the answer of a worker or of another router."""
        asked = self._asked.get(audit.worker)
        if asked is not None and not asked.done():
            asked.set_result(audit)

    async def _run(self) -> dict[str, Any]:
        clock = asyncio.get_running_loop().time
        async with self._running:
            await asyncio.sleep(self._not_before - clock())
            self._next = None
            began = clock()
            try:
                return await self._look()
            finally:
                took_s = clock() - began
                self._not_before = clock() + min(max(MIN_PAUSE_S, PAUSES * took_s), MAX_PAUSE_S)

    async def _look(self) -> dict[str, Any]:
        """Ask all that are up, and wait for their answers; None: it did not answer in time."""
        workers, routers = self._up()
        loop = asyncio.get_running_loop()
        asked = {node: loop.create_future() for node in (*workers, *routers)}
        self._asked = asked
        for node in asked:
            if node == self._router:
                self.receive(self._own())
            else:
                self._send(node, AuditRequest(self._router))
        if asked:
            await asyncio.wait(asked.values(), timeout=ANSWER_TIMEOUT_S)
        found = {node: each.result() if each.done() else None for node, each in asked.items()}
        num_live, left = 0, list[str]()
        for router in routers:
            audit = found[router]
            num_live += 1 if audit is None else audit.counts["live"]  # it may serve one
            left += () if audit is None else audit.left
        return audit_dict({worker: found[worker] for worker in workers}, num_live, left)


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
    """Returns a line for each sum of blocks that does not come out even."""
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
