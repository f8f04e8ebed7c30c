"""The KV pool of a GPU gets what the weights and the largest step leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.device_memory import RESERVE_BYTES, DeviceMemory, spread
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.gpu import steps as gpu_steps
from kvrelay.engine.step import Step
from tests.engine.model.runners import model_runner
from tests.engine.model.tiny import make_checkpoint, scheduled, tokens_of

GIB = 1 << 30


def test_others_the_peak_and_a_reserve_are_taken_off() -> None:
    found = DeviceMemory(total=80 * GIB, free=60 * GIB, reserved=17 * GIB, peak=20 * GIB)
    assert found.room(0.9) == 72 * GIB - 3 * GIB - 20 * GIB - RESERVE_BYTES


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "longest", "lengths"),
    [
        (8, 3, 100, (3, 3, 2)),
        (8, 3, 2, (2, 2, 2)),
        (2, 3, 100, (1, 1)),
    ],
)
def test_a_step_of_all_tokens_and_all_sequences(
    num_tokens: int, num_seqs: int, longest: int, lengths: tuple[int, ...]
) -> None:
    assert spread(num_tokens, num_seqs, longest) == lengths


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On torch's own operations, which are what a GPU may have too."""

    def unavailable(*_: object) -> None:
        raise kernels.KernelsUnavailable("not here")

    make_checkpoint("llama", tmp_path)
    monkeypatch.setattr(kernels, "load", unavailable)
    return tmp_path


def with_room(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> list[torch.Tensor]:
    """A device with so much room for KV; the list gets what the largest step returns."""
    steps: list[torch.Tensor] = []

    def after_a_step(_: torch.device, step: Callable[[], torch.Tensor]) -> DeviceMemory:
        steps.append(step())
        return DeviceMemory(num_bytes + RESERVE_BYTES, num_bytes + RESERVE_BYTES, 0, 0)

    monkeypatch.setattr(gpu_steps, "after_a_step", after_a_step)
    return steps


def test_the_pool_is_made_after_the_largest_step(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = model_runner(model, dtype="float32", device="cpu", num_blocks=20)
    each = given.kv_spec.bytes_per_block
    steps = with_room(monkeypatch, 20 * each + each // 2)
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 50, "gpu_memory_utilization": 1.0}
    fitted = model_runner(model, dtype="float32", device="cpu", num_blocks=0, **options)
    assert steps[0].shape == (3, 131)
    assert fitted.kv_pool.shape == given.kv_pool.shape
    assert fitted.max_model_len == 20 * 16
    tokens = tokens_of(70, 1)
    step = Step(0, [scheduled(tokens, 0, [19, 3, 7, 0, 11])])
    assert fitted.execute(step).sampled == given.execute(step).sampled


def test_no_room_is_told_with_what_there_is(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_room(monkeypatch, 100)
    told = r"no memory is left for KV: 90% of 0.5 GiB is for this worker, .* raise engine.gpu_mem"
    with pytest.raises(ModelError, match=told):
        model_runner(model, dtype="float32", device="cpu", num_blocks=0)
