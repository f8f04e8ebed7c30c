"""The worker node, put together of the parts of both roles."""

from __future__ import annotations

from decode_worker.decodes import Decodes
from engine.config import WorkerConfig
from kvtransfer.tiers.blocks import StoreRecords
from kvtransfer.worker import Worker
from prefill_worker.prefills import Prefills


def make_worker(config: WorkerConfig, records: StoreRecords | None = None) -> Worker:
    """`records`: what its stores held when they were opened."""
    return Worker(config, (Prefills, Decodes), records)
