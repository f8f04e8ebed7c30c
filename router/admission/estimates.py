"""What requests take, learned from those that were served: work, seconds, and how fast the queue
drains.

Work is counted in units: one for a prompt token that is computed, `OUTPUT_UNITS` for a token of
output. The queue drains as fast as the workers do work while requests wait: that is measured token
by token, so that it is known long before the first of many requests ends.
"""

from __future__ import annotations

from math import exp

from router.record import RequestRecord

OUTPUT_UNITS = 2.0  # an output token against one of a prompt, as in VTC (Sheng et al. 2024)
WINDOW_S = 10.0  # time constant of the rate at which the queue drains
SERVED_WINDOW_S = 3.0  # and of what is served at any time, which grows as load comes
KNOWN_AFTER_S = 1.0  # of measuring; before that a rate is not known
FIRST_OUTPUT = 128.0  # tokens, until requests have ended
SMOOTHING = 0.05


class Meter:
    """Units per second over a window that forgets exponentially. Its clock is the caller's."""

    __slots__ = ("_at", "_sum", "_window_s")

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._sum = self._at = 0.0

    def add(self, clock: float, units: float) -> None:
        self._sum = self._sum * exp((self._at - clock) / self._window_s) + units
        self._at = clock

    def rate(self, clock: float) -> float:
        """Of a meter that has run since clock 0."""
        if clock <= 0:
            return 0.0
        decayed = self._sum * exp((self._at - clock) / self._window_s)
        return decayed / (self._window_s * (1.0 - exp(-clock / self._window_s)))


class Clock:
    """Seconds for which something was going on."""

    __slots__ = ("_at", "_runs", "seconds")

    def __init__(self) -> None:
        self.seconds = self._at = 0.0
        self._runs = False

    def watch(self, now: float, runs: bool) -> None:
        """From now on it goes on, or does not."""
        if self._runs:
            self.seconds += now - self._at
        self._at, self._runs = now, runs


class Drain:
    """How much work is done: while requests wait, which is how fast the queue drains, and while
    any are served; and how fast requests of each priority join the queue. Each clock stands still
    while there is nothing to measure."""

    def __init__(self) -> None:
        self._waiting, self._serving = Clock(), Clock()
        self._drained, self._served = Meter(), Meter(SERVED_WINDOW_S)
        self._joined: dict[int, Meter] = {}
        self._is_waiting = False

    def watch(self, now: float, *, waits: bool, serves: bool) -> None:
        """From now on requests wait, or none does; some are served, or none is."""
        self._waiting.watch(now, waits)
        self._serving.watch(now, serves)
        self._is_waiting = waits

    def done(self, units: float) -> None:
        self._served.add(self._serving.seconds, units)
        if self._is_waiting:
            self._drained.add(self._waiting.seconds, units)

    def joined(self, priority: int, units: float) -> None:
        if self._is_waiting:
            self._joined.setdefault(priority, Meter()).add(self._waiting.seconds, units)

    @property
    def units_per_s(self) -> float | None:
        """Of the queue, or as long as none has drained, of what is served; None: not known yet."""
        return _known(self._drained, self._waiting) or _known(self._served, self._serving)

    @property
    def can_serve_per_s(self) -> float | None:
        """The most that is known of; None: nothing is yet."""
        served = _known(self._served, self._serving)
        drained = _known(self._drained, self._waiting)
        return max(served or 0.0, drained or 0.0) or None

    def joining_above(self, priority: int) -> float:
        """Units per second of requests that go before this priority."""
        above = [meter for number, meter in self._joined.items() if number < priority]
        return sum(meter.rate(self._waiting.seconds) for meter in above)


def _known(meter: Meter, clock: Clock) -> float | None:
    rate = meter.rate(clock.seconds)
    return rate if clock.seconds >= KNOWN_AFTER_S and rate > 0 else None


class Ratio:
    """Seconds per token over the last requests; long ones count for more."""

    __slots__ = ("_seconds", "_tokens")

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        self._seconds += seconds - SMOOTHING * self._seconds
        self._tokens += tokens - SMOOTHING * self._tokens

    @property
    def value(self) -> float:
        """0 before the first."""
        return self._seconds / self._tokens if self._tokens else 0.0


class Estimates:
    """Owned by the router's admission."""

    def __init__(self) -> None:
        self._output_tokens = FIRST_OUTPUT
        self._computed_share = 1.0  # of prompt tokens; the rest was cached
        self._prompt_s = Ratio()  # per prompt token, from dispatch to the first token of output
        self._output_s = Ratio()  # per token of output after the first

    def units(self, num_prompt: int, max_tokens: int) -> float:
        """What a request will take."""
        computed = max(1.0, num_prompt * self._computed_share)
        return computed + OUTPUT_UNITS * min(max_tokens, self._output_tokens)

    def service_s(self, num_prompt: int, max_tokens: int) -> float:
        """From its dispatch to its end; 0 as long as nothing is known."""
        output_s = min(max_tokens, self._output_tokens) * self._output_s.value
        return num_prompt * self._prompt_s.value + output_s

    def observe(self, now: float, log: RequestRecord, sent_at: float | None) -> None:
        """Learn from a request that was served to its end."""
        self._output_tokens += SMOOTHING * (log.num_output_tokens - self._output_tokens)
        if log.num_cached_tokens is not None:
            share = computed_tokens(log) / log.num_prompt_tokens
            self._computed_share += SMOOTHING * (share - self._computed_share)
        self.time(now, log, sent_at)

    def time(self, now: float, log: RequestRecord, sent_at: float | None) -> None:
        """Learn how long it took, as far as it came; None: it was sent more than once."""
        if sent_at is None:
            return
        first_at = now if log.first_token_at is None else log.first_token_at
        self._prompt_s.add(first_at - sent_at, log.num_prompt_tokens)
        if log.num_output_tokens > 1:
            self._output_s.add(now - first_at, log.num_output_tokens - 1)


def units_done(log: RequestRecord) -> float:
    """What `log` has taken up to now."""
    if log.first_token_at is None:
        return 0.0
    return computed_tokens(log) + OUTPUT_UNITS * log.num_output_tokens


def computed_tokens(log: RequestRecord) -> int:
    return log.num_prompt_tokens - (log.num_cached_tokens or 0)
