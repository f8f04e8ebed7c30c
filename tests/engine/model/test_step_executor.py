"""Steps as a worker's model thread runs them."""

from __future__ import annotations

from functools import partial

import pytest

from kvrelay.engine.model.step_executor import StepExecutor
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import Sampled, ScheduledSeq, Step, StepDone
from kvrelay.kvtransfer.checksum import checksum_blocks
from tests.kvtransfer.movers.nixl_peer import content

NUM_BLOCKS, BLOCK = 8, 256


def a_step(*checksum_blocks: int) -> Step:
    seqs = [
        ScheduledSeq("r", [1, 2], 0, [0], sample, SamplingParams(), [1, 2], 2)
        for sample in (False, True)
    ]
    return Step(7, seqs, list(checksum_blocks))


def test_blocks_are_checksummed_after_the_step() -> None:
    pool = content(NUM_BLOCKS, BLOCK, 0)

    def run(step: Step) -> StepDone:
        pool[5] = 9
        return StepDone(step.step_id, [None, Sampled(3)])

    done = StepExecutor(run, partial(checksum_blocks, pool)).execute(a_step(5, 1))
    assert done.checksums == checksum_blocks(pool, [5, 1])
    assert (done.step_id, done.sampled, done.error) == (7, [None, Sampled(3)], None)


def test_an_exception_becomes_an_error_of_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def run(step: Step) -> StepDone:
        raise ValueError("shape mismatch\nand more")

    done = StepExecutor(run, partial(checksum_blocks, content(2, 8, 0))).execute(a_step(0))
    assert done == StepDone(7, [None, None], error="ValueError: shape mismatch")
    assert "Traceback" in caplog.text


def test_after_a_step_that_failed_the_device_is_asked() -> None:
    def run(step: Step) -> StepDone:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    checksums = partial(checksum_blocks, content(2, 8, 0))
    done = StepExecutor(run, checksums, is_device_lost=lambda: True).execute(a_step(0))
    assert done.device_lost
    assert not StepExecutor(run, checksums).execute(a_step(0)).device_lost


def test_a_block_that_cannot_be_checksummed_is_an_error() -> None:
    executor = StepExecutor(
        lambda step: StepDone(step.step_id, [None, None]),
        partial(checksum_blocks, content(2, 8, 0)),
    )
    assert (executor.execute(a_step(2)).error or "").startswith("IndexError")
