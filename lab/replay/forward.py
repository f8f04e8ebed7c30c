"""Forward passes that are not run: how long each takes, and the tokens that come of it.

Every output token of request number i is the same number, which no prompt has, so that the blocks
of answers have hashes of their own.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from math import ceil, sqrt

from kvrelay.engine.sequence import Sequence
from kvrelay.engine.step import Sampled, ScheduledSeq, Step, StepDone
from kvrelay.lab.timing.timing import Timing

FIRST_OUTPUT_TOKEN = 1 << 31
"""Plus the number of the request. Block ids of traces are below."""


@dataclass(slots=True, eq=False)
class Burst:
    """Decode steps in a row that are under way. Step j (from 1) ends `ends_s(j)` after the start;
    each takes a little longer than the one before, because there is more KV to read."""

    step: Step
    start_s: float
    first_s: float
    growth_s: float
    repeats: int
    running: list[Sequence]  # when it began

    def ends_s(self, count: int) -> float:
        return count * (self.first_s + self.growth_s * (count - 1) / 2)

    def count_at(self, now: float) -> int:
        """Steps that have to end before the burst may: those that have begun by now."""
        elapsed_s = now - self.start_s
        linear = self.first_s - self.growth_s / 2
        if self.growth_s > 1e-12:
            root = sqrt(linear * linear + 2 * self.growth_s * elapsed_s)
            count = (root - linear) / self.growth_s
        else:
            count = elapsed_s / self.first_s
        return min(self.repeats, max(1, ceil(count - 1e-9)))


@dataclass(slots=True)
class TokenLog:
    """When tokens came. Owned by a runtime; a request is known by its number."""

    gap_s: array[float] = field(default_factory=lambda: array("f"))
    gap_counts: array[int] = field(default_factory=lambda: array("i"))
    last_at: dict[int, float] = field(default_factory=dict)  # request -> its last token
    num_tokens: dict[int, int] = field(default_factory=dict)  # request -> tokens so far
    second_at: dict[int, float] = field(default_factory=dict)

    def note(self, request: int, first_at: float, last_at: float, count: int) -> None:
        """`count` tokens more of `request`, the first and last of them at these times."""
        before = self.last_at.get(request)
        known = self.num_tokens.get(request, 0)
        if before is not None:
            self.gap_s.append(first_at - before)
            self.gap_counts.append(1)
        if known == 1:
            self.second_at[request] = first_at
        elif known == 0 and count > 1:
            self.second_at[request] = first_at + (last_at - first_at) / (count - 1)
        self.last_at[request] = last_at
        self.num_tokens[request] = known + count

    def forget(self, request: int) -> float | None:
        """`request` is over. Returns when its second token came."""
        self.last_at.pop(request, None)
        self.num_tokens.pop(request, None)
        return self.second_at.pop(request, None)


class ForwardPasses:
    """Stands for the model of every worker. Holds nothing of its own but the log."""

    def __init__(self, timing: Timing, log: TokenLog) -> None:
        self._timing = timing
        self._log = log

    def seconds(self, step: Step, pool_tokens: int) -> tuple[float, float]:
        """How long `step` takes, and how much longer each repeat takes than the one before."""
        prompt_tokens, pairs, num_prompts = 0, 0.0, 0
        num_decodes, kv_tokens = 0, 0
        for share in step.seqs:
            count = len(share.tokens)
            if count == 1:
                num_decodes += 1
                kv_tokens += share.start + 1
            else:
                num_prompts += 1
                prompt_tokens += count
                pairs += count * (share.start + count / 2)
        pass_s = self._timing.pass_s
        first_s = pass_s(prompt_tokens, pairs, num_prompts, num_decodes, kv_tokens, pool_tokens)
        if step.repeats == 1:
            return first_s, 0.0
        last = step.repeats - 1
        grown = kv_tokens + last * num_decodes
        last_s = pass_s(0, 0.0, 0, num_decodes, grown, pool_tokens)
        return first_s, max(0.0, last_s - first_s) / last

    def finish(self, burst: Burst, count: int, now: float) -> StepDone:
        """`burst` has ended now, after `count` steps."""
        step, log = burst.step, self._log
        first_at = burst.start_s + burst.first_s if count > 1 else now
        sampled = [self._sample(share, count, first_at, now) for share in step.seqs]
        if count > 1:
            log.gap_s.append((now - first_at) / (count - 1))
            log.gap_counts.append((count - 1) * len(step.seqs))
        checksums = [0] * len(step.checksum_blocks)
        return StepDone(step.step_id, sampled, checksums, now - burst.start_s)

    def _sample(
        self, share: ScheduledSeq, count: int, first_at: float, last_at: float
    ) -> Sampled | None:
        if not share.sample:
            return None
        request = share.sampling.seed
        self._log.note(request, first_at, last_at, count)
        token = FIRST_OUTPUT_TOKEN + request
        return Sampled(token, None, (token,) * (count - 1))
