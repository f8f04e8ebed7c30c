"""Other weights than those that a runner began with: loaded beside its steps, then used."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kvrelay.engine.identity import files_of
from kvrelay.engine.model.checkpoint.load import load_weights
from kvrelay.engine.model.checkpoint.region import OpenRegion
from kvrelay.engine.model.checkpoint.version import find_version, read_version
from kvrelay.engine.model.config import check_unchanged, versions_of
from kvrelay.engine.model.cpu.ops import CpuOps
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq, Step
from kvrelay.engine.support import Capability, refusal_of
from kvrelay.engine.weights import (
    LoadWeights,
    UseWeights,
    WeightsLoaded,
    WeightsUsed,
    WeightVersion,
)

if TYPE_CHECKING:
    from kvrelay.engine.model.weights import Weights

GREEDY = SamplingParams(temperature=0.0)
logger = logging.getLogger(__name__)


def read_weights(version: WeightVersion, runner: Any) -> Weights:
    """Those of `version`, prepared for a ModelRunner. Raises ModelError."""
    if isinstance(runner.own_ops, CpuOps):
        runner.own_ops.use_new_chunks()
    given = runner.config, runner.ops, lambda _: None
    if version.memory is not None:
        with OpenRegion(version.memory, version.digest) as region:
            return load_weights(runner.model_dir, *given, region)
    folder = find_version(version, runner.model_dir, runner.cache_dir)
    before = versions_of(files_of(folder))
    if read_version(folder).digest != version.digest:
        raise ModelError(f"{folder} was changed while it was read: start again")
    weights = load_weights(folder, *given)
    check_unchanged(before, files_of(folder))
    return weights


class Versions:
    """Changes the weights of a runner in place. Called from one thread, which runs no steps."""

    def __init__(self, runner: Any) -> None:
        """`runner`: a ModelRunner, or one of several ranks with its interface."""
        self._runner = runner
        self._next: Weights | None = None  # loaded, and not in use yet

    def change(self, request: LoadWeights | UseWeights) -> WeightsLoaded | WeightsUsed:
        """Not from the model's thread: to load takes long, and to use them no step may run. Says
        why nothing has changed, if it has not."""
        began, why = time.monotonic(), ""
        try:
            if why := refusal_of(Capability.WEIGHT_UPDATES, self._runner.traits):
                pass
            elif isinstance(request, UseWeights):
                self._use(request)
            else:
                self.load(request)
        except Exception as error:  # whatever is wrong with the files, the old ones are there
            logger.warning("weights are not changed", exc_info=error)
            why = " ".join(str(error).splitlines()[:1]) or type(error).__name__
        if isinstance(request, UseWeights):
            return WeightsUsed(request.digest, why)
        return WeightsLoaded(request.version.digest, why, time.monotonic() - began)

    def load(self, request: LoadWeights) -> None:
        """Beside the steps. Raises ModelError, OSError."""
        with torch.inference_mode():
            self._next = read_weights(request.version, self._runner)

    def swap(self) -> Callable[[], None]:
        """Compute with what was loaded; as `ModelRunner.swap_weights`."""
        weights, self._next = self._next, None
        assert weights is not None
        undo: Callable[[], None] = self._runner.swap_weights(weights)
        return undo

    def forget(self) -> None:
        """What was loaded is not used."""
        self._next = None

    def _use(self, request: UseWeights) -> None:
        undo = self.swap()
        try:
            self._probe(request)
        except Exception:
            undo()
            raise

    def _probe(self, request: UseWeights) -> None:
        """Raises ModelError unless the new weights sample a token that is one."""
        share = ScheduledSeq("probe", [0], 0, [*request.block_ids], True, GREEDY, [0], 1)
        if (fault := self._runner.execute(Step(-1, [share])).fault(0)) is not None:
            raise ModelError(f"the new weights do not answer: {fault[1]}")
