"""The threads of one worker: one that computes, one that copies KV in memory, and one for each tier
of storage, so that a slow disk holds up nothing else. All report to the node. On shared cores a
second one computes the steps of low priority."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from kvrelay.engine.host import Deliver
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.model.step_executor import StepExecutor
from kvrelay.engine.node import Effect, NodeId
from kvrelay.engine.priority import lower_priority
from kvrelay.engine.step import (
    AbandonStep,
    AskProgress,
    Execute,
    Launch,
    PrepareGrammar,
    Step,
    StepDone,
    StepProgress,
)
from kvrelay.engine.weights import LoadWeights, UseWeights
from kvrelay.kvtransfer.agent import (
    AttachStore,
    ConnectPeer,
    CopyBlocks,
    FindStored,
    StoreFailed,
    StoreIndex,
)
from kvrelay.kvtransfer.executor import Store, TransferExecutor, failed_copy
from kvrelay.kvtransfer.ranks import RankAnswers
from kvrelay.kvtransfer.tiers.registry import is_storage
from kvrelay.kvtransfer.transfer_loop import Request, TransferLoop

log = logging.getLogger("kvrelay.threads")

CLOSE_S = 15.0
"""What runs when a worker stops, a step or a write to disk, has this long to end."""

T = TypeVar("T")
R = TypeVar("R")
JoinRanks = Callable[[Deliver], RankAnswers]


def at_low_priority(call: Callable[[], T]) -> T:
    """Calls `call` on a thread of low priority."""
    with ThreadPoolExecutor(1, "low-priority", initializer=lower_priority) as thread:
        return thread.submit(call).result()


class StepThread(Generic[T, R]):
    """Answers what it is given, one after the other, on a thread of its own: executes steps, or
    waits for those that were launched. `call` answers for failures."""

    def __init__(
        self,
        call: Callable[[T], R],
        deliver: Callable[[R], None],
        name: str,
        *,
        low_priority: bool = False,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`at_end`: called on the thread when all was answered."""
        self._call = call
        self._deliver = deliver
        self._low_priority = low_priority
        self._at_end = at_end
        self._given: SimpleQueue[T | None] = SimpleQueue()  # two at most, as the node asks
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, given: T) -> None:
        self._given.put(given)

    def stop(self) -> None:
        """Begin to end, without waiting."""
        self._given.put(None)

    def join(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait for what runs. False if it has not ended in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._low_priority:
            lower_priority()
        while (given := self._given.get()) is not None:
            self._deliver(self._call(given))
        self._at_end()


class LaunchThreads:
    """Launches steps on one thread and waits for their ends on another, so that the next one is
    prepared while one runs. Results are delivered in the order of the steps."""

    def __init__(self, launch: Launch, deliver: Callable[[StepDone], None], name: str) -> None:
        """`launch` is that of StepExecutor."""
        waits: StepThread[Callable[[], StepDone], StepDone]
        waits = StepThread(lambda wait: wait(), deliver, f"{name}-wait")
        launches = StepThread(launch, waits.submit, name, at_end=waits.stop)
        self.submit, self.stop, self.join = launches.submit, launches.stop, waits.join


Copies = Mapping[Tier, tuple[TransferExecutor, Store | None]]
"""What copies to and from each storage, and the index of that; under `DEVICE` what copies in memory
and from peers, and the index of host memory, if it has one."""


def loop_of(request: Request) -> Tier:
    """Which one of `Copies` a request is for."""
    match request:
        case StoreIndex(tier=tier) | AttachStore(tier=tier) | FindStored(tier=tier):
            pass
        case CopyBlocks(src_tier=tier) if is_storage(tier):
            pass
        case CopyBlocks(dst_tier=tier):
            pass
        case _:
            return Tier.DEVICE
    return tier if is_storage(tier) else Tier.DEVICE


class TransferLoops:
    """Takes transfers to the thread that they are for. Owns the threads, and by them the movers and
    the stores."""

    def __init__(self, copies: Copies, answer: Callable[[Any], None], name: NodeId) -> None:
        """`answer`: called from any of the threads."""
        self._answer = answer
        self.loops = {
            tier: TransferLoop(executor, answer, store=store, name=f"{name}-kv-{tier}")
            for tier, (executor, store) in copies.items()
        }

    def submit(self, request: Request) -> None:
        tier = loop_of(request)
        missing = f"this worker has no {tier} tier"
        if tier in self.loops:
            self.loops[tier].submit(request)
        elif isinstance(request, CopyBlocks):
            self._answer(failed_copy(request, missing))
        else:
            self._answer(StoreFailed(missing, tier=tier))

    def close(self, timeout_s: float) -> None:
        """Copies that run have `timeout_s` to settle."""
        for loop in self.loops.values():
            loop.stop(timeout_s)
        for loop in self.loops.values():
            loop.join(timeout_s)


class WorkerThreads:
    """Executor of a worker's effects. Owns the threads, and by them the model, the movers and the
    stores."""

    def __init__(
        self,
        steps: StepExecutor,
        copies: Copies,
        deliver: Deliver,
        name: NodeId,
        *,
        join_ranks: JoinRanks | None = None,
        shares_cores: bool = False,
    ) -> None:
        """`join_ranks`: of a worker of several ranks. `shares_cores`: with other workers of its
        machine."""
        self._name = name
        self._model = steps
        self._steps: StepThread[Step, StepDone] | LaunchThreads
        if steps.launches:
            self._steps = LaunchThreads(steps.launch, deliver, f"{name}-step")
        else:
            self._steps = StepThread(steps.execute, deliver, f"{name}-step")
        change = steps.change_weights
        self._weights = StepThread(change, deliver, f"{name}-weights", low_priority=True)
        self._low_priority = self._steps
        if shares_cores:
            self._low_priority = StepThread(
                steps.execute, deliver, f"{name}-prompts", low_priority=True
            )
        self._deliver = deliver
        self._ranks = join_ranks(deliver) if join_ranks else None
        answer = deliver if self._ranks is None else partial(self._ranks.add, 0)
        self._copies = TransferLoops(copies, answer, name)

    def perform(self, effect: Effect) -> None:
        match effect:
            case Execute(step):
                (self._low_priority if step.low_priority else self._steps).submit(step)
            case AskProgress():
                self._deliver(StepProgress(self._model.num_passed()))
            case AbandonStep(step_id):
                self._model.abandon(step_id)
            case PrepareGrammar(grammar):
                self._model.prepare_grammar(grammar)
            case LoadWeights() | UseWeights():
                self._weights.submit(effect)
            case _:
                asked = ConnectPeer | CopyBlocks | StoreIndex | FindStored
                assert isinstance(effect, asked), effect
                if self._ranks is not None:
                    self._ranks.begin(effect)
                self._copies.submit(effect)

    def close(self) -> None:
        """All at once, so that the slowest decides how long it takes."""
        parts: dict[str, StepThread[Any, Any] | LaunchThreads | TransferLoop] = {
            "step": self._steps,
            "weights": self._weights,
            **{f"{tier} tier's": loop for tier, loop in self._copies.loops.items()},
        }
        if self._low_priority is not self._steps:
            parts["prompts"] = self._low_priority
        for part in parts.values():
            part.stop()
        deadline = time.monotonic() + CLOSE_S
        for name, part in parts.items():
            if not part.join(max(0.0, deadline - time.monotonic())):
                log.warning("%s: the %s thread has not ended in time", self._name, name)
        self._model.close()
