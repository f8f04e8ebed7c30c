"""What several packages' tests share."""

from pathlib import Path

import pytest

from engine.model.resolve import DEFAULT_MODEL, resolve_model


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model, converted: once per machine, into the default cache."""
    return resolve_model(DEFAULT_MODEL, progress=lambda _: None)
