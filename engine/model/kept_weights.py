"""Weights that a process has loaded for those that are forked from it: packed once, in memory that
all of them share, in huge pages.

A `ModelRunner` of such a process takes what it finds here if it would have loaded the same. Nothing
writes to weights, so nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvrelay.engine.identity import files_of
from kvrelay.engine.model.config import ModelConfig, versions_of
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


_kept: dict[str, tuple[WeightsIdentity, Weights]] = {}


def keep(name: str, identity: WeightsIdentity, weights: Weights) -> None:
    """In place of what was kept under that name before."""
    _kept[name] = identity, weights


def drop(name: str) -> None:
    _kept.pop(name, None)


def kept(identity: WeightsIdentity) -> Weights | None:
    """Returns None unless just these are kept."""
    return next((weights for known, weights in _kept.values() if known == identity), None)
