"""Sessions that other routers have changed: of two states of one session the higher version counts.

Every change raises a session's version by one. Two routers that change it at once both raise the
same one: then the state that was used last counts, for all of them alike. A turn that is running
here is not lost: its end is a change like any other, of the version after the newest known.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.router.sessions.session import Session, SessionRecord, restored
from kvrelay.router.sessions.table import SessionTable


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
    tenants = {record.tenant for record in updated.records if _is_news(now, table, record)}
    for tenant, name, version in updated.closed:
        session = table.find(tenant, name)
        if session is not None and version > session.version:
            session.version = version
            if not session.live:
                table.remove(session)
    return tenants


def _is_news(now: float, table: SessionTable, record: SessionRecord) -> bool:
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
