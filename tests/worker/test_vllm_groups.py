"""Models at vLLM whose layers are in groups, some with a window: blocks of each group are copied,
handed over, found again and freed, and what windows have left takes no memory.

`tests/e2e/test_vllm_models.py` has Gemma 3 at the real vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from kvrelay.cluster.roles import ROLES
from kvrelay.decode_worker.vllm.build import build, with_windows
from kvrelay.decode_worker.vllm.form import Form
from kvrelay.decode_worker.vllm.groups import windows_of
from kvrelay.decode_worker.vllm.node import VllmWorker
from tests.local.test_local import model_dir as model_dir
from tests.support import vllm_stand_in
from tests.support.local import LocalCluster
from tests.support.vllm_stand_in import LLMEngine
from tests.worker.test_vllm_form import ENGINE, FULL, WHOLE, WINDOW
from tests.worker.test_vllm_worker import GREEDY, HANDS_OVER, VLLM, assert_clean, greedy

WINDOW_TOKENS = 80  # three or four blocks
GROUPS = [(0, WINDOW_TOKENS), (WINDOW_TOKENS, 0, WINDOW_TOKENS), (WINDOW_TOKENS,), (0, 40, 100)]
PROMPTS = [[(7 * i + 3 * j) % 249 for j in range(150 + 61 * i)] for i in range(4)]
SMALL_STEPS = structs.replace(VLLM, num_blocks=96, max_num_batched_tokens=64)


@pytest.fixture(params=GROUPS, ids=str)
def windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    vllm_stand_in.install(monkeypatch)
    monkeypatch.setattr(LLMEngine, "windows", request.param)

    def built(spec: Any, options: Any) -> Any:
        vllm_stand_in.EventPublisherFactory.registered.clear()  # each process has its own
        return build(spec, ROLES, options.make_agent)

    monkeypatch.setattr("tests.support.local.build_worker", built)
    yield request.param
    if LLMEngine.turns is not None:
        LLMEngine.turns.release(100_000)


def nodes(cluster: LocalCluster) -> list[VllmWorker]:
    return [each.node for each in cluster.workers.values()]


def forget_at_vllm() -> None:
    for engine in LLMEngine.made:
        for known_as in [*engine.cached]:
            engine._uncache(known_as)


def test_prompts_are_handed_over_in_blocks_of_each_group(
    model_dir: Path, windows: tuple[int, ...]
) -> None:
    with LocalCluster(
        model_dir, prefill=1, decode=1, engine=SMALL_STEPS, router=HANDS_OVER
    ) as cluster:
        # Wrong bytes in any group that is read would have given another token.
        answers = cluster.generate(PROMPTS, GREEDY)
        assert [each.tokens for each in answers] == [greedy(each, 60) for each in PROMPTS]
        counters = [node.core.counters for node in nodes(cluster)]
        assert sum(each.get("handoffs_done", 0) for each in counters) == len(PROMPTS)
        assert not sum(each.get("kv_blocks_damaged", 0) for each in counters)
        cluster.check()
        forget_at_vllm()
        few = replace(GREEDY, max_tokens=4)
        again = cluster.generate(PROMPTS, few)
        assert [each.tokens for each in again] == [greedy(each, 4) for each in PROMPTS]
        most = [(len(each) - 1) // 32 * 32 for each in PROMPTS]
        assert [each.num_cached_tokens for each in again] == most
        assert_clean(cluster)


def test_a_session_goes_on_from_the_end_of_its_answer(
    model_dir: Path, windows: tuple[int, ...]
) -> None:
    few = replace(GREEDY, max_tokens=4)
    with LocalCluster(model_dir, prefill=0, decode=1, engine=SMALL_STEPS) as cluster:
        cluster.generate(PROMPTS[:2], GREEDY)
        forget_at_vllm()
        later = [[*each, *greedy(each, 60), 7, 8, 9] for each in PROMPTS[:2]]
        again = cluster.generate(later, few)
        assert [each.tokens for each in again] == [greedy(each, 4) for each in later]
        most = [(len(each) - 4) // 32 * 32 for each in later]  # its last token has no KV
        assert [each.num_cached_tokens for each in again] == most
        assert_clean(cluster)


def test_a_worker_that_dies_is_taken_over_from(model_dir: Path, windows: tuple[int, ...]) -> None:
    with LocalCluster(model_dir, prefill=0, decode=2, engine=SMALL_STEPS) as cluster:
        turns = vllm_stand_in.turns(0)
        futures = [cluster.submit(prompt, GREEDY) for prompt in PROMPTS]
        deadline = time.monotonic() + 60
        while cluster.status().totals.output_tokens < 40:
            assert time.monotonic() < deadline
            turns.release(1)
            time.sleep(0.001)
        cluster.kill("decode-0")
        turns.release(10_000)
        answers = [future.result(60.0) for future in futures]
        assert [each.tokens for each in answers] == [greedy(each, 60) for each in PROMPTS]
        assert cluster.status().totals.retries
        assert_clean(cluster)


def test_what_only_vllm_has_kept_is_copied_again(model_dir: Path, windows: tuple[int, ...]) -> None:
    few = replace(GREEDY, max_tokens=4)
    with LocalCluster(model_dir, prefill=0, decode=1, engine=SMALL_STEPS) as cluster:
        [node] = nodes(cluster)

        def forget() -> None:
            pool = node.core.kv.pool
            for name in [*pool.block_hashes()]:
                pool.forget(pool.lookup([name])[0])

        def once() -> Any:
            [answer] = cluster.generate(PROMPTS[-1:], few)
            assert answer.tokens == greedy(PROMPTS[-1], 4)
            return answer.num_cached_tokens

        assert once() == 0
        cluster.run(forget)
        assert once() > 300, "vLLM has it"
        forget_at_vllm()
        assert once() == (len(PROMPTS[-1]) - 1) // 32 * 32, "from the worker's memory"
        assert_clean(cluster)


@pytest.mark.parametrize("damaged", [0, 1])
def test_damage_in_any_group_is_computed_again(
    model_dir: Path, windows: tuple[int, ...], damaged: int
) -> None:
    few, prompt = replace(GREEDY, max_tokens=3), PROMPTS[2]
    with LocalCluster(model_dir, prefill=0, decode=1, engine=SMALL_STEPS) as cluster:
        cluster.generate([prompt], few)
        forget_at_vllm()
        [node] = nodes(cluster)
        kinds = node.core.kv.pool.kinds
        pool = LLMEngine.made[0].connectors[0]._copies.pool
        written = np.flatnonzero(pool.any(axis=1))
        pool[[row for row in written if not kinds or kinds[row] == damaged], 5] ^= 1
        [answer] = cluster.generate([prompt], few)
        assert answer.tokens == greedy(prompt, 3)
        is_there = not kinds or damaged in kinds
        assert bool(node.core.counters.get("kv_blocks_damaged", 0)) is is_there
        assert_clean(cluster)


def test_windows_take_no_more_than_they_read(model_dir: Path, windows: tuple[int, ...]) -> None:
    if 0 not in windows:
        pytest.skip("no group keeps all")
    prompt = [(3 * j) % 249 for j in range(400)]
    with LocalCluster(model_dir, prefill=0, decode=1, engine=SMALL_STEPS) as cluster:
        [node] = nodes(cluster)
        turns = vllm_stand_in.turns(9)  # the prompt takes seven
        future = cluster.submit(prompt, GREEDY)
        deadline = time.monotonic() + 60
        while cluster.status().totals.output_tokens < 2:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(0.1)  # the last copies are reported
        rows = -(-len(prompt) // 32) + 1
        num_full, sized = windows.count(0), [each for each in windows if each]
        held = cluster.run(lambda: sum(len({*s.block_ids} - {-1}) for s in node.core.seqs.values()))
        assert held <= num_full * rows + sum(-(-each // 32) + 2 for each in sized)
        assert held < len(windows) * rows
        turns.release(10_000)
        assert future.result(60.0).tokens == greedy(prompt, 60)
        assert_clean(cluster)


# What is understood of vLLM's groups


def group(kind: str, window: int | None = None, **about: Any) -> Any:
    shape = {"num_kv_heads": 2, "head_size": 8, "dtype": "bf16", "page_size_bytes": 1024}
    spec = {"block_size": 32, "kind": kind, "sliding_window": window, **shape, **about}
    return SimpleNamespace(kv_cache_spec=SimpleNamespace(**spec))


def test_groups_are_copied_where_their_blocks_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_stand_in.install(monkeypatch)
    full, sliding = group("full_attention"), group("sliding_window", 64)
    assert windows_of([full, sliding, sliding], 32) == (0, 64, 64)
    assert windows_of([group("mla_attention")], 32) == (0,)
    for other in (
        group("mamba"),
        group("chunked_local_attention"),
        group("sliding_window", 64, block_size=64),
        group("sliding_window", 64, head_size=16),
        group("sliding_window", 64, extra_retained_tokens=3),
    ):
        assert windows_of([full, other], 32) is None
    assert windows_of([], 32) is None


def test_steps_are_such_that_windows_have_blocks_for_them() -> None:
    form = structs.replace(WHOLE, groups=(FULL, WINDOW, WINDOW))
    engine = structs.replace(ENGINE, max_model_len=3200, max_num_batched_tokens=2048)
    assert with_windows(form, engine, 10_000) == {}
    assert with_windows(form, engine, 0) == {}, "a GPU finds out how many there are"
    few = with_windows(form, engine, 160)["long_prefill_token_threshold"]
    assert few == 160 // 4 // 2 * 32, "a quarter of all is ahead of prompts, in two groups"
    whole = with_windows(WHOLE, engine, 10_000)
    assert whole == {"disable_hybrid_kv_cache_manager": True}


def test_the_form_says_which_layers_keep_what() -> None:
    form = structs.replace(WHOLE, groups=(FULL, WINDOW))
    assert form.windows == (0, 64)
    assert structs.replace(form, why_not="states").windows == (0,)
    assert Form("0.32").windows == (0,)
