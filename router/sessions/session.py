"""The sessions that a router knows: a bounded table, what is due, and what outlives the router.

Life of a session: made by the first Submit that names it, refreshed by the end of every turn,
removed when its retention is over, when it is closed, or when there are too many. Its KV is found
by its tokens: the hashes of its blocks follow from them on any worker.

Whose sessions make room: first those of the tenant that is beyond its own limits, then those of
the tenant that has most. So what one fills or pins is not at the others' cost.

Other routers change sessions too: of two states of one session the higher version counts. Every
change raises a session's version by one. Two routers that change it at once both raise the
same one: then the state that was used last counts, for all of them alike. A turn that is running
here is not lost: its end is a change like any other, of the version after the newest known.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from kvrelay.engine.kv.block_hash import HASH_BYTES, hash_blocks
from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.kv.tier import DEFAULT_RETENTION, Retention
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import WorkerInfo
from kvrelay.router.messages import SessionLimits, SessionState

TOKEN_BYTES = array("I").itemsize
PROBE = 32  # tokens that are compared at a place
NUM_PROBES = 4
TAIL = 16  # tokens at a prompt's end that say that an answer begins, at most
Kind = tuple[bytes, int]  # fingerprint and block size: the same block hashes on all such workers


def kind_of(info: WorkerInfo) -> Kind:
    return info.fingerprint, info.block_size


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Limits of a router's sessions, and how long each of their states lasts."""

    max_sessions: int = 10_000
    max_per_tenant: int = 2_000
    max_tokens: int = (
        64_000_000  # all sessions together have; each takes 4 bytes here and in a store
    )
    park_after_s: float = 30.0  # without a turn for this long, a session is parked; 0: never
    order_timeout_s: float = 10.0  # a command is answered after this, complete or not
    max_parks_at_once: int = 16
    max_commands: int = 1024  # that wait for workers
    retention: Retention = DEFAULT_RETENTION  # where a request does not say
    durable: bool = False  # True: every change is an effect for a store
    shared: bool = False  # the store is other routers' too, and forgets what has expired by itself


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as it outlives its router. Times count back from when it was written or read."""

    tenant: str
    session: str
    tokens: bytes  # as array("I") writes them
    scope: CacheScope
    retention: Retention
    num_turns: int
    worker: NodeId | None
    pinned: bool
    age_s: float
    idle_s: float  # since the end of its last turn
    parked: bool = True
    version: int = 0  # grows with every change; of two, the higher one counts


@dataclass(slots=True, eq=False)
class Session:
    """Owned by a `SessionTable`. Times are the router's."""

    tenant: str
    name: str
    scope: CacheScope
    retention: Retention
    created_at: float
    used_at: float  # end of its last turn; its retention counts from here
    touched_at: float  # as `used_at`, or when it was resumed: parking counts from here
    tokens: bytes = b""  # prompt and output of its last finished turn
    num_turns: int = 0
    worker: NodeId | None = None  # that decoded it
    parked: bool = False
    pinned: bool = False
    saved: bool = False  # the store may have a record of it
    version: int = 0  # in the last record that was saved or received
    foreign: bool = False  # its last change was another router's
    live: set[str] = field(default_factory=set)  # requests that are turns of it
    due_at: float | None = None  # in its entry in the table's heap; None: it has none
    opening: tuple[int, ...] = ()  # prompt of its first turn, until that has ended
    num_opening: int = 0  # tokens of that; 0: another router has seen it, or an earlier one
    num_prompt: int = 0  # tokens of the last turn's prompt that ended; 0: as with `num_opening`
    _hashes: dict[Kind, bytes] = field(default_factory=dict)

    @property
    def state(self) -> SessionState:
        if self.live:
            return SessionState.ACTIVE
        return SessionState.PARKED if self.parked else SessionState.IDLE

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def set_tokens(self, tokens: bytes) -> None:
        """`tokens`: as array("I") writes them."""
        self.tokens, self.opening = tokens, ()
        self._hashes.clear()

    def set_hashes(self, kind: Kind, block_hashes: Sequence[bytes]) -> None:
        """Cache the result of `block_hashes`."""
        self._hashes[kind] = b"".join(block_hashes[: self.num_blocks(kind)])

    def num_blocks(self, kind: Kind) -> int:
        """The last token was sampled, not computed: it has no KV yet."""
        return max(0, self.num_tokens - 1) // kind[1]

    def block_hashes(self, kind: Kind) -> list[bytes]:
        """Hashes of the blocks of its KV, in order. Cached packed: a session may have thousands."""
        packed = self._hashes.get(kind)
        if packed is None:
            fingerprint, size = kind
            tokens = array("I", self.tokens[: self.num_blocks(kind) * size * TOKEN_BYTES])
            packed = b"".join(hash_blocks(fingerprint, self.scope, tokens, size))
            self._hashes[kind] = packed
        return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]

    def num_shared(self, other: Session, block_size: int) -> int:
        """Whole blocks at the beginning that `other` has too: the same tokens, and the same salt or
        none. O(log blocks) comparisons."""
        size = block_size * TOKEN_BYTES
        low, high = 0, min(len(self.tokens), len(other.tokens)) // size
        mine, theirs = self.scope, other.scope
        if mine.public_salt != theirs.public_salt:
            return 0
        if mine.salt != theirs.salt:
            high = min(high, mine.num_public_tokens // block_size)
            high = min(high, theirs.num_public_tokens // block_size)
        if high and self.tokens[:size] != other.tokens[:size]:
            return 0
        while low < high:  # [0, low) is shared; nothing from `high` on is
            middle = (low + high + 1) // 2
            part = slice(low * size, middle * size)
            if self.tokens[part] == other.tokens[part]:
                low = middle
            else:
                high = middle - 1
        return low

    def is_continued_by(self, prompt: Sequence[int]) -> bool:
        """Whether `prompt` begins as the first turn's did, up to the end of what was asked there,
        so far as some places tell; where that is not known, as the first half of all. O(1)."""
        end = self.num_opening - TAIL if self.num_opening else self.num_tokens // 2
        if end <= 0:
            return not self.tokens and tuple(prompt) == self.opening
        return self._begins_as(prompt, end)

    def num_continued(self, prompt: Sequence[int]) -> int:
        """How many of its tokens `prompt` goes on from, so far as some places tell: all, or the
        last turn's prompt where its answer has come back otherwise; else 0. O(1)."""
        for end in (self.num_tokens - 1, self.num_prompt - TAIL):
            if end > 0 and self.num_prompt < len(prompt) and self._begins_as(prompt, end):
                return end
        return 0

    def _begins_as(self, prompt: Sequence[int], end: int) -> bool:
        if end > len(prompt):
            return False
        for number in range(1, NUM_PROBES + 1):
            last = end * number // NUM_PROBES
            first = max(0, last - PROBE)
            known = array("I", self.opening[first:last]).tobytes()
            if self.tokens:
                known = self.tokens[first * TOKEN_BYTES : last * TOKEN_BYTES]
            if known != array("I", prompt[first:last]).tobytes():
                return False
        return True

    def record(self, now: float) -> SessionRecord:
        return SessionRecord(
            tenant=self.tenant,
            session=self.name,
            tokens=self.tokens,
            scope=self.scope,
            retention=self.retention,
            num_turns=self.num_turns,
            worker=self.worker,
            pinned=self.pinned,
            age_s=now - self.created_at,
            idle_s=now - self.used_at,
            parked=self.parked,
            version=self.version,
        )


def restored(now: float, record: SessionRecord) -> Session:
    """The session of `record`, parked."""
    used_at = now - record.idle_s
    return Session(
        tenant=record.tenant,
        name=record.session,
        scope=record.scope,
        retention=record.retention,
        created_at=now - record.age_s,
        used_at=used_at,
        touched_at=used_at,
        tokens=record.tokens,
        num_turns=record.num_turns,
        worker=record.worker,
        parked=True,
        pinned=record.pinned,
        saved=True,
        version=record.version,
    )


@dataclass(slots=True, eq=False)
class TenantSessions:
    """The sessions of one tenant by name, the one touched last at the end. Owned by a
    `SessionTable`. `num_tokens`: of all."""

    name: str
    limits: SessionLimits = field(default_factory=SessionLimits)
    num_tokens: int = 0
    sessions: OrderedDict[str, Session] = field(default_factory=OrderedDict)

    def least_used(self) -> Session | None:
        """The one to remove first: idle, and pinned only if all idle ones are."""
        first_idle = None
        for session in self.sessions.values():
            if not session.live:
                if not session.pinned:
                    return session
                first_idle = first_idle or session
        return first_idle

    def why_not_pinned(self, session: Session) -> str | None:
        limit = self.limits.max_pinned_tokens
        others = (s for s in self.sessions.values() if s.pinned and s is not session)
        num_others = sum(other.num_tokens for other in others)
        if not limit or num_others + session.num_tokens <= limit:
            return None
        return (
            f"session {session.name!r} has {session.num_tokens} tokens, {num_others} are pinned, "
            f"and this API key may pin {limit} (max_pinned_tokens): unpin another session"
        )


def of_largest(
    tenants: Collection[TenantSessions], size: Callable[[TenantSessions], int]
) -> Session | None:
    """The session to remove of the tenant that has most; None: all are active. Of tenants of one
    size, the one goes first whose first session was touched longest ago."""

    def rank(tenant: TenantSessions) -> tuple[int, float]:
        return size(tenant), -next(iter(tenant.sessions.values())).touched_at

    found = max(tenants, key=rank).least_used()
    if found is not None:
        return found
    each = (tenant.least_used() for tenant in sorted(tenants, key=rank, reverse=True))
    return next((session for session in each if session is not None), None)


MAX_STALE = 64  # outdated entries of the heap, beside one for each session
FOREIGN_PATIENCE = 3.0  # a session that another router parks is parked here after so much longer


class SessionTable:
    """Owned by `Sessions`. Invariant: `_by_use` and the tables of the tenants hold the same
    sessions, each once, the one touched last at the end; `num_tokens` is the sum over them. There
    are only tenants that have sessions."""

    def __init__(self, config: SessionConfig) -> None:
        self._config = config
        self._by_use: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._tenants: dict[str, TenantSessions] = {}
        self._heap: list[tuple[float, int, Session]] = []
        self._num_entries = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._by_use)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_use.values())

    def find(self, tenant: str, name: str) -> Session | None:
        return self._by_use.get((tenant, name))

    def of_tenant(self, tenant: str) -> list[Session]:
        own = self._tenants.get(tenant)
        return [] if own is None else list(own.sessions.values())

    def set_limits(self, tenant: str, limits: SessionLimits) -> None:
        """As its last request said. They are forgotten with its last session."""
        own = self._tenants.get(tenant)
        if own is not None:
            own.limits = limits

    def add(self, session: Session) -> None:
        key = (session.tenant, session.name)
        assert key not in self._by_use, f"session {key} is there already"
        self._by_use[key] = session
        own = self._tenants.setdefault(session.tenant, TenantSessions(session.tenant))
        own.sessions[session.name] = session
        self._count(session, session.num_tokens)
        self.schedule(session)

    def remove(self, session: Session) -> None:
        del self._by_use[session.tenant, session.name]
        own = self._tenants[session.tenant]
        self._count(session, -session.num_tokens)
        del own.sessions[session.name]
        if not own.sessions:
            del self._tenants[session.tenant]
        session.due_at = None

    def touch(self, session: Session) -> None:
        """It was used, or will be: the last to be removed."""
        self._by_use.move_to_end((session.tenant, session.name))
        self._tenants[session.tenant].sessions.move_to_end(session.name)
        self.schedule(session)

    def set_tokens(self, session: Session, tokens: bytes) -> None:
        self._count(session, -session.num_tokens)
        session.set_tokens(tokens)
        self._count(session, session.num_tokens)

    def _count(self, session: Session, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._tenants[session.tenant].num_tokens += num_tokens

    def surplus(self, tenant: str) -> Session | None:
        """The session to remove for the limits to hold; None: they hold, or all are active. Called
        when a turn has ended: there may be as many more as there are live requests.

        Who is beyond its own limits makes room itself. Beyond those of all, the tenant that has
        most does: what one pins or fills is not at the others' cost."""
        config = self._config
        own = self._tenants.get(tenant)
        if own is not None:
            limits = own.limits
            too_many = len(own.sessions) > (limits.max_sessions or config.max_per_tenant)
            if too_many or 0 < limits.max_tokens < own.num_tokens:
                return own.least_used()
        if len(self) > config.max_sessions:
            return of_largest(self._tenants.values(), lambda tenant: len(tenant.sessions))
        if self.num_tokens > config.max_tokens:
            return of_largest(self._tenants.values(), lambda tenant: tenant.num_tokens)
        return None

    def why_not_pinned(self, session: Session) -> str | None:
        """Which limit of its tenant does not let `session` be pinned; None: it may be. If it is
        pinned already, whether it may stay so."""
        return self._tenants[session.tenant].why_not_pinned(session)

    def schedule(self, session: Session) -> None:
        """Have it taken by `take_due` when its retention is over or it should be parked."""
        due_at = self._due_at(session)
        if due_at == inf or (session.due_at is not None and session.due_at <= due_at):
            return  # an entry that is too early is corrected when it is taken
        session.due_at = due_at
        self._num_entries += 1
        heapq.heappush(self._heap, (due_at, self._num_entries, session))
        if len(self._heap) > 2 * len(self) + MAX_STALE:
            self._heap = [entry for entry in self._heap if entry[2].due_at == entry[0]]
            heapq.heapify(self._heap)

    def take_due(self, now: float, at_most: int) -> list[Session]:
        """Sessions for which something is due now. Each has to be scheduled again, or removed."""
        found: list[Session] = []
        while len(found) < at_most and self.next_due <= now:
            session = heapq.heappop(self._heap)[2]
            session.due_at = None
            if self._due_at(session) <= now:
                found.append(session)
            else:
                self.schedule(session)
        return found

    @property
    def next_due(self) -> float:
        """Infinity: nothing will be due."""
        while self._heap and self._heap[0][2].due_at != self._heap[0][0]:
            heapq.heappop(self._heap)  # its session was removed, or has an earlier one
        return self._heap[0][0] if self._heap else inf

    def expires_at(self, session: Session) -> float:
        """When its retention is over if it is not used; infinity: it is active, or pinned."""
        if session.live or session.pinned:
            return inf
        return session.used_at + session.retention.keep_s

    def _due_at(self, session: Session) -> float:
        expires_at = self.expires_at(session)
        if session.live or session.parked or not self._config.park_after_s > 0:
            return expires_at
        # The router that saw its last turn parks it; the others only if that one does not.
        patience = FOREIGN_PATIENCE if session.foreign else 1.0
        return min(expires_at, session.touched_at + patience * self._config.park_after_s)

    def check_integrity(self) -> None:
        """Assert the class invariant. O(everything): for tests."""
        own = [s for tenant in self._tenants.values() for s in tenant.sessions.values()]
        assert sorted(map(id, own)) == sorted(map(id, self._by_use.values()))
        for tenant in self._tenants.values():
            assert tenant.sessions
            assert tenant.num_tokens == sum(s.num_tokens for s in tenant.sessions.values())
        assert self.num_tokens == sum(s.num_tokens for s in own)
        entries = {(at, id(session)) for at, _, session in self._heap}
        for session in own:
            due_at = self._due_at(session)
            if due_at < inf:
                assert session.due_at is not None
                assert session.due_at <= due_at
                assert (session.due_at, id(session)) in entries


@dataclass(frozen=True, slots=True)
class SaveSession:
    """Effect: save this record, in place of an earlier one of the session."""

    record: SessionRecord


@dataclass(frozen=True, slots=True)
class DeleteSession:
    """Effect: delete the record of this session."""

    tenant: str
    session: str
    version: int = 0  # as that of a record: what is newer stays


@dataclass(frozen=True, slots=True)
class SessionsUpdated:
    """Message: sessions as another router, or an earlier run of this one, has changed them."""

    records: tuple[SessionRecord, ...]
    closed: tuple[tuple[str, str, int], ...] = ()  # tenant, name, version


def merge(now: float, table: SessionTable, updated: SessionsUpdated) -> set[str]:
    """Apply what is newer. Returns the tenants that have sessions they did not have before."""
    tenants = {record.tenant for record in updated.records if _is_newer(now, table, record)}
    for tenant, name, version in updated.closed:
        session = table.find(tenant, name)
        if session is not None and version > session.version:
            session.version = version
            if not session.live:
                table.remove(session)
    return tenants


def _is_newer(now: float, table: SessionTable, record: SessionRecord) -> bool:
    if record.idle_s >= record.retention.keep_s and not record.pinned:
        return False
    session = table.find(record.tenant, record.session)
    if session is None:
        session = restored(now, record)
        session.parked, session.foreign = record.parked, True
        table.add(session)
        return True
    used_at = now - record.idle_s
    if (record.version, used_at) <= (session.version, session.used_at):
        return False
    _update(session, record, used_at)
    table.set_tokens(session, record.tokens)
    table.touch(session)
    return True


def _update(session: Session, record: SessionRecord, used_at: float) -> None:
    session.scope, session.retention = record.scope, record.retention
    session.num_turns, session.worker = record.num_turns, record.worker
    session.parked = record.parked and not session.live
    session.pinned, session.version = record.pinned, record.version
    session.used_at = session.touched_at = used_at
    session.saved = session.foreign = True
