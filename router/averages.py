"""Moving averages of a router: means, ratios and rates in which what is old counts for less.

The clock is the caller's. A clock that stands still while there is nothing to measure keeps a rate
from falling in that time.
"""

from __future__ import annotations

from math import exp

WINDOW_S = 10.0  # time constant of the rate at which the queue drains
SERVED_WINDOW_S = 3.0  # and of what is served at any time, which grows as load comes
BEST_FADES_S = 60.0  # time constant with which the best rate is forgotten
WAITS_FADE_S = 60.0  # and with which it is that requests waited
KNOWN_AFTER_S = 1.0  # measured; before that a rate is not known
STALL_S = 5.0  # so long without any work done, and clocks stand still: workers may be down
SURE_AFTER = 2.0  # requests like those that are served now, done in the last minutes
OUTAGE_S = 30.0  # so long, and what was served meanwhile says nothing of how long serving takes
SMOOTHING = 0.05  # weight of the latest value


class Average:
    """Exponential moving average, by count."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        """`value`: what it is before the first."""
        self.value = value

    def add(self, value: float) -> None:
        self.value += SMOOTHING * (value - self.value)


class Share:
    """The share of about the last `count` cases in which something was so; at first, of all."""

    __slots__ = ("_count", "_num_cases", "_num_hits")

    def __init__(self, count: int, num_cases: float) -> None:
        """`num_cases`: the weight of what is assumed before the first case."""
        self._count = count
        self._num_hits = self._num_cases = num_cases

    def add(self, is_hit: bool) -> None:
        self._num_hits += is_hit - self._num_hits / self._count
        self._num_cases += 1 - self._num_cases / self._count

    @property
    def value(self) -> float:
        """It is never 0, so that it may divide."""
        return max(1.0, self._num_hits) / self._num_cases


class Meter:
    """Units per second over a window that forgets exponentially."""

    __slots__ = ("_at", "_sum", "_window_s")

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._sum = self._at = 0.0

    def add(self, clock: float, units: float) -> None:
        self._sum = self._sum * exp((self._at - clock) / self._window_s) + units
        self._at = clock

    def lately(self, clock: float) -> float:
        """Units in about the last window."""
        return self._sum * exp((self._at - clock) / self._window_s)

    def rate(self, clock: float) -> float:
        """The rate of a meter that has run since clock 0."""
        if clock <= 0:
            return 0.0
        return self.lately(clock) / (self._window_s * (1.0 - exp(-clock / self._window_s)))


class DrainRate:
    """How much work is done: while requests wait, which is how fast the queue drains, and while
    any are served. Each clock stands still while there is nothing to measure, and both do while no
    worker gets anything done.

    How fast requests of each priority come is measured by time as it passes, as if none had come
    before the first: a few that come at once, and wait for a second, come at no rate.

    Work is counted when it is done: while many long prompts are computed, none is done for long,
    and what a few requests took before says little of what workers can do. Until requests have
    waited for WINDOW_S, the rate is at least what workers say they compute of prompts.

    A rate is sure once the work of two whole requests was done while it was measured: until then it
    may be that of the few tokens that came before the first long prompt was computed."""

    def __init__(self) -> None:
        self.workers_per_s = 0.0  # prompt tokens; 0: not known
        self._recently_waiting_s = 0.0
        self._waiting_s = self._serving_s = 0.0
        self._drained, self._served = Meter(), Meter(SERVED_WINDOW_S)
        self._done, self._done_at = 0.0, 0.0  # in the last minutes
        self._capacity, self._best, self._best_at = Meter(), 0.0, 0.0
        self._joined: dict[int, Meter] = {}
        self._is_waiting = self._is_serving = False
        self._at = self._worked_at = 0.0  # work that began or was done
        self._outage_until = float("-inf")

    def update(self, now: float, *, waits: bool, serves: bool) -> None:
        """From `now` on requests wait, or none does; some are served, or none is."""
        elapsed_s = max(0.0, min(now, self._worked_at + STALL_S) - self._at)
        self._recently_waiting_s *= exp(min(0.0, self._at - now) / WAITS_FADE_S)
        if self._is_waiting:
            self._waiting_s += elapsed_s
            self._recently_waiting_s += elapsed_s
        if self._is_serving:
            self._serving_s += elapsed_s
        if not (self._is_waiting or self._is_serving):
            self._worked_at = now
        self._at, self._is_waiting, self._is_serving = now, waits, serves

    def on_work(self, units: float) -> None:
        """So much work is done, at the time of the last update."""
        if self._at - self._worked_at >= OUTAGE_S:
            self._outage_until = self._at
        self._worked_at = self._at
        self._done, self._done_at = self._lately_done() + units, self._serving_s
        self._served.add(self._serving_s, units)
        self._capacity.add(self._serving_s, units)
        rate = self._capacity.rate(self._serving_s) if self._serving_s >= WINDOW_S else 0.0
        self._best, self._best_at = max(rate, self._faded_best()), self._serving_s
        if self._is_waiting:
            self._drained.add(self._waiting_s, units)

    def is_sure(self, units: float) -> bool:
        """Whether enough was done to judge requests of so many units by the rates."""
        return self._lately_done() >= SURE_AFTER * units

    def _lately_done(self) -> float:
        return self._done * exp((self._done_at - self._serving_s) / BEST_FADES_S)

    def was_out(self, since: float) -> bool:
        """Whether for long no work was done, at some time after `since`."""
        return self._at - self._worked_at >= OUTAGE_S or self._outage_until > since

    def on_queued(self, priority: int, units: float) -> None:
        self._joined.setdefault(priority, Meter()).add(self._at, units)

    @property
    def units_per_s(self) -> float | None:
        """How fast the queue drains, or as long as none has, what is served; None: not known
        yet."""
        if self.workers_per_s and self._recently_waiting_s < WINDOW_S:
            return self.can_serve_per_s
        return _known(self._drained, self._waiting_s) or _known(self._served, self._serving_s)

    @property
    def can_serve_per_s(self) -> float | None:
        """The highest of the two, of what was served in the last minutes, and of what workers say;
        None: not known yet."""
        served = _known(self._served, self._serving_s) or 0.0
        drained = _known(self._drained, self._waiting_s) or 0.0
        return max(served, drained, self._faded_best(), self.workers_per_s) or None

    def _faded_best(self) -> float:
        return self._best * exp((self._best_at - self._serving_s) / BEST_FADES_S)

    def joining_above(self, priority: int) -> float:
        """Units per second of requests that go before this priority."""
        above = [meter for number, meter in self._joined.items() if number < priority]
        return sum(meter.lately(self._at) for meter in above) / WINDOW_S


def _known(meter: Meter, clock_s: float) -> float | None:
    rate = meter.rate(clock_s)
    return rate if clock_s >= KNOWN_AFTER_S and rate > 0 else None
