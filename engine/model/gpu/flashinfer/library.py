"""The FlashInfer package, imported only where a setting asks for it, and what it has to run on."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from kvrelay.engine.model.errors import ModelError


def load(setting: str) -> Any:
    """The package. `setting`: what asked for it, for the message. Raises ModelError if it cannot be
    imported."""
    try:
        library = import_module("flashinfer")
        import_module("flashinfer.decode")
    except (ImportError, OSError, RuntimeError) as error:  # the last two: no CUDA that fits it
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{setting} is flashinfer, which cannot be imported ({reason}):"
            " pip install 'kvrelay[flashinfer]', or set it to triton"
        ) from error
    return library


def capability(device: torch.device) -> tuple[int, int]:
    """Returns a GPU's (major, minor), and (0, 0) for a CPU."""
    return (0, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)
