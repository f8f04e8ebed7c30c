"""Files and batches of all servers of one cluster, in Redis: each sees, runs and takes over all.

The life of a row is as in `store`; what is one transaction there is one script here, or what stands
between WATCH and EXEC. A lease is a key that expires by Redis' clock, so no two clocks are
compared. It saves work and decides nothing: the first result of a row counts whoever sends it, and
a batch is ended by who holds its lease at that moment. Keys, below one prefix:

    seq                         counts files and batches, which gives them an order
    file:ID                     hash: tenant, record, size (what its parts take here)
    parts:ID                    list: its bytes, deflated; of one that is being written, it expires
    readers:ID                  set: batches that have not ended and read it
    files:TENANT, bytes:TENANT  sorted set of its files by age; their bytes, as the tenant sees them
    expiry, kept                sorted sets of files and batches, by when they may be deleted
    batch:NAME                  hash: tenant, record
    batches:TENANT, open:TENANT sorted sets by age: all, and those that have not ended
    ended:TENANT                sorted set of those that have, by when that was
    live                        sorted set: those of all tenants that have not ended
    lease:NAME                  who runs it
    output:NAME, error:NAME     hashes: line of the input -> result, deflated
    counts:NAME                 hash: sums over its results
    stored                      bytes of all parts and results
    uploads                     hash: parts that are being written -> their bytes until now
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from redis import Redis
from redis.exceptions import OutOfMemoryError, RedisError, WatchError

from kvrelay.cluster.api.batches.folder import Folder, Full
from kvrelay.cluster.api.batches.store import (
    KEEP_S,
    MAX_BATCHES,
    MAX_ENDED,
    PAGE,
    SUMS,
    Backlog,
    Page,
    Record,
    Result,
    StoreAway,
    with_counts,
)
from kvrelay.cluster.api.pages import PageQuery

FOLDER = "shared-files"  # copies of what was written and read on this machine
_PART_BYTES = 1 << 20
_PARTS_KEEP_S = 600  # an upload that is not going on; each part begins it anew
_MAX_TRIES = 64  # a change is given up then: others got ahead
_NAMES = 512  # that are read at once, to find some among them
_LEVEL = 1  # deflate's fastest
_KINDS = ("output", "error")

# KEYS[1] of each is the prefix. Where Redis has as much as it may, it refuses a script whose first
# change needs memory; so what has to go on then, such as the end of a batch, deletes first.
_CLAIM = """
redis.call('DEL', KEYS[1]..'none')
local busy, full, num_busy = {}, {}, tonumber(ARGV[4])
for i = 5, #ARGV do
  if i < 5 + num_busy then busy[ARGV[i]] = true else full[ARGV[i]] = true end
end
for _, name in ipairs(redis.call('ZRANGE', KEYS[1]..'live', 0, -1)) do
  if redis.call('EXISTS', KEYS[1]..'lease:'..name) == 0 then
    local found = redis.call('HMGET', KEYS[1]..'batch:'..name, 'tenant', 'record')
    local waits = not found[1] or busy[found[1]]
    if not waits and full[found[1]] then
      local record = cjson.decode(found[2])
      waits = record.status == 'in_progress' and record.expires_at > tonumber(ARGV[3])
    end
    if not waits then
      redis.call('SET', KEYS[1]..'lease:'..name, ARGV[1], 'PX', ARGV[2])
      return found
    end
  end
end
"""
# A lease that has run out, and that nobody has taken, is renewed as well.
_RENEW = """
redis.call('DEL', KEYS[1]..'none')
local mine = {}
for i = 3, #ARGV do
  local lease = KEYS[1]..'lease:'..ARGV[i]
  local holder = redis.call('GET', lease)
  if (not holder or holder == ARGV[1]) and redis.call('ZSCORE', KEYS[1]..'live', ARGV[i]) then
    redis.call('SET', lease, ARGV[1], 'PX', ARGV[2])
    table.insert(mine, redis.call('HGET', KEYS[1]..'batch:'..ARGV[i], 'record'))
  end
end
return mine
"""
_RELEASE = """
local names = {ARGV[2]}
if ARGV[2] == '' then names = redis.call('ZRANGE', KEYS[1]..'live', 0, -1) end
for _, name in ipairs(names) do
  local lease = KEYS[1]..'lease:'..name
  if redis.call('GET', lease) == ARGV[1] then redis.call('DEL', lease) end
end
"""
_SET = """
redis.call('DEL', KEYS[1]..'none')
redis.call('HSET', KEYS[1]..'batch:'..ARGV[1], 'record', ARGV[2])
"""
# Frees the results of a batch; where its record is given, the batch ends too.
_END = """
local owner, name, tenant, input, record = unpack(ARGV)
if redis.call('GET', KEYS[1]..'lease:'..name) ~= owner
    or not redis.call('ZSCORE', KEYS[1]..'live', name) then return end
local size = redis.call('HGET', KEYS[1]..'counts:'..name, 'size') or '0'
for _, kind in ipairs({'output', 'error', 'counts'}) do
  redis.call('DEL', KEYS[1]..kind..':'..name)
end
redis.call('DECRBY', KEYS[1]..'stored', size)
if record == '' then return end
redis.call('DEL', KEYS[1]..'lease:'..name)
redis.call('ZREM', KEYS[1]..'live', name)
redis.call('ZREM', KEYS[1]..'open:'..tenant, name)
redis.call('SREM', KEYS[1]..'readers:'..input, name)
redis.call('HSET', KEYS[1]..'batch:'..name, 'record', record)
redis.call('ZADD', KEYS[1]..'ended:'..tenant, redis.call('INCR', KEYS[1]..'seq'), name)
"""
# An upload has so many bytes now. Returns what all parts, results and uploads have. A part goes
# through no script, whose memory would keep it for long.
_COUNT = """
local parts, size = unpack(ARGV)
redis.call('HSET', KEYS[1]..'uploads', parts, size)
local total = tonumber(redis.call('GET', KEYS[1]..'stored') or 0)
local uploads = redis.call('HGETALL', KEYS[1]..'uploads')
for i = 1, #uploads, 2 do
  if redis.call('EXISTS', uploads[i]) == 1 then
    total = total + tonumber(uploads[i + 1])
  else
    redis.call('HDEL', KEYS[1]..'uploads', uploads[i])
  end
end
return total
"""
# Returns 1 where there is no room. What says that a row was not sent has to find some: otherwise
# the batch could not end.
_PUT = """
local name, kind, row, line, most = unpack(ARGV)
if not redis.call('ZSCORE', KEYS[1]..'live', name)
    or redis.call('HEXISTS', KEYS[1]..'output:'..name, row) == 1
    or redis.call('HEXISTS', KEYS[1]..'error:'..name, row) == 1 then return 0 end
local stored = tonumber(redis.call('GET', KEYS[1]..'stored') or '0')
if kind == 'output' and stored + #line > tonumber(most) then return 1 end
redis.call('HSET', KEYS[1]..kind..':'..name, row, line)
redis.call('INCRBY', KEYS[1]..'stored', #line)
for i = 6, #ARGV, 2 do redis.call('HINCRBY', KEYS[1]..'counts:'..name, ARGV[i], ARGV[i + 1]) end
return 0
"""
T = TypeVar("T")


@contextmanager
def _redis_errors() -> Iterator[None]:
    """Raises OSError as a disk does."""
    try:
        yield
    except OutOfMemoryError as error:
        raise OSError(errno.ENOSPC, f"Redis takes no more: {error}") from error
    except RedisError as error:
        raise StoreAway(f"Redis has not done it: {error}") from error


class SharedBatchStore(Folder):
    """As `BatchStore`, of which no bytes are only here. Owned by the API."""

    def __init__(
        self, folder: Path | None, redis: Redis, prefix: str, max_bytes: Callable[[], int]
    ) -> None:
        """folder: None if no copies are to be kept. max_bytes: of all parts, uploads and results;
        may ask Redis."""
        super().__init__(folder, FOLDER)
        self._prefix, self._most = prefix, max_bytes
        self._redis: Any = redis
        scripts = (_CLAIM, _RENEW, _RELEASE, _PUT, _SET, _END, _COUNT)
        registered = map(self._redis.register_script, scripts)
        self._claim, self._renew, self._release, self._put, self._set, *rest = registered
        self._end, self._count = rest

    def _key(self, *names: str) -> str:
        return self._prefix + ":".join(names)

    def _step(self, change: Callable[[Any], T], *keys: str) -> T:
        """What `change` has read holds when that is done which it puts behind `multi`."""
        with self._redis.pipeline() as pipe:
            for _ in range(_MAX_TRIES):
                with suppress(WatchError):
                    pipe.watch(*keys)
                    result = change(pipe)
                    pipe.execute()
                    return result
        raise StoreAway(f"others have changed {keys[0]} {_MAX_TRIES} times meanwhile")

    def _records(self, kind: str, names: Iterable[bytes]) -> list[Record]:
        with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hget(self._key(kind, name.decode()), "record")
            return [json.loads(record) for record in pipe.execute() if record]

    def _page(
        self, kind: str, names: str, asked: PageQuery, prefix: str = "", purpose: str = ""
    ) -> Page:
        """Of a sorted set only what is asked for is read, and names before that."""
        found, wanted = list[Record](), asked.limit + 1
        at_once = _NAMES if prefix else wanted
        every = self._names(names, asked, at_once)
        begun = (name for name in every if name.startswith(prefix.encode()))
        if asked.after is not None and not asked.after.startswith(prefix):
            raise KeyError(asked.after)
        while part := list(islice(begun, wanted - len(found))):
            records = self._records(kind, part)
            found += (each for each in records if not purpose or each["purpose"] == purpose)
        return found[: asked.limit], len(found) == wanted

    def _names(self, names: str, asked: PageQuery, at_once: int) -> Iterator[bytes]:
        call = self._redis.zrangebyscore if asked.is_asc else self._redis.zrevrangebyscore
        place, end = ("-inf", "+inf") if asked.is_asc else ("+inf", "-inf")
        if asked.after is not None:
            if (score := self._redis.zscore(names, asked.after)) is None:
                raise KeyError(asked.after)
            place = f"({score:.0f}"
        while part := call(names, place, end, start=0, num=at_once, withscores=True):
            yield from (name for name, _ in part)
            place = f"({part[-1][1]:.0f}"

    def _record(self, kind: str, tenant: str, name: str) -> Record | None:
        its, record = self._redis.hmget(self._key(kind, name), "tenant", "record")
        return json.loads(record) if its == tenant.encode() else None

    # Files.

    @_redis_errors()
    def check_room(self, tenant: str, max_bytes: int) -> None:
        """max_bytes: of all files of the tenant and its uploads here. Raises Full."""
        self._check_room(self._redis, tenant, max_bytes)

    def _check_room(self, redis: Any, tenant: str, max_bytes: int) -> None:
        count = redis.zcard(self._key("files", tenant))
        size = int(redis.get(self._key("bytes", tenant)) or 0)
        self._check(tenant, count, size, max_bytes)

    @_redis_errors()
    def add_file(self, tenant: str, record: Record, draft: Path, max_bytes: int) -> None:
        """Keeps an upload, which is the draft. Raises Full as `check_room`."""
        parts, size = self._upload(draft, self._most())

        def add(pipe: Any) -> None:
            self._check_room(pipe, tenant, max_bytes)
            self._begin(pipe, parts)
            self._put_file(pipe, tenant, record, parts, size)

        try:
            self._step(add, parts, self._key("files", tenant), self._key("bytes", tenant))
        finally:
            self._forget_uploads(parts)
        os.replace(draft, self.path(record["id"]))

    def _upload(self, draft: Path, most: float) -> tuple[str, int]:
        """Returns the key of its parts and what they take: so much may be stored with it."""
        parts, size = self._key("parts", draft.name), 0
        try:
            with draft.open("rb") as file:
                part = bytes(_PART_BYTES)
                while len(part) == _PART_BYTES:
                    part = file.read(_PART_BYTES)
                    packed = zlib.compress(part, _LEVEL)
                    size += len(packed)
                    with self._redis.pipeline() as pipe:
                        pipe.rpush(parts, packed).expire(parts, _PARTS_KEEP_S).execute()
                    stored = self._count([self._prefix], [parts, size]) - size
                    if stored + size > most:
                        text = f"files, uploads and results have {stored} of {most} bytes"
                        raise OSError(errno.ENOSPC, text)
        except BaseException:
            with suppress(RedisError):
                self._forget_uploads(parts)
            raise
        return parts, size

    def _forget_uploads(self, *parts: str) -> None:
        """What was not made a file of is gone; files have taken theirs."""
        if parts:
            with self._redis.pipeline() as pipe:
                pipe.delete(*parts).hdel(self._key("uploads"), *parts).execute()

    def _begin(self, pipe: Any, *parts: str) -> None:
        """A transaction that makes files of what was uploaded."""
        if parts and pipe.exists(*parts) < len(parts):
            raise StoreAway("Redis has lost what was just written: was it restarted?")
        pipe.multi()

    def _put_file(self, pipe: Any, tenant: str, record: Record, parts: str, size: int) -> None:
        name, its = record["id"], self._key("parts", record["id"])
        fields = {"tenant": tenant, "record": json.dumps(record), "size": size}
        pipe.rename(parts, its).persist(its)
        pipe.hset(self._key("file", name), mapping=fields)
        pipe.zadd(self._key("files", tenant), {name: self._redis.incr(self._key("seq"))})
        pipe.zadd(self._key("expiry"), {name: record["expires_at"]})
        pipe.incrby(self._key("bytes", tenant), record["bytes"])
        pipe.incrby(self._key("stored"), size)

    @_redis_errors()
    def fetched(self, name: str) -> Path:
        """Where its bytes are on this machine, from now on. Raises FileNotFoundError."""
        path, key = self.path(name), self._key("parts", name)

        def parts() -> Iterator[bytes]:
            for index in range(self._redis.llen(key)):
                if (packed := self._redis.lindex(key, index)) is None:
                    raise FileNotFoundError(name)
                yield zlib.decompress(packed)

        if not path.exists():
            draft = self._written(parts())
            if draft is None:
                raise FileNotFoundError(name)
            os.replace(draft, path)
        return path

    @_redis_errors()
    def files(self, tenant: str, asked: PageQuery, purpose: str = "") -> Page:
        """The tenant's, or those of a purpose. Raises KeyError where `after` is none of them."""
        return self._page("file", self._key("files", tenant), asked, purpose=purpose)

    @_redis_errors()
    def file(self, tenant: str, name: str) -> Record | None:
        return self._record("file", tenant, name)

    @_redis_errors()
    def delete_file(self, tenant: str, name: str) -> None:
        """Raises Full where a batch that has not ended reads it."""
        if readers := self._redis.smembers(self._key("readers", name)):
            raise Full(min(readers).decode())
        self._delete_file(name, tenant)

    def _delete_file(self, name: str, tenant: str | None = None) -> None:
        """tenant: whose it has to be."""
        key, parts, readers = (self._key(kind, name) for kind in ("file", "parts", "readers"))

        def delete(pipe: Any) -> None:
            its, record, size = pipe.hmget(key, "tenant", "record", "size")
            if its is None or tenant not in (None, its.decode()) or pipe.exists(readers):
                return
            pipe.multi()
            pipe.delete(key, parts)
            pipe.zrem(self._key("files", its.decode()), name).zrem(self._key("expiry"), name)
            pipe.decrby(self._key("bytes", its.decode()), json.loads(record)["bytes"])
            pipe.decrby(self._key("stored"), int(size))

        self._step(delete, key, readers)
        self.path(name).unlink(missing_ok=True)

    # Batches.

    @_redis_errors()
    def add_batch(self, tenant: str, record: Record) -> None:
        """Keeps a new one. Raises Full where there are too many."""
        name, opened = record["id"], self._key("open", tenant)

        def add(pipe: Any) -> None:
            if (count := pipe.zcard(opened)) >= MAX_BATCHES:
                raise Full(f"{count} batches that have not ended, which is the limit")
            pipe.multi()
            fields = {"tenant": tenant, "record": json.dumps(record)}
            pipe.hset(self._key("batch", name), mapping=fields)
            order = self._redis.incr(self._key("seq"))
            for key in (opened, self._key("batches", tenant), self._key("live")):
                pipe.zadd(key, {name: order})
            pipe.zadd(self._key("kept"), {name: record["expires_at"] + KEEP_S})
            pipe.sadd(self._key("readers", record["input_file_id"]), name)

        self._step(add, opened)

    @_redis_errors()
    def batches(self, tenant: str, asked: PageQuery, prefix: str = "") -> Page:
        """The tenant's whose names begin so. Raises KeyError where `after` is none of them."""
        found, has_more = self._page("batch", self._key("batches", tenant), asked, prefix)
        return self._counted(found), has_more

    @_redis_errors()
    def batch(self, tenant: str, name: str) -> Record | None:
        found = self._record("batch", tenant, name)
        return self._counted([found])[0] if found else None

    def _counted(self, records: list[Record]) -> list[Record]:
        with self._redis.pipeline(transaction=False) as pipe:
            for record in records:
                pipe.hmget(self._key("counts", record["id"]), *SUMS)
            sums = [[int(each or 0) for each in found] for found in pipe.execute()]
        return [with_counts(record, *its) for record, its in zip(records, sums, strict=True)]

    def _sums(self, redis: Any, name: str) -> list[int]:
        found = redis.hmget(self._key("counts", name), *SUMS, "unsent", "size")
        return [int(each or 0) for each in found]

    @_redis_errors()
    def backlog(self) -> Backlog:
        live = self._redis.zrange(self._key("live"), 0, -1)
        records = self._counted(self._records("batch", live))
        counts = [record["request_counts"] for record in records]
        num_rows = sum(
            each["total"] - each.get("completed", 0) - each.get("failed", 0) for each in counts
        )
        created_at, ends_at = (
            tuple(record[of] for record in records) for of in ("created_at", "expires_at")
        )
        return Backlog(max(0, num_rows), created_at, ends_at)

    @_redis_errors()
    def change_batch(self, name: str, change: Callable[[Record], Record]) -> Record | None:
        """What `change` makes of a batch that has not ended. None: it has, or is not there."""
        key = self._key("batch", name)

        def rewrite(pipe: Any) -> Record | None:
            if pipe.zscore(self._key("live"), name) is None:
                return None
            record = change(json.loads(pipe.hget(key, "record")))
            pipe.multi()
            self._set([self._prefix], [name, json.dumps(record)], client=pipe)
            return record

        return self._step(rewrite, key)

    @_redis_errors()
    def delete_batch(self, tenant: str, name: str) -> bool:
        """With its files. False: it has not ended."""
        record = self._record("batch", tenant, name)
        if record is None or self._redis.zscore(self._key("live"), name) is not None:
            return False
        self._forget_batch(tenant, name)
        for kind in ("input", "output", "error"):
            if file := record[f"{kind}_file_id"]:
                self._delete_file(file, tenant)
        return True

    def _forget_batch(self, tenant: str, name: str) -> None:
        with self._redis.pipeline() as pipe:
            pipe.delete(self._key("batch", name)).zrem(self._key("kept"), name)
            for kind in ("batches", "ended"):
                pipe.zrem(self._key(kind, tenant), name)
            pipe.execute()

    def _forget_oldest(self, tenant: str) -> None:
        """Those that ended first, where there are too many; else the next end does it."""
        with suppress(RedisError):
            for name in self._redis.zrange(self._key("ended", tenant), 0, -MAX_ENDED - 1):
                self._forget_batch(tenant, name.decode())

    @_redis_errors()
    def claim(
        self,
        owner: str,
        now: float,
        lease_s: float,
        busy: Collection[str],
        full: Collection[str] = (),
    ) -> tuple[str, Record] | None:
        """The oldest batch that nobody runs, and whose it is: now it is `owner`'s. busy: tenants
        whose batches wait. full: those whose rows wait, not what is to be checked or to end.
        now: for windows; leases are by Redis' own."""
        args: list[str | float] = [owner, int(1000 * lease_s), now, len(busy), *busy, *full]
        found = self._claim([self._prefix], args)
        return (found[0].decode(), json.loads(found[1])) if found else None

    @_redis_errors()
    def renew(
        self, owner: str, now: float, lease_s: float, names: Collection[str]
    ) -> dict[str, Record]:
        """names: of batches that run. Returns those of them that are still the owner's."""
        found = self._renew([self._prefix], [owner, int(1000 * lease_s), *names])
        return {record["id"]: record for record in map(json.loads, found)}

    @_redis_errors()
    def release(self, owner: str, name: str = "") -> None:
        """Anybody may run its batches now, or the one of that name."""
        self._release([self._prefix], [owner, name])

    @_redis_errors()
    def free_results(self, owner: str, name: str) -> None:
        """Deletes those of its batch, whose room something else is to have."""
        self._end([self._prefix], [owner, name, "", "", ""])

    @_redis_errors()
    def end(self, owner: str, tenant: str, record: Record) -> None:
        """Ends a batch without its results, for which there is no room."""
        args = [owner, record["id"], tenant, record["input_file_id"], json.dumps(record)]
        self._end([self._prefix], args)
        self._forget_oldest(tenant)

    # Results.

    @_redis_errors()
    def put_results(self, batch: str, results: Collection[Result]) -> None:
        """The first one of a row counts; after the batch's end none."""
        most = self._most()
        with self._redis.pipeline(transaction=False) as pipe:
            for result in results:
                line = zlib.compress(result.line, _LEVEL)
                sums = 1, result.is_error, *result.tokens, result.is_unsent, len(line)
                pairs = zip((*SUMS, "unsent", "size"), map(int, sums), strict=True)
                counts = [each for pair in pairs for each in pair]
                args = [batch, _KINDS[result.is_error], result.row, line, most, *counts]
                self._put([self._prefix], args, client=pipe)
            if any(pipe.execute()):
                raise OSError(errno.ENOSPC, f"files and results have {most} bytes")

    @_redis_errors()
    def rows_done(self, batch: str) -> set[int]:
        return {int(row) for kind in _KINDS for row in self._redis.hkeys(self._key(kind, batch))}

    @_redis_errors()
    def num_unsent(self, batch: str) -> int:
        """Rows whose result says that the batch ended before."""
        return self._sums(self._redis, batch)[6]

    @_redis_errors()
    def write_results(self, batch: str, is_error: bool) -> Path | None:
        """A draft with a line for each, in the order of the input. None: there is none."""
        key = self._key(_KINDS[is_error], batch)
        rows = sorted(map(int, self._redis.hkeys(key)))
        pages = (self._redis.hmget(key, rows[i : i + PAGE]) for i in range(0, len(rows), PAGE))
        return self._written(zlib.decompress(line) + b"\n" for page in pages for line in page)

    @_redis_errors()
    def finish(
        self, owner: str, tenant: str, record: Record, files: Mapping[Path, Record]
    ) -> Record | None:
        """Ends a batch with the files of its results. None: it is not the owner's any more."""
        name, live = record["id"], self._key("live")
        lease, batch, counts, *results = (
            self._key(kind, name) for kind in ("lease", "batch", "counts", *_KINDS)
        )
        uploads = dict[str, int]()

        def end(pipe: Any) -> Record | None:
            if pipe.get(lease) != owner.encode() or pipe.zscore(live, name) is None:
                return None
            *sums, _, size = self._sums(pipe, name)
            ended = with_counts(record, *sums)
            self._begin(pipe, *uploads)
            for file, upload in zip(files.values(), uploads.items(), strict=True):
                self._put_file(pipe, tenant, file, *upload)
            pipe.hset(batch, "record", json.dumps(ended))
            pipe.zrem(live, name).zrem(self._key("open", tenant), name)
            pipe.zadd(self._key("ended", tenant), {name: self._redis.incr(self._key("seq"))})
            pipe.srem(self._key("readers", record["input_file_id"]), name)
            pipe.delete(lease, counts, *results).decrby(self._key("stored"), size)
            return ended

        try:
            # The results are there already, and what is refused here would never end.
            uploads |= (self._upload(draft, float("inf")) for draft in files)
            ended = self._step(end, lease, batch, counts, *uploads)
        finally:
            self._forget_uploads(*uploads)
        for draft, file in files.items():
            if ended is None:
                draft.unlink()
            else:
                os.replace(draft, self.path(file["id"]))
        self._forget_oldest(tenant)
        return ended

    @_redis_errors()
    def sweep(self, now: float) -> None:
        """Deletes what has been kept long enough; no file that a batch is to read."""
        for name in self._redis.zrangebyscore(self._key("expiry"), "-inf", now):
            self._delete_file(name.decode())
        for name in map(bytes.decode, self._redis.zrangebyscore(self._key("kept"), "-inf", now)):
            if self._redis.zscore(self._key("live"), name) is None:
                its = self._redis.hget(self._key("batch", name), "tenant") or b""
                self._forget_batch(its.decode(), name)
        for path in self._folder.glob("[!.]*"):
            if not self._redis.exists(self._key("file", path.name)):
                path.unlink(missing_ok=True)
        self._sweep_drafts()

    def close(self) -> None:
        self._redis.close()
