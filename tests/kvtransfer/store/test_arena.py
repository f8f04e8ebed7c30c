"""Host memory that outlives its worker: what the next one finds, and what others read meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvrelay.engine.kv.tier import DiskRecord, Tier
from kvrelay.kvtransfer.agent import (
    AgentError,
    AttachStore,
    FindStored,
    StoreFound,
    StoreGone,
    StoreIndex,
)
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.movers.left import LIST_S, LOOK_S, MAX_FOUND, PACE_S, LeftMover
from kvrelay.kvtransfer.store import StoreError, StoreInUse
from kvrelay.kvtransfer.store.arena import (
    HEADER_BYTES,
    INDEX,
    RECORD,
    RESERVE_BYTES,
    HostArena,
    abandoned_arenas,
    arena_root,
    remove_arena,
)
from tests.kvtransfer.movers.agent_kit import begin

SIZE, SLOTS = 8192, 64
HOST, DEVICE, LEFT = Tier.HOST, Tier.DEVICE, Tier.LEFT


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def open_arena(folder: Path, identity: str = "a", **given: Any) -> HostArena:
    options: dict[str, Any] = {
        "identity": {"model": identity},
        "bytes_per_block": SIZE,
        "num_slots": SLOTS,
        "lock_timeout_s": 0.0,
    }
    return HostArena.open(folder, **options | given)


def write(arena: HostArena, slot: int, number: int, keep_s: float = 60.0) -> None:
    arena.reserve([slot])
    arena.memory[slot] = np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)
    (checksum,) = checksum_blocks(arena.memory, [slot])
    arena.update(StoreIndex(put=(DiskRecord(slot, name_of(number), checksum, keep_s),), tier=HOST))


def contents(arena: Any) -> dict[bytes, int]:
    """Slots by name; each has the bytes of its checksum."""
    for record in arena.records:
        assert checksum_blocks(arena.memory, [record.slot]) == [record.checksum]
    return {record.block_hash: record.slot for record in arena.records}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cluster" / "decode-0"


class TestTheNextWorker:
    def test_it_finds_what_was_listed_the_last_written_first(self, folder: Path) -> None:
        arena = open_arena(folder)
        for slot, number in ((3, 1), (5, 2), (1, 3)):
            write(arena, slot, number)
        arena.update(StoreIndex(remove=(5,), tier=HOST))
        write(arena, 3, 4)
        arena.close()
        again = open_arena(folder)
        assert contents(again) == {name_of(4): 3, name_of(3): 1}
        assert [record.block_hash for record in again.records] == [name_of(4), name_of(3)]
        again.close(remove=True)
        assert not folder.exists()

    def test_it_finds_nothing_of_another_form_nor_of_what_has_expired(self, folder: Path) -> None:
        arena = open_arena(folder)
        write(arena, 0, 1)
        write(arena, 1, 2, keep_s=-1.0)
        arena.close()
        again = open_arena(folder)
        assert contents(again) == {name_of(1): 0}
        again.close()
        other = open_arena(folder, "b")
        assert other.records == []
        assert not other.memory.any()
        other.close()
        assert open_arena(folder).records == []

    def test_it_may_have_another_size(self, folder: Path) -> None:
        arena = open_arena(folder)
        write(arena, 1, 1)
        write(arena, 40, 2)
        arena.close()
        smaller = open_arena(folder, num_slots=16)
        assert contents(smaller) == {name_of(1): 1}
        smaller.close()
        larger = open_arena(folder, num_slots=128)
        assert contents(larger) == {name_of(1): 1}
        write(larger, 127, 3)
        larger.close()

    def test_a_changed_record_is_not_found(self, folder: Path) -> None:
        arena = open_arena(folder)
        for slot in range(SLOTS):
            write(arena, slot, slot)
        arena.close()
        rng, index = random.Random(1), folder / INDEX
        whole = bytearray(index.read_bytes())
        for slot in range(0, SLOTS, 2):
            at = HEADER_BYTES + slot * RECORD.itemsize + rng.randrange(RECORD.itemsize)
            whole[at] ^= 1 << rng.randrange(8)
        index.write_bytes(whole)
        again = open_arena(folder)
        assert contents(again) == {name_of(slot): slot for slot in range(1, SLOTS, 2)}

    def test_one_that_lives_has_it_alone(self, folder: Path) -> None:
        arena = open_arena(folder)
        with pytest.raises(StoreInUse, match=f"process {os.getpid()} has it open"):
            open_arena(folder)
        arena.close()

    def test_one_that_was_killed_at_any_moment_leaves_what_fits(self, folder: Path) -> None:
        for seed in range(4):
            started = multiprocessing.get_context("fork").Process(target=_write_on, args=(folder,))
            started.start()
            while not (folder / INDEX).exists():
                pass
            started.join(0.05 + 0.02 * seed)
            assert started.pid is not None
            os.kill(started.pid, signal.SIGKILL)
            started.join()
            arena = open_arena(folder)
            assert contents(arena)
            arena.close()


def _write_on(folder: Path) -> None:
    arena, rng = open_arena(folder), random.Random(os.getpid())
    while True:
        slot = rng.randrange(SLOTS)
        arena.update(StoreIndex(remove=(slot,), tier=HOST))
        write(arena, slot, rng.randrange(1000))


class TestMemory:
    def test_it_is_taken_as_it_comes_into_use(self, folder: Path) -> None:
        arena = open_arena(folder, num_slots=4 * RESERVE_BYTES // SIZE)
        blocks = folder / "blocks.kv"
        assert blocks.stat().st_blocks == 0
        arena.reserve([0, 7])
        assert blocks.stat().st_blocks * 512 == RESERVE_BYTES
        arena.reserve([RESERVE_BYTES // SIZE])
        assert blocks.stat().st_blocks * 512 == 2 * RESERVE_BYTES
        arena.close()

    def test_more_than_there_is_room_for_is_refused_in_words(self, folder: Path) -> None:
        with pytest.raises(StoreError, match=r"GiB are needed, .* GiB are free"):
            open_arena(folder, num_slots=1 << 30)

    def test_workers_of_a_machine_share_its_memory(
        self, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        room = SimpleNamespace(f_bavail=3 * SLOTS * SIZE // 2, f_frsize=1)
        monkeypatch.setattr(os, "statvfs", lambda path: room)
        first = open_arena(folder, among=tmp_path)
        beside = folder.parent / "decode-1"
        with pytest.raises(StoreError, match="of them for others; give more shared memory"):
            open_arena(beside, among=tmp_path)
        open_arena(beside, among=tmp_path, num_slots=SLOTS // 2).close()
        first.close()
        open_arena(beside, among=tmp_path).close()

    def test_a_root_that_others_can_read_is_refused(self, tmp_path: Path) -> None:
        root = arena_root(tmp_path)
        assert root.stat().st_mode & 0o777 == 0o700
        root.chmod(0o755)
        with pytest.raises(StoreError, match="others may read it"):
            arena_root(tmp_path)

    def test_what_nobody_has_can_be_removed(self, tmp_path: Path, folder: Path) -> None:
        held, left = open_arena(folder), open_arena(folder.with_name("decode-1"))
        left.reserve([0])
        left.close()
        (found,) = abandoned_arenas(tmp_path)
        assert found == (left.folder, SLOTS * SIZE)
        assert not remove_arena(held.folder)
        assert remove_arena(left.folder)
        assert list(abandoned_arenas(tmp_path)) == []
        held.close()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def reader(folder: Path) -> Iterator[tuple[LeftMover, Clock, Any]]:
    clock, pool = Clock(), np.zeros((SLOTS, SIZE), np.uint8)
    agent = LeftMover("me", folder.parent, None, {DEVICE: pool}, clock)
    yield agent, clock, pool
    agent.close()


def look(agent: LeftMover, clock: Clock) -> list[StoreFound | StoreGone]:
    clock.now += LIST_S
    return agent.check(True)


class TestSurvivors:
    def test_they_read_what_the_dead_one_had_and_leave_it_to_the_next(
        self, folder: Path, reader: tuple[LeftMover, Clock, Any]
    ) -> None:
        agent, clock, pool = reader
        arena = open_arena(folder)
        write(arena, 5, 1)
        assert look(agent, clock) == []  # it lives
        was = arena.memory[5].copy()
        arena.close()
        (found,) = look(agent, clock)
        assert isinstance(found, StoreFound)
        (record,) = found.records
        assert (found.num_slots, record.block_hash, record.slot) == (SLOTS, name_of(1), 5)
        begin(agent, "me", [5], [9], LEFT, DEVICE)
        assert (pool[9] == was).all()

        clock.now += 60.0  # all of it has expired
        assert agent.check(True) == [StoreGone(LEFT, 0, SLOTS)]
        assert not folder.exists()
        with pytest.raises(AgentError, match="is back"):
            begin(agent, "me", [5], [9], LEFT, DEVICE)

    def test_what_is_asked_for_comes_first_and_the_rest_slowly(
        self, folder: Path, reader: tuple[LeftMover, Clock, Any]
    ) -> None:
        agent, clock, _ = reader
        num_slots = 4 * MAX_FOUND + 10
        arena = open_arena(folder, num_slots=num_slots)
        records = [DiskRecord(slot, name_of(slot), 7 * slot, 60.0) for slot in range(num_slots)]
        arena.update(StoreIndex(put=tuple(records), tier=HOST))
        session = tuple(map(name_of, range(MAX_FOUND + 5)))  # the oldest
        look(agent, clock)
        agent.update(FindStored((*session, name_of(num_slots + 3))))
        arena.close()

        def parts(pause_s: float) -> list[StoreFound]:
            found: list[StoreFound] = []
            while not found or found[-1].has_more or not found[-1].was_asked_for:
                changes = agent.check(True)
                found += [change for change in changes if isinstance(change, StoreFound)]
                clock.now += pause_s
                if not changes:
                    break
            records = [record for part in found for record in part.records]
            assert all((r.block_hash, r.checksum) == (name_of(r.slot), 7 * r.slot) for r in records)
            return found

        first = parts(PACE_S)
        assert [[r.slot for r in part.records] for part in first] == [
            [*range(MAX_FOUND)],
            [*range(MAX_FOUND, MAX_FOUND + 5)],
        ]
        clock.now -= PACE_S
        assert agent.check(True) == []  # the node has a turn
        clock.now += LOOK_S
        rest = parts(LOOK_S)
        assert not any(part.was_asked_for for part in rest)
        slots = [[record.slot for record in part.records] for part in rest]
        assert max(map(len, slots)) == MAX_FOUND
        assert [slot for part in slots for slot in part] == [*range(num_slots)][::-1]
        agent.update(FindStored(session[:3]))  # by a stream that comes later
        (part,) = parts(PACE_S)
        assert [record.slot for record in part.records] == [0, 1, 2]

    def test_a_worker_that_is_alone_looks_seldom(
        self, folder: Path, reader: tuple[LeftMover, Clock, Any]
    ) -> None:
        agent, clock, _ = reader
        look(agent, clock)
        assert agent.wait_s == LIST_S
        arena = open_arena(folder)
        look(agent, clock)
        assert agent.wait_s == LOOK_S  # it may die at any moment
        arena.close(remove=True)
        look(agent, clock)
        look(agent, clock)
        assert agent.wait_s == LIST_S

    def test_one_that_waits_gets_it(
        self, folder: Path, reader: tuple[LeftMover, Clock, Any]
    ) -> None:
        agent, clock, _ = reader
        arena = open_arena(folder)
        write(arena, 5, 1)
        arena.close()
        assert len(look(agent, clock)) == 1
        with ThreadPoolExecutor(1) as thread:
            opening = thread.submit(open_arena, folder, lock_timeout_s=10.0)
            changes: list[StoreFound | StoreGone] = []
            while not opening.done():
                changes += agent.check(True)  # by the same time: what is there must not expire
        assert changes == [StoreGone(LEFT, 0, SLOTS)]
        again = opening.result()
        assert contents(again) == {name_of(1): 5}
        assert look(agent, clock) == []
        again.close()
        (found,) = look(agent, clock)
        assert isinstance(found, StoreFound)

    def test_two_are_beside_each_other_and_gaps_are_used_again(
        self, folder: Path, reader: tuple[LeftMover, Clock, Any]
    ) -> None:
        agent, clock, pool = reader
        for number in range(3):
            arena = open_arena(folder.with_name(f"w{number}"))
            write(arena, 2, number)
            arena.close()
        found = [change for _ in range(3) for change in look(agent, clock)]
        firsts = {each.first_slot for each in found}
        assert firsts == {0, SLOTS, 2 * SLOTS}
        for each in found:
            assert isinstance(each, StoreFound)
            (record,) = each.records
            assert record.slot == each.first_slot + 2
            begin(agent, "me", [record.slot], [0], LEFT, DEVICE)
            assert checksum_blocks(pool, [0]) == [record.checksum]


class TestRanks:
    """Rank 0 says to which slots a place is attached; the others attach their parts there."""

    @pytest.fixture
    def follower(self, folder: Path) -> Iterator[LeftMover]:
        pool = np.zeros((SLOTS, SIZE), np.uint8)
        agent = LeftMover("me", folder.parent, None, {DEVICE: pool}, Clock(), follows=True)
        yield agent
        agent.close()

    def test_it_waits_until_its_part_is_free(self, folder: Path, follower: LeftMover) -> None:
        arena = open_arena(folder)
        write(arena, 5, 1)
        follower.update(AttachStore(LEFT, folder.name, 100, SLOTS))
        assert follower.check(True) == []  # that rank lives still
        arena.close()
        (found,) = follower.check(True)
        assert isinstance(found, StoreFound)
        assert (found.first_slot, found.place) == (100, folder.name)
        assert [record.slot for record in found.records] == [105]
        begin(follower, "me", [105], [0], LEFT, DEVICE)

    def test_it_looks_for_nothing_itself(self, folder: Path, follower: LeftMover) -> None:
        arena = open_arena(folder)
        write(arena, 5, 1)
        arena.close()
        assert look(follower, follower._clock) == []  # type: ignore[arg-type]

    def test_what_is_attached_to_the_same_slots_is_left(
        self, folder: Path, follower: LeftMover
    ) -> None:
        for name in ("a", "b"):
            arena = open_arena(folder.with_name(name))
            write(arena, 5, ord(name))
            arena.close()
        for name in ("a", "b"):
            follower.update(AttachStore(LEFT, name, 0, SLOTS))
            (found,) = look(follower, follower._clock)  # type: ignore[arg-type]
            assert isinstance(found, StoreFound)
            assert [r.block_hash for r in found.records] == [name_of(ord(name))]
        open_arena(folder.with_name("a")).close()  # nobody reads it any more

    def test_it_leaves_a_part_that_is_wanted(self, folder: Path, follower: LeftMover) -> None:
        arena = open_arena(folder)
        write(arena, 5, 1)
        arena.close()
        follower.update(AttachStore(LEFT, folder.name, 0, SLOTS))
        follower.check(True)
        with ThreadPoolExecutor(1) as thread:
            opening = thread.submit(open_arena, folder, lock_timeout_s=10.0)
            changes: list[StoreFound | StoreGone] = []
            while not opening.done():
                changes += follower.check(True)
        assert changes == [StoreGone(LEFT, 0, SLOTS)]
        assert contents(opening.result()) == {name_of(1): 5}
