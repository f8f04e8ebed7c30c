"""Models that operators have added and removed while a server served, in a file of the state
directory, one for each port: the next start reads it beside the settings."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvrelay.cluster.config import Config, ConfigError, ModelEntry, check_added
from kvrelay.engine.files import write_private

_decode = msgspec.json.Decoder(dict[str, ModelEntry | None]).decode


def changes_file(config: Config) -> Path | None:
    """None: at a port that is any, no later server would find it."""
    port = config.api.port
    return config.sessions.state_path / f"models-{port}.json" if port else None


def with_changes(config: Config) -> Config:
    """`config` of the settings with what was added and removed since. Raises ConfigError."""
    file = changes_file(config)
    if file is None or not config.models:
        return config
    try:
        changes = _decode(file.read_bytes())
    except FileNotFoundError:
        return config
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file} is not read: {error}; remove it to go by the settings") from None
    kept = tuple(each for each in config.models if each.name not in changes)
    models = (*kept, *filter(None, changes.values()))
    try:
        for each in filter(None, changes.values()):
            check_added(each)
        return config.with_models(models)
    except ConfigError as error:
        raise ConfigError(f"{file}, which `kvrelay models` has written: {error}") from None


def keep_change(config: Config, name: str, entry: ModelEntry | None) -> None:
    """For the next start. Raises OSError."""
    file = changes_file(config)
    if file is None:
        return
    changes = _decode(file.read_bytes()) if file.exists() else {}
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(file, msgspec.json.encode({**changes, name: entry}))
