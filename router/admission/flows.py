"""What waits at a router, by tenant and priority: the parts of `fair_queue`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from kvrelay.engine.waiting import Passes
from kvrelay.router.messages import TenantShare


@dataclass(slots=True, eq=False)
class Entry:
    """A live request, from `push` to `settle`."""

    record: Any  # its RequestRecord
    units: float  # of service, as estimated
    level: Level
    flow: Flow
    sent_at: float | None = None  # of its first attempt; None: it was never sent, or came back
    is_charged: bool = False
    is_served: bool = False  # it has an attempt
    units_left: float = 0.0  # while it is served
    passes: Passes = field(default_factory=Passes)  # while no worker has room for it
    is_late: bool = False


@dataclass(slots=True, eq=False)
class Flow:
    """A tenant's requests of one priority. Invariant: `units` is the sum over those that wait."""

    tenant: str
    share: TenantShare
    floor: float = 0.0  # virtual time when it began to wait
    finish: float = 0.0  # virtual finish of the last request that was charged
    on_time: OrderedDict[str, Entry] = field(default_factory=OrderedDict)
    late: OrderedDict[str, Entry] = field(default_factory=OrderedDict)
    by_size: list[tuple[float, int, Entry]] = field(default_factory=list)  # a heap, longest first
    on_time_units: float = 0.0
    num_before_late: int = 0  # sent while late ones waited, since the last of those
    units: float = 0.0

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
    def longest(self) -> Entry | None:
        """Of those that are on time."""
        while self.by_size:
            entry = self.by_size[0][2]
            if entry.record.request_id in self.on_time:
                return entry
            heappop(self.by_size)
        return None

    def add(self, entry: Entry) -> None:
        """To the end of those that are on time."""
        self.on_time[entry.record.request_id] = entry
        heappush(self.by_size, (-entry.units, entry.record.arrival, entry))
        self.on_time_units += entry.units
        self.units += entry.units

    def put_late(self, entry: Entry) -> None:
        if self._leave(entry):
            entry.is_late = True
            self.late[entry.record.request_id] = entry

    def remove(self, entry: Entry) -> bool:
        """Whether it was here."""
        if entry.is_late:
            found = self.late.pop(entry.record.request_id, None) is not None
        else:
            found = self._leave(entry)
        if found:
            self.num_before_late = 0 if entry.is_late else self.num_before_late + bool(self.late)
            self.units = self.units - entry.units if self else 0.0
        return found

    def _leave(self, entry: Entry) -> bool:
        if self.on_time.pop(entry.record.request_id, None) is None:
            return False
        self.on_time_units = self.on_time_units - entry.units if self.on_time else 0.0
        if not self.on_time:
            self.by_size.clear()
        return True

    def head(self, skip: Mapping[str, Entry], late_share: float) -> Entry | None:
        """What goes next."""
        parts = [self.on_time, self.late]
        if self.num_before_late * late_share >= 1:
            parts.reverse()
        return next((e for part in parts for name, e in part.items() if name not in skip), None)


@dataclass(slots=True, eq=False)
class Level:
    """A priority. Invariant: it is in the queue's `_levels` while anything of it waits."""

    priority: int
    flows: dict[str, Flow] = field(default_factory=dict)
    returned: list[tuple[int, Entry]] = field(default_factory=list)  # by arrival
    virtual: float = 0.0  # start of the last request that was charged
    credit: float = 0.0  # service owed to it while higher priorities are served
    units: float = 0.0  # of all that waits
    num_new: int = 0  # that were never served

    def __bool__(self) -> bool:
        return bool(self.num_new or self.returned)
