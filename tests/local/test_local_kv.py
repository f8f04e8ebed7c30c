"""FP8 KV and windows with a real (tiny) model: one worker, two pools, tiers and a restart give the
same tokens; a window is served out of a flat footprint; a block table that lies is caught."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvrelay.engine.config import EngineSection
from kvrelay.engine.images import Images
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq, Step
from kvrelay.kvtransfer.agent import CopyBlocks
from tests.engine.model.runners import model_runner
from tests.local.test_local import GREEDY, REMOTE, VOCAB, small
from tests.local.test_local import model_dir as model_dir
from tests.local.test_local_tiers import assert_clean, counted, load_all, settle
from tests.support.local import LocalCluster

LENGTH, MIB = 150, 1 << 20
PROMPTS = [[(7 * i + 3 * j + i * j) % VOCAB for j in range(LENGTH)] for i in range(4)]
FP8 = small(kv_dtype="float8_e4m3")
WINDOW = small(window=40, sinks=4, max_num_batched_tokens=64, max_model_len=2000)
KINDS = {"fp8": FP8, "window": WINDOW, "both": small(window=40, sinks=4, kv_dtype="float8_e4m3")}


def answer_of(
    runner: ModelRunner,
    prompt: list[int],
    blocks: list[int],
    count: int,
    sampling: SamplingParams = GREEDY,
    images: Images | None = None,
) -> list[int]:
    """`count` tokens, with a table from which no block is taken."""
    tokens, start, kept = list(prompt), 0, dict[str, Any]()
    while len(tokens) < len(prompt) + count:
        fed = tokens[start:]
        share = ScheduledSeq("r", fed, start, blocks, True, sampling, tokens, len(prompt))
        share.images, share.kept = images, kept
        while (done := runner.execute(Step(0, [share]))).waiting:
            pass
        (sampled,) = done.sampled
        assert sampled is not None
        start, tokens = len(tokens), [*tokens, sampled.token]
    return tokens[len(prompt) :]


def ask(cluster: LocalCluster, count: int = 12) -> list[list[int]]:
    """One after the other; nothing is evicted before it is in the lower tiers, if there are any."""
    sampling, answers = SamplingParams(max_tokens=count, temperature=0.0), []
    for prompt in PROMPTS:
        answers.append(cluster.generate([prompt], sampling)[0].tokens)
        settle(cluster)
    return answers


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def expected(model_dir: Path, kind: str) -> list[list[int]]:
    """From a runner that keeps every block."""
    engine, answers = KINDS[kind], []
    runner = model_runner(
        model_dir,
        dtype="float32",
        device="cpu",
        num_blocks=12,
        window=engine.window,
        sinks=engine.sinks,
        kv_dtype=engine.kv_dtype,
    )
    for prompt in PROMPTS:
        answers.append(answer_of(runner, prompt, list(range(12)), 12))
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    return answers


def test_two_pools_answer_as_one_and_damage_on_the_way_is_noticed(
    model_dir: Path, kind: str, expected: list[list[int]]
) -> None:
    corrupted: list[CopyBlocks] = []

    def corrupt(read: CopyBlocks, pool: NDArray[np.uint8]) -> None:
        if len(corrupted) < 1:
            pool[read.dst[0], -1] ^= 0x01  # with FP8: of a scale
            corrupted.append(read)

    engine = KINDS[kind]
    with LocalCluster(model_dir, engine=engine, router=REMOTE, corrupt=corrupt) as cluster:
        assert ask(cluster) == expected
        totals = cluster.status().totals
        assert_clean(cluster)
    assert (len(corrupted), totals.handoffs) == (1, len(PROMPTS))


def test_kv_comes_back_from_host_memory_and_from_disk_after_a_restart(
    model_dir: Path, kind: str, expected: list[list[int]], tmp_path: Path
) -> None:
    engine = small(
        num_blocks=16,
        **{key: getattr(KINDS[kind], key) for key in ("kv_dtype", "window", "sinks")},
    )
    tiers: dict[str, Any] = {
        "host_bytes": 4 * MIB,
        "disk_bytes": 16 * MIB,
        "disk_path": str(tmp_path),
        "disk_after_s": 0.0,
    }
    # Blocks of 150 + 12 tokens; with a window, sinks and what is read from the last full one on, of
    # the prompt and of all.
    each = 1 + 4 if engine.window else 9
    with LocalCluster(model_dir, prefill=0, engine=engine, **tiers) as cluster:
        assert ask(cluster) == expected
        assert counted(cluster, "disk.used") >= each * len(PROMPTS)
        assert_clean(cluster)
        if engine.window:
            assert counted(cluster, "host.used") == each * len(PROMPTS)
    with LocalCluster(model_dir, prefill=0, engine=engine, **tiers) as cluster:
        load_all(cluster)
        sampling = SamplingParams(max_tokens=6, temperature=0.0)
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            (turn,) = cluster.generate([[*prompt, *answer[:11]]], sampling)
            assert turn.tokens[0] == answer[11]
            assert turn.num_cached_tokens >= LENGTH // 16 * 16
        assert_clean(cluster)


def test_half_the_bytes_hold_twice_the_blocks(model_dir: Path) -> None:
    counts = {}
    for kv_dtype in ("auto", "float8_e4m3"):
        engine = EngineSection(kv_cache_gib=0.001, kv_dtype=kv_dtype)
        with LocalCluster(model_dir, prefill=0, engine=engine) as cluster:
            info = cluster.workers["decode-0"].info
            counts[kv_dtype] = info.num_blocks
            names = dict(cluster.workers["decode-0"].node.config.compatibility)  # type: ignore[attr-defined]
            assert names["dtype"] == kv_dtype.replace("auto", "float32")
    assert counts["float8_e4m3"] == pytest.approx(counts["auto"] * 64 / 17, abs=4)


def test_an_answer_far_longer_than_the_pool_and_the_model_is_served_by_a_window(
    model_dir: Path,
) -> None:
    """The model has 512 positions, the pool 6 blocks of 16."""
    prompt, asked = PROMPTS[0][:20], {"a": (0, 520), "computed again": (500, 20)}
    answers: dict[str, list[int]] = {}
    for name, (given, count) in asked.items():
        engine = small(num_blocks=6, window=40, sinks=4, max_model_len=2000)
        sampling = SamplingParams(max_tokens=count, temperature=0.0)
        with LocalCluster(model_dir, prefill=0, engine=engine) as cluster:
            tokens = [*prompt, *answers.get("a", [])[:given]]
            answers[name] = cluster.generate([tokens], sampling)[0].tokens
            assert_clean(cluster)
    assert len(answers["a"]) == 520
    assert answers["computed again"] == answers["a"][500:]


def test_a_block_table_that_lies_fails_its_own_attempt_only(model_dir: Path) -> None:
    """The router tries it again: all three clients get what they would have got."""
    long = SamplingParams(max_tokens=120, temperature=0.0)
    with LocalCluster(model_dir, prefill=0, engine=small()) as cluster:
        right = [answer.tokens for answer in cluster.generate(PROMPTS[:3], long)]
    with LocalCluster(model_dir, prefill=0, engine=small()) as cluster:
        futures = [cluster.submit(prompt, long) for prompt in PROMPTS[:3]]
        core: Any = cluster.workers["decode-0"].node.core  # type: ignore[attr-defined]

        def lie() -> bool:
            seqs = sorted(core.seqs.values(), key=lambda seq: seq.request_id)
            if len(seqs) < 3 or any(seq.num_output_tokens == 0 for seq in seqs):
                return False
            seqs[1].block_ids[2] = seqs[0].block_ids[2]
            return True

        deadline = time.monotonic() + 30
        while not cluster.run(lie):
            assert time.monotonic() < deadline
        assert [future.result(60).tokens for future in futures] == right
        assert core.counters["sequences_left_out"] == 1
        assert core.counters["refused_block_table_fault"] == 1
        cluster.run(partial(core.kv.check_integrity))
        assert_clean(cluster)
