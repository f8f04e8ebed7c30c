"""What a router knows of the workers' caches: prefixes by tier, gaps, epochs, expected blocks."""

from __future__ import annotations

import pytest

from kvrelay.engine.kv.events import KVEvents, KVSnapshot
from kvrelay.engine.kv.tier import Tier, TierHashes
from kvrelay.router.index.prefix_index import Held, PrefixIndex

RETRY_S = 1.0
EXPECTED_S = 10.0


def names(*numbers: int) -> tuple[bytes, ...]:
    return tuple(bytes([n]) * 16 for n in numbers)


CHAIN = names(1, 2, 3, 4, 5, 6)


def index_of(*workers: str) -> PrefixIndex:
    """Follows `workers`, epoch 1, each in step with event 0 and an empty cache."""
    index = PrefixIndex(RETRY_S, EXPECTED_S)
    for worker in workers:
        index.add(worker, 1)
        index.apply(0.0, KVSnapshot(worker, 1, 0, ()))
    return index


def found_by(index: PrefixIndex, now: float, hashes: tuple[bytes, ...]) -> dict[str, Held]:
    matches = index.lookup(now, b"".join(hashes))
    return {worker: matches.held(worker) for worker in matches.workers()}


def lengths(index: PrefixIndex, now: float, hashes: tuple[bytes, ...]) -> dict[str, int]:
    """How much of the prefix each worker has in device memory, where no other tier has any."""
    found = found_by(index, now, hashes)
    assert all(held.total == held.device for held in found.values())
    return {worker: held.device for worker, held in found.items()}


def test_lookup_counts_the_prefix_of_each_worker() -> None:
    index = index_of("a", "b", "c", "d")
    index.apply(0.0, KVEvents("a", 1, 1, CHAIN, ()))
    index.apply(0.0, KVEvents("b", 1, 1, CHAIN[:2], ()))
    index.apply(0.0, KVEvents("d", 1, 1, CHAIN[1:], ()))
    assert lengths(index, 0.0, CHAIN) == {"a": 6, "b": 2}
    assert lengths(index, 0.0, CHAIN[:2]) == {"a": 2, "b": 2}
    assert lengths(index, 0.0, ()) == {}


def test_a_hole_ends_the_prefix_though_later_blocks_are_there() -> None:
    index = index_of("a", "b")
    index.apply(0.0, KVEvents("a", 1, 1, CHAIN, ()))
    index.apply(0.0, KVEvents("b", 1, 1, CHAIN, ()))
    index.apply(0.0, KVEvents("a", 1, 2, (), (CHAIN[3],)))
    assert lengths(index, 0.0, CHAIN) == {"a": 3, "b": 6}


def test_a_gap_asks_for_a_snapshot_at_a_bounded_rate_and_freezes_the_view() -> None:
    index = index_of("a")
    assert not index.apply(0.0, KVEvents("a", 1, 1, CHAIN[:1], ()))
    assert index.apply(1.0, KVEvents("a", 1, 3, CHAIN[2:3], ()))
    assert not index.apply(1.5, KVEvents("a", 1, 4, CHAIN[3:4], ()))
    assert index.due(1.9) == []
    assert index.due(2.0) == ["a"]
    assert index.due(2.1) == []
    assert lengths(index, 2.1, CHAIN) == {"a": 1}
    assert not index.apply(2.2, KVSnapshot("a", 1, 4, CHAIN[:4]))
    assert index.in_step
    assert index.due(99.0) == []
    assert lengths(index, 2.2, CHAIN) == {"a": 4}


def test_a_snapshot_from_before_the_gap_does_not_close_it() -> None:
    index = index_of("a")
    assert index.apply(0.0, KVEvents("a", 1, 5, CHAIN[:1], ()))
    assert not index.apply(0.1, KVSnapshot("a", 1, 3, CHAIN[:3]))
    assert not index.in_step
    assert index.due(1.1) == ["a"]
    assert lengths(index, 1.1, CHAIN) == {"a": 3}


def test_repeated_and_older_news_change_nothing() -> None:
    index = index_of("a")
    index.apply(0.0, KVEvents("a", 1, 1, CHAIN[:2], ()))
    index.apply(0.0, KVEvents("a", 1, 2, (), CHAIN[1:2]))
    for old in (
        KVEvents("a", 1, 1, CHAIN[:2], ()),
        KVSnapshot("a", 1, 0, CHAIN),
        KVSnapshot("a", 1, 2, CHAIN),
        KVEvents("a", 0, 3, CHAIN, ()),
        KVEvents("stranger", 1, 1, CHAIN, ()),
    ):
        assert not index.apply(0.0, old)
    assert lengths(index, 0.0, CHAIN) == {"a": 1}
    assert index.in_step


def test_a_later_epoch_empties_the_view_and_asks() -> None:
    index = index_of("a")
    index.apply(0.0, KVEvents("a", 1, 1, CHAIN, ()))
    index.expect(0.0, "a", b"".join(names(9)))
    assert index.apply(0.1, KVEvents("a", 2, 1, CHAIN[:1], ()))
    assert lengths(index, 0.1, CHAIN) == {}
    assert index.num_blocks("a") == 0
    index.check_integrity()


def test_the_number_of_the_last_event_shows_that_it_was_lost() -> None:
    index = index_of("a")
    assert not index.on_event_seq(0.0, "a", 1, 0)
    assert not index.on_event_seq(0.0, "a", 2, 7)
    assert not index.on_event_seq(0.0, "stranger", 1, 7)
    assert index.on_event_seq(0.0, "a", 1, 1)
    assert not index.in_step


def test_a_removed_worker_leaves_nothing_and_its_place_is_used_again() -> None:
    index = index_of("a", "b")
    index.apply(0.0, KVEvents("a", 1, 1, CHAIN, ()))
    index.apply(0.0, KVEvents("b", 1, 1, CHAIN[:1], ()))
    index.expect(0.0, "a", b"".join(names(9)))
    index.remove("a")
    index.remove("a")
    index.check_integrity()
    assert lengths(index, 0.0, CHAIN) == {"b": 1}
    index.add("c", 1)
    assert index.due(0.0) == ["c"]
    index.apply(0.0, KVSnapshot("c", 1, 4, CHAIN[:2]))
    assert lengths(index, 0.0, CHAIN) == {"c": 2, "b": 1}
    index.check_integrity()


def test_expected_blocks_count_until_they_expire() -> None:
    index = index_of("a")
    index.expect(0.0, "a", b"".join(CHAIN[:3]))
    assert lengths(index, EXPECTED_S - 0.1, CHAIN) == {"a": 3}
    assert lengths(index, EXPECTED_S, CHAIN) == {}
    index.check_integrity()


def test_what_is_expected_already_is_not_expected_for_longer() -> None:
    index = index_of("a")
    index.expect(0.0, "a", b"".join(CHAIN[:2]))
    index.expect(5.0, "a", b"".join(CHAIN[:3]))
    assert lengths(index, EXPECTED_S - 1, CHAIN) == {"a": 3}
    assert lengths(index, EXPECTED_S, CHAIN) == {}
    index.expect(EXPECTED_S, "a", b"".join(CHAIN[:3]))
    assert lengths(index, EXPECTED_S + 1, CHAIN) == {"a": 3}
    assert lengths(index, 2 * EXPECTED_S, CHAIN) == {}
    index.check_integrity()


def test_the_end_of_an_expectation_is_not_that_of_a_worker_in_the_same_place() -> None:
    index = index_of("a")
    index.expect(0.0, "a", b"".join(CHAIN[:2]))
    index.remove("a")
    index.due(1.0)
    index.add("b", 1)
    index.expect(5.0, "b", b"".join(CHAIN[:2]))
    assert lengths(index, EXPECTED_S + 1, CHAIN) == {"b": 2}


def test_a_real_block_replaces_an_expected_one() -> None:
    index = index_of("a")
    index.expect(0.0, "a", b"".join(CHAIN[:2]))
    index.apply(1.0, KVEvents("a", 1, 1, CHAIN[:1], ()))
    assert lengths(index, EXPECTED_S + 1, CHAIN) == {"a": 1}
    index.apply(1.0, KVEvents("a", 1, 2, (), CHAIN[:1]))
    assert lengths(index, EXPECTED_S + 1, CHAIN) == {}
    index.check_integrity()


def test_expected_blocks_are_bounded_and_the_oldest_go_first() -> None:
    index = PrefixIndex(RETRY_S, EXPECTED_S, max_expected=3)
    index.add("a", 1)
    index.expect(0.0, "a", b"".join(names(7)))
    index.expect(1.0, "a", b"".join(CHAIN[:3]))
    assert lengths(index, 1.0, names(7)) == {}
    assert lengths(index, 1.0, CHAIN) == {"a": 3}
    index.expect(1.0, "stranger", b"".join(CHAIN))
    index.check_integrity()


@pytest.mark.parametrize("num_workers", [1, 70])
def test_many_workers_are_told_apart(num_workers: int) -> None:
    workers = [f"w{n}" for n in range(num_workers)]
    index = index_of(*workers)
    for depth, worker in enumerate(workers):
        index.apply(0.0, KVEvents(worker, 1, 1, CHAIN[: 1 + depth % 6], ()))
    found = lengths(index, 0.0, CHAIN)
    assert found == {worker: 1 + depth % 6 for depth, worker in enumerate(workers)}


# -- tiers ------------------------------------------------------------------------------------


def below(tier: Tier, stored: tuple[bytes, ...], removed: tuple[bytes, ...] = ()) -> TierHashes:
    return TierHashes(tier, stored, removed)


def test_a_prefix_goes_on_from_tier_to_tier() -> None:
    index = index_of("a", "b", "c", "d")
    host, disk = below(Tier.HOST, CHAIN[1:4]), below(Tier.DISK, CHAIN)
    index.apply(0.0, KVEvents("a", 1, 1, CHAIN[:2], (), (host, disk)))
    index.apply(0.0, KVEvents("b", 1, 1, (), (), (disk,)))
    index.apply(0.0, KVEvents("c", 1, 1, CHAIN[1:], (), (below(Tier.HOST, CHAIN[:1]),)))
    index.apply(0.0, KVEvents("d", 1, 1, CHAIN[:1], (), (below(Tier.DISK, CHAIN[2:]),)))
    assert found_by(index, 0.0, CHAIN) == {
        "a": Held(device=2, host=2, disk=2, said=6),
        "b": Held(disk=6, said=6),
        "c": Held(host=6, said=6),  # a block of the device behind one of the host is in memory
        "d": Held(device=1, said=1),  # block 1 is nowhere
    }
    index.check_integrity()


def test_a_block_counts_for_the_fastest_tier_until_it_leaves_it() -> None:
    index = index_of("a")
    index.apply(0.0, KVEvents("a", 1, 1, CHAIN[:3], (), (below(Tier.HOST, CHAIN[:3]),)))
    index.apply(0.0, KVEvents("a", 1, 2, (), (), (below(Tier.DISK, CHAIN[:2]),)))
    assert found_by(index, 0.0, CHAIN) == {"a": Held(device=3, said=3)}
    index.apply(0.0, KVEvents("a", 1, 3, (), CHAIN[1:3]))
    assert found_by(index, 0.0, CHAIN) == {"a": Held(device=1, host=2, said=3)}
    index.apply(0.0, KVEvents("a", 1, 4, (), (), (below(Tier.HOST, (), CHAIN[:3]),)))
    assert found_by(index, 0.0, CHAIN) == {"a": Held(device=1, disk=1, said=2)}
    index.apply(0.0, KVEvents("a", 1, 5, (), CHAIN[:1], (below(Tier.DISK, (), CHAIN[:2]),)))
    assert found_by(index, 0.0, CHAIN) == {}
    index.check_integrity()


def test_names_and_numbers_are_told_apart_by_tier() -> None:
    index = index_of("a")
    host, disk = below(Tier.HOST, CHAIN[:3]), below(Tier.DISK, CHAIN[:4])
    index.apply(0.0, KVEvents("a", 1, 1, CHAIN[:2], (), (host, disk)))
    index.expect(0.0, "a", b"".join(CHAIN[2:5]))
    assert index.block_hashes("a") == index.block_hashes("a", Tier.DEVICE) == set(CHAIN[:2])
    assert index.block_hashes("a", Tier.HOST) == set(CHAIN[:3])
    assert index.block_hashes("a", Tier.DISK) == set(CHAIN[:4])
    assert index.block_hashes("stranger", Tier.DISK) == frozenset()
    assert index.num_blocks("a") == 5, "in device memory, and about to be there"


def test_a_snapshot_tells_all_of_every_tier() -> None:
    index = index_of("a")
    every = (below(Tier.HOST, CHAIN), below(Tier.DISK, CHAIN))
    index.apply(0.0, KVEvents("a", 1, 1, CHAIN, (), every))
    index.apply(0.0, KVSnapshot("a", 1, 2, CHAIN[:1], (below(Tier.DISK, CHAIN[:3]),)))
    assert found_by(index, 0.0, CHAIN) == {"a": Held(device=1, disk=2, said=3)}
    assert index.block_hashes("a", Tier.HOST) == frozenset()
    index.check_integrity()


def test_a_later_epoch_empties_every_tier() -> None:
    index = index_of("a", "b")
    for worker in ("a", "b"):
        index.apply(0.0, KVEvents(worker, 1, 1, (), (), (below(Tier.DISK, CHAIN),)))
    index.add("a", 2)
    assert found_by(index, 0.0, CHAIN) == {"b": Held(disk=6, said=6)}
    index.check_integrity()


def test_what_is_expected_is_in_the_device_but_was_not_said() -> None:
    index = index_of("a")
    index.apply(0.0, KVEvents("a", 1, 1, CHAIN[:1], (), (below(Tier.HOST, CHAIN[1:3]),)))
    index.expect(0.0, "a", b"".join(CHAIN[:5]))
    assert found_by(index, 0.0, CHAIN) == {"a": Held(device=5, said=3)}
    index.apply(0.0, KVEvents("a", 1, 2, (), (), (below(Tier.HOST, (), CHAIN[1:3]),)))
    assert found_by(index, 0.0, CHAIN) == {"a": Held(device=5, said=1)}
    assert found_by(index, EXPECTED_S, CHAIN) == {"a": Held(device=1, said=1)}
    index.check_integrity()


def test_blocks_become_tokens() -> None:
    assert Held(1, 2, 3, 4).times(16) == Held(16, 32, 48, 64)
    assert Held(1, 2, 3, 4).total == 6
