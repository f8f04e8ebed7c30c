"""Other weights than those that a runner began with: loaded beside its steps, then used."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from kvrelay.engine.identity import files_of
from kvrelay.engine.model.checkpoint.load import load_weights
from kvrelay.engine.model.checkpoint.version import find_version, read_version
from kvrelay.engine.model.config import check_unchanged, versions_of
from kvrelay.engine.model.cpu.ops import CpuOps
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.support import Capability, refusal_of
from kvrelay.engine.weights import (
    LoadWeights,
    UseWeights,
    WeightsLoaded,
    WeightsUsed,
    WeightVersion,
)

if TYPE_CHECKING:
    from kvrelay.engine.model.runner import ModelRunner
    from kvrelay.engine.model.weights import Weights

logger = logging.getLogger(__name__)


def read_weights(version: WeightVersion, runner: ModelRunner) -> Weights:
    """Those of `version`, prepared for the runner. Raises ModelError."""
    folder = find_version(version, runner.model_dir, runner.cache_dir)
    before = versions_of(files_of(folder))
    if read_version(folder).digest != version.digest:
        raise ModelError(f"{folder} was changed while it was read: start again")
    if isinstance(runner.ops, CpuOps):
        runner.ops.use_new_chunks()
    weights = load_weights(folder, runner.config, runner.ops, lambda _: None)
    check_unchanged(before, files_of(folder))
    return weights


class Versions:
    """Changes the weights of a runner in place. Called from one thread, which runs no steps."""

    def __init__(self, runner: ModelRunner) -> None:
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
                weights, self._next = self._next, None
                assert weights is not None
                self._runner.replace_weights(weights, request.block_ids)
            else:
                with torch.inference_mode():
                    self._next = read_weights(request.version, self._runner)
        except Exception as error:  # whatever is wrong with the files, the old ones are there
            logger.warning("weights are not changed", exc_info=error)
            why = " ".join(str(error).splitlines()[:1]) or type(error).__name__
        if isinstance(request, UseWeights):
            return WeightsUsed(request.digest, why)
        return WeightsLoaded(request.version.digest, why, time.monotonic() - began)
