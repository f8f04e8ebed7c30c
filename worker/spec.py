"""What a process becomes a worker of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvrelay.engine.config import EngineSection, ModelSection, TiersSection
from kvrelay.engine.identity import checkpoint_identity, shown
from kvrelay.engine.logs import LogSection
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.parallel.link import RankHost
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.engine.weights import WeightVersion
from kvrelay.engine.wire import channel
from kvrelay.worker.kv_plan import GIB
from kvrelay.worker.process import Listening

log = logging.getLogger("kvrelay.build")

MakeAgent = Callable[[NodeId, Any, Any, Any], Any]
"""Given a name, a pool, the host arena or None, and the HeadShare of both."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything that a process needs to become a worker: the sections of the settings that it
    reads, with what its machine and its pool decide filled in, and its place in the cluster."""

    cluster: str  # name of the cluster, for operators
    worker: NodeId
    role: Role
    epoch: int
    model_dir: str  # where the launcher found the model; other machines may have to find it
    model: ModelSection  # with its device
    engine: EngineSection
    tiers: TiersSection
    num_sharing: int = 0  # workers of its machine that divide its tiers; 0: this one has none
    num_peers: int = 0  # other workers of the cluster
    left_reads_s: float = 13.0  # as in WorkerConfig
    num_gpus: int = 0  # that it is given
    machine: str = ""  # its id
    further: tuple[str, ...] = ()  # ids of other machines; the ranks are divided evenly among all
    # Known once those wait for the worker: by what they reach its machine, and by what it reaches
    # them.
    host: str = ""
    rank_hosts: tuple[RankHost, ...] = ()
    log: LogSection = field(default_factory=LogSection)
    fork_server: bool = False  # fork its process, where that is possible (`worker.fork_server`)
    weights: WeightVersion | None = None  # in place of the model's own
    # Identity of what the server serves (`engine.identity`), and its commit on the hub. Empty: an
    # earlier version has not said.
    checkpoint: bytes = b""
    commit: str = ""

    @property
    def on_gpu(self) -> bool:
        return self.model.device.startswith("cuda")

    @property
    def num_machines(self) -> int:
        return 1 + len(self.further)

    @property
    def num_ranks_here(self) -> int:
        """How many ranks it has on each of its machines."""
        return self.engine.tensor_parallel_size // self.num_machines

    def share_of(self, machine_gib: float) -> int:
        """Bytes that it gets, on all its machines, of a tier whose size is per machine."""
        here = int(machine_gib * GIB) // self.num_sharing if self.num_sharing else 0
        return here * self.num_machines

    def find_model(self) -> Path:
        """The checkpoint on this machine, which is what the server serves. Raises ModelError."""
        path = Path(self.model_dir)
        if not path.is_dir():
            cache_dir = Path(self.model.cache_dir) if self.model.cache_dir else None
            revision = self.commit or self.model.revision
            path = resolve_model(
                self.model.name,
                revision,
                cache_dir=cache_dir,
                progress=log.info,
                runs=self.engine.runs,
            )
        found = checkpoint_identity(path, self.engine.runs, self.engine.arguments)
        if self.checkpoint not in (b"", found):
            raise ModelError(
                f"{path} on this machine is {shown(found)}, and the server serves"
                f" {shown(self.checkpoint)}: other weights, configuration, vocabulary or"
                " engine.arguments; have it hold the same files, or set model.revision where the"
                " model comes from the hub"
            )
        return path


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """To a worker's process: what it is to be. Answered by WorkerStarted or StartFailed."""

    spec: WorkerSpec
    listening: Listening


channel.register(WorkerOrder)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """For tests and measurements: what to build a worker from, where it is not the usual."""

    make_agent: MakeAgent | None = None  # None: NIXL; of a worker of one process only
    corrupt: Callable[..., None] | None = None  # given to the TransferExecutors
