"""The block pool against a naive model that keeps everything in plain dicts."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool

NUM_BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.users: list[list[int]] = []  # block tables
        self.content: dict[int, bytes] = {}  # block -> name, sealed blocks
        self.known: set[bytes] = set()  # what a listener believes

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        in_use = {block for table in self.users for block in table}
        blocks = self.pool.allocate(count)
        if count > NUM_BLOCKS - len(in_use):
            assert blocks is None
            return
        assert blocks is not None
        assert len(set(blocks)) == count
        assert not set(blocks) & in_use
        for block in blocks:
            self.content.pop(block, None)
        self.users.append(blocks)

    @precondition(lambda self: any(self.users))
    @rule(data=st.data(), name=st.integers(0, 12))
    def seal(self, data: st.DataObject, name: int) -> None:
        table = data.draw(st.sampled_from([t for t in self.users if t]))
        block = data.draw(st.sampled_from(table))
        if block in self.content:
            return
        label = bytes([name])
        sealed = self.pool.seal(block, label)
        assert sealed == (label not in self.content.values())
        if sealed:
            self.content[block] = label

    @rule(names=st.lists(st.integers(0, 12), max_size=4, unique=True))
    def hit(self, names: list[int]) -> None:
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
        self.users.append(blocks)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        self.pool.release(table)

    @rule(names=st.lists(st.integers(0, 12), max_size=4))
    def evict(self, names: list[int]) -> None:
        in_use = {block for table in self.users for block in table}
        labels = {bytes([n]) for n in names}
        gone = [b for b, name in self.content.items() if name in labels and b not in in_use]
        assert self.pool.evict([bytes([n]) for n in names]) == len(gone)
        for block in gone:
            del self.content[block]

    @rule()
    def listen(self) -> None:
        stored, removed = self.pool.take_changes()
        assert not set(stored) & set(removed)
        assert not set(stored) & self.known
        assert set(removed) <= self.known
        self.known = (self.known | set(stored)) - set(removed)
        assert self.known == set(self.pool.names())

    @invariant()
    def consistent(self) -> None:
        self.pool.check_integrity()
        in_use = {block for table in self.users for block in table}
        assert self.pool.num_free == NUM_BLOCKS - len(in_use)
        assert set(self.pool.names()) == set(self.content.values())


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    assert table is not None
    for index, block in enumerate(table):
        pool.seal(block, bytes([index]))
    pool.release(table)
    pool.allocate(1)
    assert pool.lookup([b"\0", b"\1", b"\2"]) == table[:2]


def test_blank_blocks_are_used_before_cached_ones() -> None:
    pool = BlockPool(4)
    first = pool.allocate(2)
    assert first is not None
    pool.seal(first[0], b"a")
    pool.release(first)
    pool.allocate(3)
    assert pool.is_cached(b"a")
    pool.allocate(1)
    assert not pool.is_cached(b"a")
    assert pool.num_evictions == 1


def test_evicted_names_are_removed_and_their_blocks_blank() -> None:
    pool = BlockPool(3)
    table = pool.allocate(2)
    assert table is not None
    pool.seal(table[0], b"a")
    pool.seal(table[1], b"b")
    pool.release(table[:1])
    pool.take_changes()
    assert pool.evict([b"a", b"b", b"c"]) == 1
    assert pool.take_changes() == ((), (b"a",))
    assert pool.names() == (b"b",)
    assert pool.num_evictable == 0
    assert pool.num_free == 2
