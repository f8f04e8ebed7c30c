"""Drafters in clusters: whatever happens to the requests, and whichever drafter a worker has, they
get the tokens that they get without one. More ways: `pytest -m long` of this file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.backoff import Backoff
from kvrelay.engine.config import EngineSection
from kvrelay.engine.stats import Role
from tests.engine.model.heads import make_head
from tests.local import test_local_drafts as drafts
from tests.local.test_local import REMOTE
from tests.local.test_migration import chase, num_taken_over
from tests.local.test_migration import unhurried as unhurried
from tests.support.local import Completion, LocalCluster

LONG = pytest.mark.long
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
    with drafts.cluster_of(model, "without drafts") as cluster:
        answers = drafts.answers_of(cluster, "without drafts", drafts.requests_of(0))
    return [answer.tokens for answer in answers]


def cluster_of(model: Path, way: str, drafter: Path) -> LocalCluster:
    """With "mixed", what is a prefill worker at the beginning has none."""
    settings: dict[str, Any] = {
        "num_blocks": 100,
        "max_num_batched_tokens": 64,
        "max_failed_steps": 1000,
    }
    engine, plain = EngineSection(drafter=str(drafter), **settings), EngineSection(**settings)
    if way == "two pools":
        return LocalCluster(model, engine=engine, router=REMOTE)
    if way == "mixed":
        return LocalCluster(model, engine=engine, engines={Role.PREFILL: plain})
    return LocalCluster(model, engine=engine, prefill=0, decode=2 if way == "moved" else 1)


def answers_of(cluster: LocalCluster, way: str) -> list[Completion]:
    futures = [cluster.submit(*request) for request in drafts.requests_of(0)]
    if way in ("moved", "mixed"):
        return chase(cluster, futures)
    return [future.result(120.0) for future in futures]


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
    if way in ("moved", "mixed"):
        request.getfixturevalue("unhurried")
    if way == "failing":
        drafts.fail_now_and_then(monkeypatch)
    if way == "preempted":
        drafts.preempt_now_and_then(monkeypatch)
    if kind != "model":
        make_head(tmp_path, kind)
    monkeypatch.setattr("kvrelay.router.router.PAUSE", Backoff(0.0, 0.0))
    # However long a row takes here, and however seldom they are right, drafts are worth it.
    monkeypatch.setattr("kvrelay.engine.scheduling.drafts.MIN_GAIN", 0.0)
    monkeypatch.setattr("kvrelay.engine.scheduling.drafts.MAX_SLOWDOWN", 100.0)
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
