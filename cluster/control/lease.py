"""Which of several servers leads their cluster: decided by each from one record that all can read.

    following --the leader is silent, or has given up--> leading --another one leads--> following

Whoever leads writes the record anew a few times per lease, with a higher `beat`. The others take
over once it has not changed for the whole of a lease, by their own clock: clocks are not compared,
and a store that was away begins the count anew. A leader may give orders until its lease, counted
from before it wrote the record, is over but for a margin. So no two give orders at a time, as long
as their clocks run at one speed; and what an older leader says is refused by its term (`epoch_of`),
whatever clocks do.

Where the store has lost the record, or has an older one, whoever knows the newest puts it back, so
that no term comes twice: processes that run refuse who leads in an older one. It makes nobody lead.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvrelay.worker.messages import Peer

LOOKS = 5  # per lease
MARGIN = 0.2  # this part of a lease before its end a leader stops
STARTS = 1_000_000  # a controller has at most so many in one term


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the servers of a cluster know of who leads. Fields have defaults: another version may
    have written it."""

    term: int = 0  # counts leaders
    holder: str = ""  # the server that leads; "": it has given up
    beat: int = 0  # rises while it leads
    model: str = ""  # that the cluster serves
    settings: str = ""  # a digest of the leader's
    controller: Peer | None = None  # where it listens
    checkpoints: dict[str, str] = {}  # identities of what the leader serves; {}: not known
    put_back_by: str = ""  # the server that has, after the store had lost it


@dataclass(frozen=True, slots=True)
class LeaseKey:
    """Where in Redis the record is kept."""

    url: str
    key: str
    timeout_s: float  # each command may take so long


class Change(StrEnum):
    NONE = "none"
    LEADS = "leads"  # it leads from now on
    LOST = "lost"  # another one does


def epoch_of(term: int, starts: int) -> int:
    """A controller's epoch is above all of earlier terms, and of earlier starts in its own."""
    return term * STARTS + starts


@dataclass(slots=True)
class _Watched:
    record: LeaseRecord | None
    since: float
    looked_at: float


class Lease:
    """One server's view. Pure: `now` is a clock that never jumps.

    Invariant: `may_lead_until` is in the past unless the last record that this server has written
    names it."""

    def __init__(self, server: str, lease_s: float, model: str, settings: str) -> None:
        """`server`: no other process has this name, before or after."""
        self.server = server
        self.lease_s = lease_s
        self.may_lead_until = float("-inf")
        self.seen: LeaseRecord | None = None  # the newest
        self.controller: Peer | None = None  # where this server's listens
        self.checkpoints: dict[str, str] = {}  # identities of what this server serves, by name
        self._model = model
        self._settings = settings
        self._term = 0  # above 0 while this server leads
        self._watched: _Watched | None = None

    @property
    def leads(self) -> bool:
        return self._term > 0

    @property
    def term(self) -> int:
        return self._term

    def look(self, now: float, record: LeaseRecord | None) -> tuple[LeaseRecord | None, Change]:
        """`record`: what is in the store, None: nothing. Returns what to write in its place, unless
        it has changed meanwhile, and None if nothing."""
        known = 0 if self.seen is None else self.seen.term
        is_lost = known > (0 if record is None else record.term)
        if record is not None and not is_lost:
            self.seen = record
        if self.leads:
            if is_lost:
                own = self._record(self._term, 0)
                if now >= self.may_lead_until:  # another may lead, and says so before the next look
                    own = msgspec.structs.replace(own, put_back_by=self.server)
                return own, Change.NONE
            assert record is not None, "what was written is known"
            if (record.term, record.holder) == (self._term, self.server):
                return self._record(self._term, record.beat + 1), Change.NONE
            self._term, self._watched = 0, None
            self.may_lead_until = float("-inf")
            return None, Change.LOST
        if is_lost and self.seen is not None:
            self._watched = None
            return msgspec.structs.replace(self.seen, put_back_by=self.server), Change.NONE
        if self._may_take(now, record):
            return self._record((0 if record is None else record.term) + 1, 0), Change.NONE
        return None, Change.NONE

    def _may_take(self, now: float, record: LeaseRecord | None) -> bool:
        if record is not None and not record.holder and not record.put_back_by:
            return True
        watched = self._watched
        # Whatever was in between, where it has not looked for a lease.
        was_away = watched is not None and now - watched.looked_at >= self.lease_s
        if watched is None or watched.record != record or was_away:
            self._watched = watched = _Watched(record, now, now)
        watched.looked_at = now
        return now - watched.since >= self.lease_s

    def store_away(self) -> None:
        """Nobody can write now; once it is back, the leader has the whole of a lease to do so."""
        self._watched = None

    def wrote(self, looked_at: float, record: LeaseRecord) -> Change:
        """`record`, which `look` gave at `looked_at`, is in the store."""
        if record.holder != self.server or record.put_back_by:
            return Change.NONE
        is_new = not self.leads
        self._term, self.seen = record.term, record
        self.may_lead_until = looked_at + self.lease_s * (1 - MARGIN)
        return Change.LEADS if is_new else Change.NONE

    def give_up(self) -> LeaseRecord | None:
        """What to write in place of the newest record, so that the next one need not wait."""
        if not self.leads or self.seen is None:
            return None
        self._term = 0
        self.may_lead_until = float("-inf")
        return msgspec.structs.replace(self.seen, holder="", controller=None)

    def why_not_join(self, record: LeaseRecord | None) -> str:
        """Why this server cannot be one of this cluster; "": it can."""
        if record is None or not record.holder or record.model == self._model:
            return ""
        if record.checkpoints and record.checkpoints == self.checkpoints:
            return ""  # these files, in another folder
        return (
            f"the cluster serves {record.model} and this server {self._model}: set model.name to "
            "the cluster's, or cluster.name to another"
        )

    def has_other_settings(self, record: LeaseRecord) -> bool:
        return bool(record.settings) and record.settings != self._settings

    def _record(self, term: int, beat: int) -> LeaseRecord:
        return LeaseRecord(
            term=term,
            holder=self.server,
            beat=beat,
            model=self._model,
            checkpoints=self.checkpoints,
            settings=self._settings,
            controller=self.controller if term == self._term else None,
        )
