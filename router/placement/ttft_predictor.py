"""When a first token will come: what a placement's parts leave out, learned from when it came.

Messages, the step under way and the client's own share of the cores come on top of the parts. And
where prefill and decode workers share a machine, a prompt takes longer while others decode: what
workers tell of their passes is a mean over both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log

from router.placement.work import Seconds

RATE = 0.15  # share of a miss that is corrected at once
BOUND = 0.25  # of a miss, as a logarithm: the many near ones count, not the few far off
UNIT_S = 0.02  # of the part that is the same for all: it learns from requests that are as short
MOST, LEAST = 8.0, 0.125  # factors of what is computed
LEAST_S = 1e-4


@dataclass(slots=True)
class TtftPredictor:
    """Owned by a dispatcher. A prediction is what is computed, times a factor, what is read, and a
    constant. There is a factor for each of four cases: whether others decode meanwhile, and whether
    other prompts come first, as more may then."""

    factors: dict[tuple[bool, bool], float] = field(default_factory=dict)
    overhead_s: float = 0.0

    def predict(self, seconds: Seconds, *, others_decode: bool) -> float:
        return sum(self._parts(seconds, others_decode))

    def learn(self, seconds: Seconds, real_s: float, *, others_decode: bool) -> None:
        """A first token came `real_s` after the decision."""
        computed_s, read_s, overhead_s = self._parts(seconds, others_decode)
        predicted_s = max(LEAST_S, computed_s + read_s + overhead_s)
        miss = RATE * min(BOUND, max(-BOUND, log(max(LEAST_S, real_s) / predicted_s)))
        whole_s = predicted_s + UNIT_S
        case = others_decode, seconds.queue > 0
        factor = self.factors.get(case, 1.0) * exp(miss * computed_s / whole_s)
        self.factors[case] = min(MOST, max(LEAST, factor))
        self.overhead_s = max(0.0, overhead_s + miss * (overhead_s + UNIT_S) / whole_s * UNIT_S)

    def _parts(self, seconds: Seconds, others_decode: bool) -> tuple[float, float, float]:
        """What is computed, what is read, and the rest, as far as it is known by now."""
        factor = self.factors.get((others_decode, seconds.queue > 0), 1.0)
        computed_s = (seconds.queue + seconds.prefill) * factor
        return computed_s, seconds.load + seconds.fetch, self.overhead_s
