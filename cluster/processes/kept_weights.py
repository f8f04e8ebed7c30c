"""Which weights a model is served with, in the state directory: a server that starts anew serves
the version that was current, unless the model's own files have changed since."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from kvrelay.cluster.control.messages import Checkpoint, ModelWeights
from kvrelay.engine.files import write_private
from kvrelay.engine.model.checkpoint.version import read_version
from kvrelay.engine.model.errors import ModelError

FILE = "weights.json"
log = logging.getLogger("kvrelay.control")


class _Kept(msgspec.Struct, frozen=True):
    weights: ModelWeights  # `base`: what the model's own files held
    files: str = ""  # for the version before, which names them by paths and times


_decode = msgspec.json.Decoder(list[_Kept]).decode


class KeptWeights:
    """Owned by the controller's process. Invariant: the file has what was given last, unless the
    disk did not take it."""

    def __init__(self, folder: Path, models: Mapping[str, Path]) -> None:
        """`models`: the folder of each, by its name."""
        self._file = folder / FILE
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
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_private(self._file, msgspec.json.encode(kept))
        except OSError as error:
            log.error("%s is not written: %s", self._file, error)

    def _read(self) -> tuple[ModelWeights, ...]:
        try:
            kept = _decode(self._file.read_bytes())
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.DecodeError) as error:
            log.error("%s is not read, models have their own weights: %s", self._file, error)
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
