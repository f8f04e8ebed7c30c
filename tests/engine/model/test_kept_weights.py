"""Weights that a process keeps for those that are forked from it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.model import kept_weights
from kvrelay.engine.model.cpu.linear import Matrix
from kvrelay.engine.model.kept_weights import WeightsIdentity
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.model.sampling import grammar
from kvrelay.engine.model.sampling.vocabulary import read_vocabulary
from tests.engine.model.runners import model_runner
from tests.engine.model.test_runner import generate
from tests.engine.model.tiny import make_checkpoint, tokens_of

OPTIONS: dict[str, Any] = {"num_blocks": 24, "dtype": "float32", "device": "cpu", "threads": 1}
PROMPT, BLOCKS = tokens_of(40, seed=1), [5, 3, 1, 7]


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_weights, "_kept", {})


def head_of(runner: ModelRunner) -> int:
    """Where the packed matrix of the logits lies."""
    head = runner._decoder._weights.head
    assert isinstance(head, Matrix)
    return head.data.data_ptr()


def test_a_runner_takes_what_it_would_have_loaded(tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path)
    alone = model_runner(tmp_path, **OPTIONS)
    expected = generate(alone, PROMPT, BLOCKS, 8, temperature=0.0)
    keeper = model_runner(tmp_path, **(OPTIONS | {"num_blocks": 1}), keep_as="a")
    taker = model_runner(tmp_path, **OPTIONS)
    assert head_of(taker) == head_of(keeper) != head_of(alone)
    assert generate(taker, PROMPT, BLOCKS, 8, temperature=0.0) == expected


@pytest.mark.parametrize("differs", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_other_weights_are_loaded(tmp_path: Path, differs: dict[str, Any]) -> None:
    make_checkpoint("qwen2", tmp_path)
    keeper = model_runner(tmp_path, **OPTIONS, keep_as="a")
    assert head_of(model_runner(tmp_path, **(OPTIONS | differs))) != head_of(keeper)


def test_each_of_several_models_is_kept_until_it_is_dropped(tmp_path: Path) -> None:
    for name in ("qwen2", "llama"):
        make_checkpoint(name, tmp_path / name)
    keepers = {
        name: model_runner(tmp_path / name, **OPTIONS, keep_as=name) for name in ("qwen2", "llama")
    }
    for name, keeper in keepers.items():
        assert head_of(model_runner(tmp_path / name, **OPTIONS)) == head_of(keeper)
    kept_weights.drop("qwen2")
    heads = {name: head_of(model_runner(tmp_path / name, **OPTIONS)) for name in keepers}
    assert [heads[name] == head_of(keepers[name]) for name in keepers] == [False, True]


def test_a_checkpoint_that_was_replaced_is_loaded(tmp_path: Path) -> None:
    """By one of the same size, with the same time of its last change."""
    make_checkpoint("qwen2", tmp_path)
    keeper = model_runner(tmp_path, **OPTIONS, keep_as="a")
    (file,) = tmp_path.glob("*.safetensors")
    before = file.stat()
    data = file.read_bytes()
    file.write_bytes(data[:-4] + bytes(4))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    taker = model_runner(tmp_path, **OPTIONS)
    assert head_of(taker) != head_of(keeper)


def test_the_vocabulary_for_grammars_is_kept_with_them(
    smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read once: it takes seconds with Python's lock, in a worker that has streams to take over."""
    num_read = []

    def read(*source: Any) -> Any:
        num_read.append(source)
        return read_vocabulary(*source)

    monkeypatch.setattr(grammar, "read_vocabulary", read)
    keeper = model_runner(smollm2_dir, **(OPTIONS | {"num_blocks": 1}), keep_as="a")
    taker = model_runner(smollm2_dir, **OPTIONS)
    assert taker.grammars.vocabulary() is keeper.grammars.vocabulary() is not None
    assert len(num_read) == 1


def test_another_end_of_outputs_is_another_vocabulary(tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path)
    model_runner(tmp_path, **OPTIONS, keep_as="a")
    identity = next(iter(kept_weights._kept.values())).identity
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    now = WeightsIdentity.of(tmp_path, identity.config, identity.dtype, identity.quantization)
    assert kept_weights.find_kept(identity)
    assert kept_weights.find_kept(now) is None
