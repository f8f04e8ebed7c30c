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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import Effect, NodeId, Send, Wake
from kvrelay.engine.stats import Role, WorkerInfo
from kvrelay.kvtransfer.messages import CacheAction, CacheOrder, CacheOrderDone
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.messages import (
    SessionCommand,
    SessionHolder,
    SessionInfo,
    SessionOp,
    SessionRefusal,
    SessionReply,
    Submit,
)
from kvrelay.router.record import Attempt, RequestRecord
from kvrelay.router.sessions.session import (
    DeleteSession,
    SaveSession,
    Session,
    SessionConfig,
    SessionRecord,
    SessionsUpdated,
    SessionTable,
    kind_of,
    merge,
    restored,
)

MAX_BRANCHES = 32  # sessions by one name of an agent
MAX_LISTED_BLOCKS = 16_384  # a page ends where it would have to look at more


class SessionBlocks:
    """Where the blocks of sessions are, and orders to the workers that hold them. Owned by
    `Sessions`. It has no state but the number of its last order: workers and their blocks are those
    of the router's index at that moment."""

    def __init__(
        self,
        router: NodeId,
        index: PrefixIndex,
        workers: Callable[[], dict[NodeId, WorkerInfo]],
        table: SessionTable,
    ) -> None:
        """`workers`: those that are up now."""
        self._router = router
        self._index = index
        self._workers = workers
        self._table = table
        self._num_orders = 0

    def orders(
        self,
        action: CacheAction,
        session: Session,
        only: Tier | None = None,
        at_most: int | None = None,
        *,
        lazy: bool = False,
    ) -> list[Send]:
        """`CacheOrder`s to the workers that hold blocks of `session`, the best `at_most` of them;
        with `only`, to those that hold some in this tier."""
        workers = self._workers()
        sends: list[Send] = []
        for holder in self._holders(session, workers)[:at_most]:
            block_hashes = self._hashes(action, session, workers[holder.worker])
            if block_hashes and (only is None or only in holder.num_blocks):
                self._num_orders += 1
                order_id = f"{self._router}/{self._num_orders}"
                order = CacheOrder(order_id, self._router, action, tuple(block_hashes), lazy)
                sends.append(Send(holder.worker, order))
        return sends

    def info(self, now: float, session: Session) -> SessionInfo:
        workers = self._workers()
        holders = self._holders(session, workers)
        infos = [workers[holder.worker] for holder in holders] or list(workers.values())
        return SessionInfo(
            session=session.name,
            tenant=session.tenant,
            state=session.state,
            num_tokens=session.num_tokens,
            num_blocks=session.num_blocks(kind_of(infos[0])) if infos else 0,
            num_turns=session.num_turns,
            pinned=session.pinned,
            retention=session.retention,
            age_s=now - session.created_at,
            last_used_s=now - session.used_at,
            worker=session.worker,
            holders=tuple(holder for holder in holders if holder.num_blocks),
        )

    def page(self, now: float, command: SessionCommand) -> tuple[list[SessionInfo], bool]:
        """What a LIST asks for, and whether there is more after it. By name, so that pages fit
        together if sessions change in between."""
        after, limit = command.session, max(1, command.limit)
        found = [s for s in self._table.of_tenant(command.tenant) if not after or s.name > after]
        page: list[SessionInfo] = []
        num_blocks = 0
        for session in sorted(found, key=lambda session: session.name)[:limit]:
            info = self.info(now, session)
            num_blocks += info.num_blocks
            if page and num_blocks > MAX_LISTED_BLOCKS:
                break
            page.append(info)
        return page, len(page) < len(found)

    def _holders(self, session: Session, workers: dict[NodeId, WorkerInfo]) -> list[SessionHolder]:
        """The workers that hold some of its blocks, the one to go on with first: a decode worker,
        unless another one holds more than twice as much, which then computes what is missing. And
        the worker of its last turn, whose events may not have come yet."""
        held: dict[NodeId, dict[Tier, int]] = {}
        for kind in {kind_of(info) for info in workers.values()}:
            found = self._index.holdings(session.block_hashes(kind))
            held.update((w, counts) for w, counts in found.items() if kind_of(workers[w]) == kind)
        if session.tokens and session.worker in workers:
            held.setdefault(session.worker, {})

        def rank(worker: NodeId) -> tuple[bool, int, int, bool]:
            counts = held[worker]
            in_device, most = counts.get(Tier.DEVICE, 0), max(counts.values(), default=0)
            goes_on = workers[worker].role is Role.DECODE and 0 < most_of_all <= 2 * most
            return goes_on, most, in_device, worker == session.worker

        most_of_all = max((n for counts in held.values() for n in counts.values()), default=0)
        best_first = sorted(sorted(held), key=rank, reverse=True)
        return [SessionHolder(worker, held[worker]) for worker in best_first]

    def _hashes(self, action: CacheAction, session: Session, info: WorkerInfo) -> list[bytes]:
        """The blocks that an order is about. Blocks that another session has too (the beginning of
        a fork) are not dropped, and not unpinned while that one is pinned, whoever's it is: tenants
        share the public part of their prompts. That is not dropped either."""
        block_hashes = session.block_hashes(kind_of(info))
        num_kept, others = 0, [*self._table.of_tenant(session.tenant)]
        if action is CacheAction.DROP:
            num_kept = session.scope.num_public_tokens // info.block_size
        elif action is CacheAction.UNPIN:
            others = [other for other in self._table if other.pinned]
        else:
            return block_hashes
        for other in others:
            if other is not session:
                num_kept = max(num_kept, session.num_shared(other, info.block_size))
        return block_hashes[num_kept:]


@dataclass(slots=True, eq=False)
class PendingCommand:
    command: SessionCommand
    session: Session
    deadline: float
    waiting: dict[str, NodeId]  # order id -> worker that has not answered
    done: dict[NodeId, int] = field(default_factory=dict)  # blocks, by worker that has


class PendingCommands:
    """Commands that wait for workers. Owned by `Sessions`. Invariant: `_by_order` has each order
    that a command here waits for, and no other; a command leaves exactly once: answered, or
    overdue. Deadlines only grow."""

    def __init__(self) -> None:
        self._commands: dict[tuple[NodeId, str], PendingCommand] = {}
        self._by_order: dict[str, PendingCommand] = {}

    def __len__(self) -> int:
        return len(self._commands)

    def __contains__(self, command: SessionCommand) -> bool:
        return (command.reply_to, command.command_id) in self._commands

    @property
    def next_deadline(self) -> float:
        first = next(iter(self._commands.values()), None)
        return inf if first is None else first.deadline

    def add(
        self,
        command: SessionCommand,
        session: Session,
        deadline: float,
        orders: Mapping[str, NodeId],
    ) -> None:
        assert command not in self
        assert orders
        pending = PendingCommand(command, session, deadline, dict(orders))
        self._commands[command.reply_to, command.command_id] = pending
        self._by_order.update((order_id, pending) for order_id in orders)

    def on_order_done(self, done: CacheOrderDone) -> PendingCommand | None:
        """Returns the command if this was the last answer that it waited for."""
        pending = self._by_order.get(done.order_id)
        if pending is None or pending.waiting[done.order_id] != done.worker:
            return None
        pending.done[done.worker] = done.num_blocks
        return self._settle(pending, done.order_id)

    def on_worker_down(self, worker: NodeId) -> list[PendingCommand]:
        """`worker` will not answer. Returns the commands that wait for no other answer."""
        lost = [(o, p) for o, p in self._by_order.items() if p.waiting[o] == worker]
        settled = [self._settle(pending, order_id) for order_id, pending in lost]
        return [pending for pending in settled if pending is not None]

    def take_overdue(self, now: float) -> list[PendingCommand]:
        overdue = [p for p in self._commands.values() if p.deadline <= now]
        for pending in overdue:
            for order_id in pending.waiting:
                del self._by_order[order_id]
            self._remove(pending)
        return overdue

    def describe(self) -> list[str]:
        """A line for each command that waits."""
        return [
            f"session command {p.command.command_id} ({p.command.op}) waits for "
            f"{', '.join(sorted(p.waiting.values()))}"
            for p in self._commands.values()
        ]

    def _settle(self, pending: PendingCommand, order_id: str) -> PendingCommand | None:
        del self._by_order[order_id], pending.waiting[order_id]
        if pending.waiting:
            return None
        self._remove(pending)
        return pending

    def _remove(self, pending: PendingCommand) -> None:
        del self._commands[pending.command.reply_to, pending.command.command_id]


TICK = "sessions"
MIN_WAKE_S = 0.25  # sessions that are due soon after each other share a wake-up
EARLY_S = 0.001  # a wake-up may come this much too early
PIN_AFTER_S = 1.0  # after a worker has started


def _continued(known: list[Session], submit: Submit) -> Session | None:
    """Which of the sessions by one name `submit` goes on with. Where agents cannot be told apart by
    how they begin, a turn under way is another one's."""
    if same := [each for each in known if submit.request_id in each.live]:
        return same[0]
    if submit.has_twins:
        found = [(each.num_continued(submit.tokens), each) for each in known if not each.live]
        longest = max(found, key=lambda each: each[0], default=(0, None))
        return longest[1] if longest[0] else None
    same = [each for each in known if each.is_continued_by(submit.tokens)]
    return max(same, key=lambda each: each.touched_at, default=None)


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
        """How many sessions are in each state."""
        return dict(Counter(str(session.state) for session in self.table))

    def check_idle(self) -> list[str]:
        """A line for each command that waits."""
        return self._pending.describe()

    def named(self, submit: Submit) -> Submit:
        """With the session that it is a turn of. A coding agent and its subagents send one name:
        their conversations are told apart by how their prompts begin. The first one gets the name,
        the next ones NAME~2 and so on; beyond MAX_BRANCHES the least recently used one is evicted.
        """
        name = submit.session
        if name is None:
            return submit
        submit = replace(submit, root=name)
        if not submit.has_branches:
            return submit
        names = [name, *(f"{name}~{number}" for number in range(2, MAX_BRANCHES + 1))]
        found = [(each, self.table.find(submit.tenant, each)) for each in names]
        known = [session for _, session in found if session is not None]
        if (session := _continued(known, submit)) is not None:
            return replace(submit, session=session.name)
        free = next((each for each, session in found if session is None), None)
        if free is None:
            idle = [session for session in known if not (session.live or session.pinned)]
            if not idle:
                return replace(submit, session=None)
            oldest = min(idle, key=lambda each: each.touched_at)
            free = oldest.name
            self._forget(oldest)
        return replace(submit, session=free)

    def on_turn(self, now: float, submit: Submit) -> None:
        """A turn is live. A repeat changes nothing."""
        assert submit.session is not None
        session = self.table.find(submit.tenant, submit.session)
        if session is None:
            retention = submit.retention or self._config.retention
            scope = submit.scope
            session = Session(submit.tenant, submit.session, scope, retention, now, now, now)
            session.opening, session.num_opening = submit.tokens, len(submit.tokens)
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
            session.num_prompt = len(submit.tokens)
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
        fork.num_opening = session.num_opening
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
                self._order(CacheAction.PARK, session, only=Tier.DEVICE, lazy=True)
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
        *,
        lazy: bool = False,
    ) -> dict[str, NodeId]:
        """Send orders; returns which to whom."""
        sends = self._blocks.orders(action, session, only, at_most, lazy=lazy)
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
