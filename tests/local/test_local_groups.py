"""Models whose layers attend to different windows, tiny and random: one worker, two pools, ranks,
tiers and a restart give the same tokens, and hold what the windows show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvrelay.engine.config import EngineSection
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.stats import Role
from kvrelay.kvtransfer.agent import CopyBlocks
from tests.engine.model.runners import model_runner
from tests.engine.model.tiny import HYBRID, make_checkpoint, tokens_of
from tests.local.test_local import REMOTE
from tests.local.test_local_kv import answer_of
from tests.local.test_local_tiers import assert_clean, counted, load_all, settle
from tests.support.local import LocalCluster

LENGTH, COUNT, MIB = 150, 12, 1 << 20
PROMPTS = [tokens_of(LENGTH, seed) for seed in range(4)]
SAMPLING = SamplingParams(max_tokens=COUNT, temperature=0.0)


def engine_of(**changes: Any) -> EngineSection:
    return EngineSection(**{"num_blocks": 256, "max_num_batched_tokens": 64, **changes})


FAMILIES = ("gemma3", "gemma2", "gpt-oss", "gemma4", "mimo-v2", *HYBRID)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, path)
    assert read_config(path).kv_spec(16, "float32").num_groups > 1
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """From a runner that keeps every block of every group."""
    blocks = list(range(11 * read_config(model).kv_spec(16, "float32").num_groups))
    runner = model_runner(model, dtype="float32", device="cpu", num_blocks=len(blocks))
    answers = [answer_of(runner, prompt, blocks, COUNT) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    return answers


def ask(cluster: LocalCluster) -> list[list[int]]:
    answers = []
    for prompt in PROMPTS:
        answers.append(cluster.generate([prompt], SAMPLING)[0].tokens)
        settle(cluster)
    return answers


@pytest.mark.slow
def test_two_pools_answer_as_one_and_damage_on_the_way_is_noticed(
    model: Path, expected: list[list[int]]
) -> None:
    corrupted: list[CopyBlocks] = []
    moved: list[int] = []

    def corrupt(read: CopyBlocks, pool: NDArray[np.uint8]) -> None:
        moved.append(len(read.dst))
        if len(corrupted) < 1:
            pool[read.dst[-1], -1] ^= 0x01
            corrupted.append(read)

    with LocalCluster(model, engine=engine_of(), router=REMOTE, corrupt=corrupt) as cluster:
        assert ask(cluster) == expected
        totals = cluster.status().totals
        windows = cluster.workers["decode-0"].node.config.kv_windows  # type: ignore[attr-defined]
        assert_clean(cluster)
    assert (len(corrupted), totals.handoffs) == (1, len(PROMPTS))
    each = sum(windows.keeps(i, LENGTH) for i in range(windows.entries(LENGTH)))
    assert each < windows.entries(LENGTH) or windows.block_size > LENGTH // 2
    # The first one may be given up before all of it has come.
    assert each * (len(PROMPTS) - 1) < sum(moved) <= each * len(PROMPTS)


@pytest.mark.slow
def test_kv_comes_back_from_host_memory_and_from_disk_after_a_restart(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    tiers: dict[str, Any] = {
        "host_bytes": 8 * MIB,
        "disk_bytes": 32 * MIB,
        "disk_path": str(tmp_path),
        "disk_after_s": 0.0,
    }
    engine = engine_of(num_blocks=40)
    with LocalCluster(model, prefill=0, engine=engine, **tiers) as cluster:
        assert ask(cluster) == expected
        windows = cluster.workers["decode-0"].node.config.kv_windows  # type: ignore[attr-defined]
        each = len({*windows.kept(LENGTH - 1), *windows.kept(LENGTH + COUNT - 1)})
        assert counted(cluster, "host.used") == each * len(PROMPTS)
        assert counted(cluster, "disk.used") >= each * len(PROMPTS)
        assert_clean(cluster)
    with LocalCluster(model, prefill=0, engine=engine, **tiers) as cluster:
        load_all(cluster)
        turns = SamplingParams(max_tokens=6, temperature=0.0)
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            (turn,) = cluster.generate([[*prompt, *answer[:11]]], turns)
            assert turn.tokens[0] == answer[11]
            assert turn.num_cached_tokens >= windows.tokens(windows.full(LENGTH))
        assert_clean(cluster)


@pytest.mark.slow
def test_ranks_hand_over_to_one_worker(model: Path, expected: list[list[int]]) -> None:
    config = read_config(model)
    if config.recurrent is not None and config.latent is None:
        pytest.skip("for seconds: test_local_parallel has these among its long tests")
    sizes = {Role.PREFILL: 2, Role.DECODE: 1}
    engines = {role: engine_of(tensor_parallel_size=size) for role, size in sizes.items()}
    with LocalCluster(model, engines=engines, router=REMOTE) as cluster:
        assert ask(cluster) == expected
        assert cluster.status().totals.handoffs == len(PROMPTS)
        cluster.check()
