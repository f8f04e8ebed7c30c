"""Requests for a `FairQueue`, and what it serves."""

from __future__ import annotations

from kvrelay.engine.request import SamplingParams
from kvrelay.router.admission.blocked import Blocked
from kvrelay.router.admission.fair_queue import FairQueue
from kvrelay.router.messages import Submit, TenantShare
from kvrelay.router.record import RequestRecord


class QueueScript:
    """Feeds one queue, and serves from it one request after the other."""

    def __init__(self, low_share: float = 0.05) -> None:
        self.queue = FairQueue(low_share)
        self.served: dict[tuple[int, str], float] = {}  # units by priority and tenant
        self.order: list[str] = []
        self.num_pushed = 0

    def push(
        self,
        tenant: str = "",
        units: float = 1.0,
        priority: int = 0,
        caller: str = "",
        root: str = "",
        needs: int = 1,
        **share: float,
    ) -> RequestRecord:
        self.num_pushed += 1
        submit = Submit(
            request_id=f"{tenant}{self.num_pushed}",
            reply_to="api",
            tokens=(1,),
            sampling=SamplingParams(),
            timeout_s=60.0,
            priority=priority,
            tenant=tenant,
            share=TenantShare(**share),  # type: ignore[arg-type]
            caller=caller,
            root=root,
        )
        record = RequestRecord(submit, submit.sampling, self.num_pushed, 0.0, 60.0, 0.0)
        self.queue.push(record, units, num_held=1 - needs)
        return record

    def serve(self) -> RequestRecord | None:
        """Send the next request to a worker; None: none may go."""
        entry = self.queue.next(Blocked())
        if entry is None:
            return None
        record = entry.record
        if not entry.is_charged:
            key = record.submit.priority, record.submit.tenant
            self.served[key] = self.served.get(key, 0.0) + entry.units
        self.order.append(record.request_id)
        self.queue.charge(0.0, record)
        return record

    def end(self, record: RequestRecord, units: float | None = None) -> None:
        self.queue.settle(record, self.queue.entry(record).units if units is None else units)
