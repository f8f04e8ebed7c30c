"""Host memory that outlives its worker: the next worker begins with it, and others of the machine
read it meanwhile; the tokens are the same."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvrelay.kvtransfer.store.arena import arena_root, arenas, remove_arenas
from tests.local.test_local import model_dir as model_dir
from tests.local.test_local import small
from tests.local.test_local_tiers import (
    CACHED,
    ENGINE,
    MIB,
    NUM_PROMPTS,
    TIMEOUT_S,
    ask,
    fill,
    load_all,
    num_cached,
)
from tests.support.local import LocalCluster


@pytest.fixture
def name() -> Iterator[str]:
    """Names a cluster of this test's own."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    remove_arenas(name)
    assert not (arena_root() / name).exists()


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    with LocalCluster(model_dir, prefill=0, engine=small(num_blocks=1024)) as cluster:
        return ask(cluster)


def leave(model_dir: Path, name: str, expected: list[list[int]]) -> None:
    """A worker computes the prompts, and is gone as one that was killed."""
    with LocalCluster(model_dir, prefill=0, engine=ENGINE, host_bytes=16 * MIB, name=name) as first:
        assert fill(first) == expected
        for built in first.workers.values():
            built.leave_kv()


def test_the_next_worker_begins_with_it(
    model_dir: Path, name: str, expected: list[list[int]]
) -> None:
    leave(model_dir, name, expected)
    with LocalCluster(model_dir, prefill=0, engine=ENGINE, host_bytes=16 * MIB, name=name) as next_:
        load_all(next_)
        assert ask(next_) == expected
        assert num_cached(next_) == NUM_PROMPTS * CACHED
        next_.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("host_bytes", [0, 16 * MIB])
def test_others_of_the_machine_read_it_meanwhile(
    model_dir: Path, name: str, expected: list[list[int]], host_bytes: int
) -> None:
    with LocalCluster(
        model_dir, prefill=0, engine=ENGINE, host_bytes=host_bytes, name=name
    ) as other:
        load_all(other)
        leave(model_dir, name, expected)
        wait_for_found(other)
        assert ask(other) == expected
        assert num_cached(other) == NUM_PROMPTS * CACHED
        other.wait_idle()


@pytest.mark.long
def test_ranks_read_what_ranks_have_left(
    model_dir: Path, name: str, expected: list[list[int]]
) -> None:
    """Each its part: those of the worker that has died, with the same division."""
    two = structs.replace(ENGINE, tensor_parallel_size=2)
    options = {"prefill": 0, "engine": two, "host_bytes": 16 * MIB, "name": name}
    with LocalCluster(model_dir, **options) as other:
        load_all(other)
        with LocalCluster(model_dir, **options) as first:
            answers = fill(first)
            for built in first.workers.values():
                built.leave_kv()
        wait_for_found(other, NUM_PROMPTS * CACHED // 16)
        assert ask(other) == answers == expected
        assert num_cached(other) == NUM_PROMPTS * CACHED
        other.wait_idle()
        assert num_arenas(name) == 4, "a rank whose leader ends without a word leaves its part"
    assert num_arenas(name) == 2, "ranks remove theirs when their worker is told to end"


def test_folders_that_are_empty_go_with_their_cluster(name: str) -> None:
    (arena_root() / name / "form").mkdir(parents=True)
    remove_arenas(name)
    assert not (arena_root() / name).exists()


def test_one_byte_that_changed_is_noticed(
    model_dir: Path, name: str, expected: list[list[int]]
) -> None:
    with LocalCluster(model_dir, prefill=0, engine=ENGINE, name=name) as other:
        load_all(other)
        leave(model_dir, name, expected)
        (kept,) = arenas(next((arena_root() / name).iterdir()))
        blocks = kept / "blocks.kv"
        changed = bytearray(blocks.read_bytes())
        for at in range(100, len(changed), 4096):
            changed[at] ^= 1
        with blocks.open("r+b") as file:
            file.write(changed)
        wait_for_found(other)
        assert ask(other) == expected
        assert num_cached(other) == 0


def num_arenas(name: str) -> int:
    return len(list((arena_root() / name).rglob("blocks.kv")))


def wait_for_found(cluster: LocalCluster, at_least: int = 1) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    nodes: list[Any] = [worker.node for worker in cluster.workers.values()]
    while at_least > sum(
        node.exchange.tiers.counters.get("tier_found_orphaned", 0) for node in nodes
    ):
        assert time.monotonic() < deadline, "nothing was found"
        time.sleep(0.02)
