"""Limits at certain times: "mon-fri 08:00-18:00 4-12", in UTC."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
        """`wall_s`: seconds since 1970."""
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
