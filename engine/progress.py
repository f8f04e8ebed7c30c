"""Whether a worker's steps make progress: each has a deadline, and failed checks are counted.

A step that is slow is not one that hangs: time counts from the last layer that it passed, where the
executor can tell. A machine whose cores are wanted by others may take minutes for what takes
seconds, and to compute that elsewhere, from its beginning, takes longer.

A step hangs where the device does, and every step fails after an error that the device does not
recover from. A process like that answers whatever it is asked, and serves nothing: it has to end,
so that another takes its place.
"""

from __future__ import annotations

from collections import deque
from math import inf

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.stats import Progress

SLACK = 20.0  # a step may take so many times as long as one like it should
FIRST_SLACK = 10.0  # for the floor, before steps were measured: they may compile
ASK_FROM = 0.25  # share of the time until it is late from which on its progress is asked
LATE = 1 / 3  # share of the deadline: other workers serve the requests better


class StepWatch:
    """Owned by a worker's core. Time counts as it passes here, tick by tick: that of a process that
    was stopped does not."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self.num_done = 0  # steps, since the start
        self._num_failed = 0  # in a row
        self._error = ""  # last one
        self._device_lost = False
        self._deadlines_s: deque[float] = deque()  # steps in flight, one after the other
        self._waited_s = 0.0  # for it, or for its next layer
        self._num_passed = 0  # layers, as was said last
        self._ticked_at = 0.0

    def begin(self, now: float, expected_s: float | None) -> None:
        """A step begins. `expected_s`: seconds that it should take; None: not known yet."""
        floor_s = self._config.step_timeout_s
        if not self._deadlines_s:
            self._waited_s, self._ticked_at = 0.0, now
        if floor_s == 0:
            self._deadlines_s.append(inf)
        elif expected_s is None:
            self._deadlines_s.append(FIRST_SLACK * floor_s)
        else:
            self._deadlines_s.append(max(floor_s, SLACK * expected_s))

    def end(
        self,
        now: float,
        error: str | None,
        *,
        is_health_check: bool = False,
        device_lost: bool = False,
    ) -> None:
        """The first of them has come back. `error`: why all of it failed. That counts against the
        worker only for a health check: any other may have failed by what a request brought.
        `device_lost`: all others will fail."""
        self.num_done += 1
        self._device_lost |= device_lost
        self._deadlines_s.popleft()
        self._waited_s, self._ticked_at = 0.0, now
        self._error = error or ""
        if error is None:
            self._num_failed = 0
        elif is_health_check:
            self._num_failed += 1

    @property
    def is_slow(self) -> bool:
        """A step has run for a while: how far it is decides what becomes of it."""
        return self._waited_s > ASK_FROM * LATE * self._deadline_s

    def on_progress(self, num_passed: int) -> None:
        """The executor has passed so many layers until now."""
        if num_passed != self._num_passed:
            self._num_passed, self._waited_s = num_passed, 0.0

    def tick(self, now: float) -> None:
        """Called about every `stats_interval_s` seconds."""
        self._waited_s += min(now - self._ticked_at, 2 * self._config.stats_interval_s)
        self._ticked_at = now

    @property
    def _deadline_s(self) -> float:
        """When the step that runs is due; infinite if there is none."""
        return self._deadlines_s[0] if self._deadlines_s else inf

    @property
    def progress(self) -> Progress:
        deadline_s = self._deadline_s
        if self._device_lost or self._num_failed >= self._config.max_failed_steps:
            return Progress.NONE
        if self._waited_s < LATE * deadline_s:
            return Progress.MADE
        return Progress.LATE if self._waited_s < deadline_s else Progress.NONE

    @property
    def hangs(self) -> bool:
        """The step that runs has no time left."""
        return self._waited_s >= self._deadline_s

    @property
    def why(self) -> str:
        """Why there is none; "" if there is."""
        if self.progress is not Progress.NONE:
            return ""
        if self.hangs:
            return f"a step has not ended after {self._waited_s:.0f} s"
        if self._device_lost:
            return f"its device is lost: {self._error}"
        return f"the last {self._num_failed} health checks failed: {self._error}"
