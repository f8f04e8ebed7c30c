"""Weights that a process has loaded for those that are forked from it: packed once, in memory that
all of them share, in huge pages.

`keep_weights` loads a checkpoint as its workers will; a `ModelRunner` of a forked process takes
what it finds here if it would have loaded the same. Nothing writes to weights, so nothing is
copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvrelay.engine.model.config import ModelConfig, files_of, versions_of
from kvrelay.engine.model.weights import Weights


@dataclass(frozen=True, slots=True)
class WeightsIdentity:
    """All that packed weights depend on, on one machine."""

    versions: dict[Path, tuple[int, ...]]  # by file
    config: ModelConfig
    dtype: str
    quantization: str

    @classmethod
    def of(cls, path: Path, config: ModelConfig, dtype: str, quantization: str) -> WeightsIdentity:
        return cls(versions_of(files_of(path)), config, dtype, quantization)


_kept: tuple[WeightsIdentity, Weights] | None = None


def keep(identity: WeightsIdentity, weights: Weights) -> None:
    """In place of what was kept before."""
    global _kept
    _kept = identity, weights


def kept(identity: WeightsIdentity) -> Weights | None:
    """Returns None unless just these are kept."""
    return _kept[1] if _kept is not None and _kept[0] == identity else None
