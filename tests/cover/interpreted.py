"""A runner whose kernels are a GPU's, interpreted, and which has the traits of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import RLock
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

from kvrelay.engine.model.ops import TORCH_DTYPES
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.step import Launch, Step, StepDone
from kvrelay.engine.support import Trait

INTERPRETER = RLock()  # its grid is one for the whole process, and there are several workers


class InterpretedRunner(ModelRunner):
    def _ops(self, num_threads: int) -> Any:
        from kvrelay.engine.model.gpu.ops import TritonOps

        kind, longest = TORCH_DTYPES[self.dtype], self.max_model_len
        return TritonOps(self._own, self._by_layers(), kind, longest, self._quantization)

    @property
    def _first_traits(self) -> frozenset[Trait]:
        return super()._first_traits - {Trait.CPU} | {Trait.GPU}

    def execute(self, step: Step) -> StepDone:
        with INTERPRETER:
            return super().execute(step)

    def _launches(self) -> Launch | None:
        launch = super()._launches()
        assert launch is not None

        def locked(step: Step) -> Callable[[], StepDone]:
            with INTERPRETER:
                wait = launch(step)

            def done() -> StepDone:
                with INTERPRETER:
                    return wait()

            return done

        return locked
