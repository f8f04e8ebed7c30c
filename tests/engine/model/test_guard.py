"""The guard over many steps: tables that were sound are believed, and nothing else is."""

import random
import re

import numpy as np
import pytest
import torch

from kvrelay.engine.kv.block_table import NO_BLOCK, BlockTable, Part
from kvrelay.engine.model.batch import Batch, Guard, Limits
from kvrelay.engine.step import Step
from tests.engine.model.tiny import scheduled

SIZE, NUM_BLOCKS = 4, 24
PLAIN = Limits(NUM_BLOCKS, SIZE, 400, 50)
WINDOWED = Limits(NUM_BLOCKS, SIZE, 400, 50, window=10, num_sinks=2)
GROUPED = Limits(2 * NUM_BLOCKS, SIZE, 400, 50, num_sinks=2, group_windows=(0, 10))
PROMPT = [1] * 17


def check(guard, *seqs):
    """faults, and the tables of the others."""
    faults, invalid, tables = guard.check(Step(0, list(seqs)))
    good = [seq for index, seq in enumerate(seqs) if index not in faults | invalid]
    return faults | invalid, [entries(*both) for both in zip(tables, good, strict=True)]


def entries(table, seq):
    """What is read of a table; else -1."""
    read = np.full((len(table.blocks), -(-seq.end // SIZE)), NO_BLOCK)
    table.write(read, 0, read.shape[1])
    return read.T.reshape(-1).tolist()


def table_of(entries, limits):
    """As the KV cache manager makes it: in parts by window."""
    count, parts = limits.num_groups, []
    for groups in limits.windows.values():
        parts.append(Part(groups))
        rows = range(0, len(entries), count)
        parts[-1].blocks = [entries[row + group] for row in rows for group in groups]
    return BlockTable(parts)


def test_a_table_that_changes_after_it_was_found_sound_is_found_again():
    table = [2, 3, 4, 5, 6]
    for index in range(4):
        guard = Guard(PLAIN)
        assert check(guard, scheduled(PROMPT, 0, table)) == ({}, [table])
        for wrong in (NUM_BLOCKS, -1, 2**40, table[index - 1]):
            lying = [*table[:index], wrong, *table[index + 1 :]]
            faults, tables = check(guard, scheduled([1], 17, lying))
            assert list(faults) == [0]
            assert tables == []
        assert check(guard, scheduled([1], 17, table)) == ({}, [table])


def test_a_table_that_grows_is_looked_at_where_it_is_new():
    guard = Guard(PLAIN)
    check(guard, scheduled(PROMPT, 0, [2, 3, 4, 5, 6]))
    assert (
        "block 3 is in its table twice"
        in check(guard, scheduled([1], 20, [2, 3, 4, 5, 6, 3]))[0][0]
    )
    check(guard, scheduled([1], 19, [2, 3, 4, 5, 6]))
    assert "outside the pool" in check(guard, scheduled([1], 20, [2, 3, 4, 5, 6, NUM_BLOCKS]))[0][0]
    check(guard, scheduled([1], 19, [2, 3, 4, 5, 6]))
    assert "5 blocks for 21 positions" in check(guard, scheduled([1], 20, [2, 3, 4, 5, 6]))[0][0]
    assert check(guard, scheduled([1], 20, [2, 3, 4, 5, 6, 7])) == ({}, [[2, 3, 4, 5, 6, 7]])


def test_a_draft_is_looked_at_like_the_token_before_it():
    guard = Guard(PLAIN)
    assert check(guard, scheduled([1], 5, [2, 3, 4], draft_tokens=[7, 8])) == ({}, [[2, 3]])
    for changes, told in (
        ({"draft_tokens": [7, 50]}, "token ids 1 to 50 are outside the vocabulary of 50"),
        ({"draft_tokens": [7] * 7}, "3 blocks for 13 positions, 4 are needed"),
        ({"draft_tokens": [7] * 396}, r"positions \[5, 402\) are empty or exceed"),
    ):
        faults, _ = check(guard, scheduled([1], 5, [2, 3, 4], **changes))
        assert re.search(told, faults[0])
    writer = scheduled([1], 7, [2, 3, 4], draft_tokens=[7])
    writer.request_id = "a"
    faults, _ = check(guard, writer, scheduled([1], 5, [4, 5]))
    assert "block 4, which is written in this step" in faults[0]


def test_what_is_used_of_a_table_is_all_that_is_looked_at():
    table = [2, 3, 4, 5, NUM_BLOCKS]
    guard = Guard(PLAIN)
    assert check(guard, scheduled([1] * 16, 0, table)) == ({}, [[2, 3, 4, 5]])
    assert list(check(guard, scheduled([1], 16, table))[0]) == [0]


def test_two_known_tables_that_come_to_share_a_written_block_are_both_left_out():
    guard = Guard(PLAIN)
    first, second, third = (scheduled([1], 6, blocks) for blocks in ([1, 2], [3, 4], [5, 6]))
    first.request_id, second.request_id, third.request_id = "a", "b", "c"
    assert check(guard, first, second, third)[0] == {}
    second.block_ids = [2, 4]  # reads what a writes
    faults, tables = check(guard, first, second, third)
    assert sorted(faults) == [0, 1]
    assert "block 2, which is written in this step, is in the tables of a and b" in faults[0]
    assert tables == [[5, 6]]
    first.start = 3  # now it reads the block, too
    second.block_ids = [3, 4]
    assert check(guard, first, second, third)[0] == {}


def test_blocks_that_are_only_read_may_be_shared():
    guard = Guard(PLAIN)
    seqs = [scheduled([1], 13, [7, 8, 9, own]) for own in (1, 2, 3)]
    for _ in range(2):
        assert check(guard, *seqs) == ({}, [seq.block_ids for seq in seqs])


def test_in_a_window_a_lost_entry_counts_when_it_is_read():
    guard = Guard(WINDOWED)
    table = [2, -1, -1, 5, 6, 7]  # position 21 reads [12, 21], and the sinks
    assert check(guard, scheduled([1], 21, table)) == ({}, [table])
    assert check(guard, scheduled([1], 22, table)) == ({}, [table])
    found = check(guard, scheduled([1], 20, table))[0][0]
    assert "entry 2 of its block table is -1, and position 20 reads it" in found
    assert "entry 0 of its" in check(guard, scheduled([1], 21, [-1, *table[1:]]))[0][0]
    # What the window has left may be anywhere, also in the table a second time.
    assert check(guard, scheduled([1], 21, [2, 7, -1, 5, 6, 7]))[0] == {}
    assert list(check(guard, scheduled([1], 11, [2, 7, 7]))[0]) == [0]


def seen_rows(seq, limits):
    """Rows that are read, of each group, from the definition."""
    return [
        {
            p // limits.block_size
            for p in range(seq.end)
            if not w or p < limits.num_sinks or p > seq.start - w
        }
        for w in limits.group_windows or (limits.window,)
    ]


def naive(step, limits):
    """Which sequences must not run, from the definition: by themselves, and beside the others."""
    size, count, faulty, visible, written = limits.block_size, limits.num_groups, set(), {}, {}
    for index, seq in enumerate(step.seqs):
        end, seen = -(-seq.end // size) * count, seen_rows(seq, limits)
        table = [*seq.block_ids]
        read = [i for i in range(end) if i // count in seen[i % count]]
        visible[index] = [table[i] for i in read] if end <= len(table) else [-1]
        written[index] = table[seq.start // size * count : end]
        is_outside = any(not 0 <= block < limits.num_blocks for block in visible[index])
        if is_outside or len(set(visible[index])) < len(visible[index]):
            faulty.add(index)
    sound = [index for index in visible if index not in faulty]
    meeting = set()
    for one in sound:
        for other in sound:
            if one != other and set(written[one]) & set(visible[other]):
                meeting |= {one, other}
    return faulty, meeting


@pytest.mark.parametrize("limits", [PLAIN, WINDOWED, GROUPED], ids=["plain", "window", "groups"])
def test_over_many_steps_it_finds_what_the_definition_does(limits):
    """Tables are rewritten, lose rows that are no longer read, and are replaced by others."""
    rng = random.Random(3)
    guard, groups = Guard(limits), limits.num_groups
    length, num_blocks = 6 * groups, limits.num_blocks
    pools = [list(range(start, start + length)) for start in range(0, num_blocks, length)]
    tables, starts = [table_of(pool, limits) for pool in pools], [0] * len(pools)
    num_faulty = num_known = 0
    for number in range(1200):
        for index, pool in enumerate(pools):  # most tables stay as they are
            if rng.random() < 0.05:
                at = rng.randrange(length)
                if tables[index][at] != NO_BLOCK:
                    tables[index][at] = rng.randrange(-2, num_blocks + 1)
            elif rng.random() < 0.1:
                tables[index] = table_of(pool, limits)
            starts[index] = max(0, min(23, starts[index] + rng.choice([-1, 0, 1, 1, 1]))) * (
                rng.random() < 0.95
            )
            for part, (size, sinks) in enumerate(limits.windows):
                row = (starts[index] - size + 1) // SIZE
                if size and row > max(sinks, tables[index].parts[part].first):
                    tables[index].lose(part, row, sinks)
        chosen = rng.sample(range(4), rng.randint(1, 4))
        seqs = []
        for index in chosen:
            count = rng.randint(1, min(5, 24 - starts[index]))
            seq = scheduled([1] * count, starts[index], tables[index])
            seq.request_id = f"r{index}"
            seqs.append(seq)
        step = Step(number, seqs)
        before = {*guard._known.values()}
        faults, _, found = guard.check(step)
        num_known += len(before & {*found})
        faulty, meeting = naive(step, limits)
        assert faulty <= set(faults) <= faulty | meeting, number
        num_faulty += bool(faults)
        good = [seq for index, seq in enumerate(seqs) if index not in faults]
        assert naive(Step(number, good), limits) == (set(), set())
        for seq, table in zip(good, found, strict=True):
            seen = seen_rows(seq, limits)
            whole = enumerate(seq.block_ids[: -(-seq.end // SIZE) * groups])
            read = [block if i // groups in seen[i % groups] else NO_BLOCK for i, block in whole]
            assert entries(table, seq) == read
        batch = Batch.from_step(Step(number, good), limits, torch.device("cpu"), found)
        alone = Batch.from_step(Step(number, good), limits, torch.device("cpu"))
        assert torch.equal(batch.slots, alone.slots)
        fed = [(seq, seq.start + i) for seq in good for i in range(len(seq.tokens))]
        assert batch.positions.tolist() == [position for _, position in fed]
        for group in range(groups):
            own = [seq.block_ids[at // SIZE * groups + group] * SIZE + at % SIZE for seq, at in fed]
            assert batch.slots_of(group).tolist() == own
    assert 50 < num_faulty < 1100
    assert num_known > 500, "most are known, and looked at where they are new"
    holders = [0] * num_blocks
    for table in guard._known.values():
        for block in table.visible(0, table.num_rows).tolist():
            holders[block] += 1
    assert guard._holders.tolist() == holders


def test_who_had_no_part_in_some_steps_is_known_and_who_has_ended_is_forgotten():
    guard = Guard(PLAIN)
    one, other = scheduled([1], 6, table_of([1, 2], PLAIN)), scheduled([1], 6, [3, 4])
    one.request_id, other.request_id = "one", "other"
    (known, _) = guard.check(Step(0, [one, other]))[2]
    for number in range(5):
        assert guard.check(Step(number, [other]))[0] == {}
    assert guard.check(Step(6, [one]))[2] == [known]
    heir = scheduled([1], 6, [5, 2])  # has a block of one that has ended
    heir.request_id = "heir"
    assert check(guard, heir) == ({}, [[5, 2]])
    assert "one" not in guard._known
    for _ in range(40):
        guard.check(Step(7, []))
    assert not guard._known
    assert not guard._holders.any()
