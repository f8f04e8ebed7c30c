"""One space of names: models, their aliases, and adapters, those of the settings and those that
operators have registered. Looked at before a server starts, and whenever something is added."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvrelay.cluster.api.adapters import FILE, read_kept
from kvrelay.cluster.config import Config, ConfigError, ModelEntry, check_tenants, names_of
from kvrelay.cluster.config_checks import name_table
from kvrelay.cluster.processes.adapter_bases import check_adapters_of


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
    except (OSError, msgspec.DecodeError):
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
    """Names, and whether what has them can be loaded. models: by what [[models]] calls them, what
    clients call each, and its folder. Takes seconds where there are some. Raises ConfigError."""
    check_names(config, [name for name, _ in models.values()])
    check_adapters_of(config, models, on_gpu=on_gpu)
