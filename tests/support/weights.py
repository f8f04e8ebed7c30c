"""Versions of a checkpoint, what each of them answers, and an operator who changes them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from kvrelay.engine.model.checkpoint.version import read_version
from kvrelay.engine.node import Effect, NodeId
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import Step
from kvrelay.engine.weights import UpdateMode, UpdateWeights, WeightsUpdated, WeightVersion
from tests.engine.model.runners import model_runner
from tests.engine.model.tiny import scheduled
from tests.support.local import LocalCluster

OPERATOR = "operator"


def scaled(model: Path, folder: Path, factor: float, part: str = "mlp.down_proj") -> Path:
    """A copy of `model` with its first tensor of this name scaled."""
    shutil.copytree(model, folder)
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        name = next((name for name in sorted(tensors) if part in name), None)
        if name is not None:
            save_file(tensors | {name: tensors[name] * factor}, file)
            return folder
    raise AssertionError(f"{model} has no {part}")


class Reference:
    """What a runner of one version alone says, greedily."""

    def __init__(self, model: Path) -> None:
        self._runner = model_runner(model, num_blocks=40, dtype="float32", threads=1)
        self.continued = cache(self._continued)

    def _continued(self, context: tuple[int, ...], count: int) -> list[int]:
        """The `count` tokens after `context`, which is computed from its first token."""
        out: list[int] = []
        sampling = SamplingParams(max_tokens=count, temperature=0.0)
        while len(out) < count:
            whole = [*context, *out]
            feed, start = ([out[-1]], len(whole) - 1) if out else (whole, 0)
            share = scheduled(feed, start, [*range(40)], context=whole, sampling=sampling)
            (sampled,) = self._runner.execute(Step(0, [share])).sampled
            assert sampled is not None
            out.append(sampled.token)
        return out


class Operator:
    """Node. Changes weights of workers; each answer ends the future of its worker."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.node_id = OPERATOR
        self._cluster = cluster
        self._asked: dict[NodeId, Future[WeightsUpdated]] = {}
        cluster.run(lambda: cluster.host.add(self))

    def start(self, now: float) -> list[Effect]:
        return []

    def receive(self, now: float, message: Any) -> list[Effect]:
        self._asked.pop(message.worker).set_result(message)
        return []

    def begin(
        self, worker: NodeId, version: WeightVersion, mode: UpdateMode, **fields: Any
    ) -> Future[WeightsUpdated]:
        future = self._asked[worker] = Future()
        update = UpdateWeights(OPERATOR, version, mode, **fields)
        self._cluster.run(lambda: self._cluster.host.deliver(worker, update))
        return future

    def update(
        self, path: Path, mode: UpdateMode, workers: Sequence[NodeId] = (), **fields: Any
    ) -> list[WeightsUpdated]:
        """One worker after the other; raises where one has failed."""
        return self.use(read_version(path), mode, workers, **fields)

    def use(
        self,
        version: WeightVersion,
        mode: UpdateMode,
        workers: Sequence[NodeId] = (),
        **fields: Any,
    ) -> list[WeightsUpdated]:
        """One worker after the other, as `update` does it."""
        found = []
        for worker in workers or sorted(self._cluster.workers):
            found.append(self.begin(worker, version, mode, **fields).result(60))
            assert found[-1].why == "", found[-1]
        return found
