"""A worker whose vLLM has several processes: KV of all ranks in one block, whatever their number.

The ranks of the stand-in are in one process; `tests/e2e/test_vllm_ranks.py` has those of vLLM."""

from __future__ import annotations

import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from kvrelay.cluster.config_checks import not_of_vllm
from kvrelay.cluster.roles import ROLES
from kvrelay.decode_worker.vllm import memory, ranks
from kvrelay.decode_worker.vllm.build import build
from kvrelay.decode_worker.vllm.copies import Copies, Move
from kvrelay.decode_worker.vllm.memory import Heads
from kvrelay.decode_worker.vllm.messages import Begin, Copied, EngineLost
from kvrelay.decode_worker.vllm.ranks import (
    MOST_SAID,
    Pipe,
    RankCopies,
    join_forms,
    make_shared_pool,
)
from kvrelay.decode_worker.vllm.stages import receive_stages
from kvrelay.engine.config import ModelSection
from kvrelay.engine.kv.window import Windows
from kvrelay.kvtransfer.layout import BlockLayout
from tests.local.test_local import model_dir as model_dir
from tests.support import vllm_stand_in
from tests.support.local import LocalCluster
from tests.support.vllm_stand_in import LLMEngine
from tests.worker.test_vllm_worker import GREEDY, HANDS_OVER, PROMPTS, VLLM, assert_clean, greedy

NUM_LAYERS, NUM_BLOCKS, SIZE, WIDTH = 4, 10, 32, 6


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ranks of the workers that are built from now on, in their order; 1 where it is empty."""
    vllm_stand_in.install(monkeypatch)
    sizes: list[int] = []

    def built(spec: Any, options: Any) -> Any:
        vllm_stand_in.EventPublisherFactory.registered.clear()  # each process has its own
        size = sizes.pop(0) if sizes else 1
        engine = structs.replace(spec.engine, tensor_parallel_size=size)
        return build(replace(spec, engine=engine), ROLES, options.make_agent)

    monkeypatch.setattr("tests.support.local.build_worker", built)
    yield sizes
    if LLMEngine.turns is not None:
        LLMEngine.turns.release(100_000)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4)])
def test_workers_of_any_sizes_hand_over(
    model_dir: Path, sizes: list[int], ranks: tuple[int, int]
) -> None:
    sizes += ranks
    with LocalCluster(model_dir, prefill=1, decode=1, engine=VLLM, router=HANDS_OVER) as cluster:
        assert [len(each.workers) for each in LLMEngine.made] == [*ranks]
        answers = cluster.generate(PROMPTS, GREEDY)
        # Wrong bytes in a head of any rank would have given another token.
        assert [each.tokens for each in answers] == [greedy(each, 60) for each in PROMPTS]
        counters = [each.node.core.counters for each in cluster.workers.values()]
        assert sum(each.get("handoffs_done", 0) for each in counters) >= len(PROMPTS)
        assert not sum(each.get("kv_blocks_damaged", 0) for each in counters)
        cluster.check()
        assert_clean(cluster)


def test_a_rank_that_has_ended_ends_its_worker_at_once(model_dir: Path, sizes: list[int]) -> None:
    sizes += [2, 1]
    with LocalCluster(model_dir, prefill=0, decode=2, engine=VLLM) as cluster:
        [lost] = [each for each in LLMEngine.made if len(each.workers) == 2]
        lost.lose_rank()  # nothing is computed there
        deadline = time.monotonic() + 60
        while not cluster.host.failed:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        [(name, error)] = cluster.host.failed.items()
        assert (name, "a process of a rank has ended" in str(error)) == ("decode-0", True)


# What ranks copy


class Rank:
    """One of several that have `num_heads` heads among them, and of a pipeline's stages."""

    def __init__(
        self, copies: Copies, whole: list[torch.Tensor], rank: int, size: int, layout: str
    ) -> None:
        heads = Heads.of_rank(
            whole[0].shape[1], max(1, whole[0].shape[1] // size), rank % size, size
        )
        assert heads is not None
        self.heads, own = heads, slice(heads.first, heads.first + heads.own)
        order = [0, *(1 + "HNC".index(axis) for axis in layout[1:])]
        back = [order.index(each) for each in range(4)]
        # As vLLM shows it: heads, tokens, numbers, whatever their order in memory.
        self.layers = [
            each[:, own].permute(order).clone(memory_format=torch.contiguous_format).permute(back)
            for each in whole
        ]
        self.copies = RankCopies(rank, copies.copied)
        caches = {str(number): each for number, each in enumerate(self.layers)}
        self.copies.register(caches, NUM_BLOCKS, lambda _: heads, layout)


def made(
    num_heads: int, size: int, stages: int, layout: str
) -> tuple[Copies, list[Rank], list[torch.Tensor]]:
    """All ranks, and the NUM_LAYERS layers that they divide."""
    torch.manual_seed(0)
    whole = [torch.randn(NUM_BLOCKS, num_heads, SIZE, WIDTH) for _ in range(NUM_LAYERS)]
    copies, each = Copies(windows=Windows.of(SIZE)), NUM_LAYERS // stages
    ranks = [
        Rank(copies, whole[stage * each :][:each], stage * size + rank, size, layout)
        for stage in range(stages)
        for rank in range(size)
    ]
    copies.layers, at = join_forms([each.copies.forms for each in ranks], size)
    spec = copies.spec(num_heads)
    assert spec is not None
    pool = make_shared_pool(4, spec.bytes_per_block)
    copies.use(pool.open(), BlockLayout(spec).share(0, 1), len(ranks))
    for rank, first in zip(ranks, at, strict=True):
        rank.copies.use(pool, first)
    return copies, ranks, whole


def copied_and_back(
    num_heads: int, size: int, stages: int, layout: str
) -> tuple[Any, tuple[int, ...], Any]:
    """(form of layers, checksums, bytes) of two blocks that ranks have saved, and loaded again."""
    copies, ranks, whole = made(num_heads, size, stages, layout)
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    copies.report = said.put
    tokens = tuple(range(2 * SIZE))
    copies.begin(Begin("a", tokens, "", {}, (3, 1)), lambda: None)
    step = copies.plan([Move("a", lambda: [[7, 2]], range(0), len(tokens))])
    for rank in ranks:
        rank.copies.save(step)
    copied = said.get(timeout=60)
    assert isinstance(copied, Copied)
    copies.end("a")
    for layer in (layer for rank in ranks for layer in rank.layers):
        layer.zero_()
    begin = Begin("b", tokens, "", {}, (3, 1), copied.checksums)
    copies.begin(begin, lambda: said.put("compared"))
    assert said.get(timeout=60) == "compared"
    step = copies.plan([Move("b", lambda: [[4, 5]], range(2), len(tokens))])
    for rank in ranks:
        rank.copies.load(step)
        rank.copies.save(step)
    copies.end("b")
    for number, rank in enumerate(ranks):
        own = slice(rank.heads.first, rank.heads.first + rank.heads.own)
        known = whole[number // size * len(rank.layers) :][: len(rank.layers)]
        for layer, before in zip(rank.layers, known, strict=True):
            assert torch.equal(layer[[4, 5]], before[[7, 2]][:, own])
    copies.close()
    assert copies.pool is not None
    return copies.layers, copied.checksums, copies.pool[[3, 1]].copy()


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is gathered and scattered at once, and written by the copying thread."""
    for module in (memory, ranks):
        monkeypatch.setattr(module, "is_in_host_memory", lambda regions: False)
    monkeypatch.setattr(ranks, "begun", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(ranks, "to_host", lambda found, event: found)


@pytest.mark.parametrize("layout", ["BHNC", "BNHC"])
def test_copies_of_a_gpu_and_of_host_memory_are_the_same(
    monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    here = copied_and_back(4, 2, 2, layout)
    as_on_a_gpu(monkeypatch)
    there = copied_and_back(4, 2, 2, layout)
    assert here[:2] == there[:2]
    assert np.array_equal(here[2], there[2])


@pytest.mark.parametrize("layout", ["BHNC", "BNHC"])
@pytest.mark.parametrize(
    ("num_heads", "size", "stages"), [(4, 2, 1), (2, 2, 1), (1, 2, 1), (2, 4, 1), (4, 2, 2)]
)
def test_a_block_is_the_same_whatever_the_number_of_ranks(
    num_heads: int, size: int, stages: int, layout: str
) -> None:
    forms, sums, block = copied_and_back(num_heads, 1, 1, layout)
    assert len(forms) == NUM_LAYERS
    other_forms, other_sums, other_block = copied_and_back(num_heads, size, stages, layout)
    assert forms == other_forms
    assert sums == other_sums
    assert np.array_equal(block, other_block)


def test_heads_that_are_divided_in_another_way_are_not_copied() -> None:
    assert Heads.of_rank(8, 4, 1, 2) == Heads(8, 4, 4)
    assert Heads.of_rank(2, 1, 3, 4) == Heads(2, 1, 1, is_copy=True)
    assert Heads.of_rank(8, 3, 1, 2) is None
    assert Heads.of_rank(3, 1, 1, 4) is None
    rank = RankCopies(0, lambda *_: None)
    rank.register({"0": torch.zeros(10, 4, 32, 6)}, 10, lambda _: Heads(2, 1, 0), "BHNC")
    assert rank.forms == [], "it has four heads where one was expected"
    some = RankCopies(0, lambda *_: None)
    some.register({"0": torch.zeros(10, 1, 32, 6)}, 10, lambda _: Heads(2, 1, 0), "BHNC")
    assert join_forms([some.forms, []], 2) == ([], [])


def test_a_rank_that_makes_no_copies_any_more_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_on_a_gpu(monkeypatch)
    copies, ranks, _ = made(2, 2, 1, "BHNC")
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    copies.report = said.put
    copies.begin(Begin("a", tuple(range(SIZE)), "", {}, (4,)), lambda: None)  # there is no row 4
    step = copies.plan([Move("a", lambda: [[7]], range(0), SIZE)])
    ranks[1].copies.save(step)
    lost = said.get(timeout=60)
    assert isinstance(lost, EngineLost)
    assert "KV is not copied any more: IndexError" in lost.why
    with pytest.raises(RuntimeError, match="KV is not copied any more"):
        copies.end("a")
    with pytest.raises(RuntimeError, match="KV is not copied any more"):
        ranks[1].copies._wait_for_room(1)


def test_a_later_stage_has_memory_to_receive_into() -> None:
    """vLLM 0.32 asserts that it has, in the first step that it computes on a CPU."""

    def worker(num_stages: int, **more: Any) -> Any:
        parallel = SimpleNamespace(pipeline_parallel_size=num_stages)
        config = SimpleNamespace(parallel_config=parallel)
        return SimpleNamespace(vllm_config=config, model_runner=SimpleNamespace(**more))

    def make(batch_size: int, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
        return {"hidden_states": torch.empty(batch_size, 3, dtype=dtype, device=device)}

    about = {
        "intermediate_tensors": None,
        "model": SimpleNamespace(make_empty_intermediate_tensors=make),
        "model_config": SimpleNamespace(dtype=torch.bfloat16),
        "max_num_tokens": 7,
        "device": "cpu",
    }
    later = worker(2, **about)
    assert receive_stages(later)
    made = later.model_runner.intermediate_tensors
    assert (made["hidden_states"].shape, made["hidden_states"].dtype) == ((7, 3), torch.bfloat16)
    assert receive_stages(later)
    assert later.model_runner.intermediate_tensors is made
    whole = worker(1, **about)
    assert receive_stages(whole)
    assert whole.model_runner.intermediate_tensors is None
    assert not receive_stages(worker(2))


def test_ranks_of_other_processes_write_to_one_memory_and_say_so() -> None:
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    pipe, pool = Pipe(lambda *about: said.put(about)), make_shared_pool(3, 64)
    mine = pool.open()
    code = (
        "import sys; from kvrelay.decode_worker.vllm.ranks import SharedPool, say_to\n"
        "SharedPool(sys.argv[1], 3, 64).open()[2] = 7\n"
        "say = say_to(sys.argv[2]); say(1, 5); say(1, 6, 'x' * 10000)"
    )
    words = [sys.executable, "-c", code, pool.path, pipe.path]
    subprocess.run(words, check=True, timeout=120)
    assert said.get(timeout=60) == (1, 5, "")
    assert said.get(timeout=60) == (1, 6, "x" * MOST_SAID)
    assert mine.sum() == 7 * 64
    assert (mine[2] == 7).all()


def test_sizes_that_workers_are_not_counted_by_are_refused() -> None:
    def why(**arguments: Any) -> str:
        return not_of_vllm(structs.replace(VLLM, arguments=arguments), ModelSection())

    assert "engine.arguments.tensor_parallel_size = 2: set engine.tensor" in why(
        tensor_parallel_size=2
    )
    assert "data_parallel_size = 2: a worker is one replica" in why(data_parallel_size=2)
    assert "pipeline_parallel_size = 0: expected 1 or more" in why(pipeline_parallel_size=0)
    assert "'ray': expected 'mp': the ranks" in why(distributed_executor_backend="ray")
    assert not why(pipeline_parallel_size=2, enable_expert_parallel=True)
