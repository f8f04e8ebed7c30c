"""Workers whose layers attend to different windows: a prefix counts as far as it can be continued,
and a sequence as the blocks that it holds."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvrelay.engine.kv.block_hash import group_hash, hash_blocks
from kvrelay.engine.kv.events import KVSnapshot
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.kv.tier import Tier, TierHashes
from kvrelay.engine.kv.window import Windows
from kvrelay.router.dispatch import fits
from kvrelay.router.index.prefix_index import IndexTable
from kvrelay.router.placement.cost import CostModel
from kvrelay.router.placement.policy import Chooser
from kvrelay.router.placement.work import HashedPrompt, Work
from tests.router.script import BLOCK, Script, worker_info

WINDOWS = (0, 16, 16)
PROMPT = tuple(range(160))
LARGE = {"num_blocks": 4096, "max_model_len": 1024, "group_windows": WINDOWS}


class Asked(Script):
    num_asked = 0


def script(*workers: str) -> Asked:
    made = Asked()
    for name in workers:
        made.up(name, **LARGE)
    return made


def tell(made: Asked, worker: str, rows: int, marks: list[int], tier: Tier = Tier.DEVICE) -> None:
    """`worker` holds the first group's blocks of `rows` rows, and the last group's at `marks`."""
    names = hash_blocks(worker_info(worker).fingerprint, UNSALTED, PROMPT, BLOCK)
    held = (*names[:rows], *(group_hash(names[row - 1], 2) for row in marks))
    on_device, below = (held, ()) if tier is Tier.DEVICE else ((), held)
    made.num_snapshots += 1
    tiers = (TierHashes(Tier.HOST, below),)
    made.tell(KVSnapshot(worker, 1, made.num_snapshots, on_device, tiers))


def held_at(made: Asked, worker: str) -> tuple[int, int]:
    """Tokens that count as held by `worker`: in device memory, in host memory."""
    name = f"{worker}-{made.num_asked}"
    made.num_asked += 1
    made.submit(name, PROMPT)
    (decision,) = made.router.explain(name)
    found = {each.worker: each.held for each in decision.options.decodes}[worker]
    return found.device, found.host


def test_a_prefix_counts_up_to_the_last_block_whose_windows_are_there() -> None:
    made = script("decode-0", "decode-1")
    tell(made, "decode-0", 30, marks=[7, 12, 33])
    tell(made, "decode-1", 20, marks=[20])
    assert held_at(made, "decode-0") == (12 * BLOCK, 0)
    assert held_at(made, "decode-1") == (20 * BLOCK, 0)
    tell(made, "decode-1", 20, marks=[])
    assert held_at(made, "decode-1") == (0, 0)
    tell(made, "decode-1", 20, marks=[18], tier=Tier.HOST)
    assert held_at(made, "decode-1") == (0, 18 * BLOCK)


def test_what_a_request_will_leave_counts_at_its_end() -> None:
    made = script("decode-0")
    tell(made, "decode-0", 0, marks=[])
    assert held_at(made, "decode-0") == (0, 0)
    assert held_at(made, "decode-0") == (len(PROMPT) - BLOCK, 0)  # the last block is computed


ROWS = len(PROMPT) // BLOCK - 1  # the last block is computed
ANSWERS = (9, 11, 15, 7)  # facts that a block has one of: in device memory, memory, any tier, said
held_by_one = st.tuples(
    st.dictionaries(st.sampled_from([1, 2, 4, 8]), st.integers(0, ROWS)),  # rows, by fact
    st.dictionaries(st.integers(1, ROWS), st.integers(1, 15)),  # facts of marks, by row
)


@given(st.lists(held_by_one, min_size=1, max_size=5), st.sampled_from([0, 14, 40]))
def test_each_run_ends_at_the_last_mark_that_it_has(
    held: list[tuple[dict[int, int], dict[int, int]]], first_slot: int
) -> None:
    table = IndexTable(32, 1000)
    for _ in range(first_slot):  # so that slots are in several words of a set
        table.open(0)
    names = hash_blocks(b"fingerprint", UNSALTED, PROMPT, BLOCK)
    expected = [0] * 4 * first_slot
    for rows, marks in held:
        slot = table.open(0)
        for fact, count in rows.items():
            table.change(slot, b"".join(names[:count]), add=fact)
        for row, facts in marks.items():
            table.change(slot, group_hash(names[row - 1], 2), add=facts)
        for answer in ANSWERS:
            end = max((count for fact, count in rows.items() if fact & answer), default=0)
            ends = (row for row, facts in marks.items() if row <= end and facts & answer)
            expected.append(max(ends, default=0))
    prompt = HashedPrompt(1, BLOCK, BLOCK, bytearray(b"".join(names)), mark_group=2)
    chooser = Chooser(CostModel(), table)
    chooser.ask(0.0, Work(len(PROMPT), len(PROMPT), 1.0, 1.0, [prompt]), trusting=False)
    (asked,) = chooser._hashed
    assert list(asked.ends[0 : 4 * asked.num_slots]) == expected


@given(
    st.lists(st.sampled_from([0, 7, 16, 40]), min_size=1, max_size=4),
    st.integers(1, 300),
    st.integers(0, 10_000),
)
def test_a_sequence_counts_as_the_blocks_that_it_holds(
    sizes: list[int], num_tokens: int, seed: int
) -> None:
    assume(any(sizes) or len(sizes) == 1)
    chunk = Random(seed).randint(1, 5)
    windows = Windows.of(BLOCK, sorted(sizes, key=lambda size: (size > 0, -size)), 0, chunk)
    info = worker_info(
        "decode-0",
        max_model_len=300,
        max_seq_blocks=windows.max_blocks(300) if windows.any else 0,
        group_windows=tuple(each.size for each in windows.groups) if windows.any else (),
    )
    needed = windows.max_blocks(num_tokens)
    if windows.any and sizes.count(0) == 0:  # bounded by the longest
        assert needed <= info.blocks_for(num_tokens) <= info.max_seq_blocks
    elif len({*sizes} - {0}) <= 1 and info.window_blocks == sum(
        window.num_blocks + chunk for window in windows.groups if window.size
    ):
        assert info.blocks_for(num_tokens) == needed
    if not windows.any:
        assert info.blocks_for(num_tokens) == -(-num_tokens // BLOCK)
    assert fits(info, num_tokens) == (info.blocks_for(num_tokens) <= info.num_blocks)


@pytest.mark.parametrize("group", [1, 2, 255])
def test_names_of_groups_differ_and_lead_back(group: int) -> None:
    first = bytes(range(100, 116))
    assert group_hash(first, group) != first
    assert group_hash(group_hash(first, group), group) == first
