"""What one worker has in an object store, all that share it have."""

from __future__ import annotations

from kvrelay.engine.kv.events import KVEvents, KVSnapshot
from kvrelay.router.index import prefix_index
from kvrelay.router.index.prefix_index import Held, PrefixIndex
from tests.router.index.test_prefix_index import CHAIN, names


def index_of(**kinds: bytes) -> PrefixIndex:
    index = PrefixIndex()
    for worker, kind in kinds.items():
        index.add(worker, 1, 0, kind)
        index.apply(0.0, KVSnapshot(worker, 1, 0, ()))
    return index


def put(
    index: PrefixIndex,
    worker: str,
    seq: int,
    put: tuple[bytes, ...] = (),
    removed: tuple[bytes, ...] = (),
    device: tuple[bytes, ...] = (),
) -> None:
    index.apply(0.0, KVEvents(worker, 1, seq, device, (), (), put, removed))


def held(index: PrefixIndex, worker: str) -> Held:
    return index.lookup(0.0, b"".join(CHAIN)).held(worker)


def test_all_of_one_kind_have_it_and_no_other_has() -> None:
    index = index_of(a=b"one", b=b"one", c=b"two")
    put(index, "a", 1, CHAIN[:4])
    assert held(index, "a") == held(index, "b") == Held(object=4)
    assert held(index, "c") == Held()
    found = index.lookup(0.0, b"".join(CHAIN))
    assert (found.stored(b"one"), found.stored(b"two"), found.workers()) == (4, 0, [])
    assert found.best(0) == [], "none holds more than another"
    index.check_integrity()


def test_it_counts_beyond_what_the_worker_has_itself() -> None:
    index = index_of(a=b"one", b=b"one")
    put(index, "a", 1, CHAIN)
    put(index, "b", 1, device=CHAIN[:2])
    assert held(index, "b") == Held(device=2, object=4, said=2)
    assert held(index, "b").total == len(CHAIN)
    put(index, "b", 2, device=CHAIN)
    assert held(index, "b") == Held(device=6, said=6)


def test_what_one_has_found_gone_is_gone_for_all() -> None:
    index = index_of(a=b"one", b=b"one")
    put(index, "a", 1, CHAIN)
    put(index, "b", 1, removed=(CHAIN[3],))
    assert held(index, "a") == Held(object=3)


def test_it_outlives_who_has_written_it_but_not_the_last_that_could_read_it() -> None:
    index = index_of(a=b"one", b=b"one")
    put(index, "a", 1, CHAIN)
    index.remove("a")
    assert held(index, "b") == Held(object=6)
    index.add("b", 2, 0, b"one")
    assert held(index, "b") == Held(object=6), "a worker that begins again has nothing else"
    index.remove("b")
    assert index.stores == {}
    index.add("b", 3, 0, b"one")
    index.apply(0.0, KVSnapshot("b", 3, 0, (), (), CHAIN[:2]))
    assert held(index, "b") == Held(object=2)
    index.check_integrity()


def test_of_a_store_without_end_no_more_is_remembered() -> None:
    before, prefix_index.MAX_STORED = prefix_index.MAX_STORED, 8
    try:
        index = index_of(a=b"one")
        put(index, "a", 1, CHAIN)
        for number in range(20):
            put(index, "a", number + 2, names(100 + number))
            (slot,) = index.stores.values()
            assert index.table.held(slot, 15) <= 8
        assert held(index, "a") == Held(object=6), "what was known is not dropped"
    finally:
        prefix_index.MAX_STORED = before
