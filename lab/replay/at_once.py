"""How many sessions at once a cluster serves within a target for the time to the first token.

A number is tried by a replay in which so many sessions run, the next one starting as one ends. It
passes if at most a tenth of all turns are late or refused, so a try ends as soon as that many are:
an overloaded cluster is not simulated to its end. Numbers double until one fails; then the gap
between the largest that passed and the smallest that failed is halved, down to an eighth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvrelay.lab.replay.config import ReplayConfig
from kvrelay.lab.replay.replay import OnProgress, Replay, ReplayResult
from kvrelay.lab.replay.trace import Trace

FIRST = 4  # sessions
LATE_SHARE = 0.1  # the target is for the 90th percentile
FINENESS = 8  # the number found is too small by at most one part in so many


class _TooManyLateError(Exception):
    """The try has failed, whatever else comes."""


@dataclass(frozen=True, slots=True)
class Try:
    """What came of `at_once` sessions at once. `result` None: it was ended early."""

    at_once: int
    late: int
    requests: int
    virtual_s: float
    result: ReplayResult | None

    @property
    def passed(self) -> bool:
        return self.late <= LATE_SHARE * self.requests


def most_at_once(
    trace: Trace,
    config: ReplayConfig,
    ttft_s: float,
    on_progress: Callable[[int], OnProgress] | None = None,
) -> list[Try]:
    """All tries, in their order. The largest that passed is the answer; if it is as many as the
    trace has sessions, more may do."""
    total = len({request.session for request in trace.requests})
    tries: list[Try] = []
    for number in _numbers(total, lambda: tries[-1].passed):
        at_once = replace(config, at_once=number)
        tell = on_progress(number) if on_progress is not None else None
        tries.append(_try(trace, at_once, ttft_s, tell))
    return tries


def _numbers(total: int, passed: Callable[[], bool]) -> Iterator[int]:
    """What to try next; `passed`: what came of the last one."""
    good, number = 0, min(FIRST, total)
    while True:
        yield number
        if not passed():
            break
        good = number
        if number == total:
            return
        number = min(2 * number, total)
    bad = number
    while bad - good > max(1, good // FINENESS):
        number = (good + bad) // 2
        yield number
        if passed():
            good = number
        else:
            bad = number


def _try(trace: Trace, config: ReplayConfig, ttft_s: float, tell: OnProgress | None) -> Try:
    run = Replay(trace, config)
    total, looked_at, late = len(trace.requests), 0, 0

    def on_progress(share: float, now: float) -> None:
        nonlocal looked_at, late
        ended = run.samples[looked_at:]
        looked_at += len(ended)
        late += sum(each.ttft_s is None or each.ttft_s > ttft_s for each in ended)
        if late + run.num_unasked > LATE_SHARE * total:
            raise _TooManyLateError
        if tell is not None:
            tell(share, now)

    result = None
    try:
        result = run.run(on_progress)
    except _TooManyLateError:
        pass
    return Try(config.at_once, late + run.num_unasked, total, run.runtime.now, result)
