"""`kvrelay profile` measures the worker that is configured, with all its processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvrelay.cluster.config import Config, ModelSection
from kvrelay.cluster.prepare import PreparedModel
from kvrelay.engine.config import EngineSection
from kvrelay.lab.profiling import forward
from kvrelay.lab.profiling.forward import ProfileError, running
from kvrelay.worker.kv_plan import plan_kv
from tests.worker.test_build import MODEL

ENGINE = EngineSection(num_blocks=9, tensor_parallel_size=2, kv_dtype="float8_e4m3", threads=3)
CONFIG = Config(
    model=ModelSection(dtype="float32", device="cpu", quantization="int8"), engine=ENGINE
)
PREPARED = PreparedModel(Path("model"), MODEL, "m", 100, plan_kv(MODEL, ENGINE, "float32"))


class Ranks:
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was opened instead of a model: its arguments, and its processes."""
    found: list[Any] = []

    def open_runner(*arguments: Any) -> tuple[Any, Any]:
        found.append((*arguments, Ranks()))
        return "runner", found[-1][-1]

    monkeypatch.setattr(forward, "open_runner", open_runner)
    return found


def test_it_has_the_processes_and_the_weights_that_are_configured(opened: list[Any]) -> None:
    with running(CONFIG, PREPARED, 2) as runner:
        ((spec, path, ranks),) = opened
        assert not ranks.is_closed
    assert runner == "runner"
    assert ranks.is_closed
    assert spec.model == CONFIG.model
    sizes = {"threads": 2, "num_blocks": 9, "max_model_len": 100}
    assert spec.engine == replace(ENGINE.sized(gpu=False), **sizes)
    assert path == Path("model")


def test_its_processes_end_when_measuring_fails(opened: list[Any]) -> None:
    with pytest.raises(ProfileError, match="a pass"), running(CONFIG, PREPARED, 2):
        raise ProfileError("a pass failed")
    assert opened[0][-1].is_closed
