"""Whose sessions make room: first those of the tenant that is beyond its own limits, then those of
the tenant that has most. So what one fills or pins is not at the others' cost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from kvrelay.router.messages import SessionLimits
from kvrelay.router.sessions.session import Session


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
