"""The KV pool of a GPU gets what the weights and the largest step leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.device_memory import (
    UNUSED_BYTES,
    DeviceMemory,
    all_graphs_bytes,
    split_bytes,
    spread,
)
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.gpu import steps as gpu_steps
from kvrelay.engine.model.gpu.penalties import DeviceCounts
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.step import Step
from tests.engine.model.runners import model_runner, sections
from tests.engine.model.tiny import HYBRID, make_checkpoint, scheduled, tokens_of

GIB = 1 << 30


def test_others_the_peak_and_a_reserve_are_taken_off() -> None:
    found = DeviceMemory(80 * GIB, 60 * GIB, reserved=17 * GIB, peak=20 * GIB, graphs=GIB)
    assert found.room(0.9) == 72 * GIB - 3 * GIB - 20 * GIB - GIB - UNUSED_BYTES


@pytest.mark.parametrize(
    ("first", "count", "expected"),
    [((90, 2, 4), 35, 96 + 32 * 4), ((90, 2), 2, 92), ((90,), 1, 90), ((0, 0, 0), 9, 0)],
)
def test_graphs_that_were_not_captured_take_what_the_later_ones_took(
    first: tuple[int, ...], count: int, expected: int
) -> None:
    assert all_graphs_bytes(first, count) == expected


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
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's own operations, which are what a GPU may have too."""

    def unavailable(*_: object) -> None:
        raise kernels.KernelsUnavailable("not here")

    monkeypatch.setattr(kernels, "load", unavailable)


@pytest.fixture
def model(tmp_path: Path, by_torch: None) -> Path:
    make_checkpoint("llama", tmp_path)
    return tmp_path


def with_room(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> list[torch.Tensor]:
    """A device with so much room for KV; the list gets what the largest step returns."""
    steps: list[torch.Tensor] = []

    def after_a_step(_: torch.device, step: Callable[[], torch.Tensor]) -> DeviceMemory:
        steps.append(step())
        return DeviceMemory(num_bytes + UNUSED_BYTES, num_bytes + UNUSED_BYTES, 0, 0)

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
    told = r"no memory is left for KV: 90% of 0.3 GiB is for this worker, .* raise engine.gpu_mem"
    with pytest.raises(ModelError, match=told):
        model_runner(model, dtype="float32", device="cpu", num_blocks=0)


def fitted_and_given(
    kind: str, path: Path, patch: pytest.MonkeyPatch
) -> tuple[ModelRunner, ModelRunner]:
    """Runners of the same model: by measured memory, and by a setting."""
    made_by = ModelRunner
    if kind == "triton":
        pytest.importorskip("triton")
        from tests.engine.model.gpu.triton_ranks import InterpretedRunner as made_by

    options = {"max_num_seqs": 2, "max_num_batched_tokens": 6, "gpu_memory_utilization": 1.0}
    options |= {"dtype": "float32", "device": "cpu"}
    given = made_by(path, *sections(options | {"num_blocks": 40}))
    beside = DeviceCounts.size(2, given.config.vocab_size)
    beside += split_bytes(given.config, 2, given.config.max_position_embeddings)
    with_room(patch, 40 * given.kv_spec.bytes_per_block + beside)
    return made_by(path, *sections(options | {"num_blocks": 0})), given


def test_the_pool_leaves_room_for_graphs(
    checkpoint_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their size is measured on a pool of one block, by passes like those that are captured."""
    measured = []

    def graphs(passes: object, _: torch.device) -> int:
        measured.append((passes.sizes, passes._limits.num_blocks))  # type: ignore[attr-defined]
        return 5 * each

    model = checkpoint_of("llama")
    each = read_config(model).kv_spec(16, "float32").bytes_per_block
    monkeypatch.setattr(gpu_steps, "measured_graphs", graphs)
    assert len(fitted_and_given("triton", model, monkeypatch)[0].kv_pool) == 35
    assert measured == [([1, 2], 0)]


INTERPRETED = [
    pytest.param("triton", each, marks=() if each == "lfm2" else pytest.mark.slow)
    for each in ("gpt-oss", *HYBRID)
]


@pytest.mark.parametrize(
    ("kind", "family"), [*(("torch", each) for each in ("gemma3", *HYBRID)), *INTERPRETED]
)
def test_the_made_pool_is_all_that_a_step_uses(
    kind: str,
    family: str,
    checkpoint_of: Callable[..., Path],
    by_torch: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States were found in the pool of one block that stands in until memory is measured."""
    fitted, given = fitted_and_given(kind, checkpoint_of(family), monkeypatch)
    assert fitted.kv_pool.shape == given.kv_pool.shape
    if fitted.kv_spec.num_state_groups:
        assert fitted.ops._states.memory.data_ptr() == fitted.kv_pool.data_ptr()
    blocks = [39 - index for index in range(3 * fitted.kv_spec.num_groups)]
    for start, tokens in ((0, tokens_of(5, seed=1)), (5, [7]), (6, [9])):
        step = Step(start, [scheduled(tokens, start, blocks)])
        assert fitted.execute(step).sampled == given.execute(step).sampled
    assert torch.equal(fitted.kv_pool, given.kv_pool)
