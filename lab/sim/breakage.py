"""Nodes with a safeguard taken out, to show that the checkers notice. Only the simulator can build
them.

- `confirm`: a read that has finished is used without asking whether the blocks were still held.
- `drain`: destination blocks are given back while a transfer may still write to them.
- `checksum`: the bytes that were read are not compared with those that were stored or sent.
- `leave`: the attempt that another has taken over from is not ended.
- `rescue`: requests that wait for memory are not moved to where there is some.
- `role`: the router does not listen to what a worker is to be preferred for.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Any

from engine.messages import Preempted
from engine.node import Effect, NodeId, Send
from kvtransfer.agent import CopyDone
from kvtransfer.messages import KVRelease
from kvtransfer.peer.arrival import Arrival
from kvtransfer.peer.connector import Connector
from kvtransfer.peer.handoff import ConsumerEvent
from kvtransfer.worker import Worker
from router.config import RouterConfig
from router.messages import RoleChanged
from router.record import Cause, RequestRecord
from router.router import Router


class Break(StrEnum):
    CONFIRM = "confirm"
    DRAIN = "drain"
    CHECKSUM = "checksum"
    LEAVE = "leave"
    RESCUE = "rescue"
    ROLE = "role"


class TrustingConnector(Connector):
    """Takes every finished read for a good one."""

    def _ask_confirmation(self, now: float, arrival: Arrival) -> list[Effect]:
        self._settle(arrival, ConsumerEvent.CONFIRMED)
        assert arrival.producer is not None
        return [Send(arrival.producer, KVRelease(*arrival.key))]


class HastyConnector(Connector):
    """Forgets the transfers of a handoff that is given up, and so frees their destination."""

    def fail(self, arrival: Arrival, why: str) -> list[Effect]:
        for transfer_id in arrival.reads:
            del self._by_transfer[transfer_id]
        arrival.reads.clear()
        arrival.seq.num_reads = 0
        return super().fail(arrival, why)

    def on_copy_done(self, now: float, done: CopyDone) -> list[Effect]:
        known = done.transfer_id in self._by_transfer
        return super().on_copy_done(now, done) if known else []


class CredulousConnector(Connector):
    """Takes what it has read for what was stored."""

    def on_copy_done(self, now: float, done: CopyDone) -> list[Effect]:
        arrival = self._by_transfer[done.transfer_id]
        indices = arrival.reads[done.transfer_id].indices
        checksums = tuple(arrival.checksum(index) for index in indices)
        return super().on_copy_done(now, replace(done, checksums=checksums))


_CONNECTORS: dict[Break, type[Connector]] = {
    Break.CONFIRM: TrustingConnector,
    Break.DRAIN: HastyConnector,
    Break.CHECKSUM: CredulousConnector,
}


def break_worker(worker: Worker, broken: Break) -> None:
    """Replace one method of its connector, before it has received anything."""
    if broken not in _CONNECTORS:
        return
    exchange = worker.exchange
    exchange.connector = _CONNECTORS[broken](worker.config, exchange.tiers, exchange.orphans)


class _BrokenRouter(Router):
    broken: Break

    def receive(self, now: float, message: Any) -> list[Effect]:
        if self.broken is Break.ROLE and isinstance(message, RoleChanged):
            return []
        if self.broken is Break.RESCUE:
            for record in self.live.values():
                for attempt in record.under_way:
                    attempt.preempted = False
            if isinstance(message, Preempted):
                return []
        return super().receive(now, message)


def _forget_left(now: float, record: RequestRecord, cause: Cause) -> None:
    record.leaving = None


def make_router(node_id: NodeId, config: RouterConfig, broken: Break | None) -> Router:
    if broken is None:
        return Router(node_id, config)
    router = _BrokenRouter(node_id, config)
    router.broken = broken
    if broken is Break.LEAVE:
        router._requests.leave = _forget_left  # type: ignore[method-assign]
    return router
