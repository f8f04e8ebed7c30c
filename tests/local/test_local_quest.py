"""Quest in the local cluster: the same tokens by every way to them, and KV of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.engine.kv.scope import CacheScope
from tests.local.test_local import GREEDY, VOCAB, small
from tests.local.test_local import model_dir as model_dir
from tests.local.test_local_tiers import assert_clean
from tests.support.local import LocalCluster

ENGINE = small(quest_budget=0.3, quest_dense_layers=0)
EXACT, QUEST = CacheScope(b"anne"), CacheScope(ENGINE.quest_mark + b"anne")
OTHER = small(quest_budget=0.2).quest_mark
PROMPTS = [[(7 * i + 3 * j + i * j) % VOCAB for j in range(150)] for i in range(4)]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.engine.model.quest.LEAST_TOKENS", 1)


def answers(cluster: LocalCluster, scope: CacheScope) -> list[list[int]]:
    asked = [cluster.submit(prompt, GREEDY, scope=scope) for prompt in PROMPTS]
    done = [each.result(60) for each in asked]
    assert all(each.failed is None for each in done)
    return [each.tokens for each in done]


def test_one_pool_and_two_give_the_same_tokens_beside_exact_ones(model_dir: Path) -> None:
    found = []
    for pools in ({"prefill": 0, "decode": 1}, {"prefill": 1, "decode": 2}):
        with LocalCluster(model_dir, engine=ENGINE, dtype="float32", **pools) as cluster:
            assert cluster.submit(PROMPTS[0], GREEDY, scope=EXACT).result(60).num_cached_tokens == 0
            found.append((answers(cluster, QUEST), answers(cluster, EXACT)))
            assert_clean(cluster)
    assert found[0] == found[1]
    assert found[0][0] != found[0][1], "what is chosen would not matter"
    with LocalCluster(model_dir, prefill=0, engine=small(), dtype="float32") as cluster:
        assert answers(cluster, EXACT) == found[0][1]
        assert answers(cluster, QUEST) == found[0][1], "who has no Quest computes exactly"


def test_exact_and_quest_requests_never_meet(model_dir: Path) -> None:
    """Nor do those of other settings."""
    with LocalCluster(model_dir, prefill=0, engine=ENGINE, dtype="float32") as cluster:
        for scope in (QUEST, EXACT, CacheScope(OTHER + b"anne")):
            first, again = (
                cluster.submit(PROMPTS[0], GREEDY, scope=scope).result(60) for _ in range(2)
            )
            assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 144)
            assert again.tokens == first.tokens
        assert_clean(cluster)


def test_a_scope_says_what_its_kv_is() -> None:
    assert (EXACT.kv, QUEST.kv, CacheScope(b"approximate KV\0\0x").kv) == (
        "exact",
        "quest",
        "approximate",
    )
    assert (EXACT.public_salt, QUEST.public_salt) == (b"", ENGINE.quest_mark)
    assert ENGINE.quest_mark != OTHER
    assert len({small().quest_mark, OTHER}) == 2
