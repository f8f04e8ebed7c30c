"""The autoscaler: a snapshot in, a decision out, carried out by a connector, and kept.

Life of a tick: the snapshot is observed, the planner decides, the connector is told, and a line for
the log is made. Whoever owns the scaler brings the snapshot and writes the line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvrelay.cluster.scaling.connector import Connector
from kvrelay.cluster.scaling.decisions import Decision, Line
from kvrelay.cluster.scaling.observations import Observer, Snapshot
from kvrelay.cluster.scaling.planner import Planner
from kvrelay.router.scaling_config import ScalingConfig

MAX_KEPT = 512


class Scaler:
    """Owned by whoever has the fleet: a controller, or the simulator."""

    def __init__(self, config: ScalingConfig, connector: Connector | None = None) -> None:
        """`connector`: None to decide only."""
        self.config = config
        self._observer = Observer(config)
        self._planner = Planner(config)
        self._connector = connector
        self.decisions: deque[Decision] = deque(maxlen=MAX_KEPT)  # the last ones, oldest first

    def begin(self) -> Line:
        """The first line of a log."""
        return Line(settings=self.config)

    def tick(self, snapshot: Snapshot) -> Line:
        """Decide, and let the connector do it. The line for the log has the decision."""
        decision = self._planner.plan(snapshot, self._observer.observe(snapshot))
        self.decisions.append(decision)
        if self._connector is not None:
            for worker, role in decision.flips:
                self._connector.flip(worker, role)
            for worker in decision.drains:
                self._connector.drain(worker)
            for role in decision.starts:
                self._connector.start(role)
        return Line(snapshot=snapshot, decision=decision)

    @property
    def why(self) -> str:
        """Of the last decision, for `kvrelay status`."""
        return self.decisions[-1].text if self.decisions else "not scaling: nothing was seen yet"


def replay_log(lines: Iterable[Line]) -> list[tuple[Decision, Decision]]:
    """The decisions of a log, each beside the one that is made from its snapshots now. Lines before
    the first settings do not count."""
    scaler: Scaler | None = None
    pairs = []
    for line in lines:
        if line.settings is not None:
            scaler = Scaler(line.settings)
        elif scaler is not None and line.snapshot is not None and line.decision is not None:
            again = scaler.tick(line.snapshot).decision
            assert again is not None
            pairs.append((line.decision, again))
    return pairs
