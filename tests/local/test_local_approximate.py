"""Approximate KV in the local cluster: it is kept in fewer bits in host memory and on disk, comes
back as numbers that are close, and never reaches a request that asked for exact KV."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvrelay.engine.config import EngineSection
from kvrelay.engine.kv.scope import APPROXIMATE, CacheScope
from kvrelay.engine.kv.tier import Tier
from tests.local.test_local import GREEDY, VOCAB, small
from tests.local.test_local import model_dir as model_dir
from tests.local.test_local_tiers import assert_clean, counted, load_all, settle
from tests.support.local import Completion, LocalCluster

LENGTH, NUM_PROMPTS = 150, 6
PROMPTS = [[(7 * i + 3 * j + i * j) % VOCAB for j in range(LENGTH)] for i in range(NUM_PROMPTS)]
BLOCKS = LENGTH // 16  # full ones of a prompt
ENGINE = small(num_blocks=24)
EXACT, ROUGH = CacheScope(b"anne"), CacheScope(APPROXIMATE + b"anne")
MIB = 1 << 20
GIB = float(1 << 30)


def ask(cluster: LocalCluster, prompt: list[int], scope: CacheScope) -> Completion:
    """What it leaves behind is in the lower tiers before the next one can evict it."""
    answer = cluster.submit(prompt, GREEDY, scope=scope).result(60)
    assert answer.failed is None
    settle(cluster)
    return answer


def opened(model_dir: Path, engine: EngineSection = ENGINE, **tiers: Any) -> LocalCluster:
    return LocalCluster(
        model_dir, prefill=0, dtype="bfloat16", engine=engine, host_bytes=4 * MIB, **tiers
    )


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> Iterator[list[list[int]]]:
    with LocalCluster(model_dir, prefill=0, dtype="bfloat16", engine=small()) as cluster:
        yield [answer.tokens for answer in cluster.generate(PROMPTS, GREEDY)]


def test_it_leaves_host_memory_for_fewer_bits_and_comes_back(
    model_dir: Path, expected: list[list[int]]
) -> None:
    with opened(model_dir, packed_gib=2 * MIB / GIB) as cluster:
        load_all(cluster)
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert ask(cluster, prompt, ROUGH).tokens == tokens  # computed, so exact
        assert counted(cluster, "packed.used") >= NUM_PROMPTS * BLOCKS
        assert counted(cluster, "host.used") == 0
        for prompt in PROMPTS:
            answer = ask(cluster, prompt, ROUGH)
            assert answer.num_cached_tokens == BLOCKS * 16
            assert len(answer.tokens) == len(expected[0])
        assert_clean(cluster)


def test_on_disk_it_takes_less_and_outlives_the_process(model_dir: Path, tmp_path: Path) -> None:
    """With blocks of 64 tokens, for what a block takes there is whole pages."""
    engine, taken = small(num_blocks=8, block_size=64), {}
    for name, scope in (("exact", EXACT), ("rough", ROUGH)):
        tiers: dict[str, Any] = {
            "disk_bytes": 8 * MIB,
            "disk_path": str(tmp_path / name),
            "disk_after_s": 0.0,
            "disk_codec": "lossless",
        }
        with opened(model_dir, engine, **tiers) as cluster:
            first = [ask(cluster, prompt, scope) for prompt in PROMPTS]
            node: Any = cluster.workers["decode-0"].node
            taken[name] = cluster.run(partial(node.exchange.tiers.used_bytes, Tier.DISK))
            assert counted(cluster, "disk.used") == NUM_PROMPTS * (LENGTH // 64)
        with opened(model_dir, engine, **tiers) as cluster:
            load_all(cluster)
            again = [ask(cluster, prompt, scope) for prompt in PROMPTS]
            assert all(answer.num_cached_tokens == LENGTH // 64 * 64 for answer in again)
            if scope is EXACT:
                assert [a.tokens for a in again] == [a.tokens for a in first]
            assert_clean(cluster)
    assert taken["rough"] < 0.7 * taken["exact"]


def test_exact_and_approximate_requests_never_meet(
    model_dir: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """On several workers with all tiers, which fetch from each other: an exact answer is the exact
    one, whoever asked before, and a prompt is new to each of the two until it was asked so."""
    rng = Random(3)
    seen: dict[tuple[int, CacheScope], bool] = {}
    with LocalCluster(
        *(model_dir,),
        prefill=1,
        decode=2,
        dtype="bfloat16",
        engine=ENGINE,
        host_bytes=4 * MIB,
        packed_gib=2 * MIB / GIB,
        disk_bytes=8 * MIB,
        disk_path=str(tmp_path),
        disk_after_s=0.0,
    ) as cluster:
        load_all(cluster)
        for _ in range(60):
            number, scope = rng.randrange(NUM_PROMPTS), rng.choice((EXACT, ROUGH))
            answer = ask(cluster, PROMPTS[number], scope)
            if not seen.get((number, scope)):
                assert (answer.num_cached_tokens, answer.tokens) == (0, expected[number])
            if scope is EXACT:
                assert answer.tokens == expected[number]
            seen[number, scope] = True
        assert len(seen) == 2 * NUM_PROMPTS
        loaded = counted(cluster, "packed.used"), counted(cluster, "disk.used")
        assert_clean(cluster)
    assert min(loaded) > 0
