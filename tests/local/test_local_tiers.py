"""The local cluster with tiers below its pools: KV that was evicted, or left by a process before,
is read instead of computed, and the answers are the same."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.request import SamplingParams
from kvrelay.kvtransfer.agent import CopyBlocks
from tests.kvtransfer.tiers.quiet import is_quiet
from tests.local.test_local import GREEDY, REMOTE, VOCAB, small
from tests.local.test_local import model_dir as model_dir
from tests.support.local import LocalCluster

LENGTH, NUM_PROMPTS = 150, 10
PROMPTS = [[(7 * i + 3 * j + i * j) % VOCAB for j in range(LENGTH)] for i in range(NUM_PROMPTS)]
CACHED = LENGTH // 16 * 16  # full blocks of a prompt, the last token being computed always
ENGINE = small(num_blocks=24)  # two prompts and their answers
MIB = 1 << 20
TIMEOUT_S = 30.0


def ask(cluster: LocalCluster) -> list[list[int]]:
    """One after the other, so that each is evicted by the next ones."""
    return [cluster.generate([prompt], GREEDY)[0].tokens for prompt in PROMPTS]


def fill(cluster: LocalCluster) -> list[list[int]]:
    """As `ask`; nothing is evicted before it is in the lower tiers, however slow they are."""
    answers = []
    for prompt in PROMPTS:
        answers.append(cluster.generate([prompt], GREEDY)[0].tokens)
        settle(cluster)
    return answers


def settle(cluster: LocalCluster) -> None:
    """Until all blocks are where the tiers want them."""
    nodes: list[Any] = [worker.node for worker in cluster.workers.values()]
    deadline = time.monotonic() + TIMEOUT_S
    while not cluster.run(lambda: all(is_quiet(n.exchange.tiers, n.core.now) for n in nodes)):
        cluster.check()
        assert time.monotonic() < deadline, "the tiers do not come to rest"
        time.sleep(0.002)


def num_cached(cluster: LocalCluster) -> int:
    return cluster.status().totals.cached_tokens


def wait_for(cluster: LocalCluster, name: str, at_least: int) -> None:
    """Until the workers together count this many."""
    deadline = time.monotonic() + TIMEOUT_S
    while (found := counted(cluster, name)) < at_least:
        cluster.check()
        assert time.monotonic() < deadline, f"{name} is {found}, not {at_least}"
        time.sleep(0.02)


def counted(cluster: LocalCluster, name: str) -> int:
    return sum(worker["counts"][name] for worker in cluster.audit()["workers"])


def load_all(cluster: LocalCluster) -> None:
    """Read whatever is there, though a model as small as this one computes it sooner."""
    for worker in cluster.workers.values():
        node: Any = worker.node
        rates = node.exchange.connector.rates
        assert callable(rates.load_s)  # a name that nobody reads would change nothing
        cluster.run(partial(setattr, rates, "load_s", lambda tier: 0.0))


def assert_clean(cluster: LocalCluster) -> None:
    """In the end: blocks that were not used for a while are still moved to further tiers."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        cluster.wait_idle(TIMEOUT_S)
        audit = cluster.audit()
        if audit["clean"]:
            return
        assert time.monotonic() < deadline, audit


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    with LocalCluster(model_dir, prefill=0, engine=small()) as cluster:
        tokens = ask(cluster)
        assert_clean(cluster)
    assert len({tuple(answer) for answer in tokens}) == NUM_PROMPTS
    return tokens


@pytest.mark.parametrize("prefill", [0, 1])
def test_evicted_kv_comes_back_from_host_memory(
    model_dir: Path, expected: list[list[int]], prefill: int
) -> None:
    router = REMOTE if prefill else None
    with LocalCluster(
        model_dir, prefill=prefill, engine=ENGINE, router=router, host_bytes=4 * MIB
    ) as cluster:
        load_all(cluster)
        assert fill(cluster) == expected
        before = num_cached(cluster)
        assert ask(cluster) == expected
        assert num_cached(cluster) - before == NUM_PROMPTS * CACHED
        assert_clean(cluster)
        assert counted(cluster, "host.used") >= NUM_PROMPTS * CACHED // 16
        assert counted(cluster, "disk.blocks") == 0


def test_bytes_that_went_bad_in_host_memory_are_computed_again(
    model_dir: Path, expected: list[list[int]]
) -> None:
    corrupted: list[CopyBlocks] = []

    def corrupt(read: CopyBlocks, pool: NDArray[np.uint8]) -> None:
        if read.src_tier is Tier.HOST and len(corrupted) < 3:
            pool[read.dst[-1], 7] ^= 0x10
            corrupted.append(read)

    with LocalCluster(
        model_dir, prefill=0, engine=ENGINE, corrupt=corrupt, host_bytes=4 * MIB
    ) as cluster:
        load_all(cluster)
        assert fill(cluster) == expected
        assert ask(cluster) == expected
        assert_clean(cluster)
    assert len(corrupted) == 3


@pytest.mark.parametrize("host_bytes", [0, 4 * MIB])
def test_kv_on_disk_outlives_the_process(
    model_dir: Path, expected: list[list[int]], tmp_path: Path, host_bytes: int
) -> None:
    num_blocks = NUM_PROMPTS * CACHED // 16
    tiers: dict[str, Any] = {
        "host_bytes": host_bytes,
        "disk_bytes": 16 * MIB,
        "disk_path": str(tmp_path),
        "disk_after_s": 0.0,
    }
    with LocalCluster(model_dir, prefill=0, engine=ENGINE, **tiers) as cluster:
        assert fill(cluster) == expected
        assert counted(cluster, "disk.used") >= num_blocks
        assert_clean(cluster)
    with LocalCluster(model_dir, prefill=0, engine=ENGINE, **tiers) as cluster:
        assert counted(cluster, "disk.used") >= num_blocks
        load_all(cluster)
        assert ask(cluster) == expected
        assert num_cached(cluster) == NUM_PROMPTS * CACHED
        assert_clean(cluster)


@pytest.mark.slow
def test_two_that_want_one_store_each_have_one(
    model_dir: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    tiers: dict[str, Any] = {"disk_bytes": 16 * MIB, "disk_path": str(tmp_path)}
    with (
        LocalCluster(model_dir, prefill=0, engine=ENGINE, **tiers) as first,
        LocalCluster(model_dir, prefill=0, engine=ENGINE, **tiers) as second,
    ):
        for cluster in (first, second):
            assert cluster.workers["decode-0"].notices == ()
            assert cluster.workers["decode-0"].info.num_disk_blocks > 0
        assert ask(second) == expected
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["decode-0", "decode-0~2"]


def test_a_folder_that_cannot_be_used_is_told_and_not_used(
    model_dir: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    with LocalCluster(
        model_dir, prefill=0, engine=ENGINE, disk_bytes=MIB, disk_path=str(tmp_path / "file")
    ) as cluster:
        (notice,) = cluster.workers["decode-0"].notices
        assert notice.startswith("serving without the disk tier: disk store ")
        assert cluster.workers["decode-0"].info.num_disk_blocks == 0
        assert ask(cluster) == expected
        assert_clean(cluster)


def test_what_other_models_left_on_disk_is_told(model_dir: Path, tmp_path: Path) -> None:
    tiers: dict[str, Any] = {"disk_bytes": MIB, "disk_path": str(tmp_path)}
    with LocalCluster(model_dir, prefill=0, engine=ENGINE, **tiers) as cluster:
        assert cluster.workers["decode-0"].notices == ()
    other = small(num_blocks=24, block_size=8)
    with LocalCluster(model_dir, prefill=0, engine=other, **tiers) as cluster:
        (notice,) = cluster.workers["decode-0"].notices
    assert notice.startswith("1 disk store(s) of other models or formats in")
    assert "decode-0" in notice


def test_an_audit_tells_live_requests_from_what_is_left_over(model_dir: Path) -> None:
    with LocalCluster(model_dir, prefill=0, engine=small()) as cluster:
        long = SamplingParams(max_tokens=300, temperature=0.0)
        future = cluster.submit(PROMPTS[0], long)
        wait_for(cluster, "device.in_use", 1)
        audit = cluster.audit()
        assert future.done() or (audit["live"], audit["clean"]) == (1, True)
        future.result(TIMEOUT_S)
        assert_clean(cluster)
        assert counted(cluster, "device.in_use") == 0
