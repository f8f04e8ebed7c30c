"""Threads that let others of the machine go first: they alone, and those that they start."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.model.step_executor import StepExecutor
from kvrelay.engine.priority import NICENESS
from kvrelay.engine.step import Execute, Step, StepDone
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.executor import TransferExecutor
from kvrelay.worker.threads import StepThread, WorkerThreads, at_low_priority
from tests.kvtransfer.fake_agent import FakeAgent
from tests.kvtransfer.movers.nixl_peer import content

DEADLINE_S = 30.0


def niceness() -> int:
    """Returns that of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def niceness_of_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(niceness()))
    thread.start()
    thread.join(DEADLINE_S)
    return found[0]


@pytest.fixture(autouse=True)
def usual() -> Iterator[int]:
    """The niceness of the process, which no test changes."""
    before = niceness()
    yield before
    assert (niceness(), niceness_of_new_thread()) == (before, before)


@pytest.mark.parametrize("low_priority", [True, False])
def test_only_a_step_thread_of_low_priority_is_nice(usual: int, low_priority: bool) -> None:
    seen: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def execute(step: Step) -> StepDone:
        seen.put((niceness(), niceness_of_new_thread()))
        return StepDone(step.step_id, [])

    done: queue.SimpleQueue[StepDone] = queue.SimpleQueue()
    steps = StepThread(execute, done.put, "toy", low_priority=low_priority)
    steps.submit(Step(1, []))
    assert done.get(timeout=DEADLINE_S).step_id == 1
    assert (niceness(), niceness_of_new_thread()) == (usual, usual)  # while it is there
    steps.stop()
    assert steps.join(DEADLINE_S)
    expected = usual + NICENESS if low_priority else usual
    assert seen.get(timeout=DEADLINE_S) == (expected, expected)


def test_a_call_at_low_priority_returns_its_result_from_a_thread_that_is_gone_then(
    usual: int,
) -> None:
    threads: list[threading.Thread] = []

    def call() -> tuple[int, int]:
        threads.append(threading.current_thread())
        return niceness(), niceness_of_new_thread()

    assert at_low_priority(call) == (usual + NICENESS, usual + NICENESS)
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()


def test_a_call_at_low_priority_raises_what_the_call_raises() -> None:
    error = ValueError("a bug")

    def call() -> None:
        raise error

    with pytest.raises(ValueError, match="a bug") as raised:
        at_low_priority(call)
    assert raised.value is error


@pytest.mark.parametrize("shares_cores", [True, False])
def test_on_shared_cores_some_steps_have_low_priority(usual: int, shares_cores: bool) -> None:
    pools: dict[Tier, Any] = {Tier.DEVICE: content(4, 8, 0)}
    seen: dict[int, int] = {}
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run_step(step: Step) -> StepDone:
        seen[step.step_id] = niceness()
        return StepDone(step.step_id, [])

    threads = WorkerThreads(
        StepExecutor(run_step, partial(checksum_blocks, pools[Tier.DEVICE])),
        {Tier.DEVICE: (TransferExecutor("me", 1, FakeAgent(states=["done"]), pools), None)},
        answers.put,
        "me",
        shares_cores=shares_cores,
    )
    for step_id, low_priority in enumerate([False, True, False, True]):
        threads.perform(Execute(Step(step_id, [], low_priority=low_priority)))
        assert answers.get(timeout=DEADLINE_S).step_id == step_id
    threads.close()
    nice = usual + NICENESS if shares_cores else usual
    assert seen == {0: usual, 1: nice, 2: usual, 3: nice}
    assert not [t for t in threading.enumerate() if t.name.startswith("me-")]
