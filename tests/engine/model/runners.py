"""Runners of a model from settings by their names, whichever section they are in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.model.parallel.runner import ParallelRunner
from kvrelay.engine.model.runner import ModelRunner


def sections(settings: dict[str, Any]) -> tuple[ModelSection, EngineSection]:
    of_model = {
        name: settings.pop(name) for name in {*ModelSection.__struct_fields__} & {*settings}
    }
    return ModelSection(**of_model), EngineSection(**settings).sized(gpu=False)


def model_runner(
    path: Path,
    *,
    kv_pool: Any = None,
    member: Any = None,
    progress: Callable[[str], None] = lambda _: None,
    keep_as: str = "",
    **settings: Any,
) -> ModelRunner:
    of = {"kv_pool": kv_pool, "member": member, "progress": progress}
    return ModelRunner(path, *sections(settings), keep_as=keep_as, **of)


def parallel_runner(
    path: Path,
    size: int,
    *,
    companion: Any = None,
    host: str = "",
    further: Any = (),
    **settings: Any,
) -> ParallelRunner:
    return ParallelRunner(
        path,
        *sections(settings | {"tensor_parallel_size": size}),
        companion=companion,
        host=host,
        further=further,
    )
