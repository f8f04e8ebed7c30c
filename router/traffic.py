"""What has come to a router, by size: what a forecast of demand is made from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import log2

BINS_PER_OCTAVE = 4  # of lengths, so that a bin is known to 9 %


def bin_of(num_tokens: int) -> int:
    """Number of the bin of this length."""
    return round(BINS_PER_OCTAVE * log2(max(1, num_tokens)))


def tokens_of(number: int) -> float:
    """A length in the middle of bin `number`."""
    return float(2.0 ** (number / BINS_PER_OCTAVE))


@dataclass(slots=True)
class Traffic:
    """Counts since the router's start; they only grow. Owned by the router's admission. Requests
    that were refused have arrived as well."""

    prompts: Counter[int] = field(default_factory=Counter)  # requests, by bin of prompt length
    outputs: Counter[int] = field(default_factory=Counter)  # those that ended, by bin of output
    prompt_tokens: int = 0  # of requests that ended
    cached_tokens: int = 0  # of those, not computed
    num_late: int = 0  # refused, or with the first token after `ttft_target_s`, if that is set

    def on_arrival(self, num_prompt_tokens: int) -> None:
        self.prompts[bin_of(num_prompt_tokens)] += 1

    def on_finished(
        self, num_prompt: int, num_cached: int | None, num_output: int, *, is_late: bool
    ) -> None:
        self.num_late += is_late
        self.outputs[bin_of(num_output)] += 1
        if num_cached is not None:
            self.prompt_tokens += num_prompt
            self.cached_tokens += num_cached
