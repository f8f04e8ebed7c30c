"""Passes of workers that share the cores of one machine: each slows the other role's down.

Life of a pass: begun with the seconds that it takes alone; while a worker of the other role has a
pass too, it gets on at 1 / slowdown of its speed; ended by its worker. Whoever replays asks after
each change when the passes will end now.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.replay.timing import Overheads
from engine.node import NodeId
from engine.stats import Role


@dataclass(slots=True)
class _Pass:
    role: Role
    left_s: float  # of it, if it were alone from now on


@dataclass(slots=True)
class Contention:
    """The passes under way on one machine. Owned by who replays.

    Invariant: at most one pass a worker, and `left_s` of each is true at `_now`."""

    overheads: Overheads
    _now: float = 0.0
    _passes: dict[NodeId, _Pass] = field(default_factory=dict)

    def begin(self, now: float, worker: NodeId, role: Role, seconds: float) -> None:
        assert worker not in self._passes, f"{worker} has a pass already"
        self._advance(now)
        self._passes[worker] = _Pass(role, seconds)

    def end(self, now: float, worker: NodeId) -> None:
        """The pass of `worker` is over, or its worker is gone."""
        self._advance(now)
        del self._passes[worker]

    def ends(self) -> dict[NodeId, float]:
        """When each pass will end if no other begins or ends before."""
        return {
            worker: self._now + each.left_s * self._slowdown(each.role)
            for worker, each in self._passes.items()
        }

    def _advance(self, now: float) -> None:
        elapsed_s, self._now = now - self._now, now
        for each in self._passes.values():
            each.left_s = max(0.0, each.left_s - elapsed_s / self._slowdown(each.role))

    def _slowdown(self, role: Role) -> float:
        """Of a pass of `role` beside those that are under way."""
        overheads = self.overheads
        if all(each.role is role for each in self._passes.values()):
            return overheads.alone_slowdown
        return overheads.prefill_slowdown if role is Role.PREFILL else overheads.decode_slowdown
