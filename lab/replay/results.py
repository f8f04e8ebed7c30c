"""What a replay has measured: plain data, for tables, JSON and pictures."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Sample:
    """One request as its client saw it. Seconds count from its arrival; None: it never came."""

    request_id: str
    at_s: float
    input_length: int
    output_length: int  # asked for
    tenant: str = ""
    priority: int = 0
    ttft_s: float | None = None
    second_s: float | None = None  # the second token; None where there is one token only
    e2e_s: float | None = None
    num_output: int = 0
    cached: dict[str, int] = field(default_factory=dict)  # prompt tokens by source
    predicted_ttft_s: float | None = None
    prefill: str | None = None  # worker that computed the prompt; None: the decode worker did
    decode: str | None = None
    refused: str | None = None  # the reason
    refused_s: float | None = None
    retry_after_s: float | None = None


@dataclass(slots=True)
class LoadSeries:
    """Per-worker load over time, sampled at `times_s`. Arrays are [len(workers), len(times_s)]."""

    workers: tuple[str, ...]
    times_s: NDArray[np.float64]
    num_running: NDArray[np.float64]
    kv_used: NDArray[np.float64]  # fraction of the pool that requests hold
    pending_tokens: NDArray[np.float64]  # prompt tokens that wait for computation


@dataclass(slots=True)
class ReplayResult:
    """What one replay has shown. `itl_s` are gaps between tokens, `itl_counts` how often each was
    seen."""

    trace: str
    policy: str
    timing: str
    speedup: float
    samples: list[Sample]
    itl_s: NDArray[np.float32]
    itl_counts: NDArray[np.int32]
    load: LoadSeries
    virtual_s: float
    wall_s: float
    num_events: int
    peak_rss_bytes: int
    retries: dict[str, int] = field(default_factory=dict)  # by cause
    counters: dict[str, float] = field(default_factory=dict)  # summed over workers
