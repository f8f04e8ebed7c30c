"""What refused clients were told: when to come back, and that there will be a place.

Life of a promise: made with a refusal -> ripe shortly before it is due: from then on its place is
kept from new requests -> kept, when its client comes back, or lapsed, when it has not for a while.
A client that comes back is known by its tenant, its priority and what it asks. Reservations fill a
calendar as fast as their tenant's line moves, so that those refused at the same time are told
different times, and not more are due in a second than can be served in one; of clients, only the
share that did come back, of late, is reckoned with.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

LEAD_S = 1.0  # a place is kept from new requests so long before it is due
HOLD_S = 4.0  # and after: HTTP's Retry-After is in whole seconds
ROUNDING_S = 1e-3
MAX_PROMISES = 16384
MAX_AHEAD_S = 600.0  # nothing is promised later than that
BOOKED_SHARE = 0.75  # of what can be served; the rest is for those who come for the first time
REMEMBERED = 200  # promises that count, when their clients' habits are learned

FlowKey = tuple[int, str]  # priority and tenant
ClientKey = tuple[int, str, bytes]  # and what the client asks, in short


@dataclass(slots=True, eq=False)
class Reservation:
    client: ClientKey
    due: float
    units: float
    is_ripe: bool = False
    is_over: bool = False

    @property
    def flow(self) -> FlowKey:
        return self.client[:2]


class Calendar:
    """Work promised to one tenant, by the second in which it is due."""

    __slots__ = ("_booked", "_full_from", "_full_until", "_room")

    def __init__(self) -> None:
        self._booked: dict[int, float] = {}
        self._room = 0.0  # of a second, when seconds were last looked through
        self._full_from = self._full_until = 0  # these had none then

    def book(self, earliest: float, units: float, units_per_s: float) -> float | None:
        """When `units` can be done from `earliest` on, beside what is booked; None: not soon."""
        room = units_per_s * BOOKED_SHARE
        first, last = int(earliest), int(earliest + MAX_AHEAD_S)
        second = first
        if self._full_from <= first and room <= self._room * 1.01:
            second = max(first, self._full_until)
        else:
            self._full_from, self._room = first, room
        while second <= last and self._booked.get(second, 0.0) >= room:
            second += 1
        self._full_until = second
        if second > last:
            return None
        taken = self._booked.get(second, 0.0)
        due = max(earliest, second + taken / room)
        while units > 0 and second <= last:
            taken = self._booked.get(second, 0.0)
            part = min(units, max(0.0, room - taken))
            self._booked[second] = taken + part
            units -= part
            second += 1
        return due

    def forget(self, now: float) -> bool:
        """What is past. True: nothing is left."""
        self._booked = {at: units for at, units in self._booked.items() if at >= int(now)}
        return not self._booked


class Reservations:
    """Owned by the router's admission. Invariant: `ripe_units` are the sums over the ripe promises
    that are not over, `num_by_flow` counts all that are not."""

    def __init__(self) -> None:
        self._by_client: dict[ClientKey, deque[Reservation]] = {}  # each by the time it was made
        self._unripe: list[tuple[float, int, Reservation]] = []  # a heap
        self._ripe: deque[Reservation] = deque()  # by when they are due
        self._numbers = count()
        self._num_open = self._num_ripe = 0
        self.num_by_flow: Counter[FlowKey] = Counter()  # of those that are open
        self._calendars: dict[FlowKey, Calendar] = {}
        self._tidied_at = 0.0
        self._last_kept: ClientKey | None = None
        self._ripe_units: dict[FlowKey, float] = {}
        self._num_kept = self._num_over = 10.0  # of late; at first all are thought to come back

    def __len__(self) -> int:
        return self._num_open

    @property
    def _share(self) -> float:
        """Of those who were told to come back, who does."""
        return max(1.0, self._num_kept) / self._num_over

    @property
    def num_ripe(self) -> int:
        """Clients that should come about now."""
        return round(self._share * self._num_ripe)

    def ripe_units(self) -> Mapping[FlowKey, float]:
        """Work that should come about now, by who was promised it."""
        return {flow: self._share * units for flow, units in self._ripe_units.items()}

    def make(
        self, client: ClientKey, earliest: float, units: float, units_per_s: float
    ) -> float | None:
        """A time to come back, at `earliest` or later, in a line that moves by `units_per_s`. None:
        too far away, or too many hold one."""
        if self._num_open >= MAX_PROMISES:
            return None
        calendar = self._calendars.setdefault(client[:2], Calendar())
        due = calendar.book(earliest, units, units_per_s / self._share)
        if due is None:
            return None
        promise = Reservation(client, due, units)
        self._by_client.setdefault(promise.client, deque()).append(promise)
        heappush(self._unripe, (due, next(self._numbers), promise))
        self._num_open += 1
        self.num_by_flow[promise.flow] += 1
        return due

    def is_due(self, now: float, client: ClientKey) -> bool:
        """Whether a client that comes now comes as it was told."""
        self.pass_time(now)
        return self._due(now, client) is not None or client == self._last_kept

    def redeem(self, now: float, client: ClientKey) -> bool:
        """As `is_due`; its promise is kept then. It holds for all requests of one call."""
        if not self.is_due(now, client):
            return False
        promise = self._due(now, client)
        if promise is not None:
            self._end(promise, was_kept=True)
            self._last_kept = client
        return True

    def pass_time(self, now: float) -> None:
        while self._unripe and self._unripe[0][0] - LEAD_S <= now:
            promise = heappop(self._unripe)[2]
            promise.is_ripe = True
            self._ripe.append(promise)
            self._num_ripe += 1
            _add(self._ripe_units, promise.flow, promise.units)
        while self._ripe and (self._ripe[0].is_over or self._ripe[0].due + HOLD_S < now):
            promise = self._ripe.popleft()
            if not promise.is_over:
                self._end(promise, was_kept=False)
        if now >= self._tidied_at + MAX_AHEAD_S / 10:
            self._tidied_at = now
            for flow in [flow for flow, each in self._calendars.items() if each.forget(now)]:
                del self._calendars[flow]

    def _due(self, now: float, client: ClientKey) -> Reservation | None:
        of_client = self._by_client.get(client, ())
        return next((p for p in of_client if p.is_ripe and p.due <= now + ROUNDING_S), None)

    def _end(self, promise: Reservation, *, was_kept: bool) -> None:
        """Of a ripe one."""
        promise.is_over = True
        of_client = self._by_client[promise.client]
        of_client.remove(promise)
        if not of_client:
            del self._by_client[promise.client]
        self._num_open -= 1
        self.num_by_flow[promise.flow] -= 1
        if not self.num_by_flow[promise.flow]:
            del self.num_by_flow[promise.flow]
        self._num_ripe -= 1
        _add(self._ripe_units, promise.flow, -promise.units)
        self._num_kept += was_kept - self._num_kept / REMEMBERED
        self._num_over += 1 - self._num_over / REMEMBERED


def _add(units: dict[FlowKey, float], flow: FlowKey, change: float) -> None:
    units[flow] = units.get(flow, 0.0) + change
    if units[flow] <= 1e-6:
        del units[flow]
