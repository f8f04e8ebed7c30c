"""The prefix index against a model that stores everything and searches everything."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.kv_events import KVEvents, KVSnapshot
from router.prefix_index import PrefixIndex

RETRY_S = 1.0
SPECULATIVE_S = 10.0


def names(*numbers: int) -> tuple[bytes, ...]:
    return tuple(bytes([n]) * 16 for n in numbers)


CHAIN = names(1, 2, 3, 4, 5, 6)


def index_of(*workers: str) -> PrefixIndex:
    """Follows `workers`, epoch 1, each in step with event 0 and an empty cache."""
    index = PrefixIndex(RETRY_S, SPECULATIVE_S)
    for worker in workers:
        index.add(worker, 1)
        index.apply(0.0, KVSnapshot(worker, 1, 0, ()))
    return index


def test_lookup_counts_the_prefix_of_each_worker() -> None:
    index = index_of("a", "b", "c", "d")
    index.apply(0.0, KVEvents("a", 1, 1, CHAIN, ()))
    index.apply(0.0, KVEvents("b", 1, 1, CHAIN[:2], ()))
    index.apply(0.0, KVEvents("d", 1, 1, CHAIN[1:], ()))
    assert index.lookup(0.0, CHAIN) == {"a": 6, "b": 2}
    assert index.lookup(0.0, CHAIN[:2]) == {"a": 2, "b": 2}
    assert index.lookup(0.0, ()) == {}


def test_a_hole_ends_the_prefix_though_later_blocks_are_there() -> None:
    index = index_of("a", "b")
    index.apply(0.0, KVEvents("a", 1, 1, CHAIN, ()))
    index.apply(0.0, KVEvents("b", 1, 1, CHAIN, ()))
    index.apply(0.0, KVEvents("a", 1, 2, (), (CHAIN[3],)))
    assert index.lookup(0.0, CHAIN) == {"a": 3, "b": 6}


def test_a_gap_asks_for_a_snapshot_at_a_bounded_rate_and_freezes_the_view() -> None:
    index = index_of("a")
    assert not index.apply(0.0, KVEvents("a", 1, 1, CHAIN[:1], ()))
    assert index.apply(1.0, KVEvents("a", 1, 3, CHAIN[2:3], ()))
    assert not index.apply(1.5, KVEvents("a", 1, 4, CHAIN[3:4], ()))
    assert index.due(1.9) == []
    assert index.due(2.0) == ["a"]
    assert index.due(2.1) == []
    assert index.lookup(2.1, CHAIN) == {"a": 1}
    assert not index.apply(2.2, KVSnapshot("a", 1, 4, CHAIN[:4]))
    assert index.in_step
    assert index.due(99.0) == []
    assert index.lookup(2.2, CHAIN) == {"a": 4}


def test_a_snapshot_from_before_the_gap_does_not_close_it() -> None:
    index = index_of("a")
    assert index.apply(0.0, KVEvents("a", 1, 5, CHAIN[:1], ()))
    assert not index.apply(0.1, KVSnapshot("a", 1, 3, CHAIN[:3]))
    assert not index.in_step
    assert index.due(1.1) == ["a"]
    assert index.lookup(1.1, CHAIN) == {"a": 3}


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
    assert index.lookup(0.0, CHAIN) == {"a": 1}
    assert index.in_step


def test_a_later_epoch_empties_the_view_and_asks() -> None:
    index = index_of("a")
    index.apply(0.0, KVEvents("a", 1, 1, CHAIN, ()))
    index.speculate(0.0, "a", names(9))
    assert index.apply(0.1, KVEvents("a", 2, 1, CHAIN[:1], ()))
    assert index.lookup(0.1, CHAIN) == {}
    assert index.num_blocks("a") == 0
    index.check_integrity()


def test_the_number_of_the_last_event_shows_that_it_was_lost() -> None:
    index = index_of("a")
    assert not index.hear(0.0, "a", 1, 0)
    assert not index.hear(0.0, "a", 2, 7)
    assert not index.hear(0.0, "stranger", 1, 7)
    assert index.hear(0.0, "a", 1, 1)
    assert not index.in_step


def test_a_removed_worker_leaves_nothing_and_its_place_is_used_again() -> None:
    index = index_of("a", "b")
    index.apply(0.0, KVEvents("a", 1, 1, CHAIN, ()))
    index.apply(0.0, KVEvents("b", 1, 1, CHAIN[:1], ()))
    index.speculate(0.0, "a", names(9))
    index.remove("a")
    index.remove("a")
    index.check_integrity()
    assert index.lookup(0.0, CHAIN) == {"b": 1}
    index.add("c", 1)
    assert index.due(0.0) == ["c"]
    index.apply(0.0, KVSnapshot("c", 1, 4, CHAIN[:2]))
    assert index.lookup(0.0, CHAIN) == {"c": 2, "b": 1}
    index.check_integrity()


def test_speculation_counts_until_it_expires() -> None:
    index = index_of("a")
    index.speculate(0.0, "a", CHAIN[:3])
    assert index.lookup(SPECULATIVE_S - 0.1, CHAIN) == {"a": 3}
    assert index.lookup(SPECULATIVE_S, CHAIN) == {}
    index.check_integrity()


def test_speculation_again_counts_for_longer() -> None:
    index = index_of("a")
    index.speculate(0.0, "a", CHAIN[:3])
    index.speculate(5.0, "a", CHAIN[:2])
    assert index.lookup(SPECULATIVE_S + 1, CHAIN) == {"a": 2}
    assert index.lookup(SPECULATIVE_S + 5, CHAIN) == {}


def test_a_real_block_replaces_a_speculative_one() -> None:
    index = index_of("a")
    index.speculate(0.0, "a", CHAIN[:2])
    index.apply(1.0, KVEvents("a", 1, 1, CHAIN[:1], ()))
    assert index.lookup(SPECULATIVE_S + 1, CHAIN) == {"a": 1}
    index.apply(1.0, KVEvents("a", 1, 2, (), CHAIN[:1]))
    assert index.lookup(SPECULATIVE_S + 1, CHAIN) == {}
    index.check_integrity()


def test_speculation_is_bounded_and_the_oldest_goes_first() -> None:
    index = PrefixIndex(RETRY_S, SPECULATIVE_S, max_speculative=3)
    index.add("a", 1)
    index.speculate(0.0, "a", names(7))
    index.speculate(1.0, "a", CHAIN[:3])
    assert index.lookup(1.0, names(7)) == {}
    assert index.lookup(1.0, CHAIN) == {"a": 3}
    index.speculate(1.0, "stranger", CHAIN)
    index.check_integrity()


@pytest.mark.parametrize("num_workers", [1, 70])
def test_many_workers_are_told_apart(num_workers: int) -> None:
    workers = [f"w{n}" for n in range(num_workers)]
    index = index_of(*workers)
    for depth, worker in enumerate(workers):
        index.apply(0.0, KVEvents(worker, 1, 1, CHAIN[: 1 + depth % 6], ()))
    found = index.lookup(0.0, CHAIN)
    assert found == {worker: 1 + depth % 6 for depth, worker in enumerate(workers)}


class IndexMachine(RuleBasedStateMachine):
    """Workers that seal and evict, a network that loses, repeats and delays, and restarts."""

    WORKERS = ("a", "b", "c")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.index = PrefixIndex(RETRY_S, SPECULATIVE_S)
        # What the workers are: epoch, number of the last event, blocks, and all that was published.
        self.epoch = dict.fromkeys(self.WORKERS, 1)
        self.seq = dict.fromkeys(self.WORKERS, 0)
        self.cache: dict[str, set[bytes]] = {w: set() for w in self.WORKERS}
        self.published: list[KVEvents | KVSnapshot] = []
        # The naive model of the index.
        self.known: dict[str, set[bytes]] = {}
        self.at: dict[str, tuple[int, int | None, int]] = {}  # epoch, applied, seen
        self.guessed: dict[str, dict[bytes, float]] = {}
        self.asked: dict[str, float] = {}
        for worker in self.WORKERS:
            self.follow(worker)

    worker = st.sampled_from(WORKERS)
    block = st.sampled_from(CHAIN)

    def follow(self, worker: str) -> None:
        self.index.add(worker, self.epoch[worker])
        if worker not in self.at or self.at[worker][0] < self.epoch[worker]:
            self.restart(worker, self.epoch[worker])

    def restart(self, worker: str, epoch: int) -> None:
        self.known[worker], self.guessed[worker] = set(), {}
        self.at[worker] = (epoch, None, -1)
        self.asked.pop(worker, None)

    def may_ask(self, worker: str) -> bool:
        _, applied, seen = self.at[worker]
        behind = applied is None or applied < seen
        last = self.asked.get(worker)
        if behind and (last is None or self.now - last >= RETRY_S):
            self.asked[worker] = self.now
            return True
        return False

    @rule(worker=worker, stored=st.sets(block), removed=st.sets(block))
    def publish(self, worker: str, stored: set[bytes], removed: set[bytes]) -> None:
        cache = self.cache[worker]
        stored, removed = stored - cache, (removed & cache) - stored
        cache |= stored
        cache -= removed
        self.seq[worker] += 1
        self.published.append(
            KVEvents(worker, self.epoch[worker], self.seq[worker], tuple(stored), tuple(removed))
        )

    @rule(worker=worker)
    def publish_snapshot(self, worker: str) -> None:
        blocks = tuple(self.cache[worker])
        self.published.append(KVSnapshot(worker, self.epoch[worker], self.seq[worker], blocks))

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Any of the last messages, in whatever order, some never, some twice."""
        if not self.published:
            return
        back = data.draw(st.integers(1, min(6, len(self.published))))
        news = self.published[-back]
        asked = self.index.apply(self.now, news)
        worker = news.worker
        if worker not in self.at or news.epoch < self.at[worker][0]:
            assert not asked
            return
        if news.epoch > self.at[worker][0]:
            self.restart(worker, news.epoch)
        epoch, applied, seen = self.at[worker]
        seen = max(seen, news.seq)
        if isinstance(news, KVSnapshot):
            if applied is None or news.seq > applied:
                self.known[worker], applied = set(news.hashes), news.seq
        elif applied is not None and news.seq == applied + 1:
            self.known[worker] = (self.known[worker] | set(news.stored)) - set(news.removed)
            applied = news.seq
        self.at[worker] = (epoch, applied, seen)
        for name in self.known[worker]:
            self.guessed[worker].pop(name, None)
        assert asked == self.may_ask(worker)

    @rule(worker=worker, blocks=st.lists(block))
    def speculate(self, worker: str, blocks: list[bytes]) -> None:
        self.index.speculate(self.now, worker, blocks)
        if worker in self.known:
            fresh = [b for b in blocks if b not in self.known[worker]]
            self.guessed[worker].update(dict.fromkeys(fresh, self.now + SPECULATIVE_S))

    @rule(seconds=st.sampled_from([0.4, 1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        assert sorted(self.index.due(self.now)) == sorted(w for w in self.at if self.may_ask(w))

    @rule(worker=worker)
    def die(self, worker: str) -> None:
        self.index.remove(worker)
        for kept in (self.known, self.at, self.guessed, self.asked):
            kept.pop(worker, None)

    @rule(worker=worker)
    def start_again(self, worker: str) -> None:
        self.epoch[worker] += 1
        self.seq[worker] = 0
        self.cache[worker] = set()
        self.follow(worker)

    @invariant()
    def agrees_with_the_model(self) -> None:
        held = {
            w: self.known[w] | {b for b, until in self.guessed[w].items() if until > self.now}
            for w in self.known
        }
        naive = {}
        for worker, blocks in held.items():
            depth = 0
            while depth < len(CHAIN) and CHAIN[depth] in blocks:
                depth += 1
            if depth:
                naive[worker] = depth
        assert self.index.lookup(self.now, CHAIN) == naive
        assert {w: self.index.names(w) for w in self.known} == self.known
        self.index.check_integrity()

    @invariant()
    def in_step_means_true(self) -> None:
        """A view without a gap is what the worker held at that event."""
        for worker, (epoch, applied, _) in self.at.items():
            if epoch == self.epoch[worker] and applied == self.seq[worker]:
                assert self.known[worker] == self.cache[worker]


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
