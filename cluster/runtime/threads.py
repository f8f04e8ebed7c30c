"""The threads of one worker: one that computes, one that moves KV. Both report to the node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from cluster.runtime.host import Deliver
from engine.node import Effect, NodeId
from engine.step import Execute, Step, StepDone
from kvtransfer.agent import ConnectPeer, ReadBlocks
from kvtransfer.executor import TransferLoop, WorkerExecutor


class StepThread:
    """Runs steps one after the other on a thread of its own. `execute` answers for failures."""

    def __init__(self, execute: Callable[[Step], StepDone], deliver: Deliver, name: str) -> None:
        self._execute = execute
        self._deliver = deliver
        self._steps: SimpleQueue[Step | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, step: Step) -> None:
        self._steps.put(step)

    def close(self, timeout_s: float = 10.0) -> None:
        """Waits for the step that runs."""
        self._steps.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            self._deliver(self._execute(step))


class WorkerThreads:
    """Executor of a worker's effects. Owns both threads, and by them the model and the agent."""

    def __init__(self, executor: WorkerExecutor, deliver: Deliver, name: NodeId) -> None:
        self._steps = StepThread(executor.execute, deliver, f"{name}-step")
        self._transfers = TransferLoop(executor, deliver, name=f"{name}-kv")

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, Execute):
            self._steps.submit(effect.step)
        else:
            assert isinstance(effect, ConnectPeer | ReadBlocks), effect
            self._transfers.submit(effect)

    def close(self) -> None:
        self._steps.close()
        self._transfers.close()
