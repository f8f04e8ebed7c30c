"""Controllers' configurations for one model, field by field."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from kvrelay.cluster.control.control_config import ControllerConfig, WorkersConfig

OF_WORKERS = {each.name for each in fields(WorkersConfig)}


def made(**settings: Any) -> ControllerConfig:
    """`settings`: fields of the controller's configuration, and of its workers'."""
    return changed(ControllerConfig({"": WorkersConfig()}), **settings)


def changed(config: ControllerConfig, **settings: Any) -> ControllerConfig:
    """Give it other values of fields of either."""
    own = {name: value for name, value in settings.items() if name in OF_WORKERS}
    rest = {name: value for name, value in settings.items() if name not in OF_WORKERS}
    models = {name: replace(each, **own) for name, each in config.models.items()}
    return replace(config, models=models, **rest)
