"""A folder of weights as a version of those that a server was started with: what it is called, and
whether it fits."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from kvrelay.engine.cache_dir import file_digest
from kvrelay.engine.identity import VOCABULARY_FILES, WEIGHTS, identity_of
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.weights import NAME_DIGITS, WeightVersion


def read_version(path: Path, name: str = "", base: Path | None = None) -> WeightVersion:
    """The version that `path` holds, by every byte of its weights. `base`: the model that it is to
    take the place of. Raises ModelError."""
    if not path.is_dir():
        raise ModelError(f"{path} is no folder; expected one with the *.safetensors of a model")
    files = sorted(path.glob(WEIGHTS))
    if not files:
        raise ModelError(f"{path} has no *.safetensors")
    if base is not None:
        _check(path, base)
    found = identity_of(files, None, b"kvrelay-version")
    return WeightVersion(name or found.hex()[:NAME_DIGITS], found, str(path))


def _check(path: Path, base: Path) -> None:
    """Raises ModelError where requests would mean something else with the model in `path`."""
    if (path / "config.json").is_file():
        one, other = (_shape(read_config(each)) for each in (path, base))
        for field in (each.name for each in fields(one)):
            mine, its = getattr(one, field), getattr(other, field)
            if mine != its:
                raise ModelError(
                    f"{path} is another model than {base}: {field} is {mine!r}, not {its!r};"
                    " weights are changed in place for the same architecture and shape only"
                )
    for name in VOCABULARY_FILES:
        mine, its = path / name, base / name
        if mine.is_file() and (not its.is_file() or file_digest(mine) != file_digest(its)):
            raise ModelError(f"{mine} differs from {its}: tokens would mean something else")


def _shape(config: ModelConfig) -> ModelConfig:
    """Where outputs end is the server's matter."""
    return replace(config, bos_token_id=None, eos_token_ids=())
