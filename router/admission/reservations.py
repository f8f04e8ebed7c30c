"""Retry-After: when a refused client should come back, and capacity that is reserved for it then.

Life of a reservation: made with a refusal -> active shortly before it is due: from then on its
capacity is kept from new requests -> redeemed, when its client comes back, or expired, when it has
not for a while. A client that comes back is known by its tenant, its priority and what it asks.
Each tenant has a schedule that fills as fast as its queue moves, so that clients that are refused
at the same time get different times, and no more work is due in a second than can be done in one.
Only the share of clients that did come back lately is counted on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from kvrelay.router.averages import Share

LEAD_S = 1.0  # capacity is kept from new requests so long before a reservation is due
HOLD_S = 4.0  # and after: HTTP's Retry-After is in whole seconds
ROUNDING_S = 1e-3
MAX_RESERVATIONS = 16384
MAX_RETRY_AFTER_S = 600.0
RESERVED_SHARE = (
    0.75  # part of what can be served; the rest is for clients that come the first time
)
NUM_REMEMBERED = 200  # reservations by which the share of clients that come back is estimated
NUM_ASSUMED = 10.0  # clients that are taken to have come back before the first

FlowKey = tuple[int, str]  # priority and tenant
ClientKey = tuple[int, str, bytes]  # and what the client asks, in short


@dataclass(slots=True, eq=False)
class Reservation:
    client: ClientKey
    due: float
    units: float
    is_active: bool = False
    is_over: bool = False

    @property
    def flow(self) -> FlowKey:
        return self.client[:2]


class RetrySchedule:
    """Work reserved for one tenant and priority, by the second in which it is due."""

    __slots__ = ("_full_from", "_full_until", "_reserved", "_room")

    def __init__(self) -> None:
        self._reserved: dict[int, float] = {}
        self._room = 0.0  # units of a second, when seconds were last looked through
        self._full_from = self._full_until = 0  # these had none left then

    def reserve(self, earliest: float, units: float, units_per_s: float) -> float | None:
        """When `units` can be done from `earliest` on, beside what is reserved; None: later than
        MAX_RETRY_AFTER_S."""
        room = units_per_s * RESERVED_SHARE
        first, last = int(earliest), int(earliest + MAX_RETRY_AFTER_S)
        second = first
        if self._full_from <= first and room <= self._room * 1.01:
            second = max(first, self._full_until)
        else:
            self._full_from, self._room = first, room
        while second <= last and self._reserved.get(second, 0.0) >= room:
            second += 1
        self._full_until = second
        if second > last:
            return None
        taken = self._reserved.get(second, 0.0)
        due = max(earliest, second + taken / room)
        while units > 0 and second <= last:
            taken = self._reserved.get(second, 0.0)
            part = min(units, max(0.0, room - taken))
            self._reserved[second] = taken + part
            units -= part
            second += 1
        return due

    def drop_past(self, now: float) -> bool:
        """Drop the seconds before `now`. True: none is left."""
        self._reserved = {at: units for at, units in self._reserved.items() if at >= int(now)}
        return not self._reserved


class Reservations:
    """Owned by the router's admission. Invariant: `active_units` are the sums over the active
    reservations that are not over, `num_by_flow` counts all that are not."""

    def __init__(self) -> None:
        self._by_client: dict[ClientKey, deque[Reservation]] = {}  # each by the time it was made
        self._upcoming: list[tuple[float, int, Reservation]] = []  # a heap
        self._active: deque[Reservation] = deque()  # by when they are due
        self._numbers = count()
        self._num_open = self._num_active = 0
        self.num_by_flow: Counter[FlowKey] = Counter()  # those that are open
        self._schedules: dict[FlowKey, RetrySchedule] = {}
        self._tidied_at = 0.0
        self._last_redeemed: ClientKey | None = None
        self._active_units: dict[FlowKey, float] = {}
        self._return_share = Share(NUM_REMEMBERED, NUM_ASSUMED)  # clients that come back

    def __len__(self) -> int:
        return self._num_open

    @property
    def num_active(self) -> int:
        """Clients that should come about now."""
        return round(self._return_share.value * self._num_active)

    def active_units(self) -> Mapping[FlowKey, float]:
        """Work that should come about now."""
        share = self._return_share.value
        return {flow: share * units for flow, units in self._active_units.items()}

    def make(
        self, client: ClientKey, earliest: float, units: float, units_per_s: float
    ) -> float | None:
        """A time to come back, at `earliest` or later, in a queue that moves by `units_per_s`.
        None: too far away, or there are too many reservations."""
        if self._num_open >= MAX_RESERVATIONS:
            return None
        schedule = self._schedules.setdefault(client[:2], RetrySchedule())
        due = schedule.reserve(earliest, units, units_per_s / self._return_share.value)
        if due is None:
            return None
        made = Reservation(client, due, units)
        self._by_client.setdefault(client, deque()).append(made)
        heappush(self._upcoming, (due, next(self._numbers), made))
        self._num_open += 1
        self.num_by_flow[made.flow] += 1
        return due

    def is_due(self, now: float, client: ClientKey) -> bool:
        """Whether a client that comes now comes as it was told."""
        self.expire(now)
        return self._due(now, client) is not None or client == self._last_redeemed

    def redeem(self, now: float, client: ClientKey) -> bool:
        """As `is_due`, and ends the reservation. It holds for all requests of one call."""
        if not self.is_due(now, client):
            return False
        reservation = self._due(now, client)
        if reservation is not None:
            self._end(reservation, was_redeemed=True)
            self._last_redeemed = client
        return True

    def expire(self, now: float) -> None:
        """Activate what is due soon, and end what its client did not redeem in time."""
        while self._upcoming and self._upcoming[0][0] - LEAD_S <= now:
            reservation = heappop(self._upcoming)[2]
            reservation.is_active = True
            self._active.append(reservation)
            self._num_active += 1
            _add(self._active_units, reservation.flow, reservation.units)
        while self._active and (self._active[0].is_over or self._active[0].due + HOLD_S < now):
            reservation = self._active.popleft()
            if not reservation.is_over:
                self._end(reservation, was_redeemed=False)
        if now >= self._tidied_at + MAX_RETRY_AFTER_S / 10:
            self._tidied_at = now
            for flow in [flow for flow, each in self._schedules.items() if each.drop_past(now)]:
                del self._schedules[flow]

    def _due(self, now: float, client: ClientKey) -> Reservation | None:
        of_client = self._by_client.get(client, ())
        return next((r for r in of_client if r.is_active and r.due <= now + ROUNDING_S), None)

    def _end(self, reservation: Reservation, *, was_redeemed: bool) -> None:
        reservation.is_over = True
        of_client = self._by_client[reservation.client]
        of_client.remove(reservation)
        if not of_client:
            del self._by_client[reservation.client]
        self._num_open -= 1
        self.num_by_flow[reservation.flow] -= 1
        if not self.num_by_flow[reservation.flow]:
            del self.num_by_flow[reservation.flow]
        self._num_active -= 1
        _add(self._active_units, reservation.flow, -reservation.units)
        self._return_share.add(was_redeemed)


def _add(units: dict[FlowKey, float], flow: FlowKey, change: float) -> None:
    units[flow] = units.get(flow, 0.0) + change
    if units[flow] <= 1e-6:
        del units[flow]
