"""What operators have changed while a server served, in files of the state directory that the next
start reads beside the settings: models that were added and removed (for each port), and which
weights a model is served with, unless its own files have changed since."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from kvrelay.cluster.config import Config, ConfigError, ModelEntry, check_added
from kvrelay.cluster.control.messages import Checkpoint, ModelWeights
from kvrelay.engine.files import NotRead, read_json, write_json
from kvrelay.engine.model.checkpoint.version import read_version
from kvrelay.engine.model.errors import ModelError

WEIGHTS_FILE = "weights.json"
Changes = dict[str, ModelEntry | None]
"""Models by their names; None: removed."""
log = logging.getLogger("kvrelay.control")


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
        changes = read_json(file, Changes)
    except NotRead as error:
        raise ConfigError(f"{error}; remove it to go by the settings") from None
    if changes is None:
        return config
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
    if file is not None:
        write_json(file, {**(read_json(file, Changes) or {}), name: entry})


class _Kept(msgspec.Struct, frozen=True):
    weights: ModelWeights  # `base`: what the model's own files held
    files: str = ""  # for the version before, which names them by paths and times


class KeptWeights:
    """Owned by the controller's process. Invariant: the file has what was given last, unless the
    disk did not take it."""

    def __init__(self, folder: Path, models: Mapping[str, Path]) -> None:
        """`models`: the folder of each, by its name."""
        self._file = folder / WEIGHTS_FILE
        self._models = models
        self._latest: tuple[ModelWeights, ...] = ()

    def add_to(self, kept: Checkpoint) -> Checkpoint:
        """What a controller before knows of a model comes first; it is younger."""
        known = {each.model: each for each in kept.weights if each.number or each.has_paused}
        if not any(each.number for each in known.values()):
            known = {each.model: each for each in self._read()} | known
        kept = replace(kept, weights=tuple(known.values()))
        self._latest = kept.weights
        return kept

    def keep(self, weights: tuple[ModelWeights, ...]) -> None:
        """A disk that is full does not stop what serves."""
        if weights == self._latest:
            return
        self._latest = weights
        kept = [_Kept(each) for each in weights if each.current.digest]
        try:
            write_json(self._file, kept)
        except OSError as error:
            log.error("%s is not written: %s", self._file, error)

    def _read(self) -> tuple[ModelWeights, ...]:
        try:
            kept = read_json(self._file, list[_Kept]) or []
        except NotRead as error:
            log.error("%s; models have their own weights", error)
            return ()
        mine = (each.weights for each in kept if self._is_for(each.weights))
        return tuple(replace(each, paused=None) for each in mine)

    def _is_for(self, weights: ModelWeights) -> bool:
        """Whether the model's own files hold what they held: the same bytes, wherever they are."""
        path = self._models.get(weights.model)
        if path is None:
            return False
        try:
            is_same = read_version(path).digest == weights.base.digest
        except (ModelError, OSError) as error:
            log.error("%s: %s; it is served with its own weights", weights.model or path, error)
            return False
        if not is_same:
            log.warning(
                "%s holds other weights than when %s took their place: it is served with its own,"
                " and not with those of the last update",
                *(path, weights.current.name),
            )
        return is_same
