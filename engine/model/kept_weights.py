"""What a process has loaded for those that are forked from it: weights, packed once, in memory that
all of them share, in huge pages, and the vocabulary for grammars, which takes a second or, of
262,144 tokens, five, with Python's lock.

A `ModelRunner` of such a process takes what it finds here if it would have loaded the same. Nothing
writes to them, so nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import llguidance

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
        ends = path / "tokenizer_config.json"  # which names the token that ends an output
        files = [*files_of(path), *([ends] if ends.is_file() else [])]
        return cls(versions_of(files), config, dtype, quantization)


@dataclass(frozen=True, slots=True)
class Kept:
    identity: WeightsIdentity
    weights: Weights
    vocabulary: llguidance.LLTokenizer | None  # None: there is none for grammars


_kept: dict[str, Kept] = {}


def keep(name: str, kept: Kept) -> None:
    """In place of what was kept under that name before."""
    _kept[name] = kept


def drop(name: str) -> None:
    _kept.pop(name, None)


def find_kept(identity: WeightsIdentity) -> Kept | None:
    """Returns None unless just these are kept."""
    return next((each for each in _kept.values() if each.identity == identity), None)
