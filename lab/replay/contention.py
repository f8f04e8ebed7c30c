"""Forward passes of workers that share the cores of one machine: each slows the other role's down.

Life of a pass: begun with the seconds that it takes alone; while a worker of the other role has a
pass too, it runs at 1 / slowdown of its speed; ended by its worker. After each change the runtime
asks when the passes will end now.

Equal passes do not take equally long: interruptions come at random, so the relative spread of a
pass is the smaller the longer it takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, sqrt
from random import Random

from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.lab.timing.timing import Overheads

SPREAD_S = 0.01  # a pass of this length is spread by Overheads.spread


@dataclass(slots=True)
class _Pass:
    role: Role
    has_prompts: bool
    left_s: float  # if it were alone from now on


@dataclass(slots=True)
class Contention:
    """The passes under way on one machine. Owned by who replays.

    Invariant: at most one pass a worker, and `left_s` of each is true at `_now`."""

    overheads: Overheads
    _now: float = 0.0
    _passes: dict[NodeId, _Pass] = field(default_factory=dict)
    _random: Random = field(default_factory=lambda: Random(0))

    def begin(
        self, now: float, worker: NodeId, role: Role, has_prompts: bool, seconds: float
    ) -> None:
        assert worker not in self._passes, f"{worker} has a pass already"
        self._advance(now)
        self._passes[worker] = _Pass(role, has_prompts, seconds * self._luck(seconds))

    def end(self, now: float, worker: NodeId) -> None:
        """The pass of `worker` is over, or its worker is gone."""
        self._advance(now)
        del self._passes[worker]

    def ends(self) -> dict[NodeId, float]:
        """When each pass will end if no other begins or ends before."""
        return {
            worker: self._now + each.left_s * self._slowdown(each)
            for worker, each in self._passes.items()
        }

    def _advance(self, now: float) -> None:
        elapsed_s, self._now = now - self._now, now
        for each in self._passes.values():
            each.left_s = max(0.0, each.left_s - elapsed_s / self._slowdown(each))

    def _luck(self, seconds: float) -> float:
        """Draws a factor that is 1 in the median."""
        spread = self.overheads.spread
        if not spread:
            return 1.0
        return exp(spread * sqrt(min(1.0, SPREAD_S / seconds)) * self._random.gauss())

    def _slowdown(self, one: _Pass) -> float:
        """How much a pass is slowed by those that are under way. Alone, what it computes is what
        counts: a prompt takes as long on a decode worker."""
        costs = self.overheads
        if all(each.role is one.role for each in self._passes.values()):
            return costs.prefill_alone_slowdown if one.has_prompts else costs.decode_alone_slowdown
        return costs.prefill_slowdown if one.role is Role.PREFILL else costs.decode_slowdown
