"""A small model, and what follows three prompts by plain torch."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.model.talks import alone, three_talks

NUM_TOKENS = 6


@pytest.fixture(scope="session")
def path(checkpoint_of: Callable[..., Path]) -> Path:
    from tests.engine.model.paged import DEVICE

    return checkpoint_of("llama", num_hidden_layers=1 if DEVICE.type == "cpu" else 3)


@pytest.fixture(scope="session")
def follow(path: Path) -> list[list[int]]:
    """The tokens after each of `three_talks`."""
    from tests.engine.model.gpu.triton_world import World

    world = World(path, "torch")
    return [alone(world, talk, NUM_TOKENS) for talk in three_talks()]
