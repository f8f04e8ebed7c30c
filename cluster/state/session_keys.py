"""Sessions in Redis, for all routers of a model: one hash for each, and a stream of what changed.

    PREFIX:session:TENANT/NAME   hash: `v` version, `l` 1 or (closed) 0, `u` ms of its last use,
                                 `d` the record; expires with its retention
    PREFIX:sessions              stream: `k` the key that has changed, `r` the router that did it

Of two states the one of the higher version stays, then one that is not closed, then the one that
was used last; a script compares and writes, so this holds whoever writes when. Times are the wall
clock's here and the router's there: between them go records whose times count back from now.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec
from redis import Redis

from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.kv.tier import Retention
from kvrelay.engine.node import NodeId
from kvrelay.router.sessions.session import (
    TOKEN_BYTES,
    DeleteSession,
    SaveSession,
    SessionRecord,
    SessionsUpdated,
)

MAX_CHANGES = 10_000  # in the stream, about
CLOSED_S = 3600.0  # how long it is known that a session was closed
MAX_KEPT_S = 10 * 365 * 86_400.0
SAME_MS = 50  # the clocks of one machine drift apart by less between two looks at a session
AT_ONCE = 256  # sessions read or written in one go

_SAVE = """
local old = redis.call('HMGET', KEYS[1], 'v', 'l', 'u')
if old[1] then
  for i = 1, 3 do
    local was, is = tonumber(old[i]) or 0, tonumber(ARGV[i])
    if was > is then return 0 end
    if was < is then break end
    if i == 3 then return 0 end
  end
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'v', ARGV[1], 'l', ARGV[2], 'u', ARGV[3], 'd', ARGV[4])
if tonumber(ARGV[5]) > 0 then redis.call('PEXPIRE', KEYS[1], ARGV[5]) end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[7], '*', 'k', KEYS[1], 'r', ARGV[6])
return 1
"""

Change = SaveSession | DeleteSession
Order = tuple[int, int, int]  # version, 1 or (closed) 0, ms of the last use
NOTHING: Order = (-1, 0, 0)


class _Row(msgspec.Struct, array_like=True, frozen=True):
    """`tokens` None: it is closed."""

    tenant: str
    session: str
    tokens: bytes | None = None
    salt: bytes = b""
    num_public_tokens: int = 0
    keep_s: float = 0.0
    num_turns: int = 0
    worker: str | None = None
    pinned: bool = False
    parked: bool = False
    created_at: float = 0.0
    used_at: float = 0.0


_rows = msgspec.msgpack.Decoder(_Row)


@dataclass(frozen=True, slots=True)
class Stamped:
    """A change as it is to be written; times of its record count back from `at`."""

    change: Change
    at: float

    @property
    def order(self) -> Order:
        change = self.change
        if isinstance(change, DeleteSession):
            return change.version, 0, int(self.at * 1000)
        return change.record.version, 1, int((self.at - change.record.idle_s) * 1000)

    def row(self) -> _Row:
        change = self.change
        if isinstance(change, DeleteSession):
            return _Row(change.tenant, change.session)
        record = change.record
        return _Row(
            tenant=record.tenant,
            session=record.session,
            tokens=record.tokens,
            salt=record.scope.salt,
            num_public_tokens=record.scope.num_public_tokens,
            keep_s=record.retention.keep_s,
            num_turns=record.num_turns,
            worker=record.worker,
            pinned=record.pinned,
            parked=record.parked,
            created_at=self.at - record.age_s,
            used_at=self.at - record.idle_s,
        )

    def left_ms(self, now: float) -> int:
        """How long it is worth keeping; 0: for ever."""
        if isinstance(self.change, DeleteSession):
            return int(CLOSED_S * 1000)
        record = self.change.record
        if record.pinned:
            return 0
        left_s = record.retention.keep_s - record.idle_s - (now - self.at)
        return max(1, int(min(left_s, MAX_KEPT_S) * 1000))


class SessionKeys:
    """Owned by a `RedisState`, used on its thread. Every method may raise what `redis` raises.

    Invariant: `_known` has the order of what this router has written or was told, by key, so that
    nothing is told to it twice."""

    def __init__(self, prefix: str, router: NodeId) -> None:
        self._router = router
        self._prefix = f"{prefix}:session:"
        self._stream = f"{prefix}:sessions"
        self._last = b"0-0"
        self._known: dict[bytes, Order] = {}
        self.num_unreadable = 0

    def save(self, redis: Redis, changes: Sequence[Stamped]) -> None:
        """Write what is newer than what is there."""
        for start in range(0, len(changes), AT_ONCE):
            some = changes[start : start + AT_ONCE]
            keys = [self._key(one.change) for one in some]
            there = self._orders(redis, keys)
            with redis.pipeline(transaction=False) as pipe:
                for key, stamped in zip(keys, some, strict=True):
                    if _is_newer(stamped.order, there[key]):
                        self._write(pipe, key, stamped)
                        self._known[key] = stamped.order
                pipe.execute()

    def load(self, redis: Redis) -> Iterator[SessionsUpdated]:
        """All that this router does not know yet; from now on `changes` has what is new."""
        newest: Any = redis.xrevrange(self._stream, count=1)
        self._last = newest[0][0] if newest else b"0-0"
        found = redis.scan_iter(match=f"{self._prefix}*", count=1000)
        keys: list[bytes] = []
        for key in found:
            keys.append(key)
            if len(keys) == AT_ONCE:
                yield self._read(redis, keys)
                keys = []
        if keys:
            yield self._read(redis, keys)

    def changes(self, redis: Redis) -> SessionsUpdated | None:
        """What other routers have changed since. None: some of it was lost; `load` again."""
        with redis.pipeline(transaction=False) as pipe:
            pipe.xrange(self._stream, count=1)
            pipe.xrange(self._stream, min=b"(" + self._last, count=AT_ONCE)
            oldest, entries = pipe.execute()
        if oldest and self._last != b"0-0" and _id(oldest[0][0]) > _id(self._last):
            return None
        if not entries:
            return SessionsUpdated(())
        own = self._router.encode()
        keys = {e[b"k"]: None for _, e in entries if e.get(b"r") != own and b"k" in e}
        learned = self._read(redis, list(keys)) if keys else SessionsUpdated(())
        self._last = entries[-1][0]
        return learned

    def _key(self, change: Change) -> bytes:
        at = change.record if isinstance(change, SaveSession) else change
        tenant, name = (
            quote(t, safe="", errors="backslashreplace") for t in (at.tenant, at.session)
        )
        return f"{self._prefix}{tenant}/{name}".encode()

    def _write(self, pipe: Redis, key: bytes, stamped: Stamped) -> None:
        try:
            data = msgspec.msgpack.encode(stamped.row())
        except UnicodeEncodeError:  # half a surrogate pair in a name
            self.num_unreadable += 1
            return
        pipe.eval(
            _SAVE,
            2,
            key,
            self._stream,
            *map(str, stamped.order),
            data,
            str(stamped.left_ms(time.time())),
            self._router,
            str(MAX_CHANGES),
        )

    def _orders(self, redis: Redis, keys: Sequence[bytes]) -> Mapping[bytes, Order]:
        with redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hmget(key, "v", "l", "u")
            return {key: _order(v) for key, v in zip(keys, pipe.execute(), strict=True)}

    def _read(self, redis: Redis, keys: Sequence[bytes]) -> SessionsUpdated:
        orders = self._orders(redis, keys)
        wanted = [k for k, order in orders.items() if order > self._known.get(k, NOTHING)]
        with redis.pipeline(transaction=False) as pipe:
            for key in wanted:
                pipe.hmget(key, "v", "l", "u", "d")
            found = pipe.execute()
        records, closed, now = [], [], time.time()
        for key, (*values, data) in zip(wanted, found, strict=True):
            order = _order(values)
            try:
                row = _rows.decode(data or b"")
                record = None if row.tokens is None else _record(row, order[0], now)
            except (msgspec.MsgspecError, ValueError):
                self.num_unreadable += data is not None
                continue
            self._known[key] = order
            if record is None:
                closed.append((row.tenant, row.session, order[0]))
            else:
                records.append(record)
        if len(self._known) > 2 * len(orders) + 100_000:
            self._known.clear()  # sessions long gone; those that are not are read once more
        return SessionsUpdated(tuple(records), tuple(closed))


def _is_newer(mine: Order, there: Order) -> bool:
    """What was written already and is told again is not."""
    return mine > there and (mine[:2] != there[:2] or mine[2] - there[2] > SAME_MS)


def _order(values: Sequence[bytes | None]) -> Order:
    if values[0] is None:
        return NOTHING
    version, live, used = (int(value or 0) for value in values)
    return version, live, used


def _id(entry: bytes) -> tuple[int, int]:
    ms, _, number = entry.partition(b"-")
    return int(ms), int(number)


def _record(row: _Row, version: int, now: float) -> SessionRecord:
    """Raises ValueError for what is no record."""
    assert row.tokens is not None
    if len(row.tokens) % TOKEN_BYTES:
        raise ValueError(f"{len(row.tokens)} bytes are no tokens")
    return SessionRecord(
        tenant=row.tenant,
        session=row.session,
        tokens=row.tokens,
        scope=CacheScope(row.salt, row.num_public_tokens),
        retention=Retention(row.keep_s),
        num_turns=row.num_turns,
        worker=row.worker,
        pinned=row.pinned,
        age_s=max(0.0, now - row.created_at),
        idle_s=max(0.0, now - row.used_at),
        parked=row.parked,
        version=version,
    )
