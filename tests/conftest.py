"""What several packages' tests share."""

import gc
import os
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():  # before anything imports Triton, as transformers does
    os.environ.setdefault("TRITON_INTERPRET", "1")

from engine.model.checkpoint.resolve import DEFAULT_MODEL, resolve_model


def pytest_collection_finish() -> None:
    """A full collection would look at every collected test, for most of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model, converted: once per machine, into the default cache."""
    return resolve_model(DEFAULT_MODEL, progress=lambda _: None)
