"""The files of a checkpoint: safetensors, one or several, mapped into memory.

Tensors are views of the files: a page is read when it is first touched, and never written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.model.checkpoint.fields import read_json
from engine.model.errors import ModelError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """The tensors of a model directory by name. Files stay mapped as long as it lives."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if there are no weights or a file is damaged."""
        self._path = path
        self._files: dict[str, Any] = {}
        index = path / "model.safetensors.index.json"
        if index.is_file():
            places = read_json(index).get("weight_map")
            if not isinstance(places, dict):
                raise ModelError(f"{index} has no weight_map")
            self._places: dict[str, str] = places
            for name in sorted(set(places.values())):
                self._open(name)
            return
        names = sorted(file.name for file in path.glob("*.safetensors"))
        if not names:
            raise ModelError(f"{path} has no *.safetensors file")
        self._places = {key: name for name in names for key in self._open(name).keys()}  # noqa: SIM118

    def _open(self, name: str) -> Any:
        file = self._path / name
        try:
            self._files[name] = safe_open(str(file), framework="pt")
        except FileNotFoundError:
            raise ModelError(f"{file} is missing") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged or truncated: {error}") from error
        return self._files[name]

    def has(self, name: str) -> bool:
        return name in self._places

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor `name`. Raises ModelError if it is missing or not of `shape`."""
        place = self._places.get(name)
        if place is None:
            raise ModelError(f"{self._path} has no tensor {name}")
        try:
            tensor = self._files[place].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{self._path / place}: {name} cannot be read: {error}") from error
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._path / place}: {name} has shape {list(tensor.shape)}, "
                f"{list(shape)} is needed"
            )
        if tensor.dtype not in FLOATS:
            raise ModelError(
                f"{self._path / place}: {name} is {tensor.dtype}, which is not supported"
            )
        return tensor
