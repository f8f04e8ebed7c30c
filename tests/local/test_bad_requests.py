"""Requests that make steps fail, beside good streams: real nodes over the default model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.isolation import KINDS, run

REASONS = {
    "grammar": "grammar_failed",
    "sampling": "sampling_failed",
    "NaN logits": "sampling_failed",
    "step": "execution_failed",
}


@pytest.mark.slow
def test_good_streams_go_on_and_bad_requests_are_refused_with_their_reason(
    smollm2_dir: Path,
) -> None:
    for outcome in run(smollm2_dir, streams=6, tokens=24, kinds=[*KINDS], counts=[3]):
        assert (outcome.failed, outcome.altered, outcome.workers_ended) == (0, 0, 0), outcome
        assert outcome.refusals == {REASONS[outcome.kind]: 3}
