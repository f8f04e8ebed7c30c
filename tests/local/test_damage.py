"""Changed bytes on the way between workers, in host memory and on disk: each one is noticed, every
answer is right, and what was lost is stored again. With windows and states, they change there.

`pytest -m "long or not long" tests/local/test_damage.py` is about windows and states, too."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvrelay.engine.kv.block_hash import hash_blocks, of_groups
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.request import SamplingParams
from kvrelay.kvtransfer.agent import CopyBlocks
from kvrelay.kvtransfer.codec import open_codec
from kvrelay.kvtransfer.store import folder
from kvrelay.worker import transfers
from tests.engine.model.tiny import VOCAB
from tests.local.test_local import REMOTE, small
from tests.local.test_local_tiers import MIB, assert_clean, counted, load_all, settle
from tests.support.local import LocalCluster

PROMPTS = [[(11 * i + 5 * j + i * j) % VOCAB for j in range(129)] for i in range(100)]
SAMPLING = SamplingParams(max_tokens=4, temperature=0.0)
ENGINE = small(num_blocks=64)


@pytest.fixture(
    scope="module",
    params=["llama", *(pytest.param(n, marks=pytest.mark.long) for n in ("qwen3-next", "gemma3"))],
)
def model(request: pytest.FixtureRequest, checkpoint_of: Callable[..., Path]) -> Path:
    untied = {"tie_word_embeddings": False} if request.param == "gemma3" else {}
    return checkpoint_of(request.param, **untied)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with LocalCluster(model, prefill=0, engine=small(num_blocks=2048)) as cluster:
        answers = cluster.generate(PROMPTS, SAMPLING)
    assert len({tuple(answer.tokens) for answer in answers}) > len(PROMPTS) // 2
    return [answer.tokens for answer in answers]


def ask(cluster: LocalCluster) -> list[list[int]]:
    return [cluster.generate([prompt], SAMPLING)[0].tokens for prompt in PROMPTS]


def fill(cluster: LocalCluster) -> list[list[int]]:
    """As `ask`; no block is evicted before it was copied down."""
    answers = []
    for prompt in PROMPTS:
        answers += [answer.tokens for answer in cluster.generate([prompt], SAMPLING)]
        settle(cluster)
    return answers


def slots_read_again(cluster: LocalCluster) -> list[int]:
    """Where the blocks are that each prompt continues after: of groups that have windows or hold
    states, if any do."""
    node: Any = cluster.workers["decode-0"].node
    config, windows, slots = node.config, node.config.kv_windows, []
    for prompt in PROMPTS:
        names = hash_blocks(config.fingerprint, UNSALTED, prompt, config.block_size)
        names = of_groups(names, windows.count)
        for index in windows.kept(windows.tokens(windows.full(len(prompt) - 1))):
            if not windows.any or windows.groups[index % windows.count].size:
                (source,) = cluster.run(lambda n=names[index]: node.exchange.tiers.find([n]))
                slots.append(source.slot)
    assert len(slots) == len(set(slots)) >= 100
    return slots


def num_bad(cluster: LocalCluster, tier: str) -> float:
    node: Any = cluster.workers["decode-0"].node
    value: float = cluster.run(lambda: node.exchange.tiers.counters.get(f"tier_bad_{tier}", 0))
    return value


def test_every_changed_byte_on_the_way_is_noticed(model: Path, expected: list[list[int]]) -> None:
    """One byte changes in a block of each prompt."""
    rng, damaged = random.Random(3), set[str]()

    def corrupt(read: CopyBlocks, pool: NDArray[np.uint8]) -> None:
        node: Any = cluster.workers["decode-0"].node
        groups = node.config.kv_windows.groups
        for seq in list(node.core.seqs.values()):
            found = [
                block
                for index, block in enumerate(seq.block_ids)
                if block in read.dst and (len(groups) == 1 or groups[index % len(groups)].size)
            ]
            if found and seq.request_id not in damaged:
                damaged.add(seq.request_id)
                pool[rng.choice(found), rng.randrange(pool.shape[1])] ^= 1 << rng.randrange(8)

    with LocalCluster(model, engine=small(), router=REMOTE, corrupt=corrupt) as cluster:
        assert ask(cluster) == expected
        noticed = cluster.run(lambda: cluster.host.counters["kv_checksum_mismatch"])
        assert_clean(cluster)
    assert (len(damaged), noticed) == (len(PROMPTS), len(PROMPTS))


def test_every_changed_byte_in_host_memory_is_noticed(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    arenas: list[Any] = []
    open_host_tier = transfers.open_host_tier

    def open_and_keep(*args: Any, **options: Any) -> Any:
        opened = open_host_tier(*args, **options)
        arenas.append(opened.blocks)
        return opened

    monkeypatch.setattr(transfers, "open_host_tier", open_and_keep)
    with LocalCluster(model, prefill=0, engine=ENGINE, host_bytes=64 * MIB) as cluster:
        load_all(cluster)
        assert fill(cluster) == expected
        (host,) = arenas
        slots = slots_read_again(cluster)
        for slot in slots:
            host[slot][rng.randrange(len(host[slot]))] ^= 1 << rng.randrange(8)
        assert ask(cluster) == expected
        assert num_bad(cluster, "host") == len(slots)
        assert_clean(cluster)
        assert fill(cluster) == expected


@pytest.mark.slow
@pytest.mark.parametrize("disk_codec", ["lossless", pytest.param("none", marks=pytest.mark.long)])
def test_every_changed_byte_on_disk_is_noticed(
    model: Path,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    disk_codec: str,
) -> None:
    """With a codec, changes of what it reads: some bytes of a coded block say nothing."""
    rng, codec = random.Random(2), open_codec(disk_codec)
    monkeypatch.setattr(folder, "PAGE_BYTES", 16)  # such small blocks need all of a real page
    tiers: dict[str, Any] = {
        "disk_bytes": 64 * MIB,
        "disk_path": str(tmp_path),
        "disk_after_s": 0.0,
        "disk_codec": disk_codec,
    }
    with LocalCluster(model, prefill=0, engine=ENGINE, **tiers) as cluster:
        assert fill(cluster) == expected
        slots, stored = slots_read_again(cluster), counted(cluster, "disk.used")
    (path,) = tmp_path.rglob("blocks.kv")
    node: Any = cluster.workers["decode-0"].node
    block_bytes, slot_bytes = node.config.bytes_per_block, node.config.disk_slot_bytes
    data = np.memmap(path, np.uint8, "r+")
    with closing(sqlite3.connect(path.with_name("index.sqlite"))) as index:
        sizes = dict(index.execute("SELECT slot, num_bytes FROM records"))
    coded = [slot for slot in slots if 0 < sizes[slot] < slot_bytes]
    assert len(coded) > 50 or codec is None
    for slot in slots:
        in_slot = data[slot * slot_bytes :][:block_bytes]
        before, after = np.zeros((2, block_bytes), np.uint8)
        if codec is None or slot not in coded:
            in_slot[rng.randrange(block_bytes)] ^= 1 << rng.randrange(8)
            continue
        assert codec.decode(in_slot, before)
        after[:] = before
        while np.array_equal(before, after):
            in_slot[rng.randrange(sizes[slot])] ^= 1 << rng.randrange(8)
            if not codec.decode(in_slot, after):
                break
    data.flush()
    with LocalCluster(model, prefill=0, engine=ENGINE, **tiers) as cluster:
        load_all(cluster)
        assert counted(cluster, "disk.used") == stored
        assert ask(cluster) == expected
        assert num_bad(cluster, "disk") == len(slots)
        assert_clean(cluster)
        assert fill(cluster) == expected
