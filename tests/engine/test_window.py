"""Which blocks a window still reads: against positions, one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.window import Window, Windows
from kvrelay.engine.stats import Role
from tests.engine.configs import worker_config


def _windows(block_size: int, sizes: list[int], num_sinks: int) -> Windows:
    return Windows.of(block_size, sizes, num_sinks)


SIZES = st.integers(1, 20)
WINDOWS = st.builds(Window, st.integers(1, 6), size=SIZES, num_sinks=st.integers(0, 9))
GROUPS = st.builds(
    _windows,
    st.integers(1, 6),
    st.lists(st.integers(0, 20), min_size=1, max_size=3),
    st.integers(0, 9),
)


def read_from(window: Window, position: int) -> set[int]:
    """Rows that a query at `position`, or at any later one of the next few, reads."""
    read: set[int] = set()
    for query in range(position, position + 3 * window.block_size):
        seen = {
            p
            for p in range(query)
            if not window.size or p < window.num_sinks or p > query - window.size
        }
        read |= {p // window.block_size for p in seen if p < position}
    return read


@given(GROUPS, st.integers(0, 80))
def test_nothing_that_is_read_later_is_given_back(windows: Windows, position: int) -> None:
    whole = position // windows.block_size * windows.block_size
    for group, window in enumerate(windows.groups):
        for start in {whole, position}:  # a later request may go on from the last full block
            read = {row * windows.count + group for row in read_from(window, start)}
            assert all(windows.keeps(index, position) for index in read)
        again = {row * windows.count + group for row in read_from(window, whole)}
        assert set(windows.kept(position)) >= again


@given(WINDOWS, st.integers(0, 200))
def test_what_is_kept_is_bounded_by_the_window(window: Window, position: int) -> None:
    end = position // window.block_size + 1
    kept = [block for block in range(end) if window.keeps(block, position)]
    assert len(kept) <= window.num_blocks
    size = window.block_size
    assert window.num_blocks <= -(-window.size // size) + -(-window.num_sinks // size) + 1


@given(GROUPS, st.integers(0, 12), st.integers(0, 12), st.integers(0, 60))
def test_runs_are_what_is_kept(windows: Windows, first: int, count: int, position: int) -> None:
    runs = windows.runs(first, first + count, position)
    blocks = [index for run in runs for index in run if windows.keeps(index, position)]
    kept = [i for i in range(first, first + count) if windows.keeps(i, position)]
    assert blocks == kept == windows.kept_of(first, first + count, position)
    if windows.count == 1:
        assert sum(map(len, runs)) == len(kept)
        assert len(runs) <= 2


@given(GROUPS, st.integers(1, 60))
def test_the_longest_sequence_that_fits_is_told(windows: Windows, num_blocks: int) -> None:
    longest = windows.most_tokens(num_blocks)
    if longest is None:
        assert windows.max_blocks(10_000) <= num_blocks
        return
    assert windows.max_blocks(longest) <= num_blocks
    assert windows.max_blocks(longest + windows.block_size) > num_blocks


@given(GROUPS, st.lists(st.booleans(), max_size=30))
def test_reach_is_the_longest_prefix_that_can_be_continued(
    windows: Windows, there: list[bool]
) -> None:
    count = windows.count
    there = there[: len(there) // count * count]

    def can_go_on(end: int) -> bool:
        read = [i for i in range(end) if windows.keeps(i, windows.tokens(end))]
        return all(there[index] for index in read)

    ends = range(0, len(there) + 1, count)
    expected = max(end for end in ends if can_go_on(end))
    assert windows.reach(len(there), there.__getitem__) == expected


def config_of(num_blocks: int, max_model_len: int, **windows: Any) -> WorkerConfig:
    return worker_config(
        node_id="w",
        role=Role.DECODE,
        epoch=1,
        num_blocks=num_blocks,
        block_size=16,
        bytes_per_block=1,
        max_model_len=max_model_len,
        fingerprint=b"",
        max_num_batched_tokens=512,
        **windows,
    )


@pytest.mark.parametrize(
    ("num_blocks", "most"),
    [(1000, 66 + 32), (72, 72), (67, 67), (66, 67), (40, 67)],  # with fewer than 67 it never fits
)
def test_a_prompt_takes_a_step_ahead_of_its_window_where_the_pool_has_room(
    num_blocks: int, most: int
) -> None:
    config = config_of(num_blocks, 20_000, window=1024, sinks=4)
    assert config.kv_windows.max_blocks(20_000) == config.info().max_seq_blocks == most
    assert config.kv_windows.max_blocks(100) == 7


def test_ahead_of_its_windows_a_prompt_takes_what_the_longest_leaves() -> None:
    for num_blocks in (270, 300, 2000):
        windows = Windows.of(16, (0, *(512,) * 5))
        longest = windows.most_tokens(num_blocks)
        assert longest is not None
        config = config_of(num_blocks, longest, group_windows=(0, *(512,) * 5))
        assert config.kv_windows.max_blocks(longest) <= num_blocks
        ahead = {window.chunk_blocks for window in config.kv_windows.groups[1:]}
        assert ahead == {1}
