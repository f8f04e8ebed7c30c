"""The prefix index against a model that stores everything and searches everything."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrelay.engine.kv.block_hash import unpack
from kvrelay.engine.kv.events import KVEvents, KVSnapshot
from kvrelay.engine.kv.tier import ANNOUNCED_TIERS, LOWER_TIERS, Tier, TierHashes
from kvrelay.router.index.prefix_index import PrefixIndex

RETRY_S = 1.0
EXPECTED_S = 10.0
CHAIN = tuple(bytes([n]) * 16 for n in range(1, 12))
PACKED = b"".join(CHAIN)

GROUPS = {"a": 0, "b": 0, "c": 0, "d": 0, "e": 1, "f": 1}
Cache = dict[Tier, set[bytes]]


def empty() -> Cache:
    return {tier: set() for tier in ANNOUNCED_TIERS}


def run_length(blocks: set[bytes]) -> int:
    depth = 0
    while depth < len(CHAIN) and CHAIN[depth] in blocks:
        depth += 1
    return depth


def always_asked(stride: int) -> set[int]:
    """Positions that a lookup asks about as long as anybody holds what is before them."""
    last = len(CHAIN) - 1
    return {*range(min(stride, last)), *range(stride - 1, last, stride), last}


def check_run(claimed: int, blocks: set[bytes], stride: int) -> None:
    """`claimed` is where a run of `blocks` may be said to end."""
    assert claimed == len(CHAIN) or CHAIN[claimed] not in blocks
    assert claimed == 0 or CHAIN[claimed - 1] in blocks
    assert all(CHAIN[at] in blocks for at in always_asked(stride) if at < claimed)
    without_holes = run_length(blocks)
    if not any(name in blocks for name in CHAIN[without_holes:]):
        assert claimed == without_holes


class Watcher:
    """Knows what it is told."""

    def __init__(self) -> None:
        self.held: dict[str, Cache] = {}

    def changed(self, worker: str, tier: Tier, stored: bytes, removed: bytes) -> None:
        held = self.held.setdefault(worker, empty())[tier]
        held |= {*unpack(stored)}
        held -= {*unpack(removed)}

    def forgotten(self, worker: str) -> None:
        self.held.pop(worker, None)

    def named(self, *_: object) -> None:
        raise AssertionError("an index knows no tokens")


class IndexMachine(RuleBasedStateMachine):
    """Workers that seal and evict, a network that loses, repeats and delays, and restarts."""

    WORKERS = ("a", "b", "c", "d", "e", "f")  # more than are kept beside a block's name
    STRIDE = len(CHAIN)

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.index = PrefixIndex(RETRY_S, EXPECTED_S, stride=self.STRIDE)
        self.watcher = self.index.watcher = Watcher()
        # What the workers are: epoch, number of the last event, blocks, and all that was published.
        self.epoch = dict.fromkeys(self.WORKERS, 1)
        self.seq = dict.fromkeys(self.WORKERS, 0)
        self.cache: dict[str, Cache] = {w: empty() for w in self.WORKERS}
        self.published: list[KVEvents | KVSnapshot] = []
        # The naive model of the index.
        self.known: dict[str, Cache] = {}
        self.at: dict[str, tuple[int, int | None, int]] = {}  # epoch, applied, seen
        self.guessed: dict[str, set[bytes]] = {}
        self.told: list[tuple[float, str, bytes]] = []  # ends of guesses
        self.asked: dict[str, float] = {}
        for worker in self.WORKERS:
            self.follow(worker)

    worker = st.sampled_from(WORKERS)
    block = st.sampled_from(CHAIN)
    change = st.tuples(st.sets(block), st.sets(block))

    def follow(self, worker: str) -> None:
        self.index.add(worker, self.epoch[worker], GROUPS[worker])
        if worker not in self.at or self.at[worker][0] < self.epoch[worker]:
            self.restart(worker, self.epoch[worker])

    def restart(self, worker: str, epoch: int) -> None:
        self.known[worker], self.guessed[worker] = empty(), set()
        self.told = [each for each in self.told if each[1] != worker]
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

    @rule(worker=worker, changes=st.fixed_dictionaries(dict.fromkeys(ANNOUNCED_TIERS, change)))
    def publish(self, worker: str, changes: dict[Tier, tuple[set[bytes], set[bytes]]]) -> None:
        """In one event, blocks come into and leave the tiers."""
        net = {}
        for tier, (stored, removed) in changes.items():
            cache = self.cache[worker][tier]
            net[tier] = tuple(stored - cache), tuple((removed & cache) - stored)
            cache |= stored
            cache -= set(net[tier][1])
        self.seq[worker] += 1
        self.published.append(
            KVEvents(
                worker,
                self.epoch[worker],
                self.seq[worker],
                *net[Tier.DEVICE],
                tuple(TierHashes(tier, *net[tier]) for tier in LOWER_TIERS if any(net[tier])),
            )
        )

    @rule(worker=worker)
    def publish_snapshot(self, worker: str) -> None:
        cache = self.cache[worker]
        tiers = tuple(TierHashes(tier, tuple(cache[tier])) for tier in LOWER_TIERS if cache[tier])
        epoch, seq = self.epoch[worker], self.seq[worker]
        self.published.append(KVSnapshot(worker, epoch, seq, tuple(cache[Tier.DEVICE]), tiers))

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Any of the last messages, in whatever order, some never, some twice."""
        if not self.published:
            return
        back = data.draw(st.integers(1, min(6, len(self.published))))
        self.take(self.published[-back])

    def take(self, news: KVEvents | KVSnapshot) -> None:
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
                self.known[worker], applied = empty(), news.seq
                for tier in (TierHashes(Tier.DEVICE, news.hashes), *news.tiers):
                    self.known[worker][tier.tier] = set(tier.stored)
        elif applied is not None and news.seq == applied + 1:
            for tier in (TierHashes(Tier.DEVICE, news.stored, news.removed), *news.tiers):
                self.known[worker][tier.tier] |= set(tier.stored)
                self.known[worker][tier.tier] -= set(tier.removed)
            applied = news.seq
        self.at[worker] = (epoch, applied, seen)
        self.guessed[worker] -= self.known[worker][Tier.DEVICE]
        assert asked == self.may_ask(worker)

    @rule(worker=worker, blocks=st.lists(block))
    def expect(self, worker: str, blocks: list[bytes]) -> None:
        self.index.expect(self.now, worker, b"".join(blocks))
        if worker in self.known:
            for block in dict.fromkeys(blocks):
                if block not in self.known[worker][Tier.DEVICE] | self.guessed[worker]:
                    self.guessed[worker].add(block)
                    self.told.append((self.now + EXPECTED_S, worker, block))

    @rule(seconds=st.sampled_from([0.4, 1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        while self.told and self.told[0][0] <= self.now:
            _, worker, block = self.told.pop(0)
            self.guessed[worker].discard(block)
        assert sorted(self.index.due(self.now)) == sorted(w for w in self.at if self.may_ask(w))

    @rule(worker=worker)
    def die(self, worker: str) -> None:
        self.index.remove(worker)
        for kept in (self.known, self.at, self.guessed, self.asked):
            kept.pop(worker, None)
        self.told = [each for each in self.told if each[1] != worker]

    @rule(worker=worker)
    def start_again(self, worker: str) -> None:
        self.epoch[worker] += 1
        self.seq[worker] = 0
        self.cache[worker] = empty()
        self.follow(worker)

    @rule(data=st.data())
    def deliver_to_all(self, data: st.DataObject) -> None:
        """Everybody gets the same blocks, so that they have many holders."""
        blocks = CHAIN[: data.draw(st.integers(1, len(CHAIN)))]
        for worker in self.WORKERS:
            self.cache[worker][Tier.DEVICE] |= set(blocks)
            self.seq[worker] += 1
            held = tuple(self.cache[worker][Tier.DEVICE])
            tiers = tuple(TierHashes(tier, tuple(self.cache[worker][tier])) for tier in LOWER_TIERS)
            snapshot = KVSnapshot(worker, self.epoch[worker], self.seq[worker], held, tiers)
            self.published.append(snapshot)
            self.take(snapshot)

    @rule()
    def move(self) -> None:
        """Everything goes into another index by way of bytes; what was only expected does not."""
        moved = PrefixIndex(RETRY_S, EXPECTED_S, stride=self.STRIDE)
        for worker, known in self.known.items():
            export = self.index.export(worker)
            assert (export is None) == (self.at[worker][1] is None)
            if export is not None:
                moved.add(worker, export.epoch)
                moved.restore(self.now, worker, *export)
                assert {tier: moved.block_hashes(worker, tier) for tier in ANNOUNCED_TIERS} == known
                assert moved.export(worker) is not None
        moved.check_integrity()

    @invariant()
    def agrees_with_the_model(self) -> None:
        matches = self.index.lookup(self.now, PACKED)
        holders = set()
        for worker, known in self.known.items():
            device = known[Tier.DEVICE] | self.guessed[worker]
            memory = device | known[Tier.HOST]
            held = matches.held(worker)
            check_run(held.device, device, self.STRIDE)
            check_run(held.device + held.host, memory, self.STRIDE)
            check_run(held.total, memory | known[Tier.DISK], self.STRIDE)
            check_run(held.said, set().union(*known.values()), self.STRIDE)
            if held.total:
                holders.add(worker)
            assert self.index.num_blocks(worker) == len(device)
        assert set(matches.workers()) == holders
        for group in (0, 1):
            best = matches.best(group)
            totals = [matches.held(worker).total for worker in best]
            assert sorted(best) == sorted(w for w in holders if GROUPS[w] == group)
            assert totals == sorted(totals, reverse=True)
        names = {
            w: {tier: self.index.block_hashes(w, tier) for tier in ANNOUNCED_TIERS}
            for w in self.known
        }
        assert names == self.known
        assert {w: self.watcher.held.get(w, empty()) for w in names} == names
        assert not any(held for w in self.watcher.held.keys() - names for held in self.told_of(w))
        self.index.check_integrity()

    def told_of(self, worker: str) -> list[set[bytes]]:
        return list(self.watcher.held[worker].values())

    @invariant()
    def in_step_means_true(self) -> None:
        """A view without a gap is what the worker held at that event."""
        for worker, (epoch, applied, _) in self.at.items():
            if epoch == self.epoch[worker] and applied == self.seq[worker]:
                assert self.known[worker] == self.cache[worker]


class StridingMachine(IndexMachine):
    """Lets lookups jump: holes may be overlooked, but not those it has seen."""

    STRIDE = 3


SETTINGS = settings(max_examples=30, stateful_step_count=40, deadline=None, derandomize=True)
TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = SETTINGS
TestStridingMachine = StridingMachine.TestCase
TestStridingMachine.settings = SETTINGS
