"""A tenant's requests of one priority, and those of all tenants of one priority, in a router's
queue."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any

from kvrelay.engine.waiting import MAX_PASSED, Passes
from kvrelay.router.messages import TenantShare


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A live request is here from `push` to `settle`."""

    record: Any  # its RequestRecord
    units: float  # estimated service
    needs: int  # tokens that memory is wanted for; more if cached KV has gone since
    level: Level
    flow: Flow
    sent_at: float | None = None  # its first attempt; None: it was never sent, or came back
    is_charged: bool = False
    is_served: bool = False  # it has an attempt
    units_left: float = 0.0  # while it is served
    passes: Passes = field(default_factory=Passes)  # while no worker has room for it
    is_late: bool = False

    @property
    def is_low(self) -> bool:
        return self.flow.is_low


@dataclass(slots=True, eq=False)
class Flow:
    """A tenant's requests of one priority. Invariant: `units` is the sum over those that wait."""

    tenant: str
    share: TenantShare
    is_low: bool = False  # its class of service is
    floor: float = 0.0  # virtual time when it began to wait
    finish: float = 0.0  # virtual finish of the last request that was charged
    on_time: OrderedDict[str, QueueEntry] = field(default_factory=OrderedDict)
    late: OrderedDict[str, QueueEntry] = field(default_factory=OrderedDict)
    by_size: list[tuple[float, int, QueueEntry]] = field(
        default_factory=list
    )  # a heap, longest first
    on_time_units: float = 0.0
    num_before_late: int = 0  # sent while late ones waited, since the last of those
    units: float = 0.0
    passed_by: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_PASSED))
    """Arrivals of those that were sent last before one of it that had to wait, and when."""
    least_needs: list[float] = field(default_factory=lambda: [inf, inf])
    """None of those that are on time needs less, and none of those that are late."""

    def __len__(self) -> int:
        return len(self.on_time) + len(self.late)

    @property
    def start(self) -> float:
        """Virtual start of its next request."""
        return max(self.floor, self.finish)

    @property
    def newest(self) -> Any:
        return next(reversed((self.late or self.on_time).values())).record

    @property
    def longest(self) -> QueueEntry | None:
        """The one with most work among those that are on time."""
        while self.by_size:
            entry = self.by_size[0][2]
            if entry.record.request_id in self.on_time:
                return entry
            heappop(self.by_size)
        return None

    def add(self, entry: QueueEntry) -> None:
        """To the end of those that are on time."""
        self.on_time[entry.record.request_id] = entry
        self.least_needs[False] = min(self.least_needs[False], entry.needs)
        heappush(self.by_size, (-entry.units, entry.record.arrival, entry))
        self.on_time_units += entry.units
        self.units += entry.units

    def put_late(self, entry: QueueEntry) -> None:
        if self._leave(entry):
            entry.is_late = True
            self.late[entry.record.request_id] = entry
            self.least_needs[True] = min(self.least_needs[True], entry.needs)

    def remove(self, entry: QueueEntry) -> bool:
        """Returns whether it was waiting here."""
        if entry.is_late:
            found = self.late.pop(entry.record.request_id, None) is not None
        else:
            found = self._leave(entry)
        if found:
            self.num_before_late = 0 if entry.is_late else self.num_before_late + bool(self.late)
            self.units = self.units - entry.units if self else 0.0
        return found

    def _leave(self, entry: QueueEntry) -> bool:
        if self.on_time.pop(entry.record.request_id, None) is None:
            return False
        self.on_time_units = self.on_time_units - entry.units if self.on_time else 0.0
        if not self.on_time:
            self.by_size.clear()
        return True

    def head(
        self, skip: Container[str], late_share: float, less_than: float = inf
    ) -> QueueEntry | None:
        """Returns the one that goes next, of those that need memory for fewer tokens."""
        first, second = False, True
        if self.num_before_late * late_share >= 1:
            first, second = True, False
        return self._first(skip, less_than, first) or self._first(skip, less_than, second)

    def _first(self, skip: Container[str], less_than: float, is_late: bool) -> QueueEntry | None:
        part = self.late if is_late else self.on_time
        if less_than == inf:
            return next((entry for name, entry in part.items() if name not in skip), None)
        if less_than <= self.least_needs[is_late]:  # so that not every message looks at all
            return None
        fitting = (e for name, e in part.items() if e.needs < less_than and name not in skip)
        found = next(fitting, None)
        if found is None:
            self.least_needs[is_late] = min((e.needs for e in part.values()), default=inf)
        return found


@dataclass(slots=True, eq=False)
class Level:
    """A priority. Invariant: it is in the queue's `_levels` while anything of it waits."""

    priority: int
    flows: dict[str, Flow] = field(default_factory=dict)
    returned: list[tuple[int, QueueEntry]] = field(default_factory=list)  # by arrival
    virtual: float = 0.0  # start of the last request that was charged
    credit: float = 0.0  # service owed to it while higher priorities are served
    units: float = 0.0  # sum over all that waits
    num_new: int = 0  # that were never served

    def __bool__(self) -> bool:
        return bool(self.num_new or self.returned)
