"""What one router knows of the keys that operators have made, and what it has counted.

Life: opened with what the store has; then once a second what was counted here goes to the store,
and what others have changed or counted comes back. Where the store is away, keys are as they were,
what is counted waits, and no key is made or revoked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import structs

from kvrelay.cluster.api.errors import ApiError, unauthorized
from kvrelay.cluster.api.keys.record import (
    DAY_S,
    KEEP_S,
    MAX_KEYS,
    PREFIX,
    ApiKey,
    Batch,
    Counts,
    Known,
    Scope,
    Taken,
    Use,
    hash_of,
    new_secret,
)
from kvrelay.cluster.api.keys.store import KeyStore

if TYPE_CHECKING:
    from kvrelay.cluster.api.keys.shared import SharedKeyStore
    from kvrelay.cluster.api.tenants import Tenant, Tenants

T = TypeVar("T")

EXCHANGE_S = 1.0  # so a revocation holds everywhere within 2 s, while the store answers
SAY_S = 60.0  # between two lines in the log about a store that is away
MAX_USES = 10_000  # kinds of use that wait for a store that is away
MAX_SERIES = 100  # labels of a metric; later ones count as OTHER
OTHER = "other"
IDLE_S = 120.0  # buckets are full again: what others have taken need not be known
AWAY = OSError, sqlite3.Error
_log = logging.getLogger("kvrelay.keys")


@dataclass(slots=True)
class _Day:
    """What a limited key has taken. known: at all routers, by the last exchange; own: here, since
    then."""

    day: int
    known: Taken = field(default_factory=Taken)
    own: Taken = field(default_factory=Taken)
    asked_at: float = 0.0  # when it was last asked for here
    is_followed: bool = False  # `known` is of the last exchange, not of an earlier one


@dataclass(slots=True)
class _Counted:
    """What was counted here and is not in the store."""

    used: dict[Use, Counts] = field(default_factory=dict)
    seen_at: dict[str, float] = field(default_factory=dict)


class Keys:
    """Owned by the API. All but `open` in one loop. Invariant: what was counted is in the store, in
    the batch that is on its way, or in `_counted`, once."""

    def __init__(
        self,
        store: KeyStore | SharedKeyStore | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """May block: it asks the store."""
        self.store = store or KeyStore()
        self._clock = clock
        self._by_hash: dict[str, ApiKey] = {}
        self.by_id: dict[str, ApiKey] = {}
        self._version = ""
        self._counted = _Counted()
        self._days: dict[str, _Day] = {}
        self._batch: Batch | None = None  # that the store may not have got
        self._number = 0
        self._said_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        # Others have taken so much of a key, requests and tokens.
        self.on_taken: Callable[[str, Taken], None] = lambda key, taken: None
        # By tenant, key and model, since this process began: for metrics.
        self.totals: defaultdict[tuple[str, str, str], Counts] = defaultdict(Counts)
        try:
            self._learn(self.store.exchange(self._next_batch(), ""))
        except AWAY as error:  # keys are found once it is there
            _log.warning("API keys are not known yet, the store is away: %r", error)

    # Asked by calls.

    def find(self, secret: str) -> ApiKey | None:
        """The key, if it was made here and is good. Raises ApiError (401) if it was once, and (503)
        before it can be known."""
        if not secret.startswith(PREFIX):
            return None
        if not self._version:
            raise _away("The store of API keys has not answered yet")
        key = self._by_hash.get(hash_of(secret))
        if key is None:
            return None
        now = self._clock()
        if (ended_at := key.ended_at(now)) is not None:
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(ended_at))
            what = "was revoked" if key.revoked_at is not None else "has expired"
            raise unauthorized(f"The API key {key.id} {what} at {when}: ask for another")
        self._counted.seen_at[key.id] = now
        return key

    def allows(self, secret: str, scope: Scope | None) -> bool:
        """Whether it is a good key for that; None: nothing that a key could be for."""
        with contextlib.suppress(ApiError):
            key = self.find(secret)
            return key is not None and scope in key.scopes
        return False

    def tenant_of(self, secret: str, tenants: Tenants) -> Tenant | None:
        """Whose calls those with this key are, with the key's limits. None: there is no such key.
        Raises ApiError (401, 403)."""
        key = self.find(secret)
        if key is None:
            return None
        if Scope.GENERATE not in key.scopes:
            scopes = ", ".join(key.scopes)
            message = f"The scopes of the API key {key.id} are {scopes}: this needs generate"
            raise ApiError(403, message, type="permission_error", code="insufficient_scope")
        tenant = tenants.named(key.tenant)
        if tenant is None:
            raise unauthorized(f"The tenant of the API key {key.id} is not configured any more")
        return replace(tenant, key=key)

    def again(self, tenant: Tenant | None, key_id: str) -> Tenant | None:
        """`tenant`, as one that was called by that key, for work that was begun then. None: the key
        was revoked. An expired one's work goes on."""
        key = self.by_id.get(key_id)
        if not key_id or tenant is None:
            return tenant
        return None if key is None or key.revoked_at is not None else replace(tenant, key=key)

    # Counted.

    def used(self, tenant: Tenant, model: str, usage: Mapping[str, Any]) -> None:
        """A call has used so many tokens, by OpenAI's names."""
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        had = Counts(1, usage["prompt_tokens"], cached, usage["completion_tokens"])
        key = tenant.key.id if tenant.key else ""
        use = Use(self._today(), tenant.name, key, model)
        if use in self._counted.used or len(self._counted.used) < MAX_USES:
            self._counted.used[use] = self._counted.used.get(use, Counts()).plus(had)
        by = tenant.name, key, model
        if by not in self.totals and len(self.totals) >= MAX_SERIES:
            by = OTHER, OTHER, OTHER
        self.totals[by] = self.totals[by].plus(had)

    def take(self, key: ApiKey, requests: int, tokens: int) -> None:
        """Counts against the limits of a key, when a call is admitted and when it ends."""
        day = self._day(key.id)
        day.own = day.own.plus(Taken(requests, tokens))

    def budget_wait_s(self, key: ApiKey) -> float:
        """Until the key has tokens again; 0: it has some."""
        day = self._day(key.id)
        if not key.tokens_per_day or day.known.plus(day.own).tokens < key.tokens_per_day:
            return 0.0
        return (day.day + 1) * DAY_S - self._clock()

    def _today(self) -> int:
        return int(self._clock() // DAY_S)

    def _day(self, key: str) -> _Day:
        today = self._today()
        day = self._days.get(key)
        if day is None or day.day != today:
            day = self._days[key] = _Day(today)
        day.asked_at = self._clock()
        return day

    # Changed by operators.

    async def create(self, key: ApiKey) -> tuple[ApiKey, str]:
        """Makes a key as `key` says, which has no id and hash; returns it, and its value, which
        nobody can find again. Raises ApiError (400, 503)."""
        now, secret = self._clock(), new_secret()
        made = structs.replace(
            key,
            id=f"key_{secrets.token_hex(8)}",
            hashed=hash_of(secret),
            ending=secret[-4:],
        )
        async with self._changing:
            await self._exchange()
            old = [
                each.id
                for each in self.by_id.values()
                if (ended_at := each.ended_at(now)) is not None and ended_at < now - KEEP_S
            ]
            if len(self.by_id) - len(old) >= MAX_KEYS:
                message = f"There are {MAX_KEYS} keys, with those that ended in the last 30 days"
                raise ApiError(400, message, code="too_many_keys")
            await self._in_store(self.store.delete, old, self._today())
            await self._in_store(self.store.put, made)
            await self._exchange()
        return made, secret

    async def revoke(self, key_id: str) -> ApiKey | None:
        """From now on it is good for nothing. None: there is no such key. Raises ApiError (503)."""
        async with self._changing:
            await self._exchange()
            key = self.by_id.get(key_id)
            if key is not None and key.revoked_at is None:
                key = structs.replace(key, revoked_at=self._clock())
                await self._in_store(self.store.put, key)
                await self._exchange()
        return key

    async def all_used(self, first: int, last: int) -> dict[Use, Counts]:
        """What all routers have counted, of these days, both included. Raises ApiError (503)."""
        async with self._changing:
            await self._exchange()
        return await self._in_store(self.store.used, first, last)

    async def last_seen(self) -> dict[str, float]:
        """When each key was last used. Raises ApiError (503)."""
        return await self._in_store(self.store.seen_at)

    async def _in_store(self, call: Callable[..., T], *args: Any) -> T:
        try:
            return await asyncio.to_thread(call, *args)
        except AWAY as error:
            if time.monotonic() - self._said_at >= SAY_S:
                self._said_at = time.monotonic()
                _log.warning("the store of API keys is away, keys stay as they are: %r", error)
            raise _away("The store of API keys does not answer now") from None

    # The exchange.

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """The store has all that was counted, if it answers."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            async with self._changing:
                with contextlib.suppress(ApiError):
                    await self._exchange()
        await asyncio.to_thread(self.store.close)

    async def _run(self) -> None:
        while True:
            try:
                async with self._changing:
                    await self._exchange()
            except ApiError:
                pass  # what was counted waits
            await asyncio.sleep(EXCHANGE_S)

    async def _exchange(self) -> None:
        """Sends what was counted, and learns what others say. Raises ApiError (503)."""
        if self._batch is None:
            self._batch = self._next_batch()
        self._learn(await self._in_store(self.store.exchange, self._batch, self._version))

    def _next_batch(self) -> Batch:
        counted, self._counted = self._counted, _Counted()
        self._number += 1
        today, now = self._today(), self._clock()
        self._days = {key: day for key, day in self._days.items() if day.day == today}
        taken = {key: day.own for key, day in self._days.items() if any(day.own)}
        for key in taken:
            day = self._days[key]
            day.own, day.known = Taken(), day.known.plus(taken[key])
        asked = tuple(key for key, day in self._days.items() if now - day.asked_at < IDLE_S)
        return Batch(self._number, today, counted.used, taken, counted.seen_at, asked)

    def _learn(self, known: Known) -> None:
        """The store has the batch."""
        batch, self._batch = self._batch, None
        if known.keys is not None:
            self.by_id = {each.id: each for each in known.keys}
            self._by_hash = {each.hashed: each for each in known.keys}
        self._version = known.version
        for key, day in self._days.items():
            if batch is None or key not in known.taken or day.day != batch.day:
                day.is_followed = False
                continue
            others, was_followed = known.taken[key].less(day.known), day.is_followed
            day.known, day.is_followed = known.taken[key], True
            if was_followed and any(others):
                self.on_taken(key, others)


def _away(message: str) -> ApiError:
    return ApiError(
        503, message, type="service_unavailable_error", code="store_away", retry_after_s=5.0
    )
