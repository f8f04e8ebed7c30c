"""A worker put together: what both roles do, in one node."""

from __future__ import annotations

from kvrelay.decode_worker.decodes import Decodes
from kvrelay.engine.config import WorkerConfig
from kvrelay.kvtransfer.tiers.blocks import StoreRecords
from kvrelay.prefill_worker.prefills import Prefills
from kvrelay.worker.node import Worker
from kvrelay.worker.process import BuiltWorker
from kvrelay.worker.spec import BuildOptions, WorkerSpec

ROLES = Prefills, Decodes


def make_worker(config: WorkerConfig, records: StoreRecords | None = None) -> Worker:
    """`records`: what its stores held when they were opened."""
    return Worker(config, ROLES, records)


def build_worker(spec: WorkerSpec, options: BuildOptions | None = None) -> BuiltWorker:
    """Load the model and make the worker; takes seconds. Raises BuildError."""
    from kvrelay.worker.build import build

    return build(spec, make_worker, options or BuildOptions())
