"""A tenant's requests of one priority, by caller, and those of all tenants of one priority, in a
router's queue."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Container, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple

from kvrelay.engine.waiting import MAX_PASSED, Passes
from kvrelay.router.admission.turns import Loads, Most, TurnOrder
from kvrelay.router.messages import TenantShare

MAX_IDLE = 256  # callers of whom nothing waits, and who had more than their share


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A live request is here from `push` to `settle`."""

    record: Any  # its RequestRecord
    units: float  # estimated service
    needs: int  # tokens that memory is wanted for; more if cached KV has gone since
    level: Level
    flow: Flow
    caller: Caller
    start: float = 0.0  # virtual, of its caller in its flow, when it was charged
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
class Caller:
    """One caller's requests in a flow, which owns it. It comes with the first of them, and has left
    once none waits and what it was sent for is made up for, which `MAX_IDLE` bounds. Invariant:
    `units` is the sum over those that wait, `on_time_units` over those of them that are on time."""

    tenant: str
    name: str  # "": it is not known who
    floor: float = 0.0  # virtual time of the flow when it began to wait
    finish: float = 0.0  # virtual finish of its last request that was charged
    units: float = 0.0
    on_time_units: float = 0.0
    on_time: OrderedDict[str, QueueEntry] = field(default_factory=OrderedDict)
    late: OrderedDict[str, QueueEntry] = field(default_factory=OrderedDict)
    by_size: list[tuple[float, int, QueueEntry]] = field(
        default_factory=list
    )  # a heap, longest first

    def __len__(self) -> int:
        return len(self.on_time) + len(self.late)

    @property
    def key(self) -> tuple[str, str]:
        return self.tenant, self.name

    @property
    def start(self) -> float:
        """Virtual start of its next request."""
        return max(self.floor, self.finish)

    @property
    def newest(self) -> QueueEntry:
        return next(reversed((self.late or self.on_time).values()))

    @property
    def longest(self) -> QueueEntry:
        """The one with most work among those that are on time, of which it has some."""
        while self.by_size[0][2].record.request_id not in self.on_time:
            heappop(self.by_size)
        return self.by_size[0][2]

    def part(self, is_late: bool) -> OrderedDict[str, QueueEntry]:
        return self.late if is_late else self.on_time

    def turn(self, is_late: bool) -> tuple[float, int] | None:
        """Its virtual start, and the arrival of its first request of that part; None: it has none
        there."""
        first = next(iter(self.part(is_late).values()), None)
        return None if first is None else (self.start, first.record.arrival)

    def add(self, entry: QueueEntry) -> None:
        """To the end of those that are on time."""
        self.on_time[entry.record.request_id] = entry
        heappush(self.by_size, (-entry.units, entry.record.arrival, entry))
        self.on_time_units += entry.units
        self.units += entry.units

    def put_late(self, entry: QueueEntry) -> bool:
        """False: it is not one of those that are on time."""
        if not self._leave(entry):
            return False
        self.late[entry.record.request_id] = entry
        return True

    def remove(self, entry: QueueEntry) -> bool:
        """Returns whether it was waiting here."""
        if entry.is_late:
            found = self.late.pop(entry.record.request_id, None) is not None
        else:
            found = self._leave(entry)
        if found:
            self.units = self.units - entry.units if self else 0.0
        return found

    def _leave(self, entry: QueueEntry) -> bool:
        if self.on_time.pop(entry.record.request_id, None) is None:
            return False
        self.on_time_units = self.on_time_units - entry.units if self.on_time else 0.0
        if not self.on_time:
            self.by_size.clear()
        return True


class Sent(NamedTuple):
    """One that was sent before another one that had to wait."""

    arrival: int
    flow: Flow
    caller: Caller
    start: float  # virtual, that its entry had
    at: float

    def has_passed(self, entry: QueueEntry) -> bool:
        """Whether it came later, and its turn did."""
        if self.arrival <= entry.record.arrival:
            return False
        is_other = self.flow is entry.flow and self.caller is not entry.caller
        return not is_other or self.start >= entry.caller.start


@dataclass(slots=True, eq=False)
class Flow:
    """A tenant's requests of one priority. Its callers share by work, as tenants do, with a virtual
    time of their own; within a caller the oldest goes first. Invariant: `units` is the sum over
    those that wait, and so are those of the callers."""

    tenant: str
    share: TenantShare
    is_low: bool = False  # its class of service is
    floor: float = 0.0  # virtual time when it began to wait
    finish: float = 0.0  # virtual finish of the last request that was charged
    virtual: float = 0.0  # among its callers: start of the last request that was charged
    callers: dict[str, Caller] = field(default_factory=dict)
    num_on_time: int = 0
    num_late: int = 0
    on_time_units: float = 0.0
    num_before_late: int = 0  # sent while late ones waited, since the last of those
    units: float = 0.0
    passed_by: deque[Sent] = field(default_factory=lambda: deque(maxlen=MAX_PASSED))
    """Those that were sent last before one of it that had to wait."""
    least_needs: list[float] = field(default_factory=lambda: [inf, inf])
    """None of those that are on time needs less, and none of those that are late."""
    _turns: tuple[TurnOrder[Caller], TurnOrder[Caller]] = field(
        default_factory=lambda: (TurnOrder(), TurnOrder())
    )
    """Of those that are on time, and of those that are late."""
    _idle: OrderedDict[str, Caller] = field(default_factory=OrderedDict)
    """Callers of which nothing waits, and what they had still counts."""
    _most_waiting: Most[Caller] = field(default_factory=Most)
    _most_on_time: Most[Caller] = field(default_factory=Most)  # units
    _loads: Loads = field(default_factory=Loads)

    def __len__(self) -> int:
        return self.num_on_time + self.num_late

    @property
    def start(self) -> float:
        """Virtual start of its next request."""
        return max(self.floor, self.finish)

    @property
    def newest(self) -> Any:
        """The newest one of the caller that has most waiting."""
        caller = self._most_waiting.top()
        assert caller is not None, f"nothing of {self.tenant!r} waits"
        return caller.newest.record

    @property
    def longest(self) -> QueueEntry | None:
        """The one with most work among those that are on time, of the caller with most of that."""
        caller = self._most_on_time.top()
        return None if caller is None else caller.longest

    def entries(self) -> Iterator[QueueEntry]:
        for caller in list(self.callers.values()):
            yield from (*caller.on_time.values(), *caller.late.values())

    def caller(self, name: str) -> Caller:
        """The one of that name, who may be new."""
        found = self.callers.get(name)
        if found is None:
            found = self.callers[name] = Caller(self.tenant, name)
        return found

    def ahead(self, name: str, own_units: float, num_own: int) -> tuple[float, int]:
        """What goes before a request of that caller behind so much of its own, about: its work, and
        how many they are. Of each other caller that is at most as much, and one more request."""
        caller = self.callers.get(name)
        if not len(self):
            return own_units, num_own
        mean = self.units / len(self)
        start = self.virtual if caller is None else max(self.virtual, caller.start)
        most = start - self.virtual + own_units + mean
        others = self._loads.up_to(most, without=0.0 if caller is None else caller.units)
        return own_units + others, num_own + (round(others / mean) if mean else 0)

    def add(self, entry: QueueEntry) -> None:
        """To the end of its caller's that are on time."""
        caller = entry.caller
        if not caller:
            caller.floor = self.virtual
            self._idle.pop(caller.name, None)
        before = caller.units
        caller.add(entry)
        self.least_needs[False] = min(self.least_needs[False], entry.needs)
        self.num_on_time += 1
        self.on_time_units += entry.units
        self.units += entry.units
        self._changed(entry, before)

    def put_late(self, entry: QueueEntry) -> None:
        caller, before = entry.caller, entry.caller.units
        if caller.put_late(entry):
            entry.is_late = True
            self._leave_on_time(entry)
            self.num_late += 1
            self.least_needs[True] = min(self.least_needs[True], entry.needs)
            self._changed(entry, before)

    def remove(self, entry: QueueEntry) -> bool:
        """Returns whether it was waiting here."""
        caller, before = entry.caller, entry.caller.units
        if not caller.remove(entry):
            return False
        if entry.is_late:
            self.num_late -= 1
        else:
            self._leave_on_time(entry)
        self.num_before_late = 0 if entry.is_late else self.num_before_late + bool(self.num_late)
        self.units = self.units - entry.units if self else 0.0
        self._changed(entry, before)
        if not self:  # nobody waits, so nobody owes
            self.callers.clear()
            self._idle.clear()
            self.virtual = 0.0
        elif not caller:
            self._idle[caller.name] = caller
            if len(self._idle) > MAX_IDLE:
                self._forget_first()
        return True

    def charge(self, entry: QueueEntry) -> None:
        """It is sent, and was removed: its caller is charged."""
        caller = entry.caller
        entry.start = caller.start
        if not self:
            return
        self.virtual = max(self.virtual, entry.start)
        self.correct(entry, entry.start + entry.units - caller.finish)
        while self._idle and next(iter(self._idle.values())).finish <= self.virtual:
            self._forget_first()  # if it comes again it starts here as well

    def correct(self, entry: QueueEntry, units: float) -> None:
        """It takes so much more than its caller was charged for."""
        entry.caller.finish += units
        self._place(entry.caller)

    def head(
        self,
        skip: Container[str],
        held_back: Collection[tuple[str, str]],
        late_share: float,
        less_than: float = inf,
    ) -> QueueEntry | None:
        """Returns the one that goes next, of those that need memory for fewer tokens. held_back:
        callers of which none does."""
        first, second = False, True
        if self.num_before_late * late_share >= 1:
            first, second = True, False
        found = self._first(skip, held_back, less_than, first)
        return found or self._first(skip, held_back, less_than, second)

    def _first(
        self,
        skip: Container[str],
        held_back: Collection[tuple[str, str]],
        less_than: float,
        is_late: bool,
    ) -> QueueEntry | None:
        if less_than < inf and less_than <= self.least_needs[is_late]:
            return None  # so that not every message looks at all
        turns = self._turns[is_late]
        for caller in turns:
            if held_back and caller.key in held_back:
                continue
            for name, entry in caller.part(is_late).items():
                if entry.needs < less_than and name not in skip:
                    return entry
        if less_than < inf:
            entries = (entry for caller in turns for entry in caller.part(is_late).values())
            self.least_needs[is_late] = min((entry.needs for entry in entries), default=inf)
        return None

    def check_integrity(self) -> None:
        """Raises AssertionError where a sum or the order is wrong."""
        callers = self.callers.values()
        assert len(self) == sum(map(len, callers))
        assert self._idle.keys() == {each.name for each in callers if not each}
        assert len(self._idle) <= MAX_IDLE
        parts = ((self.units, "units"), (self.on_time_units, "on_time_units"))
        for units, name in parts:
            found = sum(getattr(each, name) for each in callers)
            assert abs(units - found) < 1e-6 * max(1.0, units), (name, units, found)
        for is_late, turns in enumerate(self._turns):
            waiting = [each for each in callers if each.part(bool(is_late))]
            firsts = {each: next(iter(each.part(bool(is_late)).values())) for each in waiting}
            waiting.sort(key=lambda each: (each.start, firsts[each].record.arrival))
            assert list(turns) == waiting

    def _leave_on_time(self, entry: QueueEntry) -> None:
        self.num_on_time -= 1
        self.on_time_units = self.on_time_units - entry.units if self.num_on_time else 0.0

    def _changed(self, entry: QueueEntry, before: float) -> None:
        """The requests of its caller are others now; `before`: their work."""
        caller, arrival = entry.caller, entry.record.arrival
        self._loads.change(before, caller.units)
        self._most_waiting.put(caller, len(caller), -arrival)
        self._most_on_time.put(caller, caller.on_time_units, arrival)
        self._place(caller)

    def _place(self, caller: Caller) -> None:
        on_time, late = self._turns
        on_time.place(caller, caller.turn(is_late=False))
        if late or caller.late:
            late.place(caller, caller.turn(is_late=True))

    def _forget_first(self) -> None:
        name, _ = self._idle.popitem(last=False)
        del self.callers[name]


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
