"""How many calls may be under way at once and in a minute, and when one that is refused should come
back.

What is known is how long calls have kept their places. By Little's law places become free `limit`
times in that time, and each caller that is refused is given the next time that is not another's.

Each API process counts requests and tokens a minute for itself, so with several routers a tenant
may have as many times its rates. A request is admitted by what its prompt has, about; what it has
used is known, and counted, when it is over.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrelay.cluster.api.errors import ApiError

if TYPE_CHECKING:
    from kvrelay.cluster.api.tenants import Tenant

UNKNOWN_RETRY_AFTER_S = 1.0  # before any call has taken any time
SMOOTHING = 0.05

TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""Whose call it is that runs; set when its key is read."""


class LimitReached(Exception):
    """No place is free; `retry_after_s`: until one should be."""

    def __init__(self, retry_after_s: float, message: str = "no place is free") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ByteBudget:
    """Memory for bodies, from their arrival until it is known what they ask for. Owned by the API's
    context; used in its loop. Invariant: `num_taken <= limit`, of one tenant half of that."""

    def __init__(self, limit: int) -> None:
        """limit: bytes."""
        self.limit = limit
        self.num_taken = 0
        self._taken: Counter[str] = Counter()  # by tenant

    @contextmanager
    def share(self) -> Iterator[Callable[[int], bool]]:
        """A function that takes so many bytes more; False: there are not that many. All are given
        back at the end."""
        mine, tenant = 0, TENANT.get()

        def take(size: int) -> bool:
            nonlocal mine
            is_more_than_half = 2 * (self._taken[tenant] + size) > self.limit
            if is_more_than_half or self.num_taken + size > self.limit:
                return False
            self.num_taken += size
            self._taken[tenant] += size
            mine += size
            return True

        try:
            yield take
        finally:
            self.num_taken -= mine
            self._taken -= Counter({tenant: mine})


class ConcurrencyLimiter:
    """Owned by the API's context; used in its loop. Invariant: `num_taken <= limit`.

    Where it is shared by several tenants, one gets a place only while it has fewer than are free:
    so one alone has half of them at most, two a third each, and who has none finds one."""

    def __init__(
        self,
        limit: int,
        clock: Callable[[], float] = time.monotonic,
        what: str = "calls are under way",
        is_shared: Callable[[], bool] = lambda: False,
    ) -> None:
        """limit: at least 1. what: has a place, for messages."""
        self.limit = limit
        self.num_taken = 0
        self._what, self._is_shared = what, is_shared
        self._taken: Counter[str] = Counter()  # by tenant
        self._clock = clock
        self._since = 0.0  # sum of the times at which those that are taken were
        self._stay_s = 0.0  # mean of those that were left
        self._num_left = 0
        self._promised = 0.0  # the latest time that a client was asked to come back at

    def check(self) -> None:
        """Raises LimitReached, and takes nothing."""
        num_free, own = self.limit - self.num_taken, self._taken[TENANT.get()]
        if num_free <= 0:
            message = f"{self.limit} {self._what}, which is the limit"
        elif own >= num_free and self._is_shared():
            message = f"{own} {self._what} for this API key, its share of {self.limit}"
        else:
            return
        raise LimitReached(self._retry_after_s(), message)

    @contextmanager
    def take(self) -> Iterator[None]:
        """Keep a place. Raises LimitReached."""
        self.check()
        began, tenant = self._clock(), TENANT.get()
        self.num_taken += 1
        self._taken[tenant] += 1
        self._since += began
        try:
            yield
        finally:
            self.num_taken -= 1
            self._taken -= Counter([tenant])
            self._since -= began
            self._num_left += 1
            weight = max(SMOOTHING, 1.0 / self._num_left)
            self._stay_s += weight * (self._clock() - began - self._stay_s)

    def _retry_after_s(self) -> float:
        """In a line of those who were refused, but no later than when all places will have changed
        hands: not all of them come back."""
        now = self._clock()
        age_s = now - self._since / self.num_taken
        # Calls that hang, or the first ones, have been there for longer than those that have ended.
        stay_s = max(self._stay_s, age_s)
        if stay_s <= 0.0:
            return UNKNOWN_RETRY_AFTER_S
        self._promised = min(max(now, self._promised) + stay_s / self.limit, now + stay_s)
        return self._promised - now


class Turns:
    """Work that takes long: so much at once, of one tenant one, and tenants take turns, so that
    what one asks for waits behind its own. Used in one loop. Invariants: at most `limit` run; who
    could run does not wait."""

    def __init__(self, limit: int, max_waiting: int) -> None:
        """max_waiting: calls of one tenant."""
        self._limit, self._max_waiting = limit, max_waiting
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Wait for the turn of the tenant whose call it is. Raises LimitReached."""
        tenant = TENANT.get()
        if self._running.total() < self._limit and not self._running[tenant]:
            self._running[tenant] += 1
        else:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wait(tenant)
            except TimeoutError:
                raise LimitReached(UNKNOWN_RETRY_AFTER_S) from None
        try:
            yield
        finally:
            self._end(tenant)

    async def _wait(self, tenant: str) -> None:
        waiting = self._waiting.setdefault(tenant, deque())
        if len(waiting) >= self._max_waiting:
            raise LimitReached(UNKNOWN_RETRY_AFTER_S)
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._end(tenant)  # its turn had just come
            elif mine in waiting:
                waiting.remove(mine)
            raise

    def _end(self, tenant: str) -> None:
        self._running -= Counter([tenant])
        for other, waiting in list(self._waiting.items()):
            if self._running.total() >= self._limit:
                return
            if self._running[other]:
                continue
            while waiting and waiting[0].done():
                waiting.popleft()
            del self._waiting[other]
            if waiting:
                self._running[other] += 1
                waiting.popleft().set_result(None)
                self._waiting[other] = waiting  # the last in line


MINUTE_S = 60.0


@dataclass(slots=True)
class Bucket:
    """`per_minute` is also the most that it holds. Times are of one clock."""

    per_minute: float
    level: float
    at: float

    def refill(self, now: float) -> None:
        self.level += (now - self.at) * self.per_minute / MINUTE_S
        self.level, self.at = min(self.level, self.per_minute), now

    def wait_s(self, amount: float) -> float:
        """Until it holds `amount`, or all that it can hold."""
        missing = min(amount, self.per_minute) - self.level
        return max(0.0, missing * MINUTE_S / self.per_minute)


class RateLimits:
    """Owned by the API. Invariant: there are buckets only for tenants that have rates."""

    def __init__(self) -> None:
        self._buckets: dict[str, dict[str, Bucket]] = {}

    def admit(self, now: float, tenant: Tenant, num_tokens: int) -> None:
        """Take a request and its tokens. Raises `ApiError` (429) and takes nothing."""
        buckets = self._of(now, tenant)
        amounts = {"requests": 1.0, "tokens": float(num_tokens)}
        for kind, bucket in buckets.items():
            wait_s = bucket.wait_s(amounts[kind])
            if wait_s > 0:
                raise ApiError(
                    429,
                    f"Rate limit reached: {bucket.per_minute:g} {kind} a minute, of which"
                    f" {max(0, int(bucket.level))} are left; try again in {wait_s:.1f} s",
                    type="rate_limit_error",
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                )
        for kind, bucket in buckets.items():
            bucket.level -= amounts[kind]

    def settle(self, now: float, tenant: Tenant, num_taken: int, num_used: int) -> None:
        """A request is over."""
        bucket = self._of(now, tenant).get("tokens")
        if bucket is not None:
            bucket.level = min(bucket.level + num_taken - num_used, bucket.per_minute)

    def headers(self, now: float, tenant: Tenant) -> dict[str, str]:
        """As OpenAI names them."""
        found: dict[str, str] = {}
        for kind, bucket in self._of(now, tenant).items():
            full_s = bucket.wait_s(bucket.per_minute)
            found[f"x-ratelimit-limit-{kind}"] = f"{bucket.per_minute:g}"
            found[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(bucket.level)))
            found[f"x-ratelimit-reset-{kind}"] = f"{full_s:.3g}s"
        return found

    def _of(self, now: float, tenant: Tenant) -> dict[str, Bucket]:
        buckets = self._buckets.get(tenant.name)
        given = {"requests": tenant.requests_per_minute, "tokens": tenant.tokens_per_minute}
        rates = {kind: rate for kind, rate in given.items() if rate}
        if buckets is None or rates != {kind: b.per_minute for kind, b in buckets.items()}:
            buckets = {kind: Bucket(rate, rate, now) for kind, rate in rates.items()}
            self._buckets[tenant.name] = buckets
        for bucket in buckets.values():
            bucket.refill(now)
        return buckets
