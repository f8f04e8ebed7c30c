"""The answers of ranks become one: when all have answered, and good only if all are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.kv.tier import DiskRecord, Tier
from kvrelay.kvtransfer.agent import (
    DAMAGED,
    MISSING,
    NOT_STORED,
    AttachStore,
    ConnectPeer,
    CopyBlocks,
    CopyDone,
    PeerConnected,
    ReadId,
    StoreFailed,
    StoreFound,
    StoreGone,
    StoreIndex,
)
from kvrelay.kvtransfer.checksum import MOD
from kvrelay.kvtransfer.ranks import RankAnswers

NUM_RANKS = 3
COUNTED = [True, False, True]  # the second has the heads of the first


def copy(number: int) -> CopyBlocks:
    return CopyBlocks(ReadId(number), "p", 1, (0, 1), (2, 3), 1.0)


def done(number: int, rank: int, error: str | None = None) -> CopyDone:
    sums = () if error else (MOD - 1 - rank, 10 * rank)
    stored = () if error else (4096 * rank, 8192)
    return CopyDone(ReadId(number), error, sums, 0.1 * (rank + 1), 100, stored)


class World:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.told: list[Any] = []
        self.answers = RankAnswers(COUNTED, self.sent.append, self.told.append)


@st.composite
def orders(draw: st.DrawFn) -> tuple[list[tuple[int, int]], set[tuple[int, int]]]:
    """Draws (number, rank) in some order, and which of them fail."""
    each = [(number, rank) for number in range(4) for rank in range(NUM_RANKS)]
    return draw(st.permutations(each)), draw(st.sets(st.sampled_from(each)))


@given(orders())
def test_copies_are_answered_once_all_have(
    case: tuple[list[tuple[int, int]], set[tuple[int, int]]],
) -> None:
    order, failing = case
    world = World()
    for number in range(4):
        world.answers.begin(copy(number))
    assert world.sent == [copy(number) for number in range(4)]
    missing = {number: set(range(NUM_RANKS)) for number in range(4)}
    for number, rank in order:
        error = f"rank {rank} failed" if (number, rank) in failing else None
        world.answers.add(rank, done(number, rank, error))
        missing[number].remove(rank)
        told = [answer for answer in world.told if answer.transfer_id == ReadId(number)]
        assert len(told) == (not missing[number])
        if told:
            first = min((r for n, r in failing if n == number), default=None)
            (answer,) = told
            assert answer.error == (None if first is None else f"rank {first} failed")
            assert answer.checksums == (((2 * MOD - 4) % MOD, 20) if first is None else ())
            assert answer.stored_bytes == ((3 * 4096, 3 * 8192) if first is None else ())
            assert answer.elapsed_s == 0.1 * NUM_RANKS
    assert world.answers.audit() == 0


def test_connections_may_be_made_again() -> None:
    world = World()
    request = ConnectPeer("p", 1, 8, b"metadata")
    for _ in range(2):
        world.answers.begin(request)
    good = PeerConnected("p", 1)
    for rank in (0, 1, 2):
        world.answers.add(rank, good)
    assert world.told == [good]
    world.answers.add(2, replace(good, error="refused"))
    for rank in (0, 1):
        world.answers.add(rank, good)
    assert world.told[1:] == [PeerConnected("p", 1, "refused")]
    assert world.answers.audit() == 0


def test_a_store_that_fails_in_one_rank_has_failed() -> None:
    world = World()
    change = StoreIndex(remove=(1,))
    world.answers.begin(change)
    assert world.sent == [change]
    failed = StoreFailed("disk full", tier=Tier.DISK)
    world.answers.add(2, failed)
    assert world.told == [failed]
    assert world.answers.audit() == 0


def found(*slots: int, checksum: int = 0) -> StoreFound:
    records = tuple(DiskRecord(slot, bytes([slot] * 16), checksum + slot, 60.0) for slot in slots)
    return StoreFound(Tier.LEFT, 8, 4, records, "decode-0")


def test_what_was_left_is_found_once_all_ranks_have_it() -> None:
    world = World()
    world.answers.add(0, found(8, 9, 10))
    assert world.sent == [AttachStore(Tier.LEFT, "decode-0", 8, 4)]
    world.answers.add(1, found(9, 8))
    world.answers.add(2, found(10, 9))
    assert world.told == [found(9)]
    world.answers.add(2, found(8, checksum=1))  # not the block that the others have
    world.answers.add(1, found(10))
    assert world.told[1:] == [found(10)]
    world.answers.add(0, found(11))
    assert len(world.sent) == 1, "it is attached already"


def test_what_has_gone_in_one_rank_is_found_by_none() -> None:
    world = World()
    gone = StoreGone(Tier.LEFT, 8, 4)
    world.answers.add(1, found(8))  # before rank 0 has asked for it: of an earlier time
    world.answers.add(0, found(8))
    world.answers.add(1, gone)
    world.answers.add(1, found(8))
    world.answers.add(2, found(8))
    assert world.told == [gone]
    for rank in range(NUM_RANKS):  # it comes back
        world.answers.add(rank, found(8))
    assert world.told[1:] == [found(8)]
    assert len(world.sent) == 2


def test_of_objects_ranks_have_read_parts_of_one_block_or_it_is_not_used() -> None:
    """Each object says what the checksum of all parts is."""
    world = World()
    world.answers.begin(copy(1))
    parts = (5, 5, 5, MISSING, 5), (5, 5, MISSING, MISSING, 5), (7, 7, 7, DAMAGED, 7)
    wholes = (12, 12, 12, 0, 13), (12, 12, 0, 0, 13), (12, 13, 12, 0, 13)
    for rank in range(NUM_RANKS):
        read = replace(done(1, rank), checksums=parts[rank], stored_bytes=())
        world.answers.add(rank, replace(read, whole_checksums=wholes[rank]))
    (joined,) = world.told
    assert joined.checksums == (12, DAMAGED, MISSING, DAMAGED, DAMAGED)
    assert joined.whole_checksums == ()


def test_of_blocks_in_fewer_bits_ranks_tell_what_they_will_read() -> None:
    """A rank whose heads were all kept as they are says nothing of its own; a block that one did
    not store is none."""

    def joined(*stored: tuple[int, ...]) -> tuple[int, ...]:
        world = World()
        world.answers.begin(copy(0))
        for rank, each in enumerate(stored):
            world.answers.add(rank, replace(done(0, rank), stored_checksums=each))
        (answer,) = world.told
        found: tuple[int, ...] = answer.stored_checksums
        return found

    kept = done(0, 2).checksums
    assert joined((), (), ()) == ()
    assert joined((5, 7), (5, 7), (1, 2)) == (6, 9)
    assert joined((5, 7), (5, 7), ()) == ((5 + kept[0]) % MOD, 7 + kept[1])
    assert joined((5, NOT_STORED), (5, 7), (1, 2)) == (6, NOT_STORED)
    assert joined((5, 7), (5, NOT_STORED), (1, 2)) == (6, NOT_STORED)
