"""Which weights a model is served with, in the state directory: a server that starts anew serves
the version that was current, unless the model's own files have changed since."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from kvrelay.cluster.control.messages import Checkpoint, ModelWeights
from kvrelay.cluster.processes.life import weights_of
from kvrelay.engine.files import write_private

FILE = "weights.json"
log = logging.getLogger("kvrelay.control")


class _Kept(msgspec.Struct, frozen=True):
    files: str  # the model's own, as `life.weights_of` names them
    weights: ModelWeights


_decode = msgspec.json.Decoder(list[_Kept]).decode


class KeptWeights:
    """Owned by the controller's process. Invariant: the file has what was given last, unless the
    disk did not take it."""

    def __init__(self, folder: Path, models: Mapping[str, Path]) -> None:
        """`models`: the folder of each, by its name."""
        self._file = folder / FILE
        self._files = {name: weights_of(path) for name, path in models.items()}
        self._latest: tuple[ModelWeights, ...] = ()

    def add_to(self, kept: Checkpoint) -> Checkpoint:
        """What a controller before knows comes first; it is younger."""
        if not any(each.number for each in kept.weights):
            kept = replace(kept, weights=self._read())
        self._latest = kept.weights
        return kept

    def keep(self, weights: tuple[ModelWeights, ...]) -> None:
        """A disk that is full does not stop what serves."""
        if weights == self._latest:
            return
        self._latest = weights
        kept = [_Kept(self._files[each.model], each) for each in weights if each.current.digest]
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
        mine = [each.weights for each in kept if self._files.get(each.weights.model) == each.files]
        return tuple(replace(each, paused=None) for each in mine)
