"""The lease of a cluster's leader in Redis, and what a controller keeps there for the next one.

    PREFIX:cluster:NAME    hash: `lease`, a LeaseRecord; `term`, that of the lease; `kept`, a
                           Checkpoint

Nothing in it expires, and nothing in it is secret. Each write names what it replaces, or its term,
and is refused where that is out of date.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.exceptions import RedisError

from kvrelay.cluster.control.lease import LOOKS, Change, Lease, LeaseKey, LeaseRecord
from kvrelay.cluster.control.messages import Checkpoint
from kvrelay.cluster.processes.life import Deadline, now_s
from kvrelay.cluster.state.redis_client import connect, shown_url
from kvrelay.worker.messages import Peer

log = logging.getLogger("kvrelay.lease")

CLOSE_TIMEOUT_S = 5.0

_REPLACE = """
if (redis.call('HGET', KEYS[1], 'lease') or '') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'lease', ARGV[2], 'term', ARGV[3])
return 1
"""
_KEEP = """
if tonumber(redis.call('HGET', KEYS[1], 'term') or '0') > tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'kept', ARGV[2])
return 1
"""


class NotLeader(Exception):
    """A later term has begun: nothing was written."""


class KeptInRedis:
    """A controller's checkpoint. Its methods block for the store's deadline at most, and raise what
    `redis` raises."""

    def __init__(self, key: LeaseKey, term: int) -> None:
        self._key, self._term = key.key, term
        self._redis = connect(key.url, key.timeout_s)

    def read(self) -> Checkpoint | None:
        data: Any = self._redis.hget(self._key, "kept")
        try:
            return None if data is None else msgspec.msgpack.decode(data, type=Checkpoint)
        except msgspec.MsgspecError as error:
            log.warning(
                "what the last leader kept is of no use, and workers are not found: %s", error
            )
            return None

    def write(self, kept: Checkpoint) -> None:
        """Replaces what was kept. Raises NotLeader."""
        data = msgspec.msgpack.encode(kept)
        if not self._redis.eval(_KEEP, 1, self._key, str(self._term), data):
            raise NotLeader


@dataclass(frozen=True, slots=True)
class LeaseView:
    """What the supervisor hears after each look. `term`: 0 unless this server leads; `is_kept`:
    whether there is a checkpoint."""

    change: Change
    term: int
    leader: LeaseRecord
    is_kept: bool
    why_not: str = ""  # it cannot be a server of this cluster


class LeaseKeeper:
    """Looks and writes on a thread of its own. `tell` is called on that thread, after each look
    that had an answer."""

    def __init__(
        self,
        key: LeaseKey,
        lease: Lease,
        deadline: Deadline,
        tell: Callable[[LeaseView], None],
    ) -> None:
        self._key = key
        self._lease = lease
        self._deadline = deadline
        self._tell = tell
        self._redis = connect(key.url, key.timeout_s)
        self._changed = threading.Condition()
        self._look_now = False
        self._closing = False
        self._is_away = False
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def listens(self, controller: Peer | None) -> None:
        """Where this server's controller does; the others hear of it at once."""
        with self._changed:
            self._lease.controller = controller
            self._look_now = True
            self._changed.notify()

    def close(self) -> None:
        """Give up the lease, so that the next one need not wait, and end; for a bounded time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        pause_s = self._lease.lease_s / LOOKS
        while not self._closing:
            try:
                self._look()
                if self._is_away:
                    log.warning("lease: %s is there again", shown_url(self._key.url))
                self._is_away = False
            except Exception as error:  # whatever it is, this server leads or follows again later
                if not self._is_away:
                    text = "lease: %s is away (%s): nobody takes over, and no worker is started"
                    bug = None if isinstance(error, RedisError | OSError) else error
                    log.warning(text, shown_url(self._key.url), error, exc_info=bug)
                self._is_away = True
                self._lease.store_away()
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._look_now, pause_s)
                self._look_now = False
        try:
            self._leave()
        except (RedisError, OSError) as error:
            log.warning("lease: it is not given up, and the next leader waits for it: %s", error)
        self._redis.close()

    def _look(self) -> None:
        looked_at = now_s()
        data: Any = self._redis.hget(self._key.key, "lease")
        is_kept = bool(self._redis.hexists(self._key.key, "kept"))
        lease, record = self._lease, _read(data)
        why_not = lease.why_not_join(record)
        if why_not:
            self._tell(LeaseView(Change.NONE, 0, LeaseRecord(), is_kept, why_not))
            return
        write, change = lease.look(looked_at, record)
        if write is not None and self._replace(data, write):
            change = lease.wrote(looked_at, write)
        self._deadline.write(max(0.0, lease.may_lead_until))
        leader = lease.seen
        if leader is None:
            return
        if not lease.leads and lease.has_other_settings(leader) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s, which leads, has other settings: workers have those of who leads when they "
                "start",
                leader.holder,
            )
        self._tell(LeaseView(change, lease.term, leader, is_kept))

    def _leave(self) -> None:
        data: Any = self._redis.hget(self._key.key, "lease")
        record = _read(data)
        is_own = record is not None and record.holder == self._lease.server
        given = self._lease.give_up() if is_own else None
        if given is not None:
            self._replace(data, given)

    def _replace(self, old: bytes | None, new: LeaseRecord) -> bool:
        data = msgspec.msgpack.encode(new)
        done = self._redis.eval(_REPLACE, 1, self._key.key, old or b"", data, str(new.term))
        return bool(done)


def _read(data: bytes | None) -> LeaseRecord | None:
    return None if data is None else msgspec.msgpack.decode(data, type=LeaseRecord)
