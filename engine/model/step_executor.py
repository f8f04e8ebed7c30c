"""Performs a worker's effect on its model: a step, then the checksums of the blocks that it fills.

Runs in the worker's model thread; where steps are launched behind one another, the waiting for
their ends is another thread's. Knows neither torch nor the transfer of KV.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvrelay.engine.step import Launch, Sampled, Step, StepDone

logger = logging.getLogger(__name__)


class StepBeforeFailed(Exception):
    """The step that a step follows has no tokens."""


@dataclass(slots=True)
class _Launched:
    ended_at: float = 0.0
    error: str | None = None


class StepExecutor:
    """Runs steps, one at a time, from the model thread; and launches those that may be followed."""

    def __init__(
        self,
        run_step: Callable[[Step], StepDone],
        checksum_blocks: Callable[[Sequence[int]], list[int]],
        *,
        launch_step: Launch | None = None,
        begin_checksums: Callable[[Sequence[int]], Callable[[], list[int]]] | None = None,
        add_ranks: Callable[[Step, list[int]], list[int]] | None = None,
        close: Callable[[], None] | None = None,
        prepare_grammar: Callable[[str], object] = lambda _: None,
        is_device_lost: Callable[[], bool] = lambda: False,
        change_weights: Callable[[Any], Any] = lambda request: None,
        num_passed: Callable[[], int] = lambda: 0,
        abandon: Callable[[int], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`checksum_blocks`: of the device pool, one number per block id; `begin_checksums`: the
        same behind a launched step, needed with `launch_step`; `add_ranks`: those of a step
        together with what the worker's other processes found. `close` ends the
        processes that `run_step` has, if any. `prepare_grammar` begins to compile one; it may be
        called from any thread. `is_device_lost`: asked after a step that failed; it waits for all
        that was launched. `change_weights`: as `Versions.change`. `num_passed`: layers that steps
        have passed until now; `abandon`: as `AbandonStep` says; both from any thread."""
        self._run_step = run_step
        self._checksum_blocks = checksum_blocks
        self._launch_step = launch_step
        self._begin_checksums = begin_checksums
        self._last = _Launched()
        self._add_ranks = add_ranks
        self._close = close
        self.prepare_grammar = prepare_grammar
        self._is_device_lost = is_device_lost
        self.change_weights = change_weights
        self.num_passed = num_passed
        self.abandon = abandon
        self._clock = clock

    @property
    def launches(self) -> bool:
        """Whether the next step may come while one runs; then `launch` takes all of them."""
        return self._launch_step is not None

    def launch(self, step: Step) -> Callable[[], StepDone]:
        """Begin a step. The call that is returned waits for its end, and does not raise; it may
        come from another thread, in the order of the steps. A step that cannot be followed has
        ended already."""
        if self._launch_step is None or self._begin_checksums is None or not step.may_be_followed:
            done = self.execute(step)
            self._last = _Launched(self._clock())
            return lambda: done
        before, this, began = self._last, _Launched(), self._clock()
        self._last = this
        follows = any(share.follows is not None for share in step.seqs)

        def check_before() -> None:
            if follows and before.error is not None:
                raise StepBeforeFailed(before.error)

        def fail(error: Exception) -> StepDone:
            done = self._failed(step, error)
            this.error = done.error
            return done

        try:
            check_before()
            wait_for_step = self._launch_step(step)
            wait_for_checksums = self._begin_checksums(step.checksum_blocks)
        except Exception as error:
            failed = fail(error)
            return lambda: failed

        def wait() -> StepDone:
            try:
                done, checksums = wait_for_step(), wait_for_checksums()
                checksums = self._of_all_ranks(step, checksums)
                check_before()
            except Exception as error:
                return fail(error)
            this.ended_at = self._clock()
            elapsed_s = this.ended_at - max(began, before.ended_at)
            return replace(done, checksums=checksums, elapsed_s=elapsed_s)

        return wait

    def execute(self, step: Step) -> StepDone:
        """Run the step, then checksum `step.checksum_blocks`. An exception becomes the error."""
        started = self._clock()
        try:
            done = self._run_step(step)
            checksums = self._checksum_blocks(step.checksum_blocks)
            checksums = self._of_all_ranks(step, checksums)
        except Exception as error:
            return self._failed(step, error)
        return replace(done, checksums=checksums, elapsed_s=self._clock() - started)

    def _of_all_ranks(self, step: Step, own: list[int]) -> list[int]:
        return self._add_ranks(step, own) if self._add_ranks is not None and own else own

    def _failed(self, step: Step, error: Exception) -> StepDone:
        logger.error("step %d of %d tokens failed", step.step_id, step.num_tokens, exc_info=error)
        sampled: list[Sampled | None] = [None] * len(step.seqs)
        text = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        lost = self._is_device_lost()
        return StepDone(step.step_id, sampled, error=text, device_lost=lost)

    def close(self) -> None:
        if self._close is not None:
            self._close()
