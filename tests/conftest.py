"""What several packages' tests share."""

import functools
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():  # before anything imports Triton, as transformers does
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kvrelay.engine import adapter_copies
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL, PACKAGED, resolve_model
from kvrelay.engine.model.errors import ModelError

LONG_TIMEOUT_S = 900.0  # what takes two minutes at rest ends on a busy machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))


def pytest_collection_finish() -> None:
    """A full collection would look at every collected test, for most of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model, converted: once per machine, into the default cache."""
    return resolve_model(DEFAULT_MODEL, progress=lambda _: None)


@pytest.fixture(scope="session")
def gemma3_dir() -> Path:
    return _real_model("gemma3-270m")


@pytest.fixture(scope="session", params=list(PACKAGED))
def real_model_dir(request: pytest.FixtureRequest) -> Path:
    """Each of the models that are trained."""
    return _real_model(request.param)


def _real_model(name: str) -> Path:
    try:
        return resolve_model(name, progress=lambda _: None)
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", autouse=True)
def adapter_copies_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests register fills no cache of the user's."""
    folder = tmp_path_factory.mktemp("adapters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_copies, "copies_dir", lambda: folder)
        yield


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny random checkpoint of a family, with other sizes than `tiny` has where they are given.
    All tests share it, and none may change it."""
    from tests.engine.model.tiny import make_checkpoint

    @functools.cache
    def made(family: str, **changes: int) -> Path:
        path = tmp_path_factory.mktemp(family)
        make_checkpoint(family, path, changes)
        return path

    return made


@pytest.fixture(scope="session")
def llama(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("llama")


@pytest.fixture(scope="session")
def make_padded_model(
    smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """A tiny random model with the default model's tokenizer and so many rows more."""
    from tests.engine.model.tiny import make_padded

    @functools.cache
    def make(num_rows: int) -> Path:
        path = tmp_path_factory.mktemp(f"padded-{num_rows}")
        make_padded(smollm2_dir, path, num_rows)
        return path

    return make
