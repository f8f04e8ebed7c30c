"""What is needed, and how a number of workers divides into roles, in GPU-seconds per second."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from kvrelay.cluster.scaling.decisions import Alternative

DECODE_FULL = 0.8  # of a decode worker's, beside which the target still holds
BESIDE = 0.5  # of what decoding leaves of a decode worker, for prompts
SPARE = 0.3  # of a decode worker, below which a role does not change back


@dataclass(frozen=True, slots=True)
class Need:
    """Of workers, before limits."""

    size: int
    decode_demand: float  # GPU-seconds per second
    prefill_demand: float
    forecast: float
    alternatives: tuple[Alternative, ...] = ()

    def decode_workers(self, size: int, have: int) -> int:
        """Of `size`: at least one, and one is left for prompts where there are several. Of the
        `have` there are now, none goes that would soon be missed."""
        if size <= 1:
            return size
        least = decode_workers(size, self.decode_demand)
        spare = min(have, ceil(self.decode_demand / DECODE_FULL + SPARE))
        return min(size - 1, max(least, spare))


def decode_workers(size: int, demand: float) -> int:
    """Of `size`, for so many GPU-seconds of decoding per second."""
    return size if size <= 1 else min(size - 1, max(1, ceil(demand / DECODE_FULL - 1e-9)))


def for_prompts(size: int, decode_demand: float) -> float:
    """Workers' worth of prompts that `size` workers compute: prefill workers all the time, decode
    workers in a part of what decoding leaves, in chunks."""
    decode = decode_workers(size, decode_demand)
    return size - decode + BESIDE * max(0.0, DECODE_FULL * decode - decode_demand)
