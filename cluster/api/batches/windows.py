"""How many rows of batches run at once, and which goes next.

Each tenant has a window of its own at each model: what its rows are refused for, and how long they
take, is nobody else's wait. Windows of a model share the room that its API leaves to rows; a tenant
gets a place of it only while it has fewer than are free, so whoever has none finds one. A row that
waits to be sent again has neither place nor bytes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any

from kvrelay.cluster.api.batches.due import Pace

if TYPE_CHECKING:
    from kvrelay.cluster.api.context import ApiContext
    from kvrelay.cluster.api.limiter import ConcurrencyLimiter

FIRST = 4  # rows that run at once before it is known how many may
_numbers = count()


@dataclass(slots=True, eq=False)
class Waiter:
    """A row that is to run."""

    is_due: Callable[[], bool]  # its batch's window is near
    is_over: Callable[[], bool]  # its batch sends no more rows
    take: Callable[[int], bool]  # bytes, as `ByteBudget.share` gives them
    num_bytes: int
    is_again: bool  # it was sent before
    number: int = field(default_factory=lambda: next(_numbers))
    granted: asyncio.Future[bool] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def order(self) -> tuple[bool, bool, int]:
        return not self.is_due(), not self.is_again, self.number


class Room:
    """Places of rows at one model. Invariant: they have half of those of the model's API at most,
    and those whose batch is not due none of what others have of that half."""

    def __init__(self, live: ConcurrencyLimiter, num_queued: int) -> None:
        self.live, self.num_queued = live, num_queued
        self.num_rows: Counter[str] = Counter()  # by tenant
        self.windows: list[Window] = []
        self.is_short = False  # a row waits for one of these places, or for bytes

    @property
    def is_crowded(self) -> bool:
        """Whether requests of others wait for a worker."""
        return self.num_queued > self.num_rows.total()

    def has_place(self, tenant: str, is_due: bool) -> bool:
        num_taken = self.num_rows.total()
        if not is_due:
            if self.is_crowded:
                return False
            num_taken = max(num_taken, self.live.num_taken)
        is_free = self.num_rows[tenant] < max(1, self.live.limit // 2) - num_taken
        self.is_short |= not is_free
        return is_free

    def fill(self) -> None:
        """Lets those rows begin that may."""
        self.is_short = False
        for window in self.windows:
            window.fill()


class Window:
    """Rows of one tenant at one model. Invariants: 1 <= size <= most; at most `size` rows run."""

    def __init__(self, tenant: str, most: int, room: Room) -> None:
        self.tenant, self.most, self.room = tenant, most, room
        self.size = float(min(FIRST, most))
        self.num_running = 0
        self.num_refused = 0  # rows that wait to be sent again
        self.num_left = 0  # rows of batches that run here, without a result
        self.pace = Pace()
        self._num_answered, self._is_refused = 0, False  # since the last look
        self._waiting: list[Waiter] = []
        # Where the tenant has had its requests of a minute: no row begins before this time, and
        # then so many until the next look.
        self._shut_until, self._burst, self._num_begun = -inf, inf, 0
        room.windows.append(self)

    async def place(self, waiter: Waiter) -> bool:
        """Waits until the row may run. False: its batch sends no more."""
        self._waiting.append(waiter)
        self.fill()
        return await waiter.granted

    def leave(self) -> None:
        """A row that had a place runs no more."""
        self.num_running -= 1
        self.room.num_rows[self.tenant] -= 1
        self.fill()
        if self.room.is_short:
            self.room.fill()

    def fill(self) -> None:
        """Lets rows begin that may: those of due batches first, then those that were sent before;
        batches take turns, as each has one new row here. Where bytes are missing, no row that needs
        some goes before."""
        self._drop_those_that_are_over()
        lacks_bytes = False
        for waiter in sorted(self._waiting, key=lambda each: each.order):
            if not self._is_open(waiter):
                continue
            if waiter.num_bytes and (lacks_bytes or not waiter.take(waiter.num_bytes)):
                lacks_bytes = self.room.is_short = True
                continue
            self._waiting.remove(waiter)
            self.num_running += 1
            self._num_begun += 1
            self.room.num_rows[self.tenant] += 1
            waiter.granted.set_result(True)

    def _drop_those_that_are_over(self) -> None:
        over = [each for each in self._waiting if each.granted.done() or each.is_over()]
        for waiter in over:
            self._waiting.remove(waiter)
            if not waiter.granted.done():
                waiter.granted.set_result(False)

    def _is_open(self, waiter: Waiter) -> bool:
        if self.num_running >= int(min(self.size, self.most)) or self._num_begun >= self._burst:
            return False
        if not waiter.is_again and self.num_refused >= self.most:
            return False
        if asyncio.get_running_loop().time() < self._shut_until:
            return False
        return self.room.has_place(self.tenant, waiter.is_due())

    def answered(self) -> None:
        self._num_answered += 1
        self.size = min(float(self.most), self.size + 1.0)

    def refused(self) -> None:
        """There was no room for a row."""
        self._is_refused = True
        self.size = max(1.0, self.size / 2)

    def limited(self, wait_s: float) -> None:
        """The tenant has had what it may have in a minute."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._shut_until:
            self._burst = min(self._burst, self._num_begun)
        self._burst, self._num_begun = max(1, self._burst - 1), 0
        if loop.time() + wait_s > self._shut_until:
            self._shut_until = loop.time() + wait_s
            loop.call_later(wait_s + 0.01, self.fill)

    def look(self, most: int, seconds: float) -> None:
        """To be called now and then. most: rows that may run at once. seconds: since the last."""
        self.most = most
        # Rows that take long say by their place at a worker that there is room, not by answers.
        if self.num_running >= int(self.size) and not (self._is_refused or self.room.num_queued):
            self.size += 1.0
        self._is_refused = False
        if self.num_running or self._num_answered:
            self.pace.add(self._num_answered, seconds)
        self._num_answered = 0
        if asyncio.get_running_loop().time() >= self._shut_until:
            if self._num_begun >= self._burst:  # all have that might, and none was refused
                self._burst *= 2
            self._num_begun = 0
        self.size = max(1.0, min(self.size, float(most)))

    @property
    def is_used(self) -> bool:
        return bool(self.num_running or self.num_left or self._waiting)

    @property
    def needed_s(self) -> float:
        """For all rows that are left, at the rate of this process; 0: it is not known."""
        return self.pace.needed_s(self.num_left)


class Windows:
    """All of a process. Owned by the runner."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx
        self._rooms: dict[str, Room] = {}  # by model
        self._found: dict[tuple[str, str], Window] = {}  # by tenant and model
        self._queued: dict[str, int] = {}  # requests that wait for a worker, by model
        self._all_queued = 0

    def of(self, tenant: str, model: ApiContext | None) -> Window:
        """model: None where there is none of the name that a row gives."""
        name = "" if model is None else model.model_name
        live = (model or self._ctx).live
        room = self._rooms.get(name)
        if room is None:
            room = self._rooms[name] = Room(live, self._num_queued(name))
        room.live = live  # a model may have been removed, and added again
        window = self._found.get((tenant, name))
        if window is None:
            window = self._found[tenant, name] = Window(tenant, self._most(tenant), room)
        return window

    def look(self, status: Any, seconds: float) -> None:
        """status: of the cluster. seconds: since the last look."""
        self._all_queued = status.num_queued
        self._queued = {each.model: each.num_queued for each in status.models}
        for name, room in self._rooms.items():
            room.num_queued = self._num_queued(name)
        for window in self._found.values():
            if window.is_used:
                window.look(self._most(window.tenant), seconds)

    def fill(self) -> None:
        for room in self._rooms.values():
            room.fill()

    def _num_queued(self, model: str) -> int:
        return self._queued.get(model, self._all_queued)

    def _most(self, tenant: str) -> int:
        """No more than may run of the tenant: others of it wait for what it asks itself."""
        most, known = self._ctx.settings.max_batch_rows_at_once, self._ctx.tenants.named(tenant)
        limit = known.share.max_concurrent if known else 0
        return min(most, limit) if limit else most
