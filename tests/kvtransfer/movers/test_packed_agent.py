"""Blocks between memory and memory that has them in four bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import NOT_STORED, AgentError, CopyBlocks, CopyDone, MoveId
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.executor import TransferExecutor
from kvrelay.kvtransfer.kivi import Quantizer
from kvrelay.kvtransfer.layout import BlockLayout
from kvrelay.kvtransfer.movers.packed import PackedMover
from kvrelay.kvtransfer.movers.pool import pool_bytes
from kvrelay.kvtransfer.store.arena import HostArena
from tests.kvtransfer.movers.agent_kit import begin
from tests.kvtransfer.test_kivi import SPEC, block_of

NUM_DEVICE, NUM_HOST, NUM_PACKED = 12, 9, 20
DEVICE, HOST, PACKED = Tier.DEVICE, Tier.HOST, Tier.PACKED
SHARE = BlockLayout(SPEC).share(0, 1)
QUANTIZER = Quantizer(SPEC, SPEC.num_kv_heads)


class World:
    def __init__(self, folder: Path) -> None:
        self.arena = HostArena.open(
            folder,
            identity={},
            bytes_per_block=QUANTIZER.num_bytes,
            num_slots=NUM_PACKED,
            lock_timeout_s=1.0,
        )
        self.host = torch.stack([block_of(SPEC, seed) for seed in range(NUM_HOST)])
        self.device = torch.zeros((NUM_DEVICE, *self.host.shape[1:]), dtype=torch.bfloat16)
        memory = {DEVICE: self.device, HOST: self.host}
        self.bytes = {tier: pool_bytes(pool) for tier, pool in memory.items()}
        self.mover = PackedMover(memory, self.arena, QUANTIZER, SHARE)
        self.copies = TransferExecutor("me", 1, self.mover, self.bytes, share=SHARE)
        self.number = 0

    def copy(self, src: list[int], dst: list[int], src_tier: Tier, dst_tier: Tier) -> CopyDone:
        self.number += 1
        way = CopyBlocks(MoveId(self.number), "me", 1, tuple(src), tuple(dst), 5.0)
        self.copies.post(
            CopyBlocks(
                *(way.transfer_id, "me", 1, way.src, way.dst, 5.0),
                src_tier=src_tier,
                dst_tier=dst_tier,
            )
        )
        (done,) = self.copies.poll_copies()
        assert isinstance(done, CopyDone)
        return done

    def checksums(self, tier: Tier, blocks: list[int]) -> tuple[int, ...]:
        return tuple(checksum_blocks(self.bytes[tier], blocks, SHARE))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "packed")
    yield world
    assert not world.copies.audit()
    world.copies.close(1.0)
    world.arena.close(remove=True)


def test_blocks_come_back_with_the_checksums_that_were_told(world: World) -> None:
    blocks, slots = list(range(NUM_HOST)), list(range(NUM_PACKED - NUM_HOST, NUM_PACKED))
    before = world.host.clone()
    done = world.copy(blocks, slots, HOST, PACKED)
    assert done.error is None
    assert done.checksums == world.checksums(HOST, blocks)  # so damage of the source is seen
    assert set(done.checksums).isdisjoint(done.stored_checksums)
    assert torch.equal(world.host, before)
    targets = [*range(1, NUM_HOST + 1)][::-1]
    read = world.copy(slots, targets, PACKED, DEVICE)
    assert read.checksums == done.stored_checksums == world.checksums(DEVICE, targets)
    assert 0 < (world.device[targets].float() - before.float()).std() < 0.3
    again = world.copy(slots[:4], [5, 6, 7, 8], PACKED, HOST)
    assert again.checksums == done.stored_checksums[:4]
    assert torch.equal(world.host[5:9], world.device[targets[:4]])


def test_parked_again_and_again_a_block_is_the_same(world: World) -> None:
    first = world.copy([0, 1], [0, 1], HOST, PACKED)
    for _ in range(5):
        assert world.copy([0, 1], [0, 1], PACKED, HOST).checksums == first.stored_checksums
        done = world.copy([0, 1], [0, 1], HOST, PACKED)
        assert done.checksums == done.stored_checksums == first.stored_checksums


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_bit_that_flips_in_memory_is_noticed(world: World, place: int) -> None:
    done = world.copy([0], [3], HOST, PACKED)
    row = world.arena.memory[3]
    row[place if place >= 0 else len(row) - 1] ^= 0x10
    assert world.copy([3], [0], PACKED, DEVICE).checksums != done.stored_checksums


def test_what_is_not_finite_is_not_stored(world: World) -> None:
    world.host[1, 0, 0, 0, 3, 3] = float("nan")
    done = world.copy([0, 1, 2], [0, 1, 2], HOST, PACKED)
    assert [each == NOT_STORED for each in done.stored_checksums] == [False, True, False]
    assert done.checksums == world.checksums(HOST, [0, 1, 2])


def test_what_it_cannot_copy_is_refused_by_name(world: World) -> None:
    for src, dst, tiers, text in (
        ([0], [0], (PACKED, PACKED), "from packed to packed of me: no packed memory is reached"),
        ([0], [NUM_PACKED], (HOST, PACKED), f"destination block {NUM_PACKED}"),
        ([0], [NUM_DEVICE], (PACKED, DEVICE), f"destination block {NUM_DEVICE}"),
    ):
        with pytest.raises(AgentError, match=text):
            begin(world.mover, "me", src, dst, *tiers)
    assert np.count_nonzero(world.bytes[DEVICE]) == 0
