"""The worker node, put together of the parts of both roles."""

from __future__ import annotations

from kvrelay.decode_worker.decodes import Decodes
from kvrelay.engine.config import WorkerConfig
from kvrelay.kvtransfer.tiers.blocks import StoreRecords
from kvrelay.prefill_worker.prefills import Prefills
from kvrelay.worker.node import Worker


def make_worker(config: WorkerConfig, records: StoreRecords | None = None) -> Worker:
    """`records`: what its stores held when they were opened."""
    return Worker(config, (Prefills, Decodes), records)
