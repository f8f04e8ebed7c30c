"""The native table under the prefix index at sizes that a state machine does not reach."""

from __future__ import annotations

import random

import pytest

from kvrelay.engine.kv.block_hash import HASH_BYTES, unpack
from kvrelay.engine.kv.events import KVEvents, KVSnapshot
from kvrelay.engine.kv.tier import ANNOUNCED_TIERS, Tier, TierHashes
from kvrelay.router.index.prefix_index import (
    MAX_REPLACED,
    NOTHING,
    Held,
    IndexTable,
    PrefixIndex,
)
from kvrelay.router.native.bindings import bindings


def chain(seed: int, num_blocks: int) -> bytes:
    """Hashes of a prompt's blocks, packed."""
    return random.Random(seed).randbytes(HASH_BYTES * num_blocks)


def first(names: bytes, num_blocks: int) -> bytes:
    return names[: HASH_BYTES * num_blocks]


def index_of(held: dict[str, bytes]) -> PrefixIndex:
    """Each worker holds these blocks in device memory, and is in step."""
    index = PrefixIndex(1.0, 10.0)
    for worker, names in held.items():
        index.add(worker, 1)
        index.restore(0.0, worker, 1, 0, {Tier.DEVICE: names})
    return index


def settle(index: PrefixIndex) -> None:
    """What was put off is done."""
    for _ in range(100):
        index.due(0.0)
    index.check_integrity()


@pytest.mark.parametrize("num_blocks", [1, 2, 16, 17, 48, 49, 750, 7500, 9000])
def test_every_length_of_a_long_prefix_is_found_to_the_block(num_blocks: int) -> None:
    names = chain(1, num_blocks)
    rng = random.Random(num_blocks)
    lengths = {f"w{n}": rng.randint(0, num_blocks) for n in range(40)}
    lengths |= {"none": 0, "one": 1, "but one": num_blocks - 1, "all": num_blocks}
    index = index_of({worker: first(names, length) for worker, length in lengths.items()})
    matches = index.lookup(0.0, names)
    assert {w: matches.held(w).device for w in lengths} == lengths
    assert set(matches.workers()) == {w for w, length in lengths.items() if length}
    limited = index.lookup(0.0, names, limit=num_blocks // 2)
    assert {w: limited.held(w).total for w in lengths} == {
        w: min(length, num_blocks // 2) for w, length in lengths.items()
    }


def test_a_hole_behind_the_first_blocks_is_seen_where_it_was_asked_for() -> None:
    names = chain(2, 400)
    hole = HASH_BYTES * (15 + 5 * 32)  # asked about: block 15, and every 32nd from there on
    index = index_of({"a": names[:hole] + names[hole + HASH_BYTES :], "b": names})
    matches = index.lookup(0.0, names)
    assert matches.held("a").device == 175
    assert matches.held("b").device == 400


def test_a_hole_that_is_seen_while_looking_for_the_end_of_another_counts() -> None:
    names = chain(2, 400)
    hole = HASH_BYTES * 31  # between blocks 15 and 47, where the halving begins
    index = index_of({"a": names[:hole] + names[hole + HASH_BYTES :]})
    assert index.lookup(0.0, names).held("a").device == 400, "nobody asks about it"
    index.add("b", 1)
    index.restore(0.0, "b", 1, 0, {Tier.DEVICE: first(names, 20)})
    matches = index.lookup(0.0, names)
    assert matches.held("a").device == 31
    assert matches.held("b").device == 20


def test_holders_that_many_blocks_had_are_not_mistaken_for_those_of_another() -> None:
    """The memory of a set that is gone is used for the next one of its size."""
    x, y = chain(15, 1), chain(16, 1)
    workers = [f"w{n}" for n in range(10)]
    index = index_of(dict.fromkeys(workers, b""))
    told = [(x, n) for n in (0, 1, 2, 3, 9)] + [(y, n) for n in (4, 5, 6, 7, 9)]
    for name, n in told:
        seq = 2 if (name, n) == (y, 9) else 1
        index.apply(0.0, KVEvents(workers[n], 1, seq, (name,), ()))
    assert sorted(index.holdings([x])) == ["w0", "w1", "w2", "w3", "w9"]
    assert sorted(index.holdings([y])) == ["w4", "w5", "w6", "w7", "w9"]
    index.check_integrity()


def test_names_may_lie_in_any_buffer() -> None:
    names = chain(3, 100)
    index = index_of({"a": first(names, 70)})
    for given in (names, bytearray(names), memoryview(names), memoryview(bytearray(names))):
        assert index.lookup(0.0, given).held("a") == Held(device=70, said=70)
    index.expect(0.0, "a", bytearray(names))
    assert index.lookup(0.0, names).held("a") == Held(device=100, said=70)
    assert index.lookup(0.0, b"").held("a") == NOTHING
    with pytest.raises(ValueError, match="17 bytes"):
        index.lookup(0.0, bytes(17))


def test_many_blocks_of_many_holders_come_and_go() -> None:
    """A random walk against sets, with enough workers that holders spill out of their word."""
    rng = random.Random(4)
    pool = [rng.randbytes(HASH_BYTES) for _ in range(600)]
    workers = [f"w{n}" for n in range(50)]
    held: dict[str, dict[Tier, set[bytes]]] = {
        w: {t: set() for t in ANNOUNCED_TIERS} for w in workers
    }
    index = index_of(dict.fromkeys(workers, b""))
    seq = dict.fromkeys(workers, 0)
    for step in range(1500):
        worker = rng.choice(workers)
        if rng.random() < 0.02:
            index.remove(worker)
            index.add(worker, 1)
            index.apply(0.0, KVSnapshot(worker, 1, 0, ()))
            held[worker], seq[worker] = {t: set() for t in ANNOUNCED_TIERS}, 0
        tier = rng.choice(ANNOUNCED_TIERS)
        start = rng.randrange(len(pool))
        names = pool[start : start + rng.randint(1, 60)]
        there = held[worker][tier]
        if rng.random() < 0.6:
            change = TierHashes(tier, tuple(names))
            there |= set(names)
        else:
            change = TierHashes(tier, (), tuple(names))
            there -= set(names)
        seq[worker] += 1
        index.apply(0.0, KVEvents(worker, 1, seq[worker], (), (), (change,)))
        if step % 250 == 0:
            index.check_integrity()
    settle(index)
    assert {w: {t: index.block_hashes(w, t) for t in ANNOUNCED_TIERS} for w in workers} == held
    counts = index.holdings(pool)
    assert counts == {
        w: {t: len(names) for t, names in tiers.items() if names}
        for w, tiers in held.items()
        if any(tiers.values())
    }


def test_the_blocks_of_a_worker_that_went_are_taken_out_bit_by_bit() -> None:
    index = index_of({"a": chain(5, 50_000), "b": chain(6, 10)})
    index.remove("a")
    index.expect(0.0, "b", chain(7, 1))
    assert 10 < index.table.num_blocks < 50_000, "some at each call, not all at once"
    assert index.lookup(0.0, chain(5, 50_000)).workers() == []
    index.add("c", 1)
    index.check_integrity()
    settle(index)
    assert index.table.num_blocks == 11
    assert index.block_hashes("c") == frozenset()


def test_a_block_takes_less_than_48_bytes_and_room_is_given_back() -> None:
    names = chain(8, 300_000)
    index = PrefixIndex(1.0, 10.0, max_expected=0)
    empty = index.table.num_bytes
    for n in range(10):
        index.add(f"w{n}", 1)
        part = names[HASH_BYTES * 30_000 * n : HASH_BYTES * 30_000 * (n + 1)]
        index.restore(0.0, f"w{n}", 1, 0, {Tier.DEVICE: part})
    assert index.table.num_blocks == 300_000
    assert (index.table.num_bytes - empty) / 300_000 < 48
    for n in range(10):
        index.remove(f"w{n}")
    settle(index)
    assert index.table.num_blocks == 0
    assert index.table.num_bytes - empty < 3_000_000


def test_a_prefix_that_everybody_has_costs_no_more_than_its_names() -> None:
    names = chain(9, 2000)
    index = index_of({"w0": names})
    alone = index.table.num_bytes
    for n in range(1, 200):
        index.add(f"w{n}", 1)
        index.restore(0.0, f"w{n}", 1, 0, {Tier.DEVICE: names})
    lists = 200 * 2000 * 5  # each worker's own list of its blocks
    assert index.table.num_bytes - alone < lists + 100_000


def test_holders_of_a_hot_prefix_take_turns() -> None:
    names = chain(10, 10)
    held = {f"w{n}": names for n in range(20)} | {"short": first(names, 5)}
    index = index_of(held)
    turns = [index.lookup(0.0, names).best(0, limit=4) for _ in range(10)]
    assert sorted(w for turn in turns[:5] for w in turn) == sorted(set(held) - {"short"})
    assert turns[5:] == turns[:5]
    assert index.lookup(0.0, names).best(0, limit=21)[-1] == "short"
    assert index.lookup(0.0, names).best(1) == []


def test_workers_that_churn_for_ever_take_no_more_room() -> None:
    names = chain(11, 200)
    index = index_of({"a": names})
    seq = 0
    after: list[int] = []
    for _ in range(400):
        for change in ((names, b""), (b"", names)):
            seq += 1
            stored, removed = (
                tuple(part[i : i + 16] for i in range(0, len(part), 16)) for part in change
            )
            index.apply(0.0, KVEvents("a", 1, seq, stored, removed))
        after.append(index.table.num_bytes)
    assert max(after[50:]) <= max(after[:50])
    index.check_integrity()


def test_what_is_over_is_taken_out_in_parts() -> None:
    index = PrefixIndex(1.0, 10.0, max_expected=20_000)
    index.add("a", 1)
    index.expect(0.0, "a", chain(12, 5000))
    assert index.num_blocks("a") == 5000
    index.lookup(10.0, chain(13, 1))
    assert 0 < index.num_blocks("a") < 5000
    index.due(10.0)
    assert index.num_blocks("a") == 0
    index.check_integrity()


def test_a_table_follows_65535_workers_and_says_so_when_there_are_more() -> None:
    table = IndexTable(stride=64, max_expected=0)
    for _ in range(65_535):
        slot = table.open(0)
    with pytest.raises(ValueError, match="65,535 workers"):
        table.open(0)
    table.change(slot, chain(14, 3), add=1)
    table.close(slot)
    assert table.open(0) == slot
    assert table.num_blocks == 0


def test_only_what_the_header_declares_is_exported() -> None:
    library = bindings().library
    assert library["kvr_index_new"]
    for shared in ("change_block", "find_runs", "local_at"):
        with pytest.raises(AttributeError):
            library[shared]


def test_a_snapshot_in_place_of_many_blocks_leaves_them_to_later_calls() -> None:
    before, after = chain(3, MAX_REPLACED + 1), chain(4, 100)
    index = index_of({"a": before, "b": before})
    slots = dict.fromkeys("ab", -1)
    index.on_slot = lambda worker, slot: slots.update({worker: -1 if slot is None else slot})
    index.restore(0.0, "a", 1, 7, {Tier.DEVICE: after})
    assert slots == {"a": index.views["a"].slot, "b": -1}, "it has another slot"
    assert index.table.num_blocks == MAX_REPLACED + 101, "no block was taken out yet"
    assert index.lookup(0.0, before).held("a") == NOTHING
    assert index.lookup(0.0, after).held("a").device == 100
    assert index.lookup(0.0, before).held("b").device == MAX_REPLACED + 1
    settle(index)
    assert index.block_hashes("a") == set(unpack(after))
