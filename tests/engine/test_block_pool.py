"""The block pool against a naive model that keeps everything in plain dicts."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.engine.kv.block_pool import BlockPool

NUM_BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.users: list[list[int]] = []  # block tables
        self.content: dict[int, bytes] = {}  # block -> name, sealed blocks
        self.evictable: list[int] = []  # the first to go first
        self.low: set[int] = set()  # blocks of low classes
        self.first: set[int] = set()  # released to be evicted first
        self.num_evictions = 0
        self.known: set[bytes] = set()  # what a listener knows

    @rule(count=st.integers(0, NUM_BLOCKS + 1), low=st.booleans())
    def allocate(self, count: int, low: bool) -> None:
        in_use = {block for table in self.users for block in table}
        self.evictable.sort(key=lambda block: block not in self.low)
        may_have = self.pool.has_free_low(count)
        others = [block for block in self.evictable if block not in self.low]
        taken = others[: max(0, count - NUM_BLOCKS + len(in_use) + len(others))]
        few = len(self.low & in_use) + count <= NUM_BLOCKS // 4
        free = count <= NUM_BLOCKS - len(in_use)
        assert may_have == (free and (few or not taken or taken[-1] in self.first))
        blocks = self.pool.allocate(count, low=low)
        if count > NUM_BLOCKS - len(in_use):
            assert blocks is None
            return
        assert blocks is not None
        assert len(set(blocks)) == count
        assert not set(blocks) & in_use
        num_evicted = max(0, count - (NUM_BLOCKS - len(in_use) - len(self.evictable)))
        assert set(blocks) & set(self.evictable) == set(self.evictable[:num_evicted])
        del self.evictable[:num_evicted]
        self.num_evictions += num_evicted
        self.low -= {*blocks}
        self.low |= {*blocks} if low else set()
        for block in blocks:
            self.content.pop(block, None)
        self.users.append(blocks)

    @precondition(lambda self: any(self.users))
    @rule(data=st.data(), names=st.lists(st.integers(0, 12), min_size=1, max_size=4))
    def seal(self, data: st.DataObject, names: list[int]) -> None:
        table = data.draw(st.sampled_from([t for t in self.users if t]))
        unsealed = [block for block in table if block not in self.content]
        for block, label in zip(unsealed, (bytes([name]) for name in names), strict=False):
            sealed = self.pool.seal(block, label)
            assert sealed == (label not in self.content.values())
            if sealed:
                self.content[block] = label

    @rule(names=st.lists(st.integers(0, 12), max_size=4, unique=True), claims=st.booleans())
    def hit(self, names: list[int], claims: bool) -> None:
        labels = [bytes([n]) for n in names]
        blocks = self.pool.lookup(labels)
        where = {name: block for block, name in self.content.items()}
        expected = []
        for label in labels:
            if label not in where:
                break
            expected.append(where[label])
        assert blocks == expected
        self.pool.acquire(blocks)
        self.evictable = [block for block in self.evictable if block not in blocks]
        self.users.append(blocks)
        if claims:
            self.pool.claim(blocks)
            self.low -= {*blocks}

    @precondition(lambda self: self.users)
    @rule(data=st.data(), spare=st.booleans())
    def release(self, data: st.DataObject, spare: bool) -> None:
        table = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        self.pool.release(table, evict_first=spare)
        in_use = {block for other in self.users for block in other}
        idle = [b for b in reversed(table) if b in self.content and b not in in_use]
        self.evictable = idle + self.evictable if spare else self.evictable + idle
        self.first = self.first | {*idle} if spare else self.first - {*idle}
        self.low -= {*table} - {*self.content} - in_use

    @rule(names=st.lists(st.integers(0, 12), max_size=4))
    def evict(self, names: list[int]) -> None:
        in_use = {block for table in self.users for block in table}
        labels = {bytes([n]) for n in names}
        gone = [b for b, name in self.content.items() if name in labels and b not in in_use]
        assert self.pool.evict([bytes([n]) for n in names]) == len(gone)
        for block in gone:
            del self.content[block]
            self.evictable.remove(block)
            self.low.discard(block)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def forget(self, block: int) -> None:
        self.pool.forget(block)
        if self.content.pop(block, None) is not None and block in self.evictable:
            self.evictable.remove(block)
            self.low.discard(block)

    @rule()
    def listen(self) -> None:
        stored, removed = self.pool.take_changes()
        assert not set(stored) & set(removed)
        assert not set(stored) & self.known
        assert set(removed) <= self.known
        self.known = (self.known | set(stored)) - set(removed)
        assert self.known == set(self.pool.block_hashes())

    @invariant()
    def consistent(self) -> None:
        self.pool.check_integrity()
        in_use = {block for table in self.users for block in table}
        assert self.pool.num_free == NUM_BLOCKS - len(in_use)
        assert set(self.pool.block_hashes()) == set(self.content.values())
        assert self.pool.eviction_order() == sorted(
            self.evictable, key=lambda block: block not in self.low
        )
        assert self.pool.num_used_low == len(self.low & in_use)
        assert self.pool.num_evictable == len(self.evictable)
        assert self.pool.num_evictions == self.num_evictions


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
