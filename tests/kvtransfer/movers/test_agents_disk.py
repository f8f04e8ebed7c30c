"""Blocks between memory and a disk store, by NIXL's file backends, on a real file system."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import AgentError
from kvrelay.kvtransfer.movers import disk
from kvrelay.kvtransfer.movers.disk import DiskMover
from kvrelay.kvtransfer.movers.metadata import Space
from kvrelay.kvtransfer.store import DiskStore
from tests.kvtransfer.movers.agent_kit import begin, fails, read, settle
from tests.kvtransfer.movers.nixl_peer import content
from tests.kvtransfer.store.stores import files_up_to, open_store

SIZE = 5000  # not a multiple of a page
NUM_DEVICE, NUM_HOST, NUM_SLOTS = 200, 300, 400  # a transfer is more than one batch of NIXL's
DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


@dataclass
class World:
    agent: DiskMover
    store: DiskStore
    device: np.ndarray
    host: np.ndarray

    def on_disk(self, slot: int) -> np.ndarray:
        return np.frombuffer(os.pread(self.store.fd, SIZE, self.store.offset(slot)), np.uint8)

    def write(self, src: list[int], slots: list[int], tier: Tier = DEVICE) -> None:
        read(self.agent, "me", src, slots, src_tier=tier, dst_tier=DISK)

    def read(self, slots: list[int], dst: list[int], tier: Tier = HOST) -> None:
        read(self.agent, "me", slots, dst, src_tier=DISK, dst_tier=tier)


@contextmanager
def opened(tmp_path: Path) -> Iterator[World]:
    store = open_store(tmp_path / "store", bytes_per_block=SIZE, max_blocks=NUM_SLOTS)
    device, host = content(NUM_DEVICE, SIZE, 1), content(NUM_HOST, SIZE, 2)
    fds = len(os.listdir("/proc/self/fd"))
    agent = DiskMover("me", {DEVICE: device, HOST: host}, store)
    try:
        yield World(agent, store, device, host)
    finally:
        agent.close()
        assert len(os.listdir("/proc/self/fd")) <= fds
        store.close()


@pytest.fixture(params=disk.QUEUES)
def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    monkeypatch.setattr(disk, "QUEUES", (request.param,))
    with opened(tmp_path) as world:
        yield world


def test_blocks_written_from_any_memory_are_read_into_any_other(world: World) -> None:
    assert world.agent.can_reach_device
    rng = random.Random(0)
    slots = rng.sample(range(NUM_SLOTS), NUM_SLOTS)
    of_device, of_host = slots[:NUM_DEVICE], slots[NUM_DEVICE : NUM_DEVICE + 150]
    device, host = world.device.copy(), world.host.copy()
    world.write(list(range(NUM_DEVICE)), of_device)
    world.write(list(range(150)), of_host, tier=HOST)
    for i in (0, 77, 199):
        assert np.array_equal(world.on_disk(of_device[i]), device[i])
    world.device[:] = 0
    expected = host.copy()
    into = rng.sample(range(NUM_HOST), NUM_DEVICE)
    world.read(of_device, into)
    expected[into] = device
    assert np.array_equal(world.host, expected)
    world.read(of_host, list(range(150)), tier=DEVICE)
    assert np.array_equal(world.device[:150], host[:150])
    assert not world.device[150:].any()


def test_transfers_run_side_by_side(world: World) -> None:
    world.write(list(range(100)), list(range(100)))
    handles = [
        begin(world.agent, "me", [slot], [299 - slot], src_tier=DISK, dst_tier=HOST)
        for slot in range(100)
    ]
    for handle in reversed(handles):
        settle(world.agent, handle)
    assert np.array_equal(world.host[200:], world.device[:100][::-1])


def test_a_file_that_was_cut_is_an_error_and_changes_nothing(world: World) -> None:
    world.write([0, 1, 2], [0, 1, 2])
    os.truncate(world.store.folder / "blocks.kv", world.store.offset(1) + SIZE - 1)
    before = world.host.copy()
    assert "was cut to" in fails(world.agent, "me", [0, 1], [0, 1], src_tier=DISK, dst_tier=HOST)
    assert np.array_equal(world.host, before)
    world.read([0], [5])
    assert np.array_equal(world.host[5], world.device[0])


def test_a_file_that_is_cut_during_a_read_is_an_error(world: World) -> None:
    world.write([0, 1], [0, 1])
    handle = begin(world.agent, "me", [0, 1], [0, 1], src_tier=DISK, dst_tier=HOST)
    os.truncate(world.store.folder / "blocks.kv", world.store.offset(1))
    with pytest.raises(AgentError, match="was cut to 8192 bytes"):
        settle(world.agent, handle)


def test_a_full_disk_fails_the_write_and_not_the_others(world: World) -> None:
    many = list(range(NUM_DEVICE))
    with files_up_to(world.store.offset(350) + SIZE // 2):
        handles = [
            begin(world.agent, "me", many, many, src_tier=DEVICE, dst_tier=DISK),
            begin(world.agent, "me", [0, 1], [349, 350], src_tier=DEVICE, dst_tier=DISK),
            begin(world.agent, "me", many[::-1], many, src_tier=HOST, dst_tier=DISK),
        ]
        with pytest.raises(AgentError, match=r"from device to disk of me: .* GiB free"):
            settle(world.agent, handles[1])
        settle(world.agent, handles[0])
        settle(world.agent, handles[2])
        with pytest.raises(AgentError, match="of me"):
            world.write([0], [360])
    world.write([0, 1], [349, 350])
    world.read([350, 349], [0, 1])
    assert np.array_equal(world.host[:2], world.device[[1, 0]])


def test_a_store_that_was_made_anew_is_written_under_its_new_file(world: World) -> None:
    world.write([0], [0])
    shutil.rmtree(world.store.folder)
    assert world.store.check() is not None
    world.write([1], [1])
    assert np.array_equal(world.on_disk(1), world.device[1])
    assert not world.on_disk(0).any()
    world.read([1], [0])
    assert np.array_equal(world.host[0], world.device[1])


def test_a_write_into_a_file_that_the_store_has_given_up_is_an_error(world: World) -> None:
    handle = begin(world.agent, "me", [0], [0], src_tier=DEVICE, dst_tier=DISK)
    shutil.rmtree(world.store.folder)
    assert world.store.check() is not None
    with pytest.raises(AgentError, match="has another file now"):
        settle(world.agent, handle)
    assert not world.on_disk(0).any()


def test_a_store_that_is_closed_is_an_error(world: World) -> None:
    world.store.close()
    assert "is not open" in fails(world.agent, "me", [0], [0], src_tier=HOST, dst_tier=DISK)


@pytest.mark.parametrize(
    ("args", "tiers", "what"),
    [
        (("me", [0], [0]), (DISK, DISK), "no disk memory is reached"),
        (("me", [400], [0]), (DISK, HOST), "source block 400 is outside"),
        (("me", [0], [300]), (DISK, HOST), "destination block 300 is outside"),
        (("me", [200], [0]), (DEVICE, DISK), "source block 200 is outside"),
        (("me", [0], [-1]), (DEVICE, DISK), "destination block -1 is outside"),
        (("me", [0, 1], [0]), (DEVICE, DISK), "2 source and 1 destination"),
    ],
)
def test_what_it_cannot_move_is_refused(
    tmp_path: Path, args: tuple[Any, ...], tiers: tuple[Tier, Tier], what: str
) -> None:
    with opened(tmp_path) as world:
        before = world.host.copy()
        assert what in fails(world.agent, *args, src_tier=tiers[0], dst_tier=tiers[1])
        assert np.array_equal(world.host, before)


def test_blocks_on_their_way_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MAX_LIVE_BLOCKS", 3)
    with opened(tmp_path) as world:
        handle = begin(world.agent, "me", [0, 1], [0, 1], src_tier=DEVICE, dst_tier=DISK)
        text = fails(world.agent, "me", [2, 3], [2, 3], src_tier=DEVICE, dst_tier=DISK)
        assert "2 of at most 3 blocks are on their way" in text
        settle(world.agent, handle)
        world.write([2, 3], [2, 3])


@pytest.mark.parametrize("refused", ["backend", "file system"])
def test_without_gpu_direct_storage_device_memory_is_reached_by_host_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """The device pool is said to be a GPU's, on a machine that has none."""
    if refused == "file system":
        be_strange(monkeypatch, forbidden=("GDS",))
    located = disk.space_of

    def space_of(pool: np.ndarray) -> tuple[Space, int]:
        space, size = located(pool)
        return (space if len(pool) == NUM_HOST else Space(len(pool), 1 << 40, "VRAM")), size

    monkeypatch.setattr(disk, "space_of", space_of)
    with opened(tmp_path) as world:
        assert not world.agent.can_reach_device
        for tiers in ((DEVICE, DISK), (DISK, DEVICE)):
            text = fails(world.agent, "me", [0], [0], src_tier=tiers[0], dst_tier=tiers[1])
            assert "no device memory is reached" in text
        world.write([3], [9], tier=HOST)
        world.read([9], [4])
        assert np.array_equal(world.host[4], world.host[3])


GDS = 1 << 40  # a backend that no agent has, and its list


class StrangeAgent:
    """NIXL's agent, but for what the test says."""

    def __init__(self, agent: Any, forbidden: tuple[str, ...], stalled: list[bool]) -> None:
        self._agent = agent
        self._forbidden = forbidden
        self._stalled = stalled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def createBackend(self, kind: str, options: dict[str, str]) -> Any:
        if set(options) & set(self._forbidden):
            raise RuntimeError("not permitted")
        if kind == "GDS" and kind in self._forbidden:
            return GDS
        return self._agent.createBackend(kind, options)

    def registerMem(self, descs: Any, backends: list[int]) -> Any:
        if backends != [GDS]:
            return self._agent.registerMem(descs, backends)
        if descs.getType() == disk.open_nixl(on_cpu=False).FILE_SEG:
            raise RuntimeError("NIXL_ERR_BACKEND")
        return None

    def prepXferDlist(self, agent: str, descs: Any, backends: list[int]) -> int:
        return GDS if backends == [GDS] else self._agent.prepXferDlist(agent, descs, backends)

    def releasedDlistH(self, dlist: int) -> None:
        if dlist != GDS:
            self._agent.releasedDlistH(dlist)

    def deregisterMem(self, descs: Any, backends: list[int]) -> None:
        if backends != [GDS]:
            self._agent.deregisterMem(descs, backends)

    def getXferStatus(self, handle: int) -> Any:
        status = self._agent.getXferStatus(handle)
        return disk.open_nixl(on_cpu=False).NIXL_IN_PROG if any(self._stalled) else status


def be_strange(
    monkeypatch: pytest.MonkeyPatch,
    forbidden: tuple[str, ...] = (),
    stalled: list[bool] | None = None,
) -> None:
    nixl = disk.open_nixl(on_cpu=False)

    class Bindings:
        def __getattr__(self, name: str) -> Any:
            return getattr(nixl, name)

        def nixlAgent(self, *args: Any) -> StrangeAgent:
            return StrangeAgent(nixl.nixlAgent(*args), forbidden, stalled or [])

    monkeypatch.setattr(disk, "open_nixl", lambda on_cpu: Bindings())


def test_where_io_uring_is_forbidden_another_queue_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_strange(monkeypatch, forbidden=("use_uring",))
    with opened(tmp_path) as world:
        world.write([1], [2])
        assert np.array_equal(world.on_disk(2), world.device[1])


def test_where_no_queue_works_the_error_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_strange(monkeypatch, forbidden=disk.QUEUES)
    why = pytest.raises(AgentError, match=r"disk of me: .*use_uring: .*not permitted")
    with why, opened(tmp_path):
        pass


def test_what_has_not_ended_has_not_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled = [False]
    be_strange(monkeypatch, stalled=stalled)
    with opened(tmp_path) as world:
        stalled[0] = True
        handle = begin(world.agent, "me", [0], [0], src_tier=DISK, dst_tier=HOST)
        for _ in range(10):
            assert world.agent.poll(handle) is None
            world.agent.cancel(handle)
        stalled[0] = False
        settle(world.agent, handle)


def test_memory_that_a_disk_may_still_write_to_is_never_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stalled = [False]
    be_strange(monkeypatch, stalled=stalled)
    abandoned: list[Any] = []
    monkeypatch.setattr(disk, "_abandoned", abandoned)
    monkeypatch.setattr(disk, "CLOSE_S", 0.05)
    store = open_store(tmp_path / "store", bytes_per_block=SIZE, max_blocks=NUM_SLOTS)
    host = content(4, SIZE, 0)
    agent = DiskMover("me", {HOST: host}, store)
    stalled[0] = True
    begin(agent, "me", [0], [0], src_tier=DISK, dst_tier=HOST)
    agent.close()
    assert "1 moves from and to disk have not ended" in caplog.text
    (kept,) = abandoned
    assert kept[1] == {HOST: host}
    stalled[0] = False
    kept[0].close()
    store.close()
