"""How a step's inputs reach the device: side by side in page-locked memory, in one copy.

Life of an array: written into a host buffer; the buffer is copied behind what the stream does
already, without waiting; kernels read views of the device's copy. Each array starts at a multiple
of 16 bytes, as vectorized loads want it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from kvrelay.engine.model.batch import Batch

ALIGN = 16


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for; page-locked memory is torch's to reuse after it."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def stage(batch: Batch, device: torch.device) -> Batch:
    """`batch`, made on the host, on `device`."""
    named = ((field.name, getattr(batch, field.name)) for field in fields(batch))
    arrays = {name: each.numpy() for name, each in named if isinstance(each, torch.Tensor)}
    staged: dict[str, Any] = {**stage_arrays(arrays, device)}
    return replace(batch, **staged)


def stage_arrays(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies them in one piece of memory to the device, with their names, shapes and dtypes."""
    starts, size = _places(list(arrays.values()))
    host = np.empty(size, np.uint8)
    for start, array in zip(starts, arrays.values(), strict=True):
        host[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = to_device(host, device)
    return {
        name: _view(there, start, array)
        for start, (name, array) in zip(starts, arrays.items(), strict=True)
    }


class StaticInputs:
    """Arrays of fixed places: the same addresses on the device for every step, so that a graph may
    read them. Owned by the decode steps. Each of `hosts` is written only while no copy of it is
    under way."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[tuple[int, ...], type]],
        device: torch.device,
        num_hosts: int,
    ) -> None:
        """shapes: by name, shape and numpy dtype. num_hosts: copies on the host, to be written
        while others are sent."""
        models: list[np.ndarray] = [np.empty(shape, kind) for shape, kind in shapes.values()]
        starts, size = _places(models)
        pinned = device.type == "cuda"
        self._hosts = torch.zeros((num_hosts, size), dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        named = list(zip(starts, shapes, models, strict=True))
        self.hosts: list[dict[str, np.ndarray]] = [
            {
                name: raw[start : start + model.nbytes].view(model.dtype).reshape(model.shape)
                for start, name, model in named
            }
            for raw in self._hosts.numpy()
        ]
        self.device: dict[str, torch.Tensor] = {
            name: _view(self._device, start, model) for start, name, model in named
        }

    def send(self, host: int) -> None:
        """Copy all that is in `hosts[host]`."""
        self._device.copy_(self._hosts[host], non_blocking=True)


def _places(arrays: list[np.ndarray]) -> tuple[list[int], int]:
    """Where each starts, and the size of all."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // ALIGN) * ALIGN
    return starts, size


def _view(memory: torch.Tensor, start: int, like: np.ndarray) -> torch.Tensor:
    kind = torch.from_numpy(np.empty(0, like.dtype)).dtype
    return memory[start : start + like.nbytes].view(kind).view(like.shape)
