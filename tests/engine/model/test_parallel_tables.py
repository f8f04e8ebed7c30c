"""A follower's block tables are its leader's, and what is sent of them is what is new."""

import pickle
import random

import pytest

from kvrelay.engine.kv.block_table import BlockTable
from kvrelay.engine.model.batch import KEPT_STEPS, Guard, Limits
from kvrelay.engine.model.parallel.tables import ReceivedTables, SentTables
from kvrelay.engine.step import Step
from tests.engine.model.test_guard import table_of
from tests.engine.model.tiny import scheduled

SIZE, NUM_BLOCKS = 4, 4000
LIMITS = {
    "plain": Limits(NUM_BLOCKS, SIZE, 4000, 50),
    "window": Limits(NUM_BLOCKS, SIZE, 4000, 50, window=10, num_sinks=6),
    "groups": Limits(NUM_BLOCKS, SIZE, 4000, 50, group_windows=(0, 10, 2, 2)),
}
limits_of = pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)


class Ranks:
    """Both ends, and the guard of each."""

    def __init__(self, limits):
        self.limits, self.number = limits, 0
        self.sent, self.received = SentTables(SIZE), ReceivedTables()
        self.guards = Guard(limits), Guard(limits)

    def step(self, *seqs):
        """How many bytes were sent, and who is left out; alike at both ends."""
        self.number += 1
        step = Step(self.number, [*seqs])
        message = pickle.dumps(self.sent.pack(step))
        there = self.received.unpack(pickle.loads(message))
        own, theirs = (g.check(s) for g, s in zip(self.guards, (step, there), strict=True))
        assert own[:2] == theirs[:2]
        good = [seq for index, seq in enumerate(step.seqs) if index not in own[0]]
        for seq, one, other in zip(good, own[2], theirs[2], strict=True):
            end = -(-seq.end // SIZE)
            assert one.visible(0, end).tolist() == other.visible(0, end).tolist()
        return len(message), own[0]


def grow(table, limits, blocks):
    for part in table.parts:
        part.add([blocks.pop() for _ in part.groups])


def slide(table, limits, position):
    for number, (size, sinks) in enumerate(limits.windows):
        row = (position // SIZE * SIZE - size + 1) // SIZE
        if size and row > max(sinks, table.parts[number].first):
            table.lose(number, row, sinks)


@limits_of
def test_what_is_sent_of_a_step_does_not_grow_with_the_context(limits):
    ranks, blocks = Ranks(limits), [*range(NUM_BLOCKS)]
    count = limits.num_groups
    table = table_of([blocks.pop() for _ in range(10 * count)], limits)
    first, faults = ranks.step(scheduled([1] * 38, 0, table))
    assert not faults
    sizes = []
    for position in range(38, 500):
        if position % SIZE == 0:
            slide(table, limits, position)
            if position // SIZE >= table.num_rows:
                grow(table, limits, blocks)
        size, faults = ranks.step(scheduled([1], position, table))
        assert not faults
        sizes.append(size)
    assert max(sizes[-100:]) <= max(sizes[:100]) + 16
    assert max(sizes) < first + 200


@limits_of
def test_followers_leave_out_whom_their_leader_leaves_out(limits):
    """Entries are rewritten, tables replaced, and sequences pause and go back."""
    rng, ranks, count = random.Random(5), Ranks(limits), limits.num_groups
    pools = [[*range(n * 100 * count, (n + 1) * 100 * count)] for n in range(4)]
    tables = [table_of(pool[: 40 * count], limits) for pool in pools]
    starts, num_faulty = [0] * 4, 0
    for _ in range(200):
        seqs = []
        for index in rng.sample(range(4), rng.randint(1, 4)):
            starts[index] = max(0, min(120, starts[index] + rng.choice([-1, 1, 1, 2, 5])))
            table = tables[index]
            slide(table, limits, starts[index])
            if rng.random() < 0.1:
                at = rng.randrange(len(table))
                if table[at] >= 0:
                    table[at] = rng.choice([-1, NUM_BLOCKS, pools[0][0], table[at]])
            if rng.random() < 0.1:
                tables[index] = table = table_of(pools[index][: 40 * count], limits)
            seq = scheduled([1] * rng.randint(1, 9), starts[index], table)
            seq.request_id = f"r{index}"
            seqs.append(seq)
        num_faulty += bool(ranks.step(*seqs)[1])
    assert 10 < num_faulty < 190


def test_rows_that_a_group_gets_later_than_another_are_sent():
    limits = LIMITS["groups"]
    ranks, blocks = Ranks(limits), [*range(NUM_BLOCKS)]
    ranks.sent = SentTables(SIZE // 2)  # more rows than a step needs
    table = table_of([blocks.pop() for _ in range(3 * limits.num_groups)], limits)
    whole, *others = table.parts
    whole.add([blocks.pop() for _ in range(3 * len(whole.groups))])
    assert not ranks.step(scheduled([1] * 12, 0, table))[1]
    for part in others:
        part.add([blocks.pop() for _ in range(3 * len(part.groups))])
    assert not ranks.step(scheduled([1] * 12, 12, table))[1]


def test_both_ends_forget_who_has_no_part():
    ranks = Ranks(LIMITS["plain"])
    one, other = scheduled([1], 6, BlockTable.of([1, 2])), scheduled([1], 6, BlockTable.of([3, 4]))
    one.request_id, other.request_id = "one", "other"
    ranks.step(one, other)
    for _ in range(KEPT_STEPS + 2):
        ranks.step(other)
    assert [*ranks.sent._known] == [*ranks.received._known] == ["other"]
    assert not ranks.step(one, other)[1]
