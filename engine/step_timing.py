"""How fast a worker computes, learned from its own steps."""

from __future__ import annotations

from engine.config import WorkerConfig
from engine.cost import FittedCost, Rate, decode_features, prompt_features, row_features
from engine.step import Step


class StepTiming:
    """Owned by a worker's core. Rates are plain averages of the recent past; fits know what a pass
    costs by what is in it."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self.prefill_tokens_per_s = Rate()
        self.decode_step_s = Rate()
        self.prompt_cost = FittedCost(4)
        self.decode_cost = FittedCost(4)  # of a token for each
        self.row_cost = FittedCost(4)  # of a pass, by its rows

    def learn(self, step: Step, elapsed_s: float, repeats: int, num_held: int = 0) -> None:
        """`step` was run `repeats` times; `num_held` of its drafts held. Of a mixed step, the
        prompts' time is what a step of decodes alone would not have taken."""
        prompts = [share for share in step.seqs if len(share.tokens) > 1]
        if not prompts:
            self.decode_step_s.add(elapsed_s, repeats)
            count, pool_tokens = len(step.seqs), self._config.num_blocks * self._config.block_size
            kv_tokens = sum([share.start for share in step.seqs]) + count * repeats / 2
            used = kv_tokens / pool_tokens
            token_s = elapsed_s / (repeats + num_held / count)
            self.decode_cost.add(decode_features(count, used), token_s)
            drafts = [(len(share.draft), share.start) for share in step.seqs if share.draft]
            rows = count + sum(more for more, _ in drafts)
            again = sum(more * start for more, start in drafts) / pool_tokens
            self.row_cost.add(row_features(rows, used, again), elapsed_s / repeats)
            return
        if len(prompts) < len(step.seqs):
            elapsed_s = max(elapsed_s - self.decode_step_s.value, 0.1 * elapsed_s)
        total = sum(len(share.tokens) for share in prompts)
        self.prefill_tokens_per_s.add(total, elapsed_s)
        before = sum(len(share.tokens) * share.start for share in prompts)
        self.prompt_cost.add(prompt_features(total, before // total, total), elapsed_s)

    def prompt_budget(self) -> int:
        """Prompt tokens that fit beside decodes into a step of `itl_target_s`, at measured rates;
        at least a block, or a prompt might never end."""
        target_s = self._config.itl_target_s
        if target_s == 0:
            return self._config.max_num_batched_tokens
        spare_s = target_s - self.decode_step_s.value
        return max(self._config.block_size, int(spare_s * self.prefill_tokens_per_s.value))

    def present_prefill_rate(self, *, is_busy: bool) -> float:
        """Tokens per second that a prompt is computed at now: beside decodes, a budget a step."""
        rate = self.prefill_tokens_per_s.value
        if self._config.itl_target_s == 0 or rate == 0 or not is_busy:
            return rate
        budget = self.prompt_budget()
        return budget / (self.decode_step_s.value + budget / rate)

    def present_prompt_weights(self, *, is_busy: bool) -> tuple[float, ...]:
        """The fit for prompts, slowed down likewise; empty while it is not known."""
        weights, rate = self.prompt_cost.published(), self.prefill_tokens_per_s.value
        present = self.present_prefill_rate(is_busy=is_busy)
        if present == rate:
            return weights
        return tuple(weight * rate / present for weight in weights)
