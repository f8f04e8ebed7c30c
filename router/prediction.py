"""When a first token will come: what a placement's parts leave out, learned from when it came.

Messages, the step under way and the client's own share of the cores come on top of the parts. And
where prefill and decode workers share a machine, a prompt takes longer while others decode: what
workers tell of their passes is a mean over both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.placement import Seconds

RATE = 0.05  # share of a miss that is corrected at once
UNIT_S = 0.05  # of the part that is the same for all
MOST, LEAST = 4.0, 0.25  # factors of what is computed


@dataclass(slots=True)
class TtftPredictor:
    """Owned by a dispatcher. A prediction is a weighted sum of what is computed (with a weight for
    each of two cases, whether others decode meanwhile), what is read, and a constant. The weights
    follow what happens by normalised least mean squares, from no single request much."""

    factors: list[float] = field(default_factory=lambda: [1.0, 1.0])  # quiet, others decode
    overhead_s: float = 0.0

    def predict(self, seconds: Seconds, *, others_decode: bool) -> float:
        computed_s = seconds.queue + seconds.prefill
        read_s = seconds.load + seconds.fetch
        return max(0.0, computed_s * self.factors[others_decode] + read_s + self.overhead_s)

    def learn(self, seconds: Seconds, real_s: float, *, others_decode: bool) -> None:
        """A first token came `real_s` after the decision."""
        predicted_s = self.predict(seconds, others_decode=others_decode)
        bound_s = 0.5 * predicted_s + 0.005
        miss_s = min(bound_s, max(-bound_s, real_s - predicted_s))
        computed_s = seconds.queue + seconds.prefill
        step = RATE * miss_s / (computed_s * computed_s + UNIT_S * UNIT_S)
        factor = self.factors[others_decode] + step * computed_s
        self.factors[others_decode] = min(MOST, max(LEAST, factor))
        self.overhead_s += step * UNIT_S * UNIT_S
