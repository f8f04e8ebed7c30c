"""Handoffs with a safeguard taken out, to show that the checkers notice. Only the simulator can
build them.

- `confirm`: a read that has finished is used without asking whether the blocks were still held.
- `drain`: destination blocks are given back while a transfer may still write to them.
"""

from __future__ import annotations

from enum import StrEnum

from decode_worker.worker import DecodeWorker
from engine.config import WorkerConfig
from engine.node import Effect, Send
from kvtransfer.agent import ReadDone
from kvtransfer.connector import Connector, Handoff
from kvtransfer.handoff import ConsumerEvent
from kvtransfer.messages import KVRelease


class Break(StrEnum):
    CONFIRM = "confirm"
    DRAIN = "drain"


class TrustingConnector(Connector):
    """Takes every finished read for a good one."""

    def _ask_confirmation(self, now: float, handoff: Handoff) -> list[Effect]:
        self._settle(handoff, ConsumerEvent.CONFIRMED)
        return [Send(handoff.producer, KVRelease(*handoff.key))]


class HastyConnector(Connector):
    """Forgets the transfers of a handoff that is given up, and so frees their destination."""

    def fail(self, handoff: Handoff, why: str) -> list[Effect]:
        for transfer_id in handoff.reads:
            del self._by_transfer[transfer_id]
        handoff.reads.clear()
        handoff.seq.num_reads = 0
        return super().fail(handoff, why)

    def on_read_done(self, now: float, done: ReadDone) -> list[Effect]:
        known = done.transfer_id in self._by_transfer
        return super().on_read_done(now, done) if known else []


_CONNECTORS: dict[Break, type[Connector]] = {
    Break.CONFIRM: TrustingConnector,
    Break.DRAIN: HastyConnector,
}


class BrokenDecodeWorker(DecodeWorker):
    """The production worker, but for one method of its connector."""

    def __init__(self, config: WorkerConfig, broken: Break) -> None:
        super().__init__(config)
        self.connector = _CONNECTORS[broken](config)
