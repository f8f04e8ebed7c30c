"""Blocks between memory and a disk that has them coded, on a real file system."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.engine.kv.spec import KVSpec
from kvrelay.engine.kv.tier import DiskRecord, Tier
from kvrelay.kvtransfer.agent import AgentError, StoreIndex
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.codec import ExponentCodec
from kvrelay.kvtransfer.kivi import Quantizer
from kvrelay.kvtransfer.layout import BlockLayout
from kvrelay.kvtransfer.movers import coded
from kvrelay.kvtransfer.movers.coded import CodedMover, open_coded
from kvrelay.kvtransfer.movers.staged import StagedMover
from kvrelay.kvtransfer.store import DiskStore, slot_bytes
from tests.kvtransfer.movers.agent_kit import begin, ended, read
from tests.kvtransfer.test_kivi import as_bytes, block_of

SIZE = 5 * 4096 + 1000  # six pages, the last of which is not full
NUM_DEVICE, NUM_HOST, NUM_SLOTS = 60, 40, 80
DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


def numbers(count: int, seed: int) -> np.ndarray:
    """Blocks of bfloat16, but each seventh, whose bytes are random."""
    rng = torch.Generator().manual_seed(seed)
    blocks = torch.randn((count, SIZE // 2), generator=rng).bfloat16().view(torch.uint8).numpy()
    blocks[::7] = np.random.default_rng(seed).integers(0, 256, blocks[::7].shape, np.uint8)
    return blocks


def opened_store(folder: Path) -> DiskStore:
    return DiskStore.open(
        folder,
        fingerprint=b"f" * 16,
        bytes_per_block=SIZE,
        max_blocks=NUM_SLOTS,
        codec=ExponentCodec.name,
    )


class World:
    def __init__(self, folder: Path) -> None:
        self.store = opened_store(folder)
        self.device, self.host = numbers(NUM_DEVICE, 1), numbers(NUM_HOST, 2)
        memory = {DEVICE: self.device, HOST: self.host}
        self.agent = open_coded("me", memory, self.store, ExponentCodec())

    def write(self, src: list[int], slots: list[int], tier: Tier = DEVICE) -> tuple[int, ...]:
        return read(self.agent, "me", src, slots, tier, DISK).stored_bytes

    def read(self, slots: list[int], dst: list[int], tier: Tier = DEVICE) -> None:
        done = read(self.agent, "me", slots, dst, DISK, tier)
        memory = self.device if tier is DEVICE else self.host
        assert done.checksums == tuple(checksum_blocks(memory, dst))

    def assert_idle(self) -> None:
        """All of the staging area is free."""
        free = [slot for slots in self.agent._free.values() for slot in slots]
        assert sorted(free) == list(range(len(self.agent._staging)))


@pytest.fixture(params=[128, 8], ids=["at once", "in batches"])
def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    monkeypatch.setattr(coded, "MAX_STAGING", request.param)
    world = World(tmp_path / "store")
    try:
        yield world
        world.assert_idle()
    finally:
        world.agent.close()
        world.store.close()


def test_a_read_that_fails_as_it_is_begun_leaves_no_slots_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = [*range(12)]
    world.write(slots, slots)
    inner, posted = world.agent._disk, []
    copy, poll = inner.copy, inner.poll

    def fails_the_second_time(*given: Any, **options: Any) -> Any:
        if posted:
            raise AgentError("no")
        posted.append(copy(*given, **options))
        return posted[0]

    monkeypatch.setitem(world.agent._most, True, 2)
    monkeypatch.setattr(inner, "copy", fails_the_second_time)
    monkeypatch.setattr(inner, "poll", lambda handle: None)  # it has not settled
    handle = begin(world.agent, "me", slots, slots, DISK, DEVICE)
    with pytest.raises(AgentError, match="no"):
        world.agent.poll(handle)
    world.agent.cancel(handle)
    assert world.agent.poll(handle) is None
    monkeypatch.setattr(inner, "poll", poll)
    monkeypatch.setattr(inner, "copy", copy)
    assert ended(world.agent, handle).error is not None
    world.read([1], [2])  # the fixture looks whether all slots are free


def test_blocks_come_back_and_take_the_pages_that_they_need(world: World) -> None:
    before, host = world.device.copy(), world.host.copy()
    slots = list(range(NUM_SLOTS - 1, NUM_SLOTS - 1 - NUM_DEVICE, -1))
    sizes = world.write(list(range(NUM_DEVICE)), slots)
    kept = world.store.slot_bytes
    assert [size == kept for size in sizes] == [i % 7 == 0 for i in range(NUM_DEVICE)]
    assert {size for size in sizes if size != kept} == {4 * 4096}
    assert world.write([3, 0], [0, 1], HOST) == (4 * 4096, kept)
    on_disk = os.fstat(world.store.fd).st_blocks * 512
    assert on_disk == sum(sizes) + 4 * 4096 + kept
    world.device[:] = 0
    world.read(slots, list(range(NUM_DEVICE)))
    assert np.array_equal(world.device, before)
    world.host[:] = 0
    world.read([1, 0, slots[5]], [0, 3, 9], HOST)
    assert np.array_equal(world.host[[0, 3]], host[[0, 3]])
    assert np.array_equal(world.host[9], before[5])
    assert not world.host[10:].any()


def test_a_slot_gives_back_what_the_next_block_does_not_need(world: World) -> None:
    world.write([0], [4])  # as it is
    assert os.fstat(world.store.fd).st_blocks * 512 == world.store.slot_bytes
    world.write([1], [4])
    assert os.fstat(world.store.fd).st_blocks * 512 == 4 * 4096
    world.write([7], [4])  # as it is again
    world.read([4], [2])
    assert np.array_equal(world.device[2], world.device[7])


def test_what_takes_how_much_is_known_to_the_next_process(tmp_path: Path) -> None:
    first = World(tmp_path)
    sizes = first.write([0, 1, 2], [5, 6, 7])
    sums = checksum_blocks(first.device, [0, 1, 2])
    records = tuple(DiskRecord(5 + i, bytes([i] * 16), sums[i], 100.0) for i in range(3))
    first.store.update(StoreIndex(put=records))
    first.agent.close()
    first.store.close()
    second = World(tmp_path)
    assert tuple(record.num_bytes for record in second.store.records) == sizes
    second.host[:] = 0
    second.read([7, 6, 5], [2, 1, 0], HOST)
    assert checksum_blocks(second.host, [0, 1, 2]) == sums
    second.agent.close()
    second.store.close()


def test_every_block_that_was_changed_on_disk_arrives_with_another_checksum(world: World) -> None:
    """Changes where they matter: what is behind a coded block, or is 0 in it, does not."""
    rng, codec = np.random.default_rng(3), ExponentCodec()
    slots = list(range(NUM_DEVICE))
    sizes = world.write(slots, slots)
    right = checksum_blocks(world.device, slots)
    for slot, size in zip(slots, sizes, strict=True):
        at, size = world.store.offset(slot), min(size, SIZE)
        data = np.frombuffer(os.pread(world.store.fd, size, at), np.uint8).copy()
        block = world.device[slot].copy()
        while np.array_equal(block, world.device[slot]):
            data[rng.integers(size)] ^= 1 << rng.integers(8)
            is_kept = size == SIZE
            if is_kept or not codec.decode(data, block):
                block = data[:SIZE] if is_kept else np.zeros(SIZE, np.uint8)
        os.pwrite(world.store.fd, data.tobytes(), at)
    world.device[:] = 0xA5
    world.read(slots, slots)
    found = checksum_blocks(world.device, slots)
    assert [a != b for a, b in zip(found, right, strict=True)] == [True] * NUM_DEVICE


def test_copies_that_are_given_up_leave_nothing_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = list(range(NUM_DEVICE))
    world.write(slots, slots)
    held, stopped = threading.Event(), world.agent._codec.decode

    def decode(*args: Any) -> bool:
        held.wait(10.0)
        return stopped(*args)

    monkeypatch.setattr(world.agent._codec, "decode", decode)
    handles = [begin(world.agent, "me", slots, slots, DISK, DEVICE) for _ in range(2)]
    deadline = time.monotonic() + 10.0
    while not any(task.running() for b in handles[0].batches for task in b.tasks):
        assert world.agent.poll(handles[0]) is None
        assert time.monotonic() < deadline
    world.agent.poll(handles[1])
    for handle in handles:
        world.agent.cancel(handle)
    assert world.agent.poll(handles[0]) is None, "a thread still writes to its blocks"
    held.set()
    for handle in handles:
        assert ended(world.agent, handle).error is not None
    world.read(slots, slots)


def test_a_disk_that_fails_fails_the_copy(world: World) -> None:
    world.write([1, 2], [1, 2])
    os.truncate(world.store.folder / "blocks.kv", world.store.offset(2) + 100)
    with pytest.raises(AgentError, match="was cut to"):
        world.read([1, 2], [1, 2])
    world.read([1], [5])
    assert np.array_equal(world.device[5], world.device[1])
    with pytest.raises(AgentError, match="from disk to disk of me: no disk memory is reached"):
        begin(world.agent, "me", [0], [0], DISK, DISK)
    with pytest.raises(AgentError, match="outside"):
        begin(world.agent, "me", [0], [NUM_DEVICE], DISK, DEVICE)


def test_a_gpu_gets_them_by_the_staging_area_of_host_memory(tmp_path: Path) -> None:
    """A tensor stands for its memory, which the mover is not told of."""
    world = World(tmp_path)
    blocks = world.host[:20].copy()
    world.write(list(range(20)), list(range(20)), HOST)
    world.agent._memory.pop(DEVICE)
    assert not world.agent.can_reach_device
    device = torch.zeros((NUM_DEVICE, SIZE // 2), dtype=torch.bfloat16)
    agent = StagedMover(world.agent, device, world.host, NUM_HOST - 3)
    read(agent, "me", list(range(20)), list(range(30, 50)), src_tier=DISK)
    assert np.array_equal(device.view(torch.uint8).numpy()[30:50], blocks)
    world.assert_idle()
    agent.close()
    world.store.close()


def test_closing_waits_for_what_runs(tmp_path: Path) -> None:
    world = World(tmp_path)
    slots = list(range(NUM_DEVICE))
    world.write(slots, slots)
    agent: CodedMover = world.agent
    agent.poll(begin(agent, "me", slots, slots, DISK, DEVICE))
    agent.close()
    before = world.device.copy()
    time.sleep(0.01)
    assert np.array_equal(world.device, before)
    world.store.close()


def test_approximate_blocks_take_five_and_a_half_bits_and_others_stay_exact(
    tmp_path: Path,
) -> None:
    spec = KVSpec(4, 2, 64, 16, "bfloat16")
    share = BlockLayout(spec).share(0, 1)
    store = DiskStore.open(
        *(tmp_path / "store",),
        fingerprint=b"f" * 16,
        bytes_per_block=spec.bytes_per_block,
        max_blocks=NUM_SLOTS,
        codec=ExponentCodec.name,
    )
    host = np.stack([as_bytes(block_of(spec, seed)) for seed in range(9)])
    host[3].view(np.uint16)[77] = 0x7F80  # infinite
    device = np.zeros_like(host)
    quantizer = Quantizer(spec, spec.num_kv_heads)
    memory = {DEVICE: device, HOST: host}
    agent = open_coded("me", memory, store, ExponentCodec(), share, quantizer)
    try:
        slots = list(range(20, 29))
        before = tuple(checksum_blocks(host, range(9), share))
        way, more = (list(range(9)), slots, HOST, DISK), {"approximate": slots[2:6]}
        written = read(agent, "me", *way, checksums=before, **more)
        read_as, sizes = written.stored_checksums, written.stored_bytes
        changed = [i for i in range(9) if read_as[i] != before[i]]
        assert changed == [2, 4, 5]  # and not the one that is not finite
        assert {sizes[i] for i in changed} == {slot_bytes(8 + quantizer.num_bytes)}
        assert min(sizes[i] for i in range(9) if i not in changed) > max(sizes[i] for i in changed)
        assert read(agent, "me", slots, list(range(9)), DISK, DEVICE).checksums == read_as
        assert np.array_equal(device[[0, 1, 3, 6, 7, 8]], host[[0, 1, 3, 6, 7, 8]])
        way, more = ([2], [40], DEVICE, DISK), {"approximate": [40]}
        again = read(agent, "me", *way, checksums=before[2:3], **more)
        assert again.stored_checksums == read_as[2:3]
        for slot, at in ((slots[2], 9), (slots[4], 500), (slots[5], sizes[5] - 5000)):
            (byte,) = os.pread(store.fd, 1, store.offset(slot) + at)
            os.pwrite(store.fd, bytes([byte ^ 1]), store.offset(slot) + at)
        found = read(agent, "me", slots, list(range(9)), DISK, DEVICE).checksums
        assert [found[i] != read_as[i] for i in (2, 4, 5)] == [True, True, True]
    finally:
        agent.close()
        store.close()
