"""A machine whose shared memory is full: the host tier is as large as what there is."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import Effect
from kvrelay.kvtransfer.agent import AgentError, CopyBlocks
from kvrelay.kvtransfer.executor import ArenaExecutor
from kvrelay.kvtransfer.store.arena import RETRY_S, HostArena
from tests.kvtransfer.tiers.tier_world import TierWorld

SLOTS, SIZE, FEW = 24, 1 << 20, 9


class SmallMachine(TierWorld):
    """Host memory is a real arena, whose memory is taken before a slot is written."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(device=64, host=SLOTS)
        self.room = FEW * SIZE
        take = os.posix_fallocate

        def posix_fallocate(fd: int, offset: int, length: int) -> None:
            if offset + length > self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            take(fd, offset, length)

        monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)
        facts: dict[str, Any] = {"identity": {}, "lock_timeout_s": 0.0}
        self.arena = HostArena.open(folder, bytes_per_block=SIZE, num_slots=SLOTS, **facts)
        monkeypatch.setattr(self.arena, "_monotonic", lambda: self.now)
        self.index_of_arena = ArenaExecutor(self.arena)
        self.num_failed = 0

    def finish(self, read: CopyBlocks, error: str | None = None, *, damage: int = 0) -> None:
        if read.dst_tier is Tier.HOST:
            try:
                self.arena.reserve(read.dst)
            except AgentError as full:
                error = str(full)
                self.num_failed += 1
        super().finish(read, error, damage=damage)
        self.look()

    def look(self) -> None:
        for room in self.index_of_arena.check(False):
            effects: list[Effect] = self.tiers.on_store_room(room)
            self.perform(effects)


def test_where_memory_is_full_the_oldest_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = SmallMachine(tmp_path / "decode-0", monkeypatch)
    for number in range(60):
        world.serve(number)
        world.tick(2.0 if world.num_failed == 1 and number < FEW + 2 else 0.0)
    assert world.held(Tier.HOST) == [*range(60 - FEW, 60)]
    assert world.num_failed == 1
    assert world.tiers.num_lacking(Tier.HOST) == SLOTS - FEW
    [note] = [each for each in world.notes if each.counter == "host_memory_short"]
    assert f"memory for {FEW} of {SLOTS} blocks: No space left on device" in note.text

    world.room = (FEW + 5) * SIZE  # others have given some back
    world.look()
    assert world.tiers.num_lacking(Tier.HOST) == SLOTS - FEW, "it is asked for now and then"
    world.now += RETRY_S
    world.look()
    assert world.tiers.num_lacking(Tier.HOST) == SLOTS - FEW - 5
    world.room = SLOTS * SIZE
    world.now += RETRY_S
    world.look()
    assert world.tiers.num_lacking(Tier.HOST) == 0
    world.serve(*range(20))
    assert set(range(20)) <= set(world.held(Tier.HOST))
    world.assert_idle()
    world.arena.close(remove=True)
