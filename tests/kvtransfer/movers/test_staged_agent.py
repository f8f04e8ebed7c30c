"""Reads from disk for a device that no disk reaches; a CPU tensor stands for its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import AgentError
from kvrelay.kvtransfer.movers.disk import DiskMover
from kvrelay.kvtransfer.movers.staged import StagedMover
from kvrelay.kvtransfer.store import DiskStore
from tests.kvtransfer.fake_agent import FakeAgent
from tests.kvtransfer.movers.agent_kit import begin, ended, read, settle
from tests.kvtransfer.movers.nixl_peer import content

BLOCK, NUM_SLOTS, NUM_HOST, NUM_STAGING = 4096, 20, 4, 3
DISK, HOST = Tier.DISK, Tier.HOST


class Bench:
    """A StagedMover over `inner`, with 3 slots of staging behind 4 of the host tier."""

    def __init__(self, inner: object, arena: np.ndarray) -> None:
        self.device = torch.zeros((NUM_SLOTS, 2, BLOCK // 8), dtype=torch.float32)
        self.agent = StagedMover(inner, self.device, arena, NUM_HOST)  # type: ignore[arg-type]

    @property
    def device_bytes(self) -> np.ndarray:
        return self.device.flatten(1).view(torch.uint8).numpy()


@pytest.fixture
def arena() -> np.ndarray:
    return np.zeros((NUM_HOST + NUM_STAGING, BLOCK), np.uint8)


@pytest.fixture
def on_disk(tmp_path: Path, arena: np.ndarray) -> Iterator[tuple[Bench, np.ndarray]]:
    """Over a real store, and what its slots hold."""
    store = DiskStore.open(tmp_path, fingerprint=b"f", bytes_per_block=BLOCK, max_blocks=NUM_SLOTS)
    written = content(NUM_SLOTS, BLOCK, 1)
    for slot in range(NUM_SLOTS):
        assert store.fd >= 0
        with open(store.fd, "r+b", closefd=False) as file:
            file.seek(store.offset(slot))
            file.write(written[slot].tobytes())
    bench = Bench(DiskMover("me", {HOST: arena}, store), arena)
    yield bench, written
    bench.agent.close()
    store.close()


def test_more_blocks_than_the_staging_area_holds_arrive(
    on_disk: tuple[Bench, np.ndarray], arena: np.ndarray
) -> None:
    bench, written = on_disk
    src, dst = list(range(14)), list(range(19, 5, -1))
    read(bench.agent, "me", src, dst, DISK)
    assert np.array_equal(bench.device_bytes[dst], written[src])
    assert not bench.device_bytes[:6].any()
    assert not arena[:NUM_HOST].any(), "the host tier's own blocks are left alone"


def test_reads_share_the_staging_area(on_disk: tuple[Bench, np.ndarray]) -> None:
    bench, written = on_disk
    handles = [begin(bench.agent, "me", [i, i + 1], [i, i + 1], DISK) for i in range(0, 12, 2)]
    for handle in reversed(handles[:3]):
        bench.agent.cancel(handle)
        assert ended(bench.agent, handle).error is not None
    for handle in handles[3:]:
        settle(bench.agent, handle)
    assert np.array_equal(bench.device_bytes[6:12], written[6:12])
    assert len(bench.agent._free) == NUM_STAGING


def test_moves_of_host_memory_are_passed_on(
    on_disk: tuple[Bench, np.ndarray], arena: np.ndarray
) -> None:
    bench, written = on_disk
    read(bench.agent, "me", [7], [2], DISK, HOST)
    assert np.array_equal(arena[2], written[7])
    arena[1] = 9
    read(bench.agent, "me", [1], [7], HOST, DISK)
    read(bench.agent, "me", [7], [0], DISK)
    assert (bench.device_bytes[0] == 9).all()


def test_slots_are_free_only_when_nothing_writes_to_them(arena: np.ndarray) -> None:
    inner = FakeAgent()
    bench = Bench(inner, arena)
    first = begin(bench.agent, "me", [0, 1, 2, 3], [0, 1, 2, 3], DISK)
    second = begin(bench.agent, "me", [4], [4], DISK)
    assert inner.num_reads == 1, "no slot is left for the second"
    inner.pinned.add(0)
    assert bench.agent.poll(second) is None
    bench.agent.cancel(first)
    assert bench.agent.poll(first) is None
    assert bench.agent.poll(second) is None
    assert inner.num_reads == 1
    inner.pinned.clear()
    assert ended(bench.agent, first).error is not None
    assert bench.agent.poll(second) is None
    assert inner.num_reads == 2
    inner.states[1] = "done"
    settle(bench.agent, second)
    assert not inner.live


def test_a_batch_that_fails_fails_the_read(arena: np.ndarray) -> None:
    inner = FakeAgent(states=["done", "the disk is gone"])
    bench = Bench(inner, arena)
    handle = begin(bench.agent, "me", [0, 1, 2, 3], [0, 1, 2, 3], DISK)
    assert ended(bench.agent, handle).error == "the disk is gone"
    assert not inner.live
    assert len(bench.agent._free) == NUM_STAGING


def test_a_block_outside_the_device_is_refused(arena: np.ndarray) -> None:
    bench = Bench(FakeAgent(), arena)
    with pytest.raises(AgentError, match=f"destination block {NUM_SLOTS}"):
        begin(bench.agent, "me", [0], [NUM_SLOTS], DISK)
