"""The controller of a run: the production node, and what performs its effects on simulated workers.

Processes start and end at once or after a while; a process that is stopped is introduced to others
only when it goes on. The controller may die; the next one finds what that has kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from kvrelay.cluster.control.controller import Controller, ControllerConfig
from kvrelay.cluster.control.machines import Machine
from kvrelay.cluster.control.messages import (
    AdoptWorker,
    Introduce,
    Kept,
    MachinesChanged,
    Record,
    StartWorker,
    StopWorker,
    WorkerLost,
)
from kvrelay.cluster.control.wanted import WorkerState
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.node import Effect, Exit, NodeId
from kvrelay.engine.stats import Role
from kvrelay.lab.sim.faults import Sickness
from kvrelay.lab.sim.runtime import Life, SimRuntime
from kvrelay.worker.messages import CONTROLLER, Introduced, Peer, WorkerStarted

MACHINES = (Machine("m", "sim", 64.0),)
START_S = 0.3  # a worker takes up to so long to start again


class Control:
    """Owned by a run. Invariant: a worker has the epoch that a controller started last."""

    def __init__(
        self,
        runtime: SimRuntime,
        configs: Mapping[NodeId, WorkerConfig],
        routers: Sequence[NodeId],
        silent_grace_s: float,
        make: Callable[[ControllerConfig], Controller],
    ) -> None:
        """The workers have places in `runtime`, and do not run yet."""
        self._runtime = runtime
        self._configs = configs
        self._down_s: dict[NodeId, float] = {}  # of workers that crashed: until they can start
        self._latest: dict[NodeId, int] = {}  # epochs that may still begin
        self._make = make
        self._config = ControllerConfig(
            workers=tuple((worker, each.role) for worker, each in configs.items()),
            routers=tuple(Peer(router, "sim", 1, 1) for router in routers),
            backoff_s=0.01,
            max_backoff_s=0.5,
            stable_s=1.0,
            silent_grace_s=silent_grace_s,
        )
        self._kept = Kept()
        self.node = make(self._config)
        runtime.perform_other = self.perform
        runtime.add(CONTROLLER, lambda epoch, records: self.node)
        runtime.post("", CONTROLLER, MachinesChanged(MACHINES))

    def perform(self, life: Life, effect: Effect) -> None:
        runtime = self._runtime
        match effect:
            case Exit(reason):
                runtime.crash(life.node_id)
                runtime.faults.injected["exit"] += 1
                self._tell_lost(life.node_id, life.epoch, reason, 0.5 * runtime.rng.random())
            case StartWorker(worker, _, epoch):
                is_first = epoch == 1
                start_s = self._down_s.pop(worker, START_S * runtime.rng.random())
                at_s = runtime.now + (0.0 if is_first else start_s)
                self._latest[worker] = epoch
                runtime.call_at(at_s, lambda: self._start(worker, epoch))
            case StopWorker(worker, epoch):
                if self._latest.get(worker, 0) <= epoch:
                    self._latest.pop(worker, None)
                running = runtime.life(worker)
                if running is not None and running.epoch <= epoch:
                    runtime.crash(worker)
                    runtime.faults.injected["killed"] += 1
            case Introduce(to, about, epoch):
                self._introduce(Introduced(to, about, epoch))
            case Record(kept):
                self._kept = kept
            case AdoptWorker(worker, epoch):
                self._adopt(worker, epoch)
            case _:
                raise AssertionError(f"unknown effect {effect!r}")

    def crash(self, worker: NodeId, down_s: float, notice_s: float) -> None:
        """A fault: the process dies. The controller notices, and can start it again, later."""
        runtime, life = self._runtime, self._runtime.life(worker)
        if life is None:
            return
        runtime.crash(worker)
        runtime.faults.injected["crash"] += 1
        self._down_s[worker] = down_s
        self._tell_lost(worker, life.epoch, "killed", notice_s)

    def hand_over(self, away_s: float) -> None:
        """A fault: the controller dies; all that it was told, or would be told, is lost."""
        runtime = self._runtime
        if runtime.life(CONTROLLER) is None:
            return
        runtime.crash(CONTROLLER)
        runtime.faults.injected["handover"] += 1
        runtime.call_at(runtime.now + away_s, self._take_over)

    def _take_over(self) -> None:
        runtime = self._runtime
        self.node = self._make(replace(self._config, kept=self._kept))
        runtime.restart(CONTROLLER)
        runtime.post("", CONTROLLER, MachinesChanged(MACHINES))

    def _adopt(self, worker: NodeId, epoch: int) -> None:
        """One that is stopped answers when it goes on."""
        runtime, life = self._runtime, self._runtime.life(worker)
        if life is not None and life.epoch == epoch:
            until_s = runtime.faults.paused_until(runtime.now, worker, epoch)
            after_s = max(0.0, until_s - runtime.now) + 0.01 * runtime.rng.random()
            info = structs.replace(self._configs[worker], epoch=epoch).info()
            runtime.post("", CONTROLLER, WorkerStarted(info, "sim", 2), after_s)

    def fall_sick(self, sickness: Sickness) -> None:
        """A fault: this life of the worker will not get well by itself."""
        life = self._runtime.life(sickness.worker)
        if life is not None:
            self._runtime.faults.fall_sick(life.epoch, sickness)

    def roles(self) -> dict[NodeId, Role]:
        return {worker.node: worker.role for worker in self.node.workers.values()}

    def up_since(self) -> dict[NodeId, float]:
        """Of workers that are up."""
        return {worker.node: worker.up_at for worker in self.node.workers.values()}

    def all_up(self) -> bool:
        return all(w.state is WorkerState.UP for w in self.node.workers.values())

    def _start(self, worker: NodeId, epoch: int) -> None:
        runtime, config = self._runtime, self._configs[worker]
        if self._latest.get(worker) != epoch:  # it was ended before it began
            return
        del self._latest[worker]
        runtime.restart(worker, epoch)
        started = WorkerStarted(structs.replace(config, epoch=epoch).info(), "sim", 2)
        runtime.post("", CONTROLLER, started, 0.01 * runtime.rng.random())

    def _introduce(self, done: Introduced) -> None:
        """Reliable, as a call is; one of a process that is dead never comes back."""
        runtime = self._runtime
        life, after_s = runtime.life(done.to), 0.005 * runtime.rng.random()
        if life is not None:
            until_s = runtime.faults.paused_until(runtime.now, life.node_id, life.epoch)
            after_s += max(0.0, until_s - runtime.now)
            runtime.post("", CONTROLLER, done, after_s)

    def _tell_lost(self, worker: NodeId, epoch: int, reason: str, after_s: float) -> None:
        lost: Any = WorkerLost(worker, epoch, reason)
        self._runtime.post("", CONTROLLER, lost, after_s)
