"""A short run of the fuzzer; `python -m tests.fuzz.frames` runs longer ones."""

from __future__ import annotations

import pytest

from tests.fuzz.frames import fuzz_in_process, fuzz_over_sockets

MAX_GROWTH_MIB = 16.0


def test_malformed_frames_crash_nothing_and_are_not_accepted() -> None:
    result = fuzz_in_process(20_000, seed=3)
    assert result.wrong == []
    assert result.grown_mib < MAX_GROWTH_MIB
    assert result.outcomes["forged_frame: bad_mac"] > 0
    assert result.outcomes["sealed_garbage: bad_frame"] > 0


@pytest.mark.anyio
async def test_a_listening_process_survives_malformed_connections() -> None:
    result = await fuzz_over_sockets(200, seed=3)
    assert result.wrong == []
    assert result.grown_mib < MAX_GROWTH_MIB
    rejected = ("bad_mac", "bad_magic", "oversized", "truncated")
    assert all(result.outcomes[counter] for counter in rejected)
