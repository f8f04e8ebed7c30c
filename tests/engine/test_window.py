"""Which blocks a window still reads: against positions, one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.kv.window import Window
from kvrelay.engine.stats import Role
from tests.engine.configs import worker_config

WINDOWS = st.builds(Window, st.integers(1, 6), size=st.integers(1, 20), num_sinks=st.integers(0, 9))


def read_from(window: Window, position: int) -> set[int]:
    """Blocks that a query at `position`, or at any later one of the next few, reads."""
    read: set[int] = set()
    for query in range(position, position + 3 * window.block_size):
        seen = {p for p in range(query) if p < window.num_sinks or p > query - window.size}
        read |= {p // window.block_size for p in seen if p < position}
    return read


@given(WINDOWS, st.integers(0, 80))
def test_nothing_that_is_read_later_is_given_back(window: Window, position: int) -> None:
    whole = position // window.block_size * window.block_size
    for start in {whole, position}:  # a later request may go on from the last full block
        assert all(window.keeps(block, position) for block in read_from(window, start))
    assert set(window.kept(position)) >= read_from(window, whole)


@given(WINDOWS, st.integers(0, 200))
def test_what_is_kept_is_bounded_by_the_window(window: Window, position: int) -> None:
    end = position // window.block_size + 1
    kept = [block for block in range(end) if window.keeps(block, position)]
    assert len(kept) <= window.num_blocks
    size = window.block_size
    assert window.num_blocks <= -(-window.size // size) + -(-window.num_sinks // size) + 1


@given(WINDOWS, st.integers(0, 12), st.integers(0, 12), st.integers(0, 60))
def test_runs_are_what_is_kept(window: Window, first: int, count: int, position: int) -> None:
    runs = window.runs(first, first + count, position)
    blocks = [block for run in runs for block in run]
    assert blocks == [b for b in range(first, first + count) if window.keeps(b, position)]
    assert len(runs) <= 2


@given(WINDOWS, st.lists(st.booleans(), max_size=30))
def test_reach_is_the_longest_prefix_that_can_be_continued(
    window: Window, there: list[bool]
) -> None:
    def has(index: int) -> bool:
        return there[index]

    sinks = window.num_sink_blocks

    def can_go_on(end: int) -> bool:
        kept = window.kept(end * window.block_size)
        return all(there[index] for index in {*range(min(sinks, end)), *kept})

    expected = max(end for end in range(len(there) + 1) if can_go_on(end))
    assert window.reach(len(there), has) == expected


@given(st.lists(st.booleans(), max_size=30))
def test_without_a_window_a_prefix_has_no_gap(there: list[bool]) -> None:
    expected = there.index(False) if False in there else len(there)
    assert Window(4).reach(len(there), there.__getitem__) == expected


@pytest.mark.parametrize(
    ("num_blocks", "most"),
    [(1000, 66 + 32), (72, 72), (67, 67), (66, 67), (40, 67)],  # with fewer than 67 it never fits
)
def test_a_prompt_takes_a_step_ahead_of_its_window_where_the_pool_has_room(
    num_blocks: int, most: int
) -> None:
    config = worker_config(
        node_id="w",
        role=Role.DECODE,
        epoch=1,
        num_blocks=num_blocks,
        block_size=16,
        bytes_per_block=1,
        max_model_len=20_000,
        fingerprint=b"",
        window=1024,
        sinks=4,
        max_num_batched_tokens=512,
    )
    assert config.kv_window.max_blocks(20_000) == config.info().max_seq_blocks == most
    assert config.kv_window.max_blocks(100) == 7
