"""Keys and usage of all servers of one cluster, in Redis. Below one prefix:

keys          hash: id -> record
version       counts changes of them
epoch         made with the first of these keys: another one means that Redis has lost them
seen          hash: id -> when it was last used
used:DAY      hash: [tenant, key, model, count] as JSON -> number
taken:DAY     hash: key and count -> number, of limited keys
last:PROCESS  number of its last batch, so that one that is sent twice counts once
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import msgspec
from redis import Redis
from redis.exceptions import RedisError

from kvrelay.cluster.api.keys.record import DAY_S, ApiKey, Batch, Counts, Known, Taken, Use
from kvrelay.cluster.api.keys.store import KEEP_DAYS

P = ParamSpec("P")
T = TypeVar("T")

_LAST_KEEP_S = 3600  # a batch is not sent again after that
# KEYS[1] is the prefix. ARGV: process, number of the batch, how many seconds `last` is kept, then
# fours: kind of the hash and its name, field, number, seconds that the hash is kept.
_EXCHANGE = """
if redis.call('GET', KEYS[1]..'last:'..ARGV[1]) == ARGV[2] then return end
for i = 4, #ARGV, 4 do
  local name = KEYS[1]..ARGV[i]
  if ARGV[i] == 'seen' then
    redis.call('HSET', name, ARGV[i + 1], ARGV[i + 2])
  else
    redis.call('HINCRBY', name, ARGV[i + 1], ARGV[i + 2])
    redis.call('EXPIRE', name, ARGV[i + 3])
  end
end
redis.call('SET', KEYS[1]..'last:'..ARGV[1], ARGV[2], 'EX', ARGV[3])
"""
# What Redis has lost is put back: a key that was revoked stays so, whoever knows it otherwise.
_PUT_BACK = """
for i = 1, #ARGV, 3 do
  if ARGV[i + 2] == '1' then redis.call('HSET', KEYS[1]..'keys', ARGV[i], ARGV[i + 1])
  else redis.call('HSETNX', KEYS[1]..'keys', ARGV[i], ARGV[i + 1]) end
end
return redis.call('INCR', KEYS[1]..'version')
"""


def _plainly(call: Callable[P, T]) -> Callable[P, T]:
    """Redis' errors become OSError, which says of no library."""

    @wraps(call)
    def plain(*args: P.args, **options: P.kwargs) -> T:
        try:
            return call(*args, **options)
        except RedisError as error:
            raise OSError(f"Redis: {error}") from error

    return plain


class SharedKeyStore:
    """As `KeyStore`, whose calls these are. Owned by the API. May be called from any thread."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis, self._prefix = redis, f"{prefix}keys:"
        self._process = secrets.token_hex(8)
        self._known: tuple[ApiKey, ...] = ()  # as they were when they were last read
        self._epoch = b""

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _run(self, script: str, *values: Any) -> Any:
        return self._redis.eval(script, 1, self._prefix, *values)

    @_plainly
    def exchange(self, batch: Batch, seen: str) -> Known:
        more = list(_increments(batch))
        if more:
            flat = [part for each in more for part in each]
            self._run(_EXCHANGE, self._process, batch.number, _LAST_KEEP_S, *flat)
        version = self._version()
        keys = None if version == seen else self._read_keys()
        names = [f"{key} {count}" for key in batch.asked for count in Taken._fields]
        name = self._key(f"taken:{batch.day}")
        found: Any = self._redis.hmget(name, names) if names else []
        counts = [int(each or 0) for each in found]
        pairs = zip(batch.asked, counts[::2], counts[1::2], strict=True)
        return Known(version, keys, {key: Taken(*had) for key, *had in pairs})

    def _version(self) -> str:
        """Changes with the keys. What Redis has lost is there again then."""
        with self._redis.pipeline() as pipe:
            pipe.set(self._key("epoch"), secrets.token_hex(8), nx=True)
            pipe.mget(self._key("epoch"), self._key("version"))
            (epoch, version) = pipe.execute()[1]
        if self._known and epoch != self._epoch:
            parts: list[Any] = []
            for key in self._known:
                parts += [key.id, msgspec.json.encode(key), int(key.revoked_at is not None)]
            version = self._run(_PUT_BACK, *parts)
        self._epoch = epoch
        return f"{epoch.decode()}:{int(version or 0)}"

    def _read_keys(self) -> tuple[ApiKey, ...]:
        found: Any = self._redis.hvals(self._key("keys"))
        self._known = tuple(msgspec.json.decode(text, type=ApiKey) for text in found)
        return self._known

    @_plainly
    def put(self, key: ApiKey) -> None:
        with self._redis.pipeline() as pipe:
            pipe.hset(self._key("keys"), key.id, msgspec.json.encode(key))
            pipe.incr(self._key("version"))
            pipe.execute()

    @_plainly
    def delete(self, ids: list[str], today: int) -> None:
        """Keys are forgotten; their usage expires by itself."""
        if not ids:
            return
        with self._redis.pipeline() as pipe:
            pipe.hdel(self._key("keys"), *ids)
            pipe.hdel(self._key("seen"), *ids)
            pipe.incr(self._key("version"))
            pipe.execute()

    @_plainly
    def seen_at(self) -> dict[str, float]:
        found: Any = self._redis.hgetall(self._key("seen"))
        return {key.decode(): float(at) for key, at in found.items()}

    @_plainly
    def used(self, first: int, last: int) -> dict[Use, Counts]:
        days = range(max(first, last - KEEP_DAYS), last + 1)
        with self._redis.pipeline(transaction=False) as pipe:
            for day in days:
                pipe.hgetall(self._key(f"used:{day}"))
            found = pipe.execute()
        sums: defaultdict[Use, dict[str, int]] = defaultdict(dict)
        for day, fields in zip(days, found, strict=True):
            for name, number in fields.items():
                *by, count = json.loads(name)
                sums[Use(day, *by)][count] = int(number)
        return {use: Counts(**counts) for use, counts in sums.items()}

    def close(self) -> None:
        self._redis.close()


def _increments(batch: Batch) -> Iterable[tuple[str, str, int | float, int]]:
    for use, had in batch.used.items():
        for count, number in had._asdict().items():
            field = json.dumps([*use[1:], count])
            yield f"used:{use.day}", field, number, KEEP_DAYS * DAY_S
    for key, taken in batch.taken.items():
        for count, number in taken._asdict().items():
            yield f"taken:{batch.day}", f"{key} {count}", number, 2 * DAY_S
    for key, at in batch.seen_at.items():
        yield "seen", key, at, 0
