"""What waits in a router's queue, by who shares: priorities, their tenants, the callers of each,
and the agents of each caller.

An agent is a session with those of its subagents. Callers of a tenant, and agents of a caller,
share by work as tenants do, each group with a virtual time of its own; of an agent the oldest
request goes first. What has no session is one agent of its caller."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Container, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

from kvrelay.engine.waiting import MAX_PASSED, Passes
from kvrelay.router.admission.turns import Loads, Most, TurnOrder
from kvrelay.router.messages import TenantShare

MAX_IDLE = 256  # members of a group of whom nothing waits, and who had more than their share
Key = tuple[str, ...]  # names: of a tenant, its caller, and the agent of that


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A live request is here from `push` to `settle`."""

    record: Any  # its RequestRecord
    units: float  # estimated service
    needs: int  # tokens that memory is wanted for; more if cached KV has gone since
    level: Level
    flow: Flow
    caller: Caller
    agent: Agent
    starts: tuple[float, float] = (0.0, 0.0)  # virtual, of caller and agent, when it was charged
    sent_at: float | None = None  # its first attempt; None: it was never sent, or came back
    is_charged: bool = False
    is_served: bool = False  # it has an attempt
    is_prefilling: bool = False  # it is served, and never had a token
    units_left: float = 0.0  # while it is served
    passes: Passes = field(default_factory=Passes)  # while no worker has room for it
    is_late: bool = False

    @property
    def is_low(self) -> bool:
        return self.flow.is_low


@dataclass(slots=True, eq=False)
class Member:
    """One of a group, which owns it. It comes with the first of its requests, and has left once
    none waits and what it was sent for is made up for, which `MAX_IDLE` bounds."""

    key: Key
    floor: float = 0.0  # virtual time of its group when it began to wait
    finish: float = 0.0  # virtual finish of its last request that was charged
    least_needs: list[float] = field(default_factory=lambda: [inf, inf])
    """None of those that are on time needs less, and none of those that are late."""

    @property
    def name(self) -> str:
        """ "": it is not known who."""
        return self.key[-1]

    @property
    def start(self) -> float:
        """Virtual start of its next request."""
        return max(self.floor, self.finish)


@dataclass(slots=True, eq=False)
class Agent(Member):
    """The requests of a session and its subagents, or of one caller without a session. Invariant:
    `units` is the sum over those that wait, `on_time_units` over those of them that are on time."""

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
    def num_late(self) -> int:
        return len(self.late)

    @property
    def newest(self) -> QueueEntry:
        return next(reversed((self.late or self.on_time).values()))

    @property
    def longest(self) -> QueueEntry | None:
        """The one with most work among those that are on time."""
        while self.by_size and self.by_size[0][2].record.request_id not in self.on_time:
            heappop(self.by_size)
        return self.by_size[0][2] if self.by_size else None

    def entries(self) -> Iterator[QueueEntry]:
        yield from (*self.on_time.values(), *self.late.values())

    def first(
        self, skip: Container[str], held_back: Collection[Key], less_than: float, is_late: bool
    ) -> QueueEntry | None:
        """The oldest that needs memory for fewer tokens and is not in `skip`."""
        entries = (self.late if is_late else self.on_time).values()
        for entry in entries:
            if entry.needs < less_than and entry.record.request_id not in skip:
                return entry
        if less_than < inf:
            self.least_needs[is_late] = min([entry.needs for entry in entries], default=inf)
        return None

    def turn(self, is_late: bool) -> tuple[float, int] | None:
        """Its virtual start, and the arrival of its first request of that part; None: it has none
        there."""
        first = next(iter((self.late if is_late else self.on_time).values()), None)
        return None if first is None else (self.start, first.record.arrival)

    def add(self, entry: QueueEntry) -> None:
        """To the end of those that are on time."""
        self.on_time[entry.record.request_id] = entry
        self.least_needs[False] = min(self.least_needs[False], entry.needs)
        heappush(self.by_size, (-entry.units, entry.record.arrival, entry))
        self.on_time_units += entry.units
        self.units += entry.units

    def put_late(self, entry: QueueEntry) -> bool:
        """False: it is not one of those that are on time."""
        if not self._leave(entry):
            return False
        self.late[entry.record.request_id] = entry
        self.least_needs[True] = min(self.least_needs[True], entry.needs)
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

    def charge(self, entry: QueueEntry) -> None:
        """Nobody shares here: its requests go in the order in which they came."""

    def correct(self, entry: QueueEntry, units: float) -> None:
        """Nothing is owed here either."""

    def _leave(self, entry: QueueEntry) -> bool:
        if self.on_time.pop(entry.record.request_id, None) is None:
            return False
        self.on_time_units = self.on_time_units - entry.units if self.on_time else 0.0
        if not self.on_time:
            self.by_size.clear()
        return True


Each = TypeVar("Each", "Caller", Agent)


@dataclass(slots=True, eq=False)
class Group(Member, Generic[Each]):
    """Requests of several who share by work, one as another. Invariant: `units` and the other sums
    are over what waits of all members; `_turns` has each with something on time, and something
    late, in the order of their turns."""

    units: float = 0.0
    on_time_units: float = 0.0
    num_on_time: int = 0
    num_late: int = 0
    virtual: float = 0.0  # start of the last request that was charged
    members: dict[str, Each] = field(default_factory=dict)
    _turns: tuple[TurnOrder[Each], TurnOrder[Each]] = field(
        default_factory=lambda: (TurnOrder(), TurnOrder())
    )
    """Of those that are on time, and of those that are late."""
    _idle: OrderedDict[str, Each] = field(default_factory=OrderedDict)
    """Members of which nothing waits, and what they had still counts."""
    _most_waiting: Most[Each] = field(default_factory=Most)
    _most_on_time: Most[Each] = field(default_factory=Most)  # units
    _loads: Loads = field(default_factory=Loads)

    def __len__(self) -> int:
        return self.num_on_time + self.num_late

    @property
    def newest(self) -> QueueEntry:
        """The newest one of the member that has most waiting."""
        member = self._most_waiting.top()
        assert member is not None, "nothing waits"
        return member.newest

    @property
    def longest(self) -> QueueEntry | None:
        """The one with most work among those that are on time, of the member with most of that."""
        member = self._most_on_time.top()
        return None if member is None else member.longest

    def entries(self) -> Iterator[QueueEntry]:
        for member in list(self.members.values()):
            yield from member.entries()

    def first(
        self, skip: Container[str], held_back: Collection[Key], less_than: float, is_late: bool
    ) -> QueueEntry | None:
        """Returns one that needs memory for fewer tokens and is not in `skip`: of the first member
        that has one, by turns. `held_back`: members of which none goes. Where nothing is found, it
        is known from then on from which need on no member, or none at all, has to be asked."""
        turns = self._turns[is_late]
        for member in turns if less_than > self.least_needs[is_late] or less_than == inf else ():
            if less_than <= member.least_needs[is_late] and less_than < inf:
                continue
            if held_back and member.key in held_back:
                continue
            if found := member.first(skip, held_back, less_than, is_late):
                return found
        if less_than < inf:
            needs = [member.least_needs[is_late] for member in turns]
            self.least_needs[is_late] = min(needs, default=inf)
        return None

    def ahead(self, name: str, own_units: float, num_own: int) -> tuple[float, int]:
        """What goes before a request of that member behind so much of its own, about: its work, and
        how many they are. Of each other member that is at most as much, and one more request."""
        member = self.members.get(name)
        if not len(self):
            return own_units, num_own
        mean = self.units / len(self)
        start = self.virtual if member is None else max(self.virtual, member.start)
        most = start - self.virtual + own_units + mean
        others = self._loads.up_to(most, without=0.0 if member is None else member.units)
        return own_units + others, num_own + (round(others / mean) if mean else 0)

    def add(self, entry: QueueEntry) -> None:
        """To the end of its agent's that are on time."""
        member = self._of(entry)
        if not member:
            member.floor = self.virtual
            self._idle.pop(member.name, None)
        before = member.units
        member.add(entry)
        self.least_needs[False] = min(self.least_needs[False], entry.needs)
        self.num_on_time += 1
        self.on_time_units += entry.units
        self.units += entry.units
        self._changed(member, entry, before)

    def put_late(self, entry: QueueEntry) -> bool:
        """False: it is not one of those that are on time."""
        member = self._of(entry)
        before = member.units
        if not member.put_late(entry):
            return False
        self._leave_on_time(entry)
        self.least_needs[True] = min(self.least_needs[True], entry.needs)
        self.num_late += 1
        self._changed(member, entry, before)
        return True

    def remove(self, entry: QueueEntry) -> bool:
        """Returns whether it was waiting here."""
        member = self._of(entry)
        before = member.units
        if not member.remove(entry):
            return False
        if entry.is_late:
            self.num_late -= 1
        else:
            self._leave_on_time(entry)
        self.units = self.units - entry.units if self else 0.0
        self._changed(member, entry, before)
        if not self:  # nobody waits, so nobody owes
            self.members.clear()
            self._idle.clear()
            self.virtual = 0.0
        elif not member:
            self._idle[member.name] = member
            if len(self._idle) > MAX_IDLE:
                self._forget_first()
        return True

    def charge(self, entry: QueueEntry) -> None:
        """It is sent, and was removed: its member is charged."""
        member = self._of(entry)
        member.charge(entry)
        start = member.start
        if not self:
            return
        self.virtual = max(self.virtual, start)
        self._advance(member, start + entry.units - member.finish)
        while self._idle and next(iter(self._idle.values())).finish <= self.virtual:
            self._forget_first()  # if it comes again it starts here as well

    def correct(self, entry: QueueEntry, units: float) -> None:
        """It takes so much more than its member was charged for."""
        member = self._of(entry)
        member.correct(entry, units)
        self._advance(member, units)

    def check_integrity(self) -> None:
        """Raises AssertionError where a sum or the order is wrong."""
        members = self.members.values()
        assert len(self) == sum(map(len, members))
        assert self._idle.keys() == {each.name for each in members if not each}
        assert len(self._idle) <= MAX_IDLE
        parts = ((self.units, "units"), (self.on_time_units, "on_time_units"))
        for units, name in parts:
            found = sum(getattr(each, name) for each in members)
            assert abs(units - found) < 1e-6 * max(1.0, units), (name, units, found)
        for is_late, turns in enumerate(self._turns):
            assert all(self.least_needs[is_late] <= each.least_needs[is_late] for each in turns)
            waiting = [(turn, each) for each in members if (turn := each.turn(bool(is_late)))]
            assert list(turns) == [each for _, each in sorted(waiting, key=lambda pair: pair[0])]

    def _of(self, entry: QueueEntry) -> Each:
        """The member whose it is."""
        raise NotImplementedError

    def _leave_on_time(self, entry: QueueEntry) -> None:
        self.num_on_time -= 1
        self.on_time_units = self.on_time_units - entry.units if self.num_on_time else 0.0

    def _changed(self, member: Each, entry: QueueEntry, before: float) -> None:
        """The requests of a member are others now; `before`: their work."""
        arrival = entry.record.arrival
        self._loads.change(before, member.units)
        self._most_waiting.put(member, len(member), -arrival)
        self._most_on_time.put(member, member.on_time_units, arrival)
        self._place(member)

    def _advance(self, member: Each, units: float) -> None:
        member.finish += units
        self._place(member)

    def _place(self, member: Each) -> None:
        on_time, late = self._turns
        on_time.place(member, member.turn(is_late=False))
        if late or member.num_late:
            late.place(member, member.turn(is_late=True))

    def _forget_first(self) -> None:
        name, _ = self._idle.popitem(last=False)
        del self.members[name]


@dataclass(slots=True, eq=False)
class Caller(Group[Agent]):
    """One caller's requests in a flow, by agent."""

    def turn(self, is_late: bool) -> tuple[float, int] | None:
        """As an agent's: of its agent whose turn it is."""
        first = next(iter(self._turns[is_late]), None)
        turn = None if first is None else first.turn(is_late)
        return None if turn is None else (self.start, turn[1])

    def agent(self, name: str) -> Agent:
        """The one of that name, who may be new."""
        found = self.members.get(name)
        if found is None:
            found = self.members[name] = Agent((*self.key, name))
        return found

    def check_integrity(self) -> None:
        Group.check_integrity(self)
        for agent in self.members.values():
            for least, part in zip(agent.least_needs, (agent.on_time, agent.late), strict=True):
                assert all(least <= entry.needs for entry in part.values())

    def _of(self, entry: QueueEntry) -> Agent:
        return entry.agent


class Sent(NamedTuple):
    """One that was sent before another one that had to wait."""

    arrival: int
    key: Key  # its agent's
    flow: Flow
    starts: tuple[float, float]  # that its entry had
    at: float

    def has_passed(self, entry: QueueEntry) -> bool:
        """Whether it came later, and its turn did."""
        if self.arrival <= entry.record.arrival:
            return False
        if self.flow is not entry.flow:
            return True
        if self.key[:2] != entry.caller.key:
            return self.starts[0] >= entry.caller.start
        return self.key == entry.agent.key or self.starts[1] >= entry.agent.start


@dataclass(slots=True, eq=False)
class Flow(Group[Caller]):
    """A tenant's requests of one priority, by caller."""

    share: TenantShare = field(default_factory=TenantShare)
    is_low: bool = False  # its class of service is
    num_before_late: int = 0  # sent while late ones waited, since the last of those
    passed_by: deque[Sent] = field(default_factory=lambda: deque(maxlen=MAX_PASSED))
    """Those that were sent last before one of it that had to wait."""

    @property
    def tenant(self) -> str:
        return self.name

    def caller(self, name: str) -> Caller:
        """The one of that name, who may be new."""
        found = self.members.get(name)
        if found is None:
            found = self.members[name] = Caller((*self.key, name))
        return found

    def before(self, caller: str, agent: str, own: QueueEntry | None = None) -> tuple[float, int]:
        """What of this tenant goes before a request of that agent, about; `own`: it waits
        already."""
        its = self.members.get(caller)
        found = None if its is None else its.members.get(agent)
        units, count = (0.0, 0) if found is None else (found.units, len(found))
        if own is not None:
            units, count = max(0.0, units - own.units), count - 1
        if its is not None:
            units, count = its.ahead(agent, units, count)
        return self.ahead(caller, units, count)

    def put_late(self, entry: QueueEntry) -> bool:
        found = Group.put_late(self, entry)
        if found:
            entry.is_late = True
        return found

    def remove(self, entry: QueueEntry) -> bool:
        found = Group.remove(self, entry)
        if found:
            late = bool(self.num_late)
            self.num_before_late = 0 if entry.is_late else self.num_before_late + late
        return found

    def charge(self, entry: QueueEntry) -> None:
        entry.starts = entry.caller.start, entry.agent.start
        Group.charge(self, entry)

    def head(
        self,
        skip: Container[str],
        held_back: Collection[Key],
        late_share: float,
        less_than: float = inf,
    ) -> QueueEntry | None:
        """Returns the one that goes next, of those that need memory for fewer tokens. held_back:
        callers and agents of which none does."""
        late_first = self.num_before_late * late_share >= 1
        found = self.first(skip, held_back, less_than, late_first)
        return found or self.first(skip, held_back, less_than, not late_first)

    def check_integrity(self) -> None:
        Group.check_integrity(self)
        for caller in self.members.values():
            caller.check_integrity()

    def _of(self, entry: QueueEntry) -> Caller:
        return entry.caller


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
