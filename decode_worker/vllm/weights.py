"""Other weights for a vLLM that serves, by its own reload: written over those in use, so that
graphs and compiled code find them where they were.

There is no second copy: what fails in the middle is undone by a reload of the weights before, whose
folder or copy is there. So all that can be known before is looked at first, beside the steps: every
byte's digest, which leaves the files in memory, and the names and shapes of all tensors, since vLLM
keeps what it had where one is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from math import isfinite
from pathlib import Path
from typing import Any

from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.host import first_line
from kvrelay.engine.identity import WEIGHTS
from kvrelay.engine.model.checkpoint.version import find_version, read_version
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.weights import (
    LoadWeights,
    UseWeights,
    WeightsLoaded,
    WeightsUsed,
    WeightVersion,
)

RESET_S = 30.0  # for blocks of requests that have ended to be free


def reload(worker: Any, folder: str) -> None:
    """Called in each process that computes. `worker`: vLLM's, of that process."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.model_loader import get_model_loader

    runner = worker.model_runner
    config, model = copy(runner.vllm_config.model_config), runner.get_model()
    config.model, config.model_weights, config.revision = folder, "", None
    loader = get_model_loader(runner.vllm_config.load_config)
    worker.reload_weights(weights_iterator=loader.get_all_weights(config, model))
    # An output layer that shares its matrix with the embedding has its own packed copy on CPUs,
    # which 0.32 does not make anew.
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and weight is not None and weight.dim() == 2:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


class VllmWeights:
    """Owned by an engine. Invariant: `_folder` holds the weights in use."""

    def __init__(
        self, engine: Any, probe: Callable[[], float], cache_dir: Path | None = None
    ) -> None:
        """`probe`: runs a request alone, and returns the log-probability of its token;
        `cache_dir`: where copies of weights are kept."""
        self._engine, self._probe = engine, probe
        self._cache_dir = cache_dir or default_cache_dir()
        self._base = self._folder = Path(engine.vllm_config.model_config.model)
        self._next: Path | None = None

    def load(self, asked: LoadWeights) -> WeightsLoaded:
        """What can be known before they are written over those in use; not on the thread that
        steps. The answer says why not, if so."""
        began, why = time.monotonic(), ""
        try:
            self._next = self._find(asked.version)
        except (ModelError, OSError) as error:
            why = first_line(error)
        return WeightsLoaded(asked.version.digest, why, time.monotonic() - began)

    def use(self, asked: UseWeights) -> WeightsUsed:
        """On the thread that steps, where no request is at vLLM. Raises what vLLM raises where the
        weights before cannot be brought back either: the engine is lost then."""
        assert self._next is not None, "loaded before"
        folder, self._next = self._next, None
        why = self._reload(folder)
        if why and self._reload(self._folder):
            raise RuntimeError(f"{why}; and {self._folder} is not loaded again")
        if not why:
            self._folder = folder
        return WeightsUsed(asked.digest, why)

    def begin_with(self, version: WeightVersion) -> None:
        """Before anything is served. Raises ModelError."""
        self._folder = self._find(version)
        if why := self._reload(self._folder):
            raise ModelError(f"{version.name}: {why}")

    def _find(self, version: WeightVersion) -> Path:
        folder = find_version(version, self._base, self._cache_dir)
        if read_version(folder).digest != version.digest:
            raise ModelError(f"{folder} was changed while it was read: start again")
        mine, its = _tensors(folder), _tensors(self._base)
        if other := sorted(
            name for name in mine.keys() | its.keys() if mine.get(name) != its.get(name)
        ):
            name, more = other[0], len(other) - 1
            raise ModelError(
                f"{folder} has other tensors than {self._base}: {name} is"
                f" {mine.get(name, 'missing')}, not {its.get(name, 'missing')}"
                + f"; so are {more} more"
                * (more > 0)
            )
        return folder

    def _reload(self, folder: Path) -> str:
        """Why the model does not compute with what is in `folder`; "": it does."""
        try:
            self._forget_kv()
            self._engine.collective_rpc(reload, args=(str(folder),))
            self._engine.reset_mm_cache()
            self._engine.reset_encoder_cache()
            number = self._probe()
        except Exception as error:  # vLLM has classes of its own
            return f"vLLM does not load {folder}: {first_line(error)}"
        return "" if isfinite(number) else f"the logits of {folder} are not numbers"

    def _forget_kv(self) -> None:
        """vLLM's prefix cache knows no versions. What has ended may still be in a step that was
        scheduled ahead."""
        deadline = time.monotonic() + RESET_S
        while not self._engine.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise TimeoutError(f"KV blocks are still in use after {RESET_S:g} s")
            self._engine.step()


def _tensors(folder: Path) -> dict[str, list[int]]:
    """The shapes of all tensors in the *.safetensors of `folder`, by name."""
    from safetensors import safe_open

    found: dict[str, list[int]] = {}
    for file in sorted(folder.glob(WEIGHTS)):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    return found
