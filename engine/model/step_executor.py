"""Performs a worker's effect on its model: a step, then the checksums of the blocks that it fills.

Runs in the worker's model thread. Knows neither torch nor the transfer of KV.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.step import Sampled, Step, StepDone

logger = logging.getLogger(__name__)


class StepExecutor:
    """Runs steps, one at a time, from the model thread."""

    def __init__(
        self,
        run_step: Callable[[Step], StepDone],
        checksum_blocks: Callable[[Sequence[int]], list[int]],
        *,
        add_ranks: Callable[[Step, list[int]], list[int]] | None = None,
        close: Callable[[], None] | None = None,
        prepare_grammar: Callable[[str], object] = lambda _: None,
        is_device_lost: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`checksum_blocks`: of the device pool, one number per block id; `add_ranks`: those of a
        step together with what the worker's other processes found. `close` ends the
        processes that `run_step` has, if any. `prepare_grammar` begins to compile one; it may be
        called from any thread. `is_device_lost`: asked after a step that failed."""
        self._run_step = run_step
        self._checksum_blocks = checksum_blocks
        self._add_ranks = add_ranks
        self._close = close
        self.prepare_grammar = prepare_grammar
        self._is_device_lost = is_device_lost
        self._clock = clock

    def execute(self, step: Step) -> StepDone:
        """Run the step, then checksum `step.checksum_blocks`. An exception becomes the error."""
        started = self._clock()
        try:
            done = self._run_step(step)
            checksums = self._checksum_blocks(step.checksum_blocks)
            if self._add_ranks is not None and checksums:
                checksums = self._add_ranks(step, checksums)
        except Exception as error:
            logger.exception("step %d of %d tokens failed", step.step_id, step.num_tokens)
            sampled: list[Sampled | None] = [None] * len(step.seqs)
            text = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            lost = self._is_device_lost()
            return StepDone(step.step_id, sampled, error=text, device_lost=lost)
        return replace(done, checksums=checksums, elapsed_s=self._clock() - started)

    def close(self) -> None:
        if self._close is not None:
            self._close()
