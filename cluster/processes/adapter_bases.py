"""What an adapter has to fit: a model's shapes, its workers, and one space of names, with what
operators have registered. Looked at before a server starts, and whenever something is added."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from kvrelay.cluster.api.adapters import FILE, AdapterBase, find_folder, model_of, read_kept
from kvrelay.cluster.config import Config, ConfigError, ModelEntry, check_tenants, names_of
from kvrelay.cluster.config_checks import name_table
from kvrelay.engine.adapters import AdapterError
from kvrelay.engine.adapters import read_config as read_adapter_config
from kvrelay.engine.model.checkpoint.adapter_check import check_adapters
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.needs import unserved
from kvrelay.engine.support import Capability, engine_traits, refusal_of

VLLM_LORA_RANK = 16  # vLLM's default for `max_lora_rank`


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
        # Whether vLLM's are on GPUs is not known here: its workers say whether they load any.
        lambda: (
            _not_at_all(config, on_gpu=config.engine.runs == "vllm")
            or ("" if loads() else unserved("adapter"))
        ),
    )


def _why_not(config: Config, model_dir: Path, folders: list[Path]) -> list[str]:
    engine, ranks = config.engine, max(1, config.engine.tensor_parallel_size)
    dtype = config.model.dtype
    found = check_adapters(folders, model_dir, dtype, engine.adapter_bytes, ranks)
    if engine.runs != "vllm":
        return found
    most = engine.arguments.get("max_lora_rank", VLLM_LORA_RANK)
    return [why or _too_wide(folder, most) for why, folder in zip(found, folders, strict=True)]


def _too_wide(folder: Path, most: int) -> str:
    scaling = read_adapter_config(folder)
    rank = max(scaling.rank, *(int(each) for _, each in scaling.ranks), 0)
    where = "engine.arguments has max_lora_rank"
    return "" if rank <= most else f"it has rank {rank}, and {where} = {most}: raise that"


def _not_at_all(config: Config, *, on_gpu: bool = False) -> str:
    return refusal_of(Capability.ADAPTERS, engine_traits(config.engine, on_gpu=on_gpu))


def model_names(config: Config, served_names: Iterable[str]) -> dict[str, str]:
    """Who has each name that models have; served_names: without [[models]] there is one. Raises
    ConfigError."""
    if config.models:
        return name_table(names_of((each.name, each.aliases) for each in config.models))
    aliases = ((name, "an alias of the model") for name in config.model.served_name.split()[1:])
    return name_table([*((name, "the model") for name in served_names), *aliases])


def check_names(config: Config, served_names: Iterable[str]) -> None:
    """Among models, their aliases, [[adapters]], and adapters that were registered for one of those
    models. Raises ConfigError."""
    file = config.sessions.state_path / FILE
    taken = model_names(config, served_names)
    own = {each.name: "an adapter in [[adapters]]" for each in config.adapters}
    name_table([*taken.items(), *own.items()])
    try:
        kept = read_kept(file)
    except OSError:
        return  # routers go on without it, and say so
    models = {each.name for each in config.models} or set(served_names)
    for name, each in kept.items():
        if name in taken and each.source and each.model in models:
            raise ConfigError(
                f"{name!r} is {taken[name]}, and an adapter that is registered in {file}: remove it"
                f" (DELETE /v1/adapters/{name}, or its line of the file), or rename the model"
            )


def check_change(
    config: Config, name: str, entry: ModelEntry | None, tenants: Collection[str]
) -> None:
    """Whether a model may be added, or (None) removed. Raises ConfigError."""
    after = config.with_model(name, entry)
    if entry is not None:
        check_names(after, ())
        check_tenants(replace(after, models=(entry,), adapters=()), tenants)


def check_settings(config: Config, models: Mapping[str, tuple[str, Path]], *, on_gpu: bool) -> None:
    """Names, and whether [[adapters]] can be loaded. models: by what [[models]] calls them, what
    clients call each, and its folder. Takes seconds where there are some. Raises ConfigError."""
    check_names(config, [name for name, _ in models.values()])
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
