"""The shared state of routers in Redis (or Valkey): a thread that writes behind and reads ahead.

    away --connected--> up --an error, a deadline--> away (again after a pause that grows) ...

While it is away the router goes on from memory. Whatever it said meanwhile is not missed: coming
back begins with reading what is there, then the router tells again what should be. Every command
has a deadline, every queue a bound; no request ever waits here.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.exceptions import RedisError

from kvrelay.cluster.state.index_keys import IndexKeys
from kvrelay.cluster.state.redis_client import connect, shown_url
from kvrelay.cluster.state.session_keys import Change, SessionKeys, Stamped
from kvrelay.cluster.status import StoreStatus
from kvrelay.engine.backoff import Backoff
from kvrelay.engine.kv.events import KVEvents
from kvrelay.engine.node import Effect, NodeId
from kvrelay.router.sessions.session import DeleteSession, SaveSession
from kvrelay.router.state import (
    ForgetView,
    IndexView,
    IndexWriter,
    OthersLoads,
    SaveEvents,
    SaveLoads,
    SaveView,
    StateUp,
    TenantLoad,
    total_loads,
)

log = logging.getLogger("kvrelay.state")

POLL_S = 0.1  # between looks at what others have changed
REST_S = 0.01  # between two rounds, so that changes come together
LOADS_S = 0.5
LOADS_TTL_S = 3.0  # a router that fell silent has no load after this
LOADS_NAMES_TTL_S = 3600  # without a router for this long their names are forgotten
RECONNECT = Backoff(0.1, 2.0)
CLOSE_TIMEOUT_S = 5.0
MAX_SESSIONS = 20_000  # not written yet
MAX_EVENTS = 20_000
MAX_EVENT_NAMES = 2_000_000

_loads = msgspec.msgpack.Decoder(dict[str, TenantLoad])


@dataclass(frozen=True, slots=True)
class RedisOptions:
    url: str
    prefix: str  # before all keys
    run: str  # this life of the cluster
    router: NodeId
    routers: tuple[NodeId, ...] = ()  # that are known by name, also of a version before the set
    shares: bool = True  # there are other routers: keep the prefix index and the loads, too
    timeout_s: float = 2.0  # for each command


class RedisState:
    """The executor of a router. Owns the thread, and by it the connection.

    Invariant: `_sessions` has the last change of each session that is not written; views and events
    are here only while this router writes the index. All fields behind `_changed` are under it."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._shown = shown_url(options.url)
        self._redis = connect(options.url, options.timeout_s)
        holder = f"{options.router}/{secrets.token_hex(4)}"
        self._index = IndexKeys(options.prefix, options.run, holder)
        self._session_keys = SessionKeys(options.prefix, options.router)
        self._load_key = f"{options.prefix}:load:{options.run}:"
        self._deliver: Callable[[Any], None] = lambda message: None
        self._changed = threading.Condition()
        self._sessions: dict[tuple[str, str], tuple[Change, float]] = {}  # and since when
        self._views: dict[NodeId, IndexView | None] = {}  # None: to be forgotten
        self._events: list[KVEvents] = []
        self._num_names = 0  # that the events have
        self._in_flight = 0  # what is being written, all three together
        self._has_gap = False  # events were dropped: all views have to be written anew
        self._own_loads: dict[str, TenantLoad] = {}
        self._closing = False
        self._writes = False  # what the router was told last
        self._next_loads = 0.0
        self._is_up = False
        self._has_loaded = False
        self._last_error = ""
        self._read_s = 0.0  # how long it took to read what was there
        self.num_dropped = 0  # changes for which there was no room; told again when it is back
        self.num_outages = 0
        self._thread = threading.Thread(target=self._run, name="redis-state", daemon=True)

    def start(self, deliver: Callable[[Any], None]) -> None:
        """Begin; what is there is told to `deliver`, from another thread."""
        self._deliver = deliver
        self._thread.start()

    def perform(self, effect: Effect) -> None:
        with self._changed:
            match effect:
                case SaveSession(record):
                    self._keep((record.tenant, record.session), effect)
                case DeleteSession(tenant, session):
                    self._keep((tenant, session), effect)
                case SaveLoads(tenants):
                    self._own_loads = tenants
                case SaveView(view) if self._writes:
                    self._views[view.worker] = view
                case ForgetView(worker) if self._writes:
                    self._views[worker] = None
                case SaveEvents(events) if self._writes:
                    self._append(events)
                case SaveView() | ForgetView() | SaveEvents():
                    pass  # said before it heard that it does not write any more
                case _:
                    raise AssertionError(f"not an effect of a router: {effect}")
            self._changed.notify()

    def close(self) -> None:
        """Write what is left, and end; for a bounded time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("state: the last changes are not written to %s", self._shown)

    def status(self) -> StoreStatus:
        with self._changed:
            num_waiting = len(self._sessions) + len(self._views) + len(self._events)
            return StoreStatus(
                store=self._shown,
                up=self._is_up,
                outages=self.num_outages,
                dropped=self.num_dropped,
                unreadable=self._index.num_unreadable + self._session_keys.num_unreadable,
                unwritten=num_waiting + self._in_flight,
                writes_index=self._writes,
                last_error=self._last_error,
                read_s=self._read_s,
            )

    def _keep(self, key: tuple[str, str], change: Change) -> None:
        if key not in self._sessions and len(self._sessions) >= MAX_SESSIONS:
            self.num_dropped += 1
            return
        self._sessions[key] = change, time.monotonic()

    def _append(self, events: KVEvents) -> None:
        names = [events.stored, events.removed]
        names += [names for tier in events.tiers for names in (tier.stored, tier.removed)]
        self._num_names += sum(map(len, names))
        self._events.append(events)
        if len(self._events) > MAX_EVENTS or self._num_names > MAX_EVENT_NAMES:
            self.num_dropped += len(self._events)
            self._events.clear()
            self._num_names, self._has_gap = 0, True

    def _run(self) -> None:
        """What the writing thread runs."""
        failures = 0
        while not self._closing:
            try:
                self._begin()
                failures = 0
                while not self._closing:
                    self._round()
                    self._rest()
                self._round()
                self._index.leave(self._redis)
            except Exception as error:
                self._lose(error)
                failures += 1
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, RECONNECT.pause_s(failures))
        self._redis.close()

    def _rest(self) -> None:
        with self._changed:
            if not (self._sessions or self._views or self._events):
                self._changed.wait(POLL_S)
        if not self._closing:
            time.sleep(REST_S)

    def _begin(self) -> None:
        """Connect, read what is there, and have the router tell what should be."""
        self._redis.ping()
        started_at = time.monotonic()
        if self._options.shares and not self._has_loaded:
            self._deliver(self._index.load(self._redis))
        self._has_loaded = True
        self._load_sessions()
        with self._changed:
            self._is_up, self._last_error = True, ""
        self._deliver(StateUp())
        self._read_s = time.monotonic() - started_at
        log.info("state: %s is there; read in %.2f s", self._shown, self._read_s)

    def _lose(self, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        self._index.forget_lease()
        with self._changed:
            is_update = self._is_up or not self._last_error
            self.num_outages += is_update
            self._is_up, self._last_error = False, reason
            self._views.clear()
            self._events.clear()
            self._num_names = self._in_flight = 0
        self._tell_writes(False)
        if is_update and not self._closing:
            bug = None if isinstance(error, RedisError | OSError) else error
            text = "state: %s is away (%s): going on from memory"
            log.warning(text, self._shown, reason, exc_info=bug)

    def _round(self) -> None:
        if self._options.shares:
            self._tell_writes(self._index.hold_lease(self._redis))
        with self._changed:
            sessions, self._sessions = self._sessions, {}
            views, self._views = self._views, {}
            events, self._events = self._events, []
            self._num_names = 0
            has_gap, self._has_gap = self._has_gap, False
            self._in_flight = len(sessions) + len(views) + len(events)
        try:
            self._session_keys.save(self._redis, _stamped(sessions.values()))
        except BaseException:
            with self._changed:
                self._sessions = sessions | self._sessions
            raise
        if has_gap:
            self._deliver(IndexWriter(self._writes))
        self._write_index(views, events)
        self._in_flight = 0
        learned = self._session_keys.changes(self._redis)
        if learned is None:
            self._load_sessions()
        elif learned.records or learned.closed:
            self._deliver(learned)
        self._exchange_loads()

    def _load_sessions(self) -> None:
        for learned in self._session_keys.load(self._redis):
            if learned.records or learned.closed:
                self._deliver(learned)

    def _write_index(self, views: dict[NodeId, IndexView | None], events: list[KVEvents]) -> None:
        for worker, view in views.items():
            if not self._index.hold_lease(self._redis):
                return  # the router hears of it in the next round
            if view is None:
                self._index.forget(self._redis, worker)
            else:
                self._index.save(self._redis, view)
        if not self._index.writes:
            return
        if events:
            self._index.append(self._redis, events)
        self._index.refresh(self._redis)

    def _tell_writes(self, writes: bool) -> None:
        if writes != self._writes:
            with self._changed:
                self._writes = writes
                if not writes:
                    self._views.clear()
                    self._events.clear()
            self._deliver(IndexWriter(writes))

    def _exchange_loads(self) -> None:
        now = time.monotonic()
        if now < self._next_loads or not self._options.shares:
            return
        self._next_loads = now + LOADS_S
        me, names = self._load_key + self._options.router, self._load_key.removesuffix(":")
        own = msgspec.msgpack.encode(self._own_loads)
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(me, own, px=int(LOADS_TTL_S * 1000))
            pipe.sadd(names, me)
            pipe.expire(names, LOADS_NAMES_TTL_S)
            pipe.smembers(names)
            others = {key.decode() for key in pipe.execute()[-1]}
        others |= {self._load_key + name for name in self._options.routers}
        others -= {me}
        found: list[Any] = self._redis.mget(list(others)) if others else []
        gone = [key for key, loads in zip(others, found, strict=True) if loads is None]
        if gone:
            self._redis.srem(names, *gone)
        self._deliver(OthersLoads(total_loads(filter(None, map(_read_loads, found)))))


def _stamped(changes: Iterable[tuple[Change, float]]) -> list[Stamped]:
    """By the wall clock as it is now, which may have been set since they were made."""
    since_1970 = time.time() - time.monotonic()
    return [Stamped(change, since_1970 + at) for change, at in changes]


def _read_loads(data: bytes | None) -> dict[str, TenantLoad] | None:
    try:
        return _loads.decode(data) if data else None
    except msgspec.MsgspecError:
        return None  # written by another version
