"""A thousand changed bytes in host memory and on disk: each one is noticed, every answer is right,
and what was lost is stored again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrelay.engine.request import SamplingParams
from kvrelay.worker import transfers
from tests.local.test_local import VOCAB, small
from tests.local.test_local import model_dir as model_dir
from tests.local.test_local_tiers import assert_clean, load_all, settle, wait_for
from tests.support.local import LocalCluster

BLOCKS_EACH, NUM_PROMPTS = 8, 63
NUM_BLOCKS = BLOCKS_EACH * NUM_PROMPTS  # all of them are damaged, in each of the two tiers
PROMPTS = [
    [(11 * i + 5 * j + i * j) % VOCAB for j in range(16 * BLOCKS_EACH + 1)]
    for i in range(NUM_PROMPTS)
]
SAMPLING = SamplingParams(max_tokens=4, temperature=0.0)
ENGINE = small(num_blocks=64)
MIB = 1 << 20


def ask(cluster: LocalCluster) -> list[list[int]]:
    return [cluster.generate([prompt], SAMPLING)[0].tokens for prompt in PROMPTS]


def fill(cluster: LocalCluster) -> list[list[int]]:
    """As `ask`; no block is evicted before it was copied down."""
    answers = []
    for prompt in PROMPTS:
        answers += [answer.tokens for answer in cluster.generate([prompt], SAMPLING)]
        settle(cluster)
    return answers


def counter(cluster: LocalCluster, name: str) -> float:
    node: Any = cluster.workers["decode-0"].node
    value: float = cluster.run(lambda: node.exchange.tiers.counters.get(name, 0))
    return value


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    with LocalCluster(model_dir, prefill=0, engine=small(num_blocks=1024)) as cluster:
        return ask(cluster)


def test_every_changed_byte_in_host_memory_is_noticed(
    model_dir: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    arenas: list[Any] = []
    open_host_tier = transfers.open_host_tier

    def open_and_keep(*args: Any, **options: Any) -> Any:
        opened = open_host_tier(*args, **options)
        arenas.append(opened.blocks)
        return opened

    monkeypatch.setattr(transfers, "open_host_tier", open_and_keep)
    with LocalCluster(model_dir, prefill=0, engine=ENGINE, host_bytes=16 * MIB) as cluster:
        load_all(cluster)
        assert fill(cluster) == expected
        (host,) = arenas
        for block in host:
            block[rng.randrange(len(block))] ^= 1 << rng.randrange(8)
        assert ask(cluster) == expected
        assert counter(cluster, "tier_bad_host") == NUM_BLOCKS
        assert_clean(cluster)
        assert fill(cluster) == expected


def test_every_changed_byte_on_disk_is_noticed(
    model_dir: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    rng = random.Random(2)
    tiers: dict[str, Any] = {
        "disk_bytes": 32 * MIB,
        "disk_path": str(tmp_path),
        "disk_after_s": 0.0,
    }
    with LocalCluster(model_dir, prefill=0, engine=ENGINE, **tiers) as cluster:
        assert fill(cluster) == expected
    (path,) = tmp_path.rglob("blocks.kv")
    node: Any = cluster.workers["decode-0"].node
    block_bytes = node.config.bytes_per_block
    data = np.memmap(path, np.uint8, "r+")
    slot = -(-block_bytes // 4096) * 4096
    for start in range(0, len(data) - block_bytes + 1, slot):
        data[start + rng.randrange(block_bytes)] ^= 1 << rng.randrange(8)
    data.flush()
    with LocalCluster(model_dir, prefill=0, engine=ENGINE, **tiers) as cluster:
        load_all(cluster)
        wait_for(cluster, "disk.used", NUM_BLOCKS)
        assert ask(cluster) == expected
        assert counter(cluster, "tier_bad_disk") == NUM_BLOCKS
        assert_clean(cluster)
        assert fill(cluster) == expected
