"""What prompts and tokens cost, in GPU-seconds, by what workers measure of their own passes."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from kvrelay.engine.cost import decode_features, fitted_s, prompt_features

KV_FILL = 0.85  # of a pool, for sequences; the rest takes what grows
MAX_BATCH = 1024
FAR = 3.0  # times what a plain rate says


class Costs(Struct, frozen=True):
    """Of a typical worker. Weights are of `engine.cost`; empty, or a rate of 0: not measured."""

    prompt_weights: tuple[float, ...]
    decode_weights: tuple[float, ...]
    prefill_tokens_per_s: float
    decode_step_s: float
    pool_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @staticmethod
    def typical(prompts: Iterable[Costs], tokens: Iterable[Costs]) -> Costs | None:
        """Of workers that have measured prompts, and of those that have measured tokens, each the
        one in the middle: a fit may be far off on a worker that has seen little. None: none has."""
        by_rate = sorted(prompts, key=lambda costs: costs.prefill_tokens_per_s)
        by_step = sorted(tokens, key=lambda costs: costs.decode_step_s)
        if not by_rate:
            return None
        of_prompts = by_rate[len(by_rate) // 2]
        if not by_step:
            return replace(of_prompts, decode_weights=(), decode_step_s=0.0)
        of_tokens = by_step[len(by_step) // 2]
        return replace(
            of_prompts,
            decode_weights=of_tokens.decode_weights,
            decode_step_s=of_tokens.decode_step_s,
        )

    def completed_by(self, newer: Costs) -> Costs:
        """`newer`, and what it does not know from here."""
        return replace(
            newer,
            prompt_weights=newer.prompt_weights or self.prompt_weights,
            decode_weights=newer.decode_weights or self.decode_weights,
            prefill_tokens_per_s=newer.prefill_tokens_per_s or self.prefill_tokens_per_s,
            decode_step_s=newer.decode_step_s or self.decode_step_s,
        )

    def prompt_s(self, num_tokens: float, cached: float = 0.0) -> float:
        """To compute a prompt whose first `cached` tokens are there."""
        start = int(cached)
        num_new = max(1, round(num_tokens) - start)
        if num_tokens <= 0:
            return 0.0
        plain_s = num_new / self.prefill_tokens_per_s if self.prefill_tokens_per_s > 0 else 0.0
        if not self.prompt_weights:
            return plain_s
        features = prompt_features(num_new, start, self.max_num_batched_tokens)
        # A fit that was made from few lengths may be far off for others.
        return min(FAR * plain_s, max(plain_s / FAR, fitted_s(self.prompt_weights, features)))

    def streams(self, itl_target_s: float, mean_context: float) -> int:
        """Sequences that one worker can decode at once within the target; at least 1."""
        by_memory = int(KV_FILL * self.pool_tokens / max(1.0, mean_context))
        most = max(1, min(by_memory, self.max_num_seqs, MAX_BATCH))
        low, high = 1, most
        while low < high:  # a step takes longer the more it decodes
            middle = (low + high + 1) // 2
            if self.step_s(middle, mean_context) <= itl_target_s:
                low = middle
            else:
                high = middle - 1
        return low

    def step_s(self, num_seqs: int, mean_context: float) -> float:
        """Of a decode step over so many sequences."""
        if not self.decode_weights:
            return self.decode_step_s
        used = min(1.0, num_seqs * mean_context / max(1, self.pool_tokens))
        return fitted_s(self.decode_weights, decode_features(num_seqs, used))

    def token_s(self, itl_target_s: float, mean_context: float) -> float:
        """GPU-seconds of one output token on a worker that decodes as much as it can."""
        streams = self.streams(itl_target_s, mean_context)
        return self.step_s(streams, mean_context) / streams
