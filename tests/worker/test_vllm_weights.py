"""Workers of vLLM get other weights while they serve: by its own reload, written over the old."""

from __future__ import annotations

import re
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvrelay.cluster.roles import ROLES
from kvrelay.decode_worker.vllm.node import VllmWorker
from kvrelay.engine.model.checkpoint.version import read_version
from kvrelay.engine.weights import UpdateMode, UpdateWeights, WeightsUpdated, WeightVersion
from tests.support import vllm_stand_in
from tests.support.local import Completion, LocalCluster
from tests.support.vllm_stand_in import LLMEngine, next_token
from tests.support.weights import Operator, scaled
from tests.worker.test_vllm_images import alone as alone
from tests.worker.test_vllm_worker import (
    GREEDY,
    PROMPTS,
    assert_clean,
    replace_config,
    sent,
)
from tests.worker.test_vllm_worker import model_dir as model_dir

COUNT = 60
LONG = PROMPTS[-1]


@pytest.fixture
def other(model_dir: Path, tmp_path: Path) -> Path:
    return scaled(model_dir, tmp_path / "v2", 2.0)


def weights_of(folder: Path) -> str:
    return vllm_stand_in.digest_of(folder)


def continued(tokens: list[int], count: int, weights: str = "") -> list[int]:
    found = list(tokens)
    for _ in range(count):
        found.append(next_token(found, weights))
    return found[len(tokens) :]


def begun(alone: LocalCluster, prompts: list[list[int]]) -> list[Future[Completion]]:
    """All of them, each of which has tokens by now, and no step is taken any more."""
    turns = vllm_stand_in.turns(40)
    futures = [alone.submit(prompt, GREEDY) for prompt in prompts]
    deadline = time.monotonic() + 60
    while min(alone.run(lambda: [r.num_output_tokens for r in alone.router.live.values()])) < 2:
        assert time.monotonic() < deadline
        turns.release(1)
        time.sleep(0.005)
    return futures


def go_on() -> None:
    assert LLMEngine.turns is not None
    LLMEngine.turns.release(100_000)


def test_streams_go_on_while_the_weights_change(alone: LocalCluster, other: Path) -> None:
    futures = begun(alone, PROMPTS[:4])
    operator, version = Operator(alone), read_version(other)
    asked = [operator.begin(each, version, UpdateMode.RECOMPUTE) for each in alone.workers]
    go_on()
    assert [each.result(60).why for each in asked] == [""]
    for prompt, future in zip(PROMPTS, futures, strict=False):
        answer = future.result(60)
        assert answer.failed is None
        tokens = answer.tokens
        old = continued(prompt, COUNT)
        num_old = next((i for i in range(COUNT) if tokens[i] != old[i]), COUNT)
        assert 0 < num_old < COUNT
        rest = continued([*prompt, *tokens[:num_old]], COUNT - num_old, weights_of(other))
        assert tokens == old[:num_old] + rest
    assert_clean(alone)


def test_a_drain_finishes_with_the_old_weights(alone: LocalCluster, other: Path) -> None:
    futures = begun(alone, PROMPTS[:2])
    operator, version = Operator(alone), read_version(other)
    asked = [operator.begin(each, version, UpdateMode.DRAIN) for each in alone.workers]
    go_on()
    assert [each.result(60).why for each in asked] == [""]
    answers = [future.result(60).tokens for future in futures]
    assert answers == [continued(prompt, COUNT) for prompt in PROMPTS[:2]]
    assert_clean(alone)


def test_kv_of_one_version_is_found_by_that_version_alone(
    alone: LocalCluster, model_dir: Path, other: Path
) -> None:
    operator = Operator(alone)

    def asked(weights: str) -> int:
        answer = alone.submit(LONG, GREEDY).result(60)
        assert answer.tokens == continued(LONG, COUNT, weights)
        return answer.num_cached_tokens

    new = weights_of(other)
    assert asked("") == 0
    assert asked("") > 0
    operator.update(other, UpdateMode.RECOMPUTE)
    assert asked(new) == 0
    operator.update(model_dir, UpdateMode.RECOMPUTE)
    assert asked("") > 0
    operator.update(other, UpdateMode.DRAIN)
    assert asked(new) > 0
    assert_clean(alone)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("in the middle", "vLLM does not load .*: cannot read"),
        ("a tensor", "has other tensors than .* is missing, not"),
    ],
)
def test_weights_that_fail_leave_the_old_ones(
    alone: LocalCluster, other: Path, fault: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "a tensor":
        [file] = other.glob("*.safetensors")
        _, *rest = sorted(load_file(file).items())
        save_file(dict(rest), file)
    version = read_version(other)
    if fault == "in the middle":
        monkeypatch.setattr(LLMEngine, "unreadable", {"v2", version.digest.hex()})
    for worker in alone.workers:
        said = Operator(alone).begin(worker, version, UpdateMode.RECOMPUTE).result(60)
        assert re.search(why, said.why), said.why
    answers = [alone.submit(prompt, GREEDY).result(60).tokens for prompt in PROMPTS]
    assert answers == [continued(prompt, COUNT) for prompt in PROMPTS]
    assert_clean(alone)


def test_kv_of_both_versions_is_refused() -> None:
    worker = VllmWorker(replace_config(base_weights=b"base"), ROLES)
    asked = UpdateWeights("controller", WeightVersion("new", b"d"), UpdateMode.KEEP)
    [said] = sent(worker.receive(0.0, asked), WeightsUpdated)
    assert "use recompute or drain" in said.why
