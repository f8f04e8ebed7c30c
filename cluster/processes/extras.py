"""Modules that an extra of the installation brings: where they are missing, a line says how to get
them."""

from __future__ import annotations

import importlib

from kvrelay.cluster.config import ConfigError


def require_extra(extra: str, *modules: str) -> None:
    """Import `modules`, which the extra of that name installs. Raises ConfigError."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            wanted = f"pip install 'kvrelay[{extra}]'"
            raise ConfigError(f"{name} is not installed: {wanted}") from error
