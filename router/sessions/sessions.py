"""Sessions as durable objects: conversations whose KV outlives their requests.

A session is a name that a tenant gives to a conversation. Every Submit that carries it is a turn;
between turns its KV may be parked, resumed, pinned, forked or dropped, by its tenant's commands or
by timeouts. The router sends orders to the workers that hold the blocks (`CacheOrder`); a command
is answered when they are carried out, or when its time is over. What has to outlive the router is
written to a store, change by change.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from math import inf

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import Effect, NodeId, Send, Wake
from kvrelay.engine.stats import WorkerInfo
from kvrelay.kvtransfer.messages import CacheAction, CacheOrderDone
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.messages import (
    SessionCommand,
    SessionOp,
    SessionRefusal,
    SessionReply,
    Submit,
)
from kvrelay.router.record import Attempt, RequestRecord
from kvrelay.router.sessions.commands import PendingCommand, PendingCommands, SessionBlocks
from kvrelay.router.sessions.session import Session, SessionConfig, SessionRecord, kind_of, restored
from kvrelay.router.sessions.sharing import DeleteSession, SaveSession, SessionsUpdated, merge
from kvrelay.router.sessions.table import SessionTable

TICK = "sessions"
MIN_WAKE_S = 0.25  # sessions that are due soon after each other share a wake-up
EARLY_S = 0.001  # a wake-up may come this much too early
PIN_AFTER_S = 1.0  # after a worker has started


class Sessions:
    """Owned by the router, which calls it after its own requests have moved on, and then takes its
    effects. Invariant: a command is answered once; one that waits has a deadline; while anything
    will be due, a wake-up is under way for it."""

    def __init__(
        self,
        router: NodeId,
        config: SessionConfig,
        index: PrefixIndex,
        workers: Callable[[], dict[NodeId, WorkerInfo]],
        records: Iterable[SessionRecord] = (),
    ) -> None:
        self._config = config
        self._records = tuple(records)
        self._effects: list[Effect] = []
        self._pending = PendingCommands()
        self._wakes: list[float] = []  # that were asked for, each before all earlier ones
        self._pin_at = inf  # when what is pinned is to be pinned again
        self.table = SessionTable(config)
        self._blocks = SessionBlocks(router, index, workers, self.table)

    def start(self, now: float) -> None:
        """Restore the sessions that the store has kept."""
        for record in sorted(self._records, key=lambda record: -record.idle_s):
            session = restored(now, record)
            if record.idle_s >= record.retention.keep_s and not record.pinned:
                self._delete(session)
            elif self.table.find(session.tenant, session.name) is None:
                self.table.add(session)
                self._make_room(session.tenant)
        self._records = ()

    def take_effects(self, now: float) -> list[Effect]:
        """The effects so far, and a wake-up if none comes before something is due."""
        due_at = min(self._pending.next_deadline, self.table.next_due, self._pin_at)
        due_at = max(due_at, now + MIN_WAKE_S)
        if due_at < (self._wakes[-1] if self._wakes else inf):
            self._wakes.append(due_at)
            self._effects.append(Wake(due_at - now, TICK))
        effects, self._effects = self._effects, []
        return effects

    def counts(self) -> dict[str, int]:
        """Sessions by state."""
        return dict(Counter(str(session.state) for session in self.table))

    def check_idle(self) -> list[str]:
        """A line for each command that waits."""
        return self._pending.describe()

    def on_turn(self, now: float, submit: Submit) -> None:
        """A turn is live. A repeat changes nothing."""
        assert submit.session is not None
        session = self.table.find(submit.tenant, submit.session)
        if session is None:
            retention = submit.retention or self._config.retention
            session = Session(submit.tenant, submit.session, submit.scope, retention, now, now, now)
            self.table.add(session)
        self.table.set_limits(submit.tenant, submit.share.sessions)
        session.live.add(submit.request_id)
        session.parked = False
        self.table.touch(session)

    def on_turn_ended(self, now: float, record: RequestRecord, attempt: Attempt | None) -> None:
        """Whether it finished or not: if there was output, the session has its tokens now. A client
        that stops an answer halfway goes on from what it has seen."""
        submit = record.submit
        session = self.table.find(submit.tenant, submit.session or "")
        if session is None or submit.request_id not in session.live:
            return
        session.live.remove(submit.request_id)
        if record.num_output_tokens:
            session.scope = submit.scope
            session.retention = submit.retention or self._config.retention
            session.used_at = now
            session.num_turns += 1
            self.table.set_tokens(session, array("I", record.tokens).tobytes())
            if attempt is not None:
                info = attempt.decode.info
                session.worker = info.worker
                session.set_hashes(kind_of(info), record.block_hashes(info))
            if session.pinned:
                self._pin_grown(session)
            self._save(now, session)
        elif not session.tokens and not session.live:
            self.table.remove(session)
            return
        session.touched_at = now
        self.table.touch(session)
        self._make_room(session.tenant)

    def on_command(self, now: float, command: SessionCommand) -> None:
        """Carry it out, or refuse it."""
        if command in self._pending:
            return  # repeated: it will be answered
        if command.op is SessionOp.LIST:
            self._list(now, command)
            return
        self.table.set_limits(command.tenant, command.limits)
        session = self.table.find(command.tenant, command.session)
        if session is None:
            detail = f"there is no session {command.session!r}"
            self._refuse(command, SessionRefusal.UNKNOWN, detail)
        elif command.op is SessionOp.SHOW:
            self._reply(now, command, session)
        elif command.op is SessionOp.FORK:
            self._fork(now, command, session)
        elif len(self._pending) >= self._config.max_commands:
            detail = f"{len(self._pending)} commands wait for workers, which is the limit"
            self._refuse(command, SessionRefusal.BUSY, detail)
        elif session.live and command.op in (SessionOp.PARK, SessionOp.CLOSE):
            detail = f"session {session.name!r} is active: a turn is running"
            self._refuse(command, SessionRefusal.CONFLICT, detail)
        elif command.op is SessionOp.PIN and (why := self.table.why_not_pinned(session)):
            self._refuse(command, SessionRefusal.LIMIT, why)
        else:
            self._carry_out(now, command, session)

    def _carry_out(self, now: float, command: SessionCommand, session: Session) -> None:
        """Change the session, ask the workers, and answer once they have."""
        match command.op:
            case SessionOp.PARK:
                session.parked = True
                self.table.schedule(session)
                orders = self._order(CacheAction.PARK, session)
                self._share(now, session)
            case SessionOp.RESUME:
                session.parked = False
                session.touched_at = now
                self.table.touch(session)
                orders = self._order(CacheAction.RESUME, session, at_most=1)
                self._share(now, session)
            case SessionOp.PIN:
                session.pinned = True
                orders = self._order(CacheAction.PIN, session)
                self._save(now, session)
            case SessionOp.UNPIN:
                orders = self._unpin(session)
                self.table.schedule(session)
                self._save(now, session)
            case _:
                assert command.op is SessionOp.CLOSE, command.op
                if session.pinned:
                    self._unpin(session)
                orders = self._order(CacheAction.DROP, session)
                self._forget(session)
        if orders:
            deadline = now + self._config.order_timeout_s
            self._pending.add(command, session, deadline, orders)
        else:
            self._reply(now, command, session)

    def _fork(self, now: float, command: SessionCommand, session: Session) -> None:
        name = command.argument
        if self.table.find(command.tenant, name) is not None:
            detail = f"session {name!r} exists: close it first, or choose another name"
            self._refuse(command, SessionRefusal.CONFLICT, detail)
            return
        if not session.tokens:
            detail = f"session {session.name!r} has no finished turn yet"
            self._refuse(command, SessionRefusal.CONFLICT, detail)
            return
        fork = restored(now, session.record(now))  # its blocks are as old as those of the first
        fork.name, fork.created_at, fork.touched_at = name, now, now
        fork.parked, fork.pinned, fork.saved = session.parked, False, False
        self.table.touch(session)
        self.table.add(fork)
        self._save(now, fork)
        self._make_room(command.tenant)
        self._reply(now, command, fork)

    def _list(self, now: float, command: SessionCommand) -> None:
        page, more = self._blocks.page(now, command)
        reply = SessionReply(command.command_id, sessions=tuple(page), has_more=more)
        self._effects.append(Send(command.reply_to, reply))

    def _refuse(self, command: SessionCommand, refusal: SessionRefusal, detail: str) -> None:
        reply = SessionReply(command.command_id, refusal, detail)
        self._effects.append(Send(command.reply_to, reply))

    def _reply(
        self,
        now: float,
        command: SessionCommand,
        session: Session,
        pending: PendingCommand | None = None,
    ) -> None:
        """It is done; or, if it still waits, these workers have not answered."""
        refusal, detail = None, ""
        if pending is not None and pending.waiting:
            refusal = SessionRefusal.DEADLINE
            silent = ", ".join(sorted(pending.waiting.values()))
            detail = f"no answer within {self._config.order_timeout_s:g} s from {silent}"
        closed = command.op is SessionOp.CLOSE
        infos = () if closed else (self._blocks.info(now, session),)
        done = {} if pending is None else pending.done
        reply = SessionReply(command.command_id, refusal, detail, infos, done=done)
        self._effects.append(Send(command.reply_to, reply))

    def on_order_done(self, now: float, done: CacheOrderDone) -> None:
        pending = self._pending.on_order_done(done)
        if pending is not None:
            self._reply(now, pending.command, pending.session, pending)

    def on_sessions_updated(self, now: float, updated: SessionsUpdated) -> None:
        """Other routers have changed sessions."""
        for tenant in merge(now, self.table, updated):
            self._make_room(tenant)

    def on_state_up(self, now: float, _: object) -> None:
        """The store was away: save all again. It keeps what it has in the same version."""
        self._effects += [SaveSession(s.record(now)) for s in self.table if s.saved]

    def on_worker_up(self, now: float) -> None:
        """A worker that starts may have KV on disk, but has no pins: it is sent them once its
        snapshot has come."""
        if any(session.pinned for session in self.table):
            self._pin_at = now + PIN_AFTER_S

    def on_worker_down(self, now: float, worker: NodeId) -> None:
        """Its blocks are gone, and its orders will not be answered."""
        for pending in self._pending.on_worker_down(worker):
            self._reply(now, pending.command, pending.session, pending)

    def tick(self, now: float) -> None:
        """A wake-up has come: park, forget, pin, and answer what is overdue."""
        now += EARLY_S
        while self._wakes and self._wakes[-1] <= now:
            self._wakes.pop()
        for pending in self._pending.take_overdue(now):
            self._reply(now, pending.command, pending.session, pending)
        for session in self.table.take_due(now, self._config.max_parks_at_once):
            if self.table.expires_at(session) <= now:
                session.saved &= (
                    not self._config.shared
                )  # the store drops what has expired by itself
                self._forget(session)
            else:
                session.parked = True
                self._order(CacheAction.PARK, session, only=Tier.DEVICE)
                self.table.schedule(session)
                self._share(now, session)
        if self._pin_at <= now:
            self._pin_at = inf
            for session in self.table:
                if session.pinned:
                    self._order(CacheAction.PIN, session)

    def _order(
        self,
        action: CacheAction,
        session: Session,
        only: Tier | None = None,
        at_most: int | None = None,
    ) -> dict[str, NodeId]:
        """Send orders; returns which to whom."""
        sends = self._blocks.orders(action, session, only, at_most)
        self._effects += sends
        return {send.message.order_id: send.to for send in sends}

    def _make_room(self, tenant: str) -> None:
        while (session := self.table.surplus(tenant)) is not None:
            self._forget(session)

    def _forget(self, session: Session) -> None:
        """Its blocks go when their own retention is over; nothing may stay pinned for it."""
        if session.pinned:
            self._unpin(session)
        self.table.remove(session)
        self._delete(session)

    def _pin_grown(self, session: Session) -> None:
        """A turn has added to a pinned session: it may be more than its tenant may pin."""
        if self.table.why_not_pinned(session) is None:
            self._order(CacheAction.PIN, session)
        else:
            self._unpin(session)

    def _unpin(self, session: Session) -> dict[str, NodeId]:
        session.pinned = False
        return self._order(CacheAction.UNPIN, session)

    def _save(self, now: float, session: Session) -> None:
        """If its KV may not be on disk, its tokens may not be there either."""
        if not session.retention.to_disk:
            self._delete(session)
        elif self._config.durable and session.tokens:
            session.saved, session.foreign = True, False
            session.version += 1
            self._effects.append(SaveSession(session.record(now)))

    def _share(self, now: float, session: Session) -> None:
        """A change that only other routers have to know of."""
        if self._config.shared:
            self._save(now, session)

    def _delete(self, session: Session) -> None:
        if self._config.durable and session.saved:
            session.saved = False
            session.version += 1
            self._effects.append(DeleteSession(session.tenant, session.name, session.version))
