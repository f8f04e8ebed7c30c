"""Draft tokens of models with recurrent layers or sparse attention, tiny and random: whatever
happens to the requests, they get the tokens that they get without drafts. All families, more seeds:
`pytest -m long tests/local/test_local_drafts.py`."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.backoff import Backoff
from kvrelay.engine.config import EngineSection
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.step import Step, StepDone
from tests.engine.model.tiny import HYBRID, VOCAB, make_checkpoint, tokens_of
from tests.local.test_local import REMOTE
from tests.local.test_migration import chase, num_taken_over
from tests.local.test_migration import unhurried as unhurried
from tests.support.local import Completion, LocalCluster

COUNT = 100
PROMPTS = [tokens_of(length, length) for length in (70, 33, 95, 16, 33)]
WAYS = ("one pool", "two pools", "preempted", "failing", "moved", "ranks")
LONG = pytest.mark.long
FAMILIES = [pytest.param(each, marks=[] if each == "qwen3.5" else [LONG]) for each in HYBRID]
FAMILIES += [
    "deepseek32",
    *(pytest.param(each, marks=LONG) for each in ("glm5-shared", "minimax-m2")),
]
Requests = list[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, path)
    return path


def requests_of(first_seed: int) -> Requests:
    """Greedy and drawn in turns; the two prompts that are equal have different seeds."""
    stops = {"stop_token_ids": (7, 19)}  # some end with one
    samplings = (
        SamplingParams(
            max_tokens=COUNT,
            temperature=0.8 * (index % 2),
            seed=first_seed + index,
            **(stops if index == 3 else {}),
        )
        for index in range(len(PROMPTS))
    )
    return list(zip(PROMPTS, samplings, strict=True))


def predicted(requests: Requests, answers: list[list[int]]) -> Requests:
    """Each expects what it will get, with some tokens changed."""
    changed = [
        tuple((token + (at % 29 == 7)) % VOCAB for at, token in enumerate(answer))
        for answer in answers
    ]
    return [
        (prompt, replace(sampling, prediction=prediction))
        for (prompt, sampling), prediction in zip(requests, changed, strict=True)
    ]


def cluster_of(model: Path, way: str) -> LocalCluster:
    """`way`: one of WAYS; "without drafts": in one pool."""
    spec = read_config(model).kv_spec(16, "float32")
    settings: dict[str, Any] = {
        "num_blocks": 100 * spec.num_groups,
        "max_num_batched_tokens": 64,
        "num_speculative_tokens": 0 if way == "without drafts" else 7,
        "max_failed_steps": 1000,
    }
    pools: dict[str, Any] = {"prefill": 0}
    if way == "two pools":
        pools = {"router": REMOTE}
    elif way == "moved":
        pools = {"prefill": 0, "decode": 2}
    elif way == "ranks":
        pools, settings["tensor_parallel_size"] = {"router": REMOTE}, 2
    return LocalCluster(model, engine=EngineSection(**settings), **pools)


def fail_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps fail when they have written KV and changed states."""
    execute, number = ModelRunner.execute, count()

    def failing(self: ModelRunner, step: Step) -> StepDone:
        done = execute(self, step)
        if next(number) % 17 == 16:
            raise RuntimeError("as it happens")
        return done

    monkeypatch.setattr(ModelRunner, "execute", failing)


def preempt_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the pool had no block for the next token."""
    grow, number = KVCacheManager.grow, count()

    def growing(self: KVCacheManager, seq: Sequence, num_unknown: int = 0) -> bool:
        return next(number) % 29 != 28 and grow(self, seq, num_unknown)

    monkeypatch.setattr(KVCacheManager, "grow", growing)


def answers_of(cluster: LocalCluster, way: str, requests: Requests) -> list[Completion]:
    futures: list[Future[Completion]] = [cluster.submit(*request) for request in requests]
    if way == "moved":
        return chase(cluster, futures)
    return [future.result(120.0) for future in futures]


def counted(cluster: LocalCluster, name: str) -> float:
    nodes: list[Any] = [built.node for built in cluster.workers.values()]
    return sum(cluster.run(partial(node.core.counters.get, name, 0)) for node in nodes)


def compare(model: Path, way: str, first_seed: int, expected: list[list[int]]) -> None:
    requests = predicted(requests_of(first_seed), expected)
    with cluster_of(model, way) as cluster:
        answers = answers_of(cluster, way, requests)
        assert [answer.failed for answer in answers] == [None] * len(requests)
        assert [answer.tokens for answer in answers] == expected
        drafted = counted(cluster, "draft_tokens")
        accepted = counted(cluster, "draft_tokens_accepted")
        assert len(expected) * COUNT / 10 < accepted < drafted, (accepted, drafted)
        if way == "preempted":
            nodes: list[Any] = [built.node for built in cluster.workers.values()]
            assert any(node.core.scheduler.num_preemptions for node in nodes)
        if way == "moved":
            assert num_taken_over(cluster) > 3
        if way in ("two pools", "ranks"):
            assert cluster.status().totals.handoffs == len(requests)
        cluster.wait_idle()


@pytest.fixture(scope="module", params=[0, *(pytest.param(s, marks=LONG) for s in (100, 200, 300))])
def seed(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def expected(model: Path, seed: int) -> list[list[int]]:
    with cluster_of(model, "without drafts") as cluster:
        answers = answers_of(cluster, "without drafts", requests_of(seed))
        assert counted(cluster, "draft_tokens") == 0
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("way", WAYS)
def test_drafts_change_no_token(
    model: Path,
    seed: int,
    expected: list[list[int]],
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if way == "ranks" and read_config(model).single_blocks:
        pytest.skip("its layers are not divided")
    if way == "moved":
        request.getfixturevalue("unhurried")
    if way == "failing":
        fail_now_and_then(monkeypatch)
    if way == "preempted":
        preempt_now_and_then(monkeypatch)
    monkeypatch.setattr("kvrelay.router.router.PAUSE", Backoff(0.0, 0.0))
    # However long a row takes here, drafts are worth it.
    monkeypatch.setattr("kvrelay.engine.scheduling.drafts.MIN_GAIN", 0.0)
    monkeypatch.setattr("kvrelay.engine.scheduling.drafts.MAX_SLOWDOWN", 100.0)
    compare(model, way, seed, expected)
