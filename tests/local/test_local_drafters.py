"""Drafters in clusters: whatever happens to the requests, and whichever drafter a worker has, they
get the tokens that they get without one. More ways: `pytest -m long` of this file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.backoff import Backoff
from kvrelay.engine.config import EngineSection
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.stats import Role
from tests.engine.model.heads import make_head
from tests.engine.model.test_mtp import make_mtp
from tests.local import test_local_drafts as drafts
from tests.local.test_local import REMOTE
from tests.local.test_migration import chase, num_taken_over
from tests.local.test_migration import unhurried as unhurried
from tests.support.local import Completion, LocalCluster

LONG = pytest.mark.long
SEEDS = [
    0,
    *(pytest.param(seed, marks=LONG) for seed in (100, 200, 300)),
]  # five requests have one each
WAYS = [
    *("two pools", "mixed"),
    *(pytest.param(each, marks=LONG) for each in ("one pool", "preempted", "failing", "moved")),
]
CASES = [
    ("two pools", "model"),
    ("mixed", "own"),
    *(
        pytest.param(*case, marks=LONG)
        for case in (
            *(("one pool", kind) for kind in ("own", "eagle", "eagle3", "medusa", "model")),
            *(("two pools", "eagle3"), ("preempted", "own"), ("failing", "eagle3")),
            *(("moved", "model"), ("moved", "own"), ("mixed", "model")),
        )
    ),
]


@pytest.fixture(scope="module")
def model(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("llama", num_hidden_layers=8)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return without(model, 0)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    make_mtp("qwen3.5", path)
    return path


@pytest.fixture(scope="module", params=SEEDS)
def of_hybrid(hybrid: Path, request: pytest.FixtureRequest) -> tuple[int, list[list[int]]]:
    return request.param, without(hybrid, request.param)


def without(model: Path, first_seed: int) -> list[list[int]]:
    with drafts.cluster_of(model, "without drafts") as cluster:
        answers = drafts.answers_of(cluster, "without drafts", drafts.requests_of(first_seed))
    return [answer.tokens for answer in answers]


def cluster_of(model: Path, way: str, drafter: Path | str) -> LocalCluster:
    """With "mixed", what is a prefill worker at the beginning has none."""
    settings: dict[str, Any] = {
        "num_blocks": 100 * read_config(model).kv_spec(16, "float32").num_groups,
        "max_num_batched_tokens": 64,
        "max_failed_steps": 1000,
    }
    engine, plain = EngineSection(drafter=str(drafter), **settings), EngineSection(**settings)
    if way == "two pools":
        return LocalCluster(model, engine=engine, router=REMOTE)
    if way == "mixed":
        return LocalCluster(model, engine=engine, engines={Role.PREFILL: plain})
    return LocalCluster(model, engine=engine, prefill=0, decode=2 if way == "moved" else 1)


def answers_of(cluster: LocalCluster, way: str, first_seed: int = 0) -> list[Completion]:
    futures = [cluster.submit(*request) for request in drafts.requests_of(first_seed)]
    if way in ("moved", "mixed"):
        return chase(cluster, futures)
    return [future.result(120.0) for future in futures]


def bring_about(way: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if way in ("moved", "mixed"):
        request.getfixturevalue("unhurried")
    if way == "failing":
        drafts.fail_now_and_then(monkeypatch)
    if way == "preempted":
        drafts.preempt_now_and_then(monkeypatch)
    monkeypatch.setattr("kvrelay.router.router.PAUSE", Backoff(0.0, 0.0))
    # However long a row takes here, and however seldom they are right, drafts are worth it.
    monkeypatch.setattr("kvrelay.engine.scheduling.drafts.MIN_GAIN", 0.0)
    monkeypatch.setattr("kvrelay.engine.scheduling.drafts.MAX_SLOWDOWN", 100.0)


@pytest.mark.parametrize("way", WAYS)
def test_the_layer_of_a_hybrid_that_drafts_changes_no_token(
    way: str,
    hybrid: Path,
    of_hybrid: tuple[int, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    bring_about(way, monkeypatch, request)
    first_seed, expected = of_hybrid
    with cluster_of(hybrid, way, "mtp") as cluster:
        answers = answers_of(cluster, way, first_seed)
        assert [answer.failed for answer in answers] == [None] * len(expected)
        assert [answer.tokens for answer in answers] == expected
        assert drafts.counted(cluster, "drafter_tokens") > 100
        if way in ("moved", "mixed"):
            assert num_taken_over(cluster) > 3
        if way == "two pools":
            assert cluster.status().totals.handoffs == len(expected)
        cluster.wait_idle()


@pytest.mark.parametrize(("way", "kind"), CASES)
def test_drafters_change_no_token(
    way: str,
    kind: str,
    model: Path,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    bring_about(way, monkeypatch, request)
    if kind != "model":
        make_head(tmp_path, kind)
    with cluster_of(model, way, model if kind == "model" else tmp_path) as cluster:
        answers = answers_of(cluster, way)
        assert [answer.failed for answer in answers] == [None] * len(expected)
        assert [answer.tokens for answer in answers] == expected
        drafted = drafts.counted(cluster, "drafter_tokens")
        accepted = drafts.counted(cluster, "drafter_tokens_accepted")
        assert drafted > 100
        if kind == "model":  # it is the model itself, and what it kept came with the KV
            assert accepted > 0.97 * drafted, (accepted, drafted)
        if way in ("moved", "mixed"):
            assert num_taken_over(cluster) > 3
        if way == "two pools":
            assert cluster.status().totals.handoffs == len(expected)
        cluster.wait_idle()
