"""How many calls may be under way at once and in a minute, and when one that is refused should come
back.

What is known is how long calls have kept their places. By Little's law places become free `limit`
times in that time, and each caller that is refused is given the next time that is not another's.

Each API process counts requests and tokens a minute for itself, so with several routers a tenant
may have as many times its rates. What is taken with a key that operators have made is counted over
all of them (`cluster.api.keys`). A request is admitted by what its prompt has, about; what it has
used is known, and counted, when it is over.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from ipaddress import IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING

from kvrelay.cluster.api.errors import ApiError
from kvrelay.engine.shares import may_take, reserve_of

if TYPE_CHECKING:
    from kvrelay.cluster.api.keys.keys import Keys
    from kvrelay.cluster.api.keys.record import ApiKey, Taken
    from kvrelay.cluster.api.tenants import Tenant

UNKNOWN_RETRY_AFTER_S = 1.0  # before any call has taken any time
SMOOTHING = 0.05

TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""Whose call it is that runs; set when its key is read."""

Caller = tuple[str, ...]
"""Who shares with whom, from the outside in: the tenant, where there are several, and the address
that the call comes from."""

CALLER: ContextVar[Caller] = ContextVar("caller", default=("",))
"""Who makes the call that runs: its address, until its key is read."""

_NAMING_KEY = secrets.token_bytes(16)


def caller_name() -> str:
    """What the router knows the caller by, within its tenant: the same for all calls from one
    address, until this process ends, and of no meaning outside it. "": the address is not known,
    as it is of a batch's rows, which any server may run."""
    address = CALLER.get()[-1]
    return blake2b(address.encode(), key=_NAMING_KEY, digest_size=8).hexdigest() if address else ""


@lru_cache(4096)
def network_of(host: str) -> str:
    """The address of a client, as far as it says who that is: of an IPv6 address the network, in
    which one client has as many addresses as it likes."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host  # a Unix socket has none
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((address, 64), strict=False))


class LimitReached(Exception):
    """No place is free; `retry_after_s`: until one should be."""

    def __init__(self, retry_after_s: float, message: str = "no place is free") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Shares:
    """How much of something that is limited each caller has.

    Somebody alone may have nearly all of it: a reserve stays, of which each gets a part only while
    that makes it no more than what is left. So who has nothing finds something, whoever has all the
    rest, until as many have come as halve the reserve to nothing. Tenants share so, and the
    addresses of each: who has many addresses, or calls from many, has one tenant's share.

    Used in one loop. Invariant: `num_taken <= limit`, and it is the sum over callers."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_taken = 0
        self._taken: Counter[Caller] = Counter()  # by caller, and by each beginning of one

    def of(self, caller: Caller) -> int:
        return self._taken[caller]

    def has_room(self, caller: Caller, amount: int = 1) -> bool:
        """Whether that caller may take so much more."""
        if self.num_taken + amount > self.limit:
            return False
        most, taken = self.limit, self.num_taken
        for depth in range(1, len(caller) + 1):
            own, free = self._taken[caller[:depth]], most - taken
            reserve = reserve_of(most)
            if not may_take(own, free, reserve, amount):
                return False
            most, taken = most - reserve, own
        return True

    def take(self, caller: Caller, amount: int = 1) -> bool:
        """False: it may not have that, and has no more than before."""
        if not self.has_room(caller, amount):
            return False
        self._add(caller, amount)
        return True

    def hold(self, caller: Caller) -> None:
        """One that it has already."""
        self._add(caller, 1)

    def give_back(self, caller: Caller, amount: int = 1) -> None:
        self._add(caller, -amount)

    def who_yields(self, caller: Caller) -> Caller | None:
        """Who has the most, where `caller` has nothing: of tenants, if its tenant has nothing
        either, and of addresses. None: nobody has two, or the caller has something."""
        has_none = [depth for depth in range(len(caller)) if not self._taken[caller[: depth + 1]]]
        found, least = caller[: min(has_none, default=0)], 2
        for depth in has_none:
            own = {
                each: num
                for each, num in self._taken.items()
                if len(each) == depth + 1 and each[:depth] == found and num >= least
            }
            if not own:
                return None
            found, least = max(own, key=lambda each: own[each]), 1
        return found or None

    def hand_over(self, giver: Caller, taker: Caller) -> None:
        """One, which is neither free in between nor refused by the taker's share."""
        self._add(giver, -1)
        self._add(taker, 1)

    def _add(self, caller: Caller, amount: int) -> None:
        self.num_taken += amount
        for depth in range(1, len(caller) + 1):
            self._taken[caller[:depth]] += amount
            if not self._taken[caller[:depth]]:
                del self._taken[caller[:depth]]


class Held:
    """Bytes of a budget that somebody has, until `close`."""

    def __init__(self, shares: Shares, caller: Caller) -> None:
        self._shares, self._caller, self.num_bytes = shares, caller, 0

    def take(self, size: int) -> bool:
        """So many more; False: there are not that many."""
        if not self._shares.take(self._caller, size):
            return False
        self.num_bytes += size
        return True

    def give_back(self, size: int) -> None:
        self._shares.give_back(self._caller, size)
        self.num_bytes -= size

    def close(self) -> None:
        self.give_back(self.num_bytes)


class ByteBudget(Shares):
    """Memory for bodies and messages, from their arrival until it is known what they ask for. Owned
    by the API's context."""

    def holder(self, caller: Caller | None = None) -> Held:
        """Who has bytes of it until it is closed; `caller`: if it is not the one that calls."""
        return Held(self, CALLER.get() if caller is None else caller)

    @contextmanager
    def share(self) -> Iterator[Callable[[int], bool]]:
        """A function that takes so many bytes more; False: there are not that many. All are given
        back at the end."""
        held = self.holder()
        try:
            yield held.take
        finally:
            held.close()


@dataclass(eq=False, slots=True)
class Place:
    """One that a call has, from `began` on, until that ends or the place is another's."""

    caller: Caller
    began: float
    is_lost: bool = False


class ConcurrencyLimiter:
    """Places for calls that run. Owned by the API's context; used in its loop."""

    def __init__(
        self,
        limit: int,
        clock: Callable[[], float] = time.monotonic,
        what: str = "calls are under way",
    ) -> None:
        """limit: at least 1. what: has a place, for messages."""
        self._shares = Shares(limit)
        self._what = what
        self._clock = clock
        self._since = 0.0  # sum of the times at which those that are taken were
        self._stay_s = 0.0  # mean of those that were left
        self._num_left = 0
        self._promised = 0.0  # the latest time that a client was asked to come back at

    @property
    def limit(self) -> int:
        return self._shares.limit

    @property
    def num_taken(self) -> int:
        return self._shares.num_taken

    def check(self) -> None:
        """Raises LimitReached, and takes nothing."""
        caller = CALLER.get()
        if self._shares.has_room(caller):
            return
        message = f"{self.limit} {self._what}, which is the limit"
        if self.num_taken < self.limit:
            own = self._shares.of(caller)
            message = f"{own} {self._what} for this caller, its share of {self.limit}"
        raise LimitReached(self._retry_after_s(), message)

    def who_yields(self) -> Caller | None:
        """Who could give a place up for the caller that has none, see `Shares`."""
        return self._shares.who_yields(CALLER.get())

    @contextmanager
    def take(self, instead: Place | None = None) -> Iterator[Place]:
        """Keep a place, that of another if it is given, which loses it. Raises LimitReached."""
        place = Place(CALLER.get(), self._clock())
        if instead is None:
            self.check()
            self._shares.take(place.caller)
        else:
            instead.is_lost = True
            self._left(instead)
            self._shares.hand_over(instead.caller, place.caller)
        self._since += place.began
        try:
            yield place
        finally:
            if not place.is_lost:
                self._left(place)
                self._shares.give_back(place.caller)

    def _left(self, place: Place) -> None:
        self._since -= place.began
        self._num_left += 1
        weight = max(SMOOTHING, 1.0 / self._num_left)
        self._stay_s += weight * (self._clock() - place.began - self._stay_s)

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


_Waiting = deque[asyncio.Future[None]]


class Turns:
    """Work that takes long: so much at once, of one tenant one (of one address, where all are one
    tenant), and they take turns, so that what one asks for waits behind its own; within a tenant
    its addresses do. Used in one loop. Invariants: at most `limit` run; who could run does not
    wait."""

    def __init__(self, limit: int, max_waiting: int) -> None:
        """max_waiting: calls of one caller."""
        self._limit, self._max_waiting = limit, max_waiting
        self._running: Counter[str] = Counter()  # by the first part of a caller
        self._waiting: OrderedDict[str, OrderedDict[Caller, _Waiting]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Wait for the turn of the caller whose call it is. Raises LimitReached."""
        caller = CALLER.get()
        if self._running.total() < self._limit and not self._running[caller[0]]:
            self._running[caller[0]] += 1
        else:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wait(caller)
            except TimeoutError:
                raise LimitReached(UNKNOWN_RETRY_AFTER_S) from None
        try:
            yield
        finally:
            self._end(caller[0])

    async def _wait(self, caller: Caller) -> None:
        callers = self._waiting.setdefault(caller[0], OrderedDict())
        waiting = callers.setdefault(caller, deque())
        if len(waiting) >= self._max_waiting:
            raise LimitReached(UNKNOWN_RETRY_AFTER_S)
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._end(caller[0])  # its turn had just come
            elif mine in waiting:
                waiting.remove(mine)
            raise

    def _end(self, outer: str) -> None:
        self._running -= Counter([outer])
        while self._running.total() < self._limit and (other := self._next()) is not None:
            self._running[other] += 1

    def _next(self) -> str | None:
        """Lets one begin, whose turn is the longest ago. Returns the first part of its caller."""
        for outer, callers in list(self._waiting.items()):
            for caller in [each for each, waiting in callers.items() if not any_left(waiting)]:
                del callers[caller]
            if not callers:
                del self._waiting[outer]
            elif not self._running[outer]:
                caller = next(iter(callers))
                callers.move_to_end(caller)
                self._waiting.move_to_end(outer)
                callers[caller].popleft().set_result(None)
                return outer
        return None


def any_left(waiting: _Waiting) -> bool:
    """Whether some of them have not gone; the first is then one of these."""
    while waiting and waiting[0].done():
        waiting.popleft()
    return bool(waiting)


MINUTE_S = 60.0


@dataclass(slots=True)
class Bucket:
    """`per_minute` is also the most that it holds. Times are of one clock.

    Who calls alone may have all of it. Where others do too, the last of it, as much as `Shares`
    keeps, is for who has had the least since the minute began. Nobody is remembered for longer."""

    per_minute: float
    level: float
    at: float
    began: float = 0.0  # the minute that is counted in
    had: Counter[Caller] = field(default_factory=Counter)
    refused: Caller | None = None  # last of all who had the least then

    def refill(self, now: float) -> None:
        self.level += (now - self.at) * self.per_minute / MINUTE_S
        self.level, self.at = min(self.level, self.per_minute), now
        if now - self.began >= MINUTE_S:
            self.began, self.refused = now, None
            self.had.clear()

    def take(self, caller: Caller, amount: float) -> None:
        """Below 0: it had taken more than it has used."""
        self.level = min(self.level - amount, self.per_minute)
        if amount:
            self.had[caller] += amount  # type: ignore[assignment]  # it counts parts too
        if self.refused == caller:
            self.refused = None

    def refuse(self, caller: Caller) -> None:
        if self.refused is None or self.had[caller] <= self.had[self.refused]:
            self.refused = caller

    def share_wait_s(self, caller: Caller, amount: float) -> float:
        """Until so much is left that others find something, if the caller has had its share."""
        amount, own = min(amount, self.per_minute), self.had[caller]
        least = min(self.had.values(), default=own)
        if self.refused is not None:
            least = min(least, self.had[self.refused])
        if not amount or own <= least:
            return 0.0
        missing = amount + reserve_of(int(self.per_minute)) - self.level
        return max(0.0, missing * MINUTE_S / self.per_minute)

    def wait_s(self, amount: float) -> float:
        """Until it holds `amount`, or all that it can hold."""
        missing = min(amount, self.per_minute) - self.level
        return max(0.0, missing * MINUTE_S / self.per_minute)


class RateLimits:
    """Owned by the API. Invariant: there are buckets only for tenants and keys that have rates."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], dict[str, Bucket]] = {}
        self._keys: Keys | None = None

    def follow(self, keys: Keys) -> None:
        """What other routers have let through with a key counts here too."""
        self._keys, keys.on_taken = keys, self._others_took

    def admit(self, now: float, tenant: Tenant, num_tokens: int) -> None:
        """Take a request and its tokens. Raises `ApiError` (429) and takes nothing."""
        key, keys, caller = tenant.key, self._keys, CALLER.get()[-1:]
        if key and keys and (wait_s := keys.budget_wait_s(key)):
            budget = f"{key.tokens_per_day} tokens a day of the key {key.id}, all of which are used"
            raise _rate_reached(budget, wait_s)
        amounts = {"requests": 1.0, "tokens": float(num_tokens)}
        limits = self._of(now, tenant)
        for whose, kind, bucket in limits:
            wait_s, why = bucket.wait_s(amounts[kind]), ""
            if wait_s <= 0:
                wait_s = bucket.share_wait_s(caller, amounts[kind])
                why = " to other addresses, since this one has had its share"
            if wait_s > 0:
                bucket.refuse(caller)
                left = max(0, int(bucket.level))
                limit = f"{bucket.per_minute:g} {kind} a minute{whose}"
                raise _rate_reached(f"{limit}, of which {left} are left{why}", wait_s)
        for _, kind, bucket in limits:
            bucket.take(caller, amounts[kind])
        if key and keys and key.is_limited:
            keys.take(key, 1, num_tokens)

    def settle(self, now: float, tenant: Tenant, num_taken: int, num_used: int) -> None:
        """A request is over: counts what it has really used."""
        for _, kind, bucket in self._of(now, tenant):
            if kind == "tokens":
                bucket.take(CALLER.get()[-1:], num_used - num_taken)
        if tenant.key and self._keys and tenant.key.is_limited:
            self._keys.take(tenant.key, 0, num_used - num_taken)

    def headers(self, now: float, tenant: Tenant) -> dict[str, str]:
        """Names what is left as OpenAI does: of each kind the limit of which least is left."""
        least: dict[str, Bucket] = {}
        for _, kind, bucket in self._of(now, tenant):
            if kind not in least or bucket.level < least[kind].level:
                least[kind] = bucket
        found: dict[str, str] = {}
        for kind, bucket in least.items():
            full_s = bucket.wait_s(bucket.per_minute)
            found[f"x-ratelimit-limit-{kind}"] = f"{bucket.per_minute:g}"
            found[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(bucket.level)))
            found[f"x-ratelimit-reset-{kind}"] = f"{full_s:.3g}s"
        return found

    def _of(self, now: float, tenant: Tenant) -> list[tuple[str, str, Bucket]]:
        """The limits of a call: whose, what they count, and the bucket."""
        own = self._refilled(now, (tenant.name, ""), tenant)
        found = [("", kind, bucket) for kind, bucket in own.items()]
        if tenant.key is not None:
            buckets = self._refilled(now, ("", tenant.key.id), tenant.key)
            whose = f" of the key {tenant.key.id}"
            found += [(whose, kind, bucket) for kind, bucket in buckets.items()]
        return found

    def _refilled(
        self, now: float, name: tuple[str, str], of: Tenant | ApiKey
    ) -> dict[str, Bucket]:
        buckets = self._buckets.get(name)
        given = {"requests": of.requests_per_minute, "tokens": of.tokens_per_minute}
        rates = {kind: rate for kind, rate in given.items() if rate}
        if not rates:
            self._buckets.pop(name, None)
            return {}
        if buckets is None or rates != {kind: b.per_minute for kind, b in buckets.items()}:
            buckets = {kind: Bucket(rate, rate, now) for kind, rate in rates.items()}
            self._buckets[name] = buckets
        for bucket in buckets.values():
            bucket.refill(now)
        return buckets

    def _others_took(self, key: str, taken: Taken) -> None:
        for kind, bucket in self._buckets.get(("", key), {}).items():
            bucket.level = min(bucket.level - getattr(taken, kind), bucket.per_minute)


def _rate_reached(what: str, wait_s: float) -> ApiError:
    return ApiError(
        429,
        f"Rate limit reached: {what}; try again in {wait_s:.1f} s",
        type="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
    )
