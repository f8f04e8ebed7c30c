"""What is asked of workers for sessions: orders about blocks, and commands that wait until workers
have carried them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId, Send
from kvrelay.engine.stats import Role, WorkerInfo
from kvrelay.kvtransfer.messages import CacheAction, CacheOrder, CacheOrderDone
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.messages import SessionCommand, SessionHolder, SessionInfo
from kvrelay.router.sessions.session import Session, kind_of
from kvrelay.router.sessions.table import SessionTable

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
                order = CacheOrder(order_id, self._router, action, tuple(block_hashes))
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
        """The workers that hold some of its blocks, the one to go on with first; and the worker of
        its last turn, whose events may not have come yet."""
        held: dict[NodeId, dict[Tier, int]] = {}
        for kind in {kind_of(info) for info in workers.values()}:
            found = self._index.holdings(session.block_hashes(kind))
            held.update((w, counts) for w, counts in found.items() if kind_of(workers[w]) == kind)
        if session.tokens and session.worker in workers:
            held.setdefault(session.worker, {})

        def rank(worker: NodeId) -> tuple[bool, int, int, bool]:
            counts = held[worker]
            in_device, most = counts.get(Tier.DEVICE, 0), max(counts.values(), default=0)
            decodes = workers[worker].role is Role.DECODE
            return decodes, most, in_device, worker == session.worker

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
