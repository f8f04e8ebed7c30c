"""Commands about sessions that wait until workers have done what they were asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from engine.node import NodeId
from kvtransfer.messages import CacheOrderDone
from router.messages import SessionCommand
from router.sessions.table import Session


@dataclass(slots=True, eq=False)
class PendingCommand:
    command: SessionCommand
    session: Session
    deadline: float
    waiting: dict[str, NodeId]  # order id -> worker that has not answered
    done: dict[NodeId, int] = field(default_factory=dict)  # blocks, by worker that has


class PendingCommands:
    """Owned by `Sessions`. Invariant: `_by_order` has each order that a command here waits for, and
    no other; a command leaves exactly once: answered, or overdue. Deadlines only grow."""

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

    def settle(self, done: CacheOrderDone) -> PendingCommand | None:
        """A worker has answered. Returns the command that waits for nobody any more."""
        pending = self._by_order.get(done.order_id)
        if pending is None or pending.waiting[done.order_id] != done.worker:
            return None
        pending.done[done.worker] = done.num_blocks
        return self._settle(pending, done.order_id)

    def lose(self, worker: NodeId) -> list[PendingCommand]:
        """`worker` will not answer. Returns the commands that wait for nobody any more."""
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
