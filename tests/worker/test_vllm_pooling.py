"""Embeddings by a worker of vLLM that pools, and what it refuses, over a stand-in for vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from kvrelay.cluster.roles import ROLES
from kvrelay.decode_worker.vllm.build import build
from kvrelay.engine.request import Pooling, Refusal, SamplingParams
from kvrelay.engine.support import Capability, Trait, engine_traits, no_to
from kvrelay.worker.kv_plan import BuildError
from tests.local.test_local import model_dir as model_dir
from tests.support import vllm_stand_in
from tests.support.local import LocalCluster
from tests.support.vllm_stand_in import LLMEngine, kv_of
from tests.worker.test_vllm_worker import GREEDY, PROMPTS, VLLM, assert_clean

POOLS = structs.replace(VLLM, arguments={"runner": "pooling"})
EMBED = SamplingParams(max_tokens=1, temperature=0.0, pooling=Pooling.LAST)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_stand_in.install(monkeypatch)

    def built(spec: Any, options: Any) -> Any:
        vllm_stand_in.EventPublisherFactory.registered.clear()
        return build(spec, ROLES, options.make_agent)

    monkeypatch.setattr("tests.support.local.build_worker", built)


@pytest.fixture
def cluster(model_dir: Path, stand_in: None) -> Iterator[LocalCluster]:
    with LocalCluster(model_dir, prefill=0, decode=2, engine=POOLS) as cluster:
        yield cluster


def test_vectors_are_those_of_vllm_and_nothing_is_kept(cluster: LocalCluster) -> None:
    answers = cluster.generate(PROMPTS * 2, EMBED)
    vectors = [np.frombuffer(each.prompt.embedding, np.float32) for each in answers]
    np.testing.assert_array_equal(vectors, [kv_of(each).numpy() for each in PROMPTS * 2])
    assert not any(each.num_cached_tokens for each in answers)
    assert_clean(cluster)


def test_a_worker_that_dies_is_taken_over_from(cluster: LocalCluster) -> None:
    futures = [cluster.submit(prompt, EMBED) for prompt in PROMPTS]
    cluster.kill("decode-0")
    for prompt, future in zip(PROMPTS, futures, strict=True):
        assert future.result(60).prompt.embedding == kv_of(prompt).numpy().tobytes()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (GREEDY, "computes embeddings alone: /v1/embeddings"),
        (replace(GREEDY, grammar='{"grammars": [{}]}'), "computes embeddings alone"),
        (replace(EMBED, pooling=Pooling.MEAN), "{seq_pooling_type = 'LAST'}: ask 'last'"),
    ],
)
def test_what_is_no_embedding_of_its_kind_is_refused(
    cluster: LocalCluster, asked: SamplingParams, said: str
) -> None:
    failed = cluster.submit(PROMPTS[1], asked).result(60).failed
    assert failed is not None
    assert failed.reason is Refusal.UNSUPPORTED
    assert said in failed.detail


def test_a_model_that_classifies_is_refused_at_the_start(
    model_dir: Path, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLMEngine, "pooling_tasks", ("classify",))
    with pytest.raises(BuildError, match="of classify, token_embed none is embeddings"):
        LocalCluster(model_dir, prefill=0, decode=1, engine=POOLS).__enter__()


def test_the_table_says_what_each_of_them_is_without() -> None:
    pools, generates = (engine_traits(each, on_gpu=False) for each in (POOLS, VLLM))
    assert Trait.POOLING in pools
    assert [no_to(Capability.EMBEDDINGS, each) is None for each in (pools, generates)] == [1, 0]
    assert [no_to(Capability.GENERATION, each) is None for each in (pools, generates)] == [0, 1]
