"""The sessions that a router knows: a bounded table, and what is due for each of them.

Life of a session: made by the first Submit that names it, refreshed by the end of every turn,
removed when its retention is over, when it is closed, or when there are too many. Its KV is found
by its tokens: the hashes of its blocks follow from them on any worker.

Whose sessions make room: first those of the tenant that is beyond its own limits, then those of
the tenant that has most. So what one fills or pins is not at the others' cost.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from math import inf

from kvrelay.router.messages import SessionLimits
from kvrelay.router.sessions.session import Session, SessionConfig


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
        """As `SessionTable.why_not_pinned`."""
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
            heapq.heappop(self._heap)  # of a session that was removed, or has an earlier one
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
