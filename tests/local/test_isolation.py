"""Tenants: what one has computed is no hit for another, in any tier, also after a restart; what is
declared public is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.kv.tier import ANNOUNCED_TIERS, Tier
from tests.local.test_local import GREEDY, VOCAB, small
from tests.local.test_local import model_dir as model_dir
from tests.local.test_local_tiers import assert_clean, counted, load_all, settle
from tests.support.local import Completion, LocalCluster

PROMPT = [(5 * i + i * i) % VOCAB for i in range(150)]  # 9 blocks that can be hits
FILLER = [[(3 * i + 7 * j) % VOCAB for j in range(150)] for i in range(1, 4)]
PUBLIC = 96  # tokens: 6 blocks
ANNE, BOB = CacheScope(b"anne"), CacheScope(b"bob")
MIB = 1 << 20


def ask(cluster: LocalCluster, prompt: list[int], scope: CacheScope) -> Completion:
    """What it leaves behind is in the lower tiers before the next one can evict it."""
    answer = cluster.submit(prompt, GREEDY, scope=scope).result(60)
    settle(cluster)
    return answer


def push_out(cluster: LocalCluster) -> None:
    """Pushes what it has off the device."""
    for number, prompt in enumerate(FILLER):
        ask(cluster, prompt, CacheScope(b"filler %d" % number))


def tiers_of(tier: Tier, tmp_path: Path) -> dict[str, Any]:
    if tier is Tier.DEVICE:
        return {}
    if tier is Tier.HOST:
        return {"host_bytes": 4 * MIB}
    return {"disk_bytes": 8 * MIB, "disk_path": str(tmp_path), "disk_after_s": 0.0}


@pytest.mark.parametrize("tier", ANNOUNCED_TIERS)
def test_the_same_prompt_of_two_tenants_has_no_hits_across(
    model_dir: Path, tmp_path: Path, tier: Tier
) -> None:
    tiers = tiers_of(tier, tmp_path)
    engine = small(num_blocks=128 if tier is Tier.DEVICE else 24)
    with LocalCluster(model_dir, prefill=0, engine=engine, **tiers) as cluster:
        load_all(cluster)
        first = ask(cluster, PROMPT, ANNE)
        if tier is not Tier.DEVICE:
            assert counted(cluster, f"{tier}.used") >= 9
            push_out(cluster)
        other = ask(cluster, PROMPT, BOB)
        assert (other.num_cached_tokens, other.tokens) == (0, first.tokens)
        if tier is not Tier.DEVICE:
            push_out(cluster)
        again = ask(cluster, PROMPT, ANNE)
        assert again.cached_by_source == {str(tier): 144}
        assert again.tokens == first.tokens
        if tier is Tier.DISK:
            assert counted(cluster, "disk.used") >= 18
        assert_clean(cluster)
    if tier is not Tier.DISK:
        return
    with LocalCluster(model_dir, prefill=0, engine=engine, **tiers) as cluster:
        load_all(cluster)
        assert counted(cluster, "disk.used") >= 18
        stranger = ask(cluster, PROMPT, CacheScope(b"carol"))
        assert stranger.num_cached_tokens == 0
        back = ask(cluster, PROMPT, BOB)
        assert back.cached_by_source == {"disk": 144}
        assert back.tokens == first.tokens


@pytest.mark.parametrize("tier", ANNOUNCED_TIERS)
def test_a_public_region_is_shared_and_what_follows_is_not(
    model_dir: Path, tmp_path: Path, tier: Tier
) -> None:
    tiers = tiers_of(tier, tmp_path)
    engine = small(num_blocks=128 if tier is Tier.DEVICE else 24)
    anne, bob = CacheScope(b"anne", PUBLIC), CacheScope(b"bob", PUBLIC)
    with LocalCluster(model_dir, prefill=0, engine=engine, **tiers) as cluster:
        load_all(cluster)
        first = ask(cluster, PROMPT, anne)
        if tier is not Tier.DEVICE:
            assert counted(cluster, f"{tier}.used") >= 9
            push_out(cluster)
        other = ask(cluster, PROMPT, bob)
        assert other.cached_by_source == {str(tier): PUBLIC}
        assert other.tokens == first.tokens
        assert_clean(cluster)
    if tier is not Tier.DISK:
        return
    with LocalCluster(model_dir, prefill=0, engine=engine, **tiers) as cluster:
        load_all(cluster)
        carol = ask(cluster, PROMPT, CacheScope(b"carol", PUBLIC))
        assert carol.cached_by_source == {"disk": PUBLIC}
