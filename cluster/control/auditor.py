"""The auditor: asks workers what they hold, and adds up the answers.

Life of an audit: asked for (`AuditAll`) -> every worker has answered, or the time is over -> told
(`AuditReport`), with the names of those that did not answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.node import Effect, NodeId, Note, Send, Wake, Woken
from engine.stats import Audit, AuditRequest

MAX_PENDING = 16


@dataclass(frozen=True, slots=True)
class AuditAll:
    """To the auditor, from its own process; answered by the effect `AuditReport`."""

    audit_id: str
    workers: tuple[NodeId, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Effect: the end of an audit. `silent` did not answer in time."""

    audit_id: str
    audits: tuple[Audit, ...]
    silent: tuple[NodeId, ...]


@dataclass(slots=True)
class _Pending:
    order: AuditAll
    answers: dict[NodeId, Audit] = field(default_factory=dict)

    def waits_for(self, worker: NodeId) -> bool:
        return worker in self.order.workers and worker not in self.answers

    def report(self) -> AuditReport:
        workers = self.order.workers
        return AuditReport(
            self.order.audit_id,
            tuple(self.answers[worker] for worker in workers if worker in self.answers),
            tuple(worker for worker in workers if worker not in self.answers),
        )


class Auditor:
    """Node. Invariant: each `AuditAll` is answered once; at most MAX_PENDING wait for an answer,
    one more is answered at once, by everybody's silence."""

    def __init__(self, node_id: NodeId) -> None:
        self.node_id = node_id
        self._pending: dict[str, _Pending] = {}

    def start(self, now: float) -> list[Effect]:
        return []

    def receive(self, now: float, message: Any) -> list[Effect]:
        match message:
            case AuditAll():
                return self._begin(message)
            case Audit(worker):
                # Two audits at once share an answer.
                waiting = [p for p in self._pending.values() if p.waits_for(worker)]
                for pending in waiting:
                    pending.answers[worker] = message
                return self._finish([p for p in waiting if not p.report().silent])
            case Woken(audit_id):
                late = self._pending.get(audit_id)
                return self._finish([late] if late is not None else [])
            case _:
                return [Note("warning", "unexpected_message", type(message).__name__)]

    def check_idle(self) -> list[str]:
        """What is leaked; empty if all is well."""
        return [f"audit {audit_id} is under way" for audit_id in self._pending]

    def _begin(self, order: AuditAll) -> list[Effect]:
        assert order.audit_id not in self._pending, order.audit_id
        pending = _Pending(order)
        if not order.workers or len(self._pending) >= MAX_PENDING:
            return [pending.report()]
        self._pending[order.audit_id] = pending
        request = AuditRequest(self.node_id)
        asked: list[Effect] = [Send(worker, request) for worker in order.workers]
        return [*asked, Wake(order.timeout_s, order.audit_id)]

    def _finish(self, ended: list[_Pending]) -> list[Effect]:
        for pending in ended:
            del self._pending[pending.order.audit_id]
        return [pending.report() for pending in ended]
