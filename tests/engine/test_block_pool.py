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
        num_evicted = max(0, count - (NUM_BLOCKS - len(in_use) - len(self.evictable)))
        assert set(blocks) & set(self.evictable) == set(self.evictable[:num_evicted])
        del self.evictable[:num_evicted]
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
        self.evictable = [block for block in self.evictable if block not in blocks]
        self.users.append(blocks)

    @precondition(lambda self: self.users)
    @rule(data=st.data(), spare=st.booleans())
    def release(self, data: st.DataObject, spare: bool) -> None:
        table = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        self.pool.release(table, evict_first=spare)
        in_use = {block for other in self.users for block in other}
        idle = [b for b in reversed(table) if b in self.content and b not in in_use]
        self.evictable = idle + self.evictable if spare else self.evictable + idle

    @rule(names=st.lists(st.integers(0, 12), max_size=4))
    def evict(self, names: list[int]) -> None:
        in_use = {block for table in self.users for block in table}
        labels = {bytes([n]) for n in names}
        gone = [b for b, name in self.content.items() if name in labels and b not in in_use]
        assert self.pool.evict([bytes([n]) for n in names]) == len(gone)
        for block in gone:
            del self.content[block]
            self.evictable.remove(block)

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
        assert self.pool.num_evictable == len(self.evictable)


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


def sealed(pool: BlockPool, name: bytes, count: int) -> list[int]:
    """Blocks in use, named `name` and their number."""
    table = pool.allocate(count)
    assert table is not None
    for index, block in enumerate(table):
        pool.seal(block, name + bytes([index]))
    return table


def test_spare_copies_go_before_everything_else_and_their_ends_first() -> None:
    pool = BlockPool(6)
    kept, spare, later = (sealed(pool, name, 2) for name in (b"k", b"s", b"l"))
    pool.release(kept)
    pool.release(spare, evict_first=True)
    pool.release(later)
    order = []
    for _ in range(6):
        before = set(pool.block_hashes())
        pool.allocate(1)
        order += before - set(pool.block_hashes())
    assert order == [b"s\1", b"s\0", b"k\1", b"k\0", b"l\1", b"l\0"]


def test_a_spare_copy_that_is_used_again_is_worth_as_much_as_any() -> None:
    pool = BlockPool(4)
    spare, other = sealed(pool, b"s", 2), sealed(pool, b"o", 2)
    pool.release(spare, evict_first=True)
    pool.release(other)
    pool.acquire(spare)
    pool.release(spare)
    pool.allocate(2)
    assert set(pool.block_hashes()) == {b"s\0", b"s\1"}


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
    assert pool.block_hashes() == (b"b",)
    assert pool.num_evictable == 0
    assert pool.num_free == 2
