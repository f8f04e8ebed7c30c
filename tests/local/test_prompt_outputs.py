"""Outputs of prompts are the same in any cluster, with a warm cache, and preempted: real nodes over
a real (tiny, random) model."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrelay.engine.request import Pooling, PromptOutputs, SamplingParams
from tests.local.test_local import REMOTE, VOCAB, small
from tests.local.test_local import model_dir as model_dir
from tests.support.local import Completion, LocalCluster

DEADLINE_S = 60.0
PROMPTS = [[(7 * i + 3 * j + j * j) % VOCAB for j in range(1 + 47 * i)] for i in range(7)]
KINDS = {
    "log-probabilities": SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=3),
    "and an answer": SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=0, logprobs=1),
    "mean": SamplingParams(max_tokens=1, pooling=Pooling.MEAN),
    "last": SamplingParams(max_tokens=1, pooling=Pooling.LAST, prompt_logprobs=1),
}
CLUSTERS: dict[str, dict[str, Any]] = {
    "one pool": {"prefill": 0, "engine": small(max_num_batched_tokens=64)},
    "handed over": {"engine": small(max_num_batched_tokens=48), "router": REMOTE},
    "several": {"prefill": 2, "decode": 2, "engine": small()},
    "preempted": {"prefill": 0, "engine": small(num_blocks=28, max_num_batched_tokens=64)},
}


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, list[Completion]]:
    """Each request alone, its prompt in one step."""
    known: dict[str, list[Completion]] = {}
    for name, sampling in KINDS.items():
        with LocalCluster(model_dir, prefill=0, engine=small()) as cluster:
            for prompt in PROMPTS:
                known.setdefault(name, []).append(cluster.submit(prompt, sampling).result(60))
    return known


def assert_same(answer: Completion, known: Completion, prompt: list[int]) -> None:
    assert answer.failed is None
    assert answer.tokens == known.tokens
    assert answer.num_cached_tokens == 0, "it would have no outputs"
    got, wanted = answer.prompt, known.prompt
    count = len(prompt) - 1 if wanted.logprobs else 0
    assert len(got.logprobs) == len(wanted.logprobs) == count
    for mine, theirs in zip(got.logprobs, wanted.logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [t for t, _ in mine.top] == [t for t, _ in theirs.top]
    vectors = [np.frombuffer(each.embedding, np.float32) for each in (got, wanted)]
    np.testing.assert_allclose(*vectors, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_the_same_in_each_cluster_and_with_a_warm_cache(
    model_dir: Path, expected: dict[str, list[Completion]], kind: str, name: str
) -> None:
    assert expected[kind][3].prompt != PromptOutputs()
    with LocalCluster(model_dir, **CLUSTERS[name]) as cluster:
        for _ in range(2):
            futures: list[Future[Completion]] = []
            for prompt in PROMPTS:  # beside them others decode, and use their KV
                futures.append(cluster.submit(prompt, KINDS[kind]))
                cluster.submit(prompt, SamplingParams(max_tokens=60, temperature=0.0))
            answers = [future.result(DEADLINE_S) for future in futures]
            for answer, known, prompt in zip(answers, expected[kind], PROMPTS, strict=True):
                assert_same(answer, known, prompt)
        cluster.check()
        cluster.wait_idle()
        if name == "preempted":
            assert any(
                each.node.core.scheduler.num_preemptions for each in cluster.workers.values()
            )
        # Their KV is as good as any.
        later = cluster.submit(PROMPTS[-1], SamplingParams(max_tokens=4)).result(DEADLINE_S)
        assert later.num_cached_tokens > 0 or name == "preempted"
        cluster.wait_idle()
