"""Requests that no worker has memory for now, beside short ones of other tenants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvrelay.lab.replay.replay import Sample
from kvrelay.lab.replay.trace import Trace, TraceRequest
from kvrelay.lab.timing.timing import Links, Polynomial
from tests.lab.replay.replay_kit import checked, config

BLOCK = 128
NUM_WORKERS = 4
NUM_SHORT = 100
NUM_STEADY = 1000  # at 10 a second
OUTPUT = 1000
TIMEOUT_S = 600.0
LINKS = Links(bytes_per_token=1000, peer_bytes_per_s=1e10, host_bytes_per_s=1e9)
# A pass of n tokens: 5 ms + 0.02 ms n; a step: 30 ms.
TIMING = Polynomial((0.0, 0.02, 5.0), (0.0, 2.0, 29.0), links=LINKS)


def beside(num_large: int) -> Trace:
    """Two streams have half of each worker's memory. Then large requests of one tenant come, and
    short ones of two others."""
    warm_up = [TraceRequest(0.2 * n, BLOCK, OUTPUT, tenant="b") for n in range(60)]
    streams = [
        TraceRequest(60.0 + 0.2 * n, 242 * BLOCK, OUTPUT, tenant="c")
        for n in range(2 * NUM_WORKERS)
    ]
    large = [
        TraceRequest(72.0 + 0.01 * n, 900 * BLOCK, OUTPUT, tenant="a") for n in range(num_large)
    ]
    short = [
        TraceRequest(72.1 + 0.1 * n, BLOCK, OUTPUT, tenant="bc"[n % 2]) for n in range(NUM_SHORT)
    ]
    return Trace("beside large ones", (*warm_up, *streams, *large, *short), block_tokens=BLOCK)


def run_trace(trace: Trace, num_workers: int) -> list[Sample]:
    cluster = config(
        num_prefill=0, num_decode=num_workers, num_blocks=1000, block_size=BLOCK,
        max_num_batched_tokens=8192, max_num_seqs=128, timeout_s=TIMEOUT_S, itl_target_s=0.2,
    )  # fmt: skip
    return checked(trace, replace(cluster, timing=TIMING))[1].samples


def run(num_large: int) -> tuple[list[Sample], list[float]]:
    """The large ones, and the seconds to the first token of the short ones."""
    samples = run_trace(beside(num_large), NUM_WORKERS)
    large = [sample for sample in samples if sample.tenant == "a"]
    short = [s for s in samples if s.at_s > 72.05 and s.tenant != "a"]
    assert len(short) == NUM_SHORT
    return large, [s.ttft_s if s.ttft_s is not None else TIMEOUT_S for s in short]


@pytest.mark.slow
@pytest.mark.parametrize("num_large", [1, pytest.param(4, marks=pytest.mark.long)])
def test_short_requests_of_others_go_out_beside_large_ones(num_large: int) -> None:
    _, alone = run(0)
    large, short = run(num_large)
    assert max(short) < 1.0, "all go out"
    assert np.percentile(short, 90) <= 1.2 * np.percentile(alone, 90)
    assert [sample.refused for sample in large] == [None] * num_large
    assert max(s.e2e_s or TIMEOUT_S for s in large) < TIMEOUT_S / 4


@pytest.mark.long
def test_a_large_one_is_served_beside_short_ones_that_keep_coming() -> None:
    """They have a third of each of two workers, and the large one needs nine tenths."""
    short = [TraceRequest(0.1 * n, 12 * BLOCK, 200, tenant="bc"[n % 2]) for n in range(NUM_STEADY)]
    requests = sorted(
        [*short, TraceRequest(10.05, 900 * BLOCK, 20, tenant="a")], key=lambda r: r.at_s
    )
    samples = run_trace(Trace("steady", tuple(requests), block_tokens=BLOCK), 2)
    assert [sample.refused for sample in samples] == [None] * len(samples)
    large = next(sample for sample in samples if sample.tenant == "a")
    assert large.ttft_s is not None
    assert large.ttft_s < 40.0, "it waits until no short ones come"
    assert np.percentile([s.ttft_s for s in samples if s is not large and s.ttft_s], 90) < 0.2
