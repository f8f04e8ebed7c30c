"""What an adapter has to fit: a model's shapes, and its workers. Looked at before a server starts,
and whenever one is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from kvrelay.cluster.api.adapters import AdapterBase, find_folder, model_of
from kvrelay.cluster.config import Config, ConfigError
from kvrelay.engine.adapters import AdapterError
from kvrelay.engine.model.checkpoint.adapter_check import check_adapters
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.needs import unserved


def base_digest(model_dir: Path) -> bytes:
    """What an adapter's base is known by: every byte of the model that KV depends on. Cheap where
    its files were read before, as workers do."""
    return read_config(model_dir).digest(model_dir)


def adapter_base(
    config: Config, model_dir: Path, loads: Callable[[], bool] = lambda: True
) -> AdapterBase:
    """config: of the model alone. loads: whether its workers load adapters, once they are up."""

    def why_not(folder: Path) -> str:
        return _why_not(config, model_dir, [folder])[0]

    return AdapterBase(
        config.model.name,
        partial(base_digest, model_dir),
        why_not,
        lambda: _not_at_all(config) or ("" if loads() else unserved("adapter")),
    )


def _why_not(config: Config, model_dir: Path, folders: list[Path]) -> list[str]:
    engine, ranks = config.engine, max(1, config.engine.tensor_parallel_size)
    return check_adapters(folders, model_dir, config.model.dtype, engine.adapter_bytes, ranks)


def _not_at_all(config: Config, *, on_gpu: bool = False) -> str:
    if config.engine.runs == "vllm":
        return "engine.runs = 'vllm' computes no adapters"
    return "adapters are computed on CPUs, not on GPUs" if on_gpu else ""


def check_adapters_of(
    config: Config, models: Mapping[str, tuple[str, Path]], *, on_gpu: bool
) -> None:
    """Whether [[adapters]] can be loaded; models: as of `check_settings`. Raises ConfigError."""
    configs = {models[name][0]: own for name, own in config.by_model().items()}
    folders = dict(models.values())
    checkpoints = {name: own.model.name for name, own in configs.items()}
    of_model: dict[str, list[tuple[str, Path]]] = {}
    for entry in config.adapters:
        if entry.model and config.models and entry.model not in configs:
            continue  # it was removed while a server served
        try:
            model = model_of(entry.path, entry.model, checkpoints)
            gpu = on_gpu and configs[model].model.device != "cpu"
            if why := _not_at_all(configs[model], on_gpu=gpu):
                raise AdapterError(why)
            of_model.setdefault(model, []).append((entry.name, find_folder(entry.path)))
        except AdapterError as error:
            raise ConfigError(f"adapters: {entry.name}: {error}") from None
    for model, own in of_model.items():
        try:
            found = _why_not(configs[model], folders[model], [folder for _, folder in own])
        except AdapterError as error:
            found = [str(error)]
        for (name, folder), why in zip(own, found, strict=False):
            if why:
                raise ConfigError(f"adapters: {name}: {folder}: {why}")
