"""Settings of the autoscaler: targets, limits and waits, and limits at certain times. Read once, at
start. They lie below the cluster, whose configuration has them as a section.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from kvrelay.engine.settings import FixedFloat, FixedInt, Section, matching

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_S = 86_400
_FIRST_DAY = 3  # 1 January 1970 was a Thursday
_TEXT = re.compile(
    r"(?P<days>daily|[a-z]{3}(?:-[a-z]{3})?) "
    r"(?P<from>\d\d:\d\d)-(?P<to>\d\d:\d\d) (?P<least>\d{1,5})-(?P<most>\d{1,5})"
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """From `least` to `most` workers on `days` (0: Monday), in `[begins_s, ends_s)` of the day. One
    that ends before it begins lasts into the next day."""

    days: frozenset[int]
    begins_s: int
    ends_s: int
    least: int
    most: int

    def covers(self, wall_s: float) -> bool:
        """`wall_s`: it is in seconds since 1970."""
        day, second = divmod(int(wall_s), _DAY_S)
        today = (day + _FIRST_DAY) % 7
        if self.begins_s < self.ends_s:
            return today in self.days and self.begins_s <= second < self.ends_s
        if second >= self.begins_s:
            return today in self.days
        return second < self.ends_s and (today - 1) % 7 in self.days


def parse_schedule(text: str) -> Schedule:
    """Raises ValueError, with what would be right."""
    found = _TEXT.fullmatch(text.strip().lower())
    wanted = f'schedule {text!r}: write "mon-fri 08:00-18:00 4-12" or "daily 22:00-06:00 0-2"'
    if found is None:
        raise ValueError(wanted)
    first, _, last = found["days"].partition("-")
    if first == "daily":
        days = frozenset(range(7))
    elif first not in DAYS or (last and last not in DAYS):
        raise ValueError(wanted)
    else:
        begin, end = DAYS.index(first), DAYS.index(last or first)
        days = frozenset((begin + i) % 7 for i in range((end - begin) % 7 + 1))
    begins_s, ends_s = _seconds(found["from"]), _seconds(found["to"])
    least, most = int(found["least"]), int(found["most"])
    if begins_s is None or ends_s is None or begins_s == ends_s or most < max(1, least):
        raise ValueError(wanted)
    return Schedule(days, begins_s, ends_s, least, most)


def _seconds(clock: str) -> int | None:
    hours, minutes = map(int, clock.split(":"))
    seconds = hours * 3600 + minutes * 60
    return seconds if minutes < 60 and seconds <= _DAY_S else None


_MACHINE = matching(
    r"(\w+=\d+(\.\d+)?(,\w+=\d+(\.\d+)?)*)?", 'resources of Ray, as "GPU=8" or "CPU=16,big=1"'
)
Count = Annotated[int, Meta(ge=0, le=10_000)]
Wait = Annotated[float, Meta(ge=0.0)]


class ScalingConfig(Section, frozen=True):
    """Workers come and go with the traffic: docs/scaling.md. Raises ValueError for a schedule that
    cannot be read, and for limits that exclude each other."""

    enabled: bool = False  # false: as many workers as cluster.prefill and cluster.decode say
    min_workers: Count = 1  # in both roles together; 0: none while there are no requests
    max_workers: Annotated[int, Meta(ge=1, le=10_000)] = 8
    ttft_target_ms: Annotated[float, Meta(gt=0.0, le=600_000.0)] = 2000.0  # to the first token
    itl_target_ms: Annotated[float, Meta(gt=0.0, le=60_000.0)] = 50.0  # between tokens, in the mean
    # percent of requests that are to be within both targets
    percentile: Annotated[float, Meta(ge=1.0, le=99.9)] = 90.0
    start_s: Wait = 60.0  # that a worker takes to start, until starts were measured
    tick_s: Annotated[float, Meta(ge=0.1, le=60.0)] = 2.0  # between two decisions
    memory_s: Annotated[float, Meta(ge=10.0, le=86_400.0)] = 900.0  # how far back traffic counts
    hold_s: Wait = 300.0  # fewer workers have to be enough for this long before any goes
    max_reversals_per_hour: FixedInt = 10  # from more to fewer, and back
    idle_s: Wait = 300.0  # without a request, until there are min_workers
    stale_s: FixedFloat = 10.0  # measurements older than this change nothing
    warmup_s: Wait = 10.0  # after a worker's start, in which what it measures does not count
    pending_timeout_s: Annotated[float, Meta(ge=1.0)] = 60.0  # without a place, a start is given up
    budget_worker_hours: Wait = 0.0  # in the last hour, at most; 0: any number
    # machines are asked for, and without GPUs have room for so many; 0: they are as they are
    workers_per_machine: Count = 0
    # what Ray knows of such a machine, as "GPU=8" or "CPU=16,big=1"; "": as the largest there is
    machine: Annotated[str, _MACHINE] = ""
    log_mib: FixedFloat = 64.0  # decisions take, twice; 0: no log
    # limits at certain times (UTC), such as "mon-fri 08:00-18:00 4-12": from 4 to 12 workers
    schedules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"scaling min_workers is {self.min_workers}, above max_workers, {self.max_workers}"
            )
        for text in self.schedules:
            parse_schedule(text)

    @property
    def ttft_target_s(self) -> float:
        return self.ttft_target_ms / 1e3

    @property
    def itl_target_s(self) -> float:
        return self.itl_target_ms / 1e3

    def limits_of_schedules(self) -> list[int]:
        """The most workers of each."""
        return [parse_schedule(text).most for text in self.schedules]

    def limits(self, wall_s: float) -> tuple[int, int]:
        """Fewest and most workers at this time: `wall_s` in seconds since 1970. The first schedule
        that fits counts."""
        for text in self.schedules:
            schedule = parse_schedule(text)
            if schedule.covers(wall_s):
                return schedule.least, schedule.most
        return self.min_workers, self.max_workers
