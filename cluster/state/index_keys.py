"""The prefix index in Redis: who writes it, a view for each worker, and the events since.

    PREFIX:index:RUN:writer         lease of the one router that writes (SET NX PX)
    PREFIX:index:RUN:workers        set of the workers that have a view
    PREFIX:index:RUN:view:WORKER    hash: `meta`, and the packed hashes of each tier in chunks
    PREFIX:index:RUN:events         stream of batches of KVEvents

A view is replaced in one transaction, so a reader sees all of it or none. RUN is one life of the
cluster: epochs count from its start, so views of an earlier run mean nothing, and expire.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from redis import Redis

from kvrelay.engine.kv.block_hash import HASH_BYTES
from kvrelay.engine.kv.events import KVEvents
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.engine.wire import codec
from kvrelay.router.state import IndexLoaded, IndexView

CHUNK_BYTES = 65_536 * HASH_BYTES
LEASE_S = 3.0
MARGIN_S = 0.5  # before its lease ends, a writer stops
TTL_S = 3600  # without a writer for this long the index is forgotten
REFRESH_S = 600.0
MAX_BATCHES = 2048  # events that are kept, about
MAX_BATCH_EVENTS = 256
VIEWS_AT_ONCE = 8  # read in one go

_TAKE_LEASE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_LEAVE_LEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class _Meta(msgspec.Struct, array_like=True, frozen=True):
    epoch: int
    seq: int
    lengths: dict[Tier, int]  # bytes


_meta = msgspec.msgpack.Decoder(_Meta)
_batch = msgspec.msgpack.Decoder(list[bytes])


class IndexKeys:
    """Owned by a `RedisState`, used on its thread. Every method may raise what `redis` raises.

    Invariant: it writes only while its lease has not run out, by its own clock."""

    def __init__(self, prefix: str, run: str, holder: str) -> None:
        base = f"{prefix}:index:{run}"
        self._holder = holder
        self._writer = f"{base}:writer"
        self._workers = f"{base}:workers"
        self._view = f"{base}:view:"
        self._events = f"{base}:events"
        self._lease_ends = 0.0
        self._next_lease = 0.0
        self._next_refresh = 0.0
        self.num_unreadable = 0

    def hold_lease(self, redis: Redis) -> bool:
        """Whether this router writes now. Asks Redis three times per lease."""
        now = time.monotonic()
        if now >= self._next_lease:
            self._next_lease = now + LEASE_S / 3
            taken = redis.eval(_TAKE_LEASE, 1, self._writer, self._holder, str(int(LEASE_S * 1000)))
            self._lease_ends = now + LEASE_S - MARGIN_S if taken == 1 else 0.0
        return self.writes

    @property
    def writes(self) -> bool:
        return time.monotonic() < self._lease_ends

    def leave(self, redis: Redis) -> None:
        """Let another router write at once."""
        if self._lease_ends:
            redis.eval(_LEAVE_LEASE, 1, self._writer, self._holder)
        self.forget_lease()

    def forget_lease(self) -> None:
        self._lease_ends = self._next_lease = 0.0

    def load(self, redis: Redis) -> IndexLoaded:
        """All that is kept. What cannot be read is left out: its workers tell it again."""
        members: Any = redis.smembers(self._workers)
        workers = sorted(str(name, "utf-8", "replace") for name in members)
        views = []
        for start in range(0, len(workers), VIEWS_AT_ONCE):
            some = workers[start : start + VIEWS_AT_ONCE]
            with redis.pipeline(transaction=False) as pipe:
                for worker in some:
                    pipe.hgetall(self._view + worker)
                for worker, fields in zip(some, pipe.execute(), strict=True):
                    view = self._read(worker, fields)
                    if view is not None:
                        views.append(view)
        batches: Any = redis.xrange(self._events)
        return IndexLoaded(tuple(views), tuple(self._read_events(batches)))

    def save(self, redis: Redis, view: IndexView) -> None:
        key = self._view + view.worker
        meta = _Meta(view.epoch, view.seq, {tier: len(n) for tier, n in view.block_hashes.items()})
        with redis.pipeline(transaction=True) as pipe:
            pipe.delete(key)
            pipe.hset(key, "meta", msgspec.msgpack.encode(meta))
            for tier, block_hashes in view.block_hashes.items():
                for number, at in enumerate(range(0, len(block_hashes), CHUNK_BYTES)):
                    pipe.hset(key, f"{tier}.{number}", block_hashes[at : at + CHUNK_BYTES])
            pipe.expire(key, TTL_S)
            pipe.sadd(self._workers, view.worker)
            pipe.expire(self._workers, TTL_S)
            pipe.execute()

    def forget(self, redis: Redis, worker: NodeId) -> None:
        with redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._view + worker)
            pipe.srem(self._workers, worker)
            pipe.execute()

    def append(self, redis: Redis, events: list[KVEvents]) -> None:
        with redis.pipeline(transaction=False) as pipe:
            for start in range(0, len(events), MAX_BATCH_EVENTS):
                bodies = [codec.encode(e) for e in events[start : start + MAX_BATCH_EVENTS]]
                blob = msgspec.msgpack.encode(bodies)
                pipe.xadd(self._events, {"e": blob}, maxlen=MAX_BATCHES, approximate=True)
            pipe.expire(self._events, TTL_S)
            pipe.execute()

    def refresh(self, redis: Redis) -> None:
        """What does not change is still true."""
        now = time.monotonic()
        if now < self._next_refresh:
            return
        self._next_refresh = now + REFRESH_S
        workers: Any = redis.smembers(self._workers)
        with redis.pipeline(transaction=False) as pipe:
            for worker in workers:
                pipe.expire(self._view.encode() + worker, TTL_S)
            pipe.expire(self._workers, TTL_S)
            pipe.expire(self._events, TTL_S)
            pipe.execute()

    def _read(self, worker: NodeId, fields: dict[bytes, bytes]) -> IndexView | None:
        if not fields:
            return None  # it has expired, or was removed a moment ago
        try:
            meta = _meta.decode(fields[b"meta"])
            block_hashes = {
                tier: b"".join(
                    fields[f"{tier}.{number}".encode()]
                    for number in range(-(-length // CHUNK_BYTES))
                )
                for tier, length in meta.lengths.items()
            }
        except (KeyError, msgspec.MsgspecError):
            self.num_unreadable += 1
            return None
        if any(len(block_hashes[tier]) != n or n % HASH_BYTES for tier, n in meta.lengths.items()):
            self.num_unreadable += 1
            return None
        return IndexView(worker, meta.epoch, meta.seq, block_hashes)

    def _read_events(
        self, batches: Iterable[tuple[bytes, dict[bytes, bytes]]]
    ) -> Iterator[KVEvents]:
        for _, fields in batches:
            try:
                messages = [codec.decode_message(body) for body in _batch.decode(fields[b"e"])]
            except (KeyError, msgspec.MsgspecError, codec.FrameError):
                self.num_unreadable += 1
                continue
            yield from (message for message in messages if isinstance(message, KVEvents))
