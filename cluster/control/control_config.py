"""What a controller is made with."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.cluster.control.messages import Checkpoint
from kvrelay.engine.model.parallel.shard import num_machines
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.router.scaling_config import ScalingConfig
from kvrelay.worker.messages import Peer


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """What is wanted of the workers of one model."""

    first: tuple[tuple[NodeId, Role], ...] = ()  # all of them, or those that scaling begins with
    fixed: dict[str, str] = field(default_factory=dict)  # as in `WorkerCheckpoint`
    built: str = ""  # version and settings of workers that are started, as a digest
    start_timeout_s: float = 180.0
    scaling: ScalingConfig | None = None  # None: as many workers as were asked for
    drain_timeout_s: float = 600.0  # a worker that is not empty by then is ended all the same
    restart_drain_s: float = 30.0  # one that is started again is ended then
    prefill_ranks: int = 1  # processes of a worker that is started as one, whatever it is later
    decode_ranks: int = 1
    ranks_per_machine: int = 0  # that one worker has; 0: all of them
    use_gpus: bool = True  # where machines have some: one for each rank
    workers_per_machine: int = 0  # at most, where machines have no GPUs; 0: any number

    def machines_for(self, num_ranks: int) -> int:
        """Among how many machines the ranks of such a worker are divided."""
        return num_machines(num_ranks, self.ranks_per_machine)


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    models: dict[str, WorkersConfig]  # by name; "" where models have none
    routers: tuple[NodeId, ...] = ()  # of its server, which starts them
    listeners: tuple[Peer, ...] = ()  # nodes beside the routers that processes send to
    kept: Checkpoint = field(default_factory=Checkpoint)  # by the controller before
    adopt_timeout_s: float = 5.0
    introduce_timeout_s: float = 10.0
    silent_grace_s: float = 5.0  # for a worker of which routers complain to answer
    backoff_s: float = 0.25
    max_backoff_s: float = 30.0
    stable_s: float = 60.0  # up for this long: earlier failures are forgotten
    max_first_failures: int = 3  # before the first worker ever was up
    max_workers: int = 0  # that all models may have, where workers come and go; 0: no limit

    @property
    def start_timeout_s(self) -> float:
        return max(each.start_timeout_s for each in self.models.values())

    def first_workers(self, model: str) -> tuple[tuple[NodeId, Role], ...]:
        """Those to begin with: where workers come and go, what the last controller had."""
        own = self.models[model]
        if own.scaling is not None and self.kept.num_named:
            mine = [each for each in self.kept.workers if each.model == model]
            return tuple((each.worker, each.role) for each in mine)
        return own.first
