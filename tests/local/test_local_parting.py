"""A hybrid, tiny and random, whose prompts part: it leaves states there, also with two prefill
workers and a router, and in pools of any size.

64 prompts of 2,200 tokens, twice, take minutes:
`pytest -m long tests/local/test_local_parting.py`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.config import EngineSection
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.stats import RECOMPUTED
from tests.engine.model.tiny import make_checkpoint, tokens_of
from tests.local.test_local import REMOTE
from tests.local.test_local_tiers import assert_clean
from tests.support.local import Completion, LocalCluster

SAMPLING = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module", params=["falcon-h1", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, path, {"max_position_embeddings": 4096})
    return path


def engine_of(num_blocks: int, **changes: Any) -> EngineSection:
    return EngineSection(num_blocks=num_blocks, max_model_len=4096, **changes)


def parting(count: int, shared: int, own: int, seed: int) -> list[list[int]]:
    begin = tokens_of(shared, seed)
    return [[*begin, *tokens_of(own, 1000 * seed + number)] for number in range(count)]


def ask(cluster: LocalCluster, prompts: list[list[int]]) -> list[Completion]:
    """Each once the one before has ended."""
    answers = [cluster.generate([prompt], SAMPLING)[0] for prompt in prompts]
    assert all(each.failed is None and len(each.tokens) == 4 for each in answers)
    return answers


def num_hits(answers: list[Completion], shared: int, block_size: int) -> int:
    return sum(each.num_cached_tokens >= shared // block_size * block_size for each in answers)


def recomputed(cluster: LocalCluster) -> float:
    counters = [worker.fact("counters") or {} for worker in cluster.status().workers]
    return sum(n for each in counters for name, n in each.items() if name.startswith(RECOMPUTED))


def shift(cluster: LocalCluster, count: int, lengths: list[tuple[int, int]]) -> list[int]:
    """Hits among `count` prompts of so many shared and own tokens."""
    (size,) = {worker.block_size for worker in cluster.status().workers}
    assert size is not None
    found = []
    for seed, (shared, own) in enumerate(lengths, start=1):
        answers = ask(cluster, parting(count, shared, own, seed))
        found.append(num_hits(answers, shared, size))
    return found


@pytest.mark.parametrize("num_blocks", [4000, 220])
def test_all_but_the_first_two_hit_wherever_prompts_part(model: Path, num_blocks: int) -> None:
    """The pool holds all of them, or three."""
    with LocalCluster(model, prefill=0, engine=engine_of(num_blocks)) as cluster:
        found = shift(cluster, 10, [(150, 70), (160, 60)])
        assert_clean(cluster)
    assert min(found) >= 8, found


@pytest.mark.long
@pytest.mark.parametrize("num_blocks", [0, 1500])
def test_62_of_64_hit_wherever_prompts_part(model: Path, num_blocks: int) -> None:
    with LocalCluster(model, prefill=0, engine=engine_of(num_blocks)) as cluster:
        found = shift(cluster, 64, [(1500, 700), (1600, 600)])
        again = recomputed(cluster)
        assert_clean(cluster)
    print(f"{found} of 64 hit; {again:.0f} tokens were computed again")
    assert min(found) >= 62, found


def test_turns_forks_and_shared_beginnings_hit_with_two_prefill_workers(model: Path) -> None:
    with LocalCluster(model, prefill=2, engine=engine_of(1000), router=REMOTE) as cluster:
        (size,) = {worker.block_size for worker in cluster.status().workers}
        assert size is not None
        # Each of the two prefill workers computes the beginning twice.
        answers = ask(cluster, parting(9, 150, 70, 1))
        assert num_hits(answers, 150, size) >= 5
        prompt = tokens_of(200, 7)
        (first,) = ask(cluster, [prompt])
        history = [*prompt, *first.tokens]
        turn, *forks = ask(cluster, [[*history, *tokens_of(20, seed)] for seed in range(5)])
        found = [each.num_cached_tokens for each in (turn, *forks)]
        assert sum(each >= 200 // size * size for each in found) >= 3, found
        again = ask(cluster, [[*prompt, *tokens_of(20, 90 + seed)] for seed in range(4)])
        found = [each.num_cached_tokens for each in again]
        assert sum(each >= 199 // size * size for each in found) >= 3, found
        assert cluster.status().totals.handoffs > 0
        assert_clean(cluster)


@pytest.mark.slow
def test_pools_four_times_too_small_or_too_large_serve_and_say_which_group_evicts(
    model: Path,
) -> None:
    """Eight prompts at once, of which the middle pool holds four."""
    prompts = [tokens_of(300, seed) for seed in range(8)]
    answers: dict[int, list[list[int]]] = {}
    for num_blocks in (75, 300, 1200):
        engine = EngineSection(num_blocks=num_blocks, max_num_batched_tokens=64)
        with LocalCluster(model, prefill=0, engine=engine) as cluster:
            sampling = SamplingParams(max_tokens=16, temperature=0.0)
            found = cluster.generate(prompts, sampling)
            assert all(each.failed is None for each in found), num_blocks
            answers[num_blocks] = [each.tokens for each in found]
            deadline = time.monotonic() + 10.0
            while not (told := cluster.status().workers[0].fact("groups")):
                assert time.monotonic() < deadline, "no statistics"
                time.sleep(0.05)
            assert_clean(cluster)
            core = cluster.workers["decode-0"].node.core  # type: ignore[attr-defined]
            groups = {each.kind: each for each in cluster.run(core.kv.group_blocks)}
        assert {each.kind for each in told} == set(groups)
        assert len(groups) > 1
        evicted = {kind: each.num_evicted for kind, each in groups.items()}
        if num_blocks == 75:
            assert all(evicted.values()), evicted
        print(num_blocks, evicted)
    assert len({tuple(map(tuple, each)) for each in answers.values()}) == 1
