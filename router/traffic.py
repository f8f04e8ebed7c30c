"""What has come to a router, by size, of which a forecast of demand is made; and what a router
tells the autoscaler of itself and of workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import log2

from msgspec import Struct

from kvrelay.engine.node import NodeId

BINS_PER_OCTAVE = 4  # for lengths, so that a bin is known to 9 %


def bin_of(num_tokens: int) -> int:
    """Number of the bin of this length."""
    return round(BINS_PER_OCTAVE * log2(max(1, num_tokens)))


def tokens_of(number: int) -> float:
    """The length that is in the middle of bin `number`."""
    return float(2.0 ** (number / BINS_PER_OCTAVE))


@dataclass(slots=True)
class Traffic:
    """Counts since the router's start; they only grow. Owned by the router's admission. Requests
    that were refused have arrived as well; those of the class `batch`, which wait for workers that
    others leave, are not counted."""

    prompts: Counter[int] = field(default_factory=Counter)  # requests, by bin of prompt length
    outputs: Counter[int] = field(default_factory=Counter)  # those that ended, by bin of output
    prompt_tokens: int = 0  # in requests that ended
    cached_tokens: int = 0  # not computed
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


class RouterSeen(Struct, frozen=True):
    """Counts of one router since its start, as of `at_s`: see `Traffic`."""

    router: str
    at_s: float
    prompts: dict[int, int]
    outputs: dict[int, int]
    prompt_tokens: int
    cached_tokens: int
    num_late: int  # requests that were refused or missed the target to the first token
    num_live: int  # requests that have not ended, without those of the class `batch`


class WorkerSeen(Struct, frozen=True):
    """What a worker said of itself at `at_s`; see `engine.stats.WorkerStats`."""

    worker: NodeId
    at_s: float
    prompt_weights: tuple[float, ...]
    decode_weights: tuple[float, ...]
    prefill_tokens_per_s: float
    decode_step_s: float
    pool_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_decoding: int  # without those of low classes
    pending_prefill_tokens: int
