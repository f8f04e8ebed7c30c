"""Costs in seconds that workers and routers have to see alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul

RATE_WEIGHT = 0.2  # of a new measurement in the moving averages


def blocks_worth_loading(load_s: Iterable[float], compute_s: float) -> int:
    """How many blocks, from the first of a run on, to load rather than to compute.

    `load_s`: seconds that each takes to load; `compute_s`: seconds to compute any one of them. A
    block that is slow to load is worth it where quick ones follow. 0: computing is quicker.
    """
    best, best_saved, saved = 0, 0.0, 0.0
    for count, seconds in enumerate(load_s, start=1):
        saved += compute_s - seconds
        if saved > best_saved:
            best, best_saved = count, saved
    return best


@dataclass(slots=True)
class Rate:
    """Amount per unit over the recent past, large measurements counting for more; 0 until
    something was measured."""

    _amount: float = 0.0
    _units: float = 0.0

    def add(self, amount: float, units: float) -> None:
        self._amount += amount - RATE_WEIGHT * self._amount
        self._units += units - RATE_WEIGHT * self._units

    @property
    def value(self) -> float:
        return self._amount / self._units if self._units else 0.0


FORGET = 0.998  # weight of what is known, with each new sample
MIN_SAMPLES = 8  # before a fit is told to anybody
TOKENS_UNIT = 4096.0  # prompt tokens count in these, so that features are of one size
SEQS_UNIT = 16.0


class FittedCost:
    """Seconds as a weighted sum of features, learned from what happened. Owned by whoever measures.

    Recursive least squares on relative errors, with forgetting, so that a rate that changes is
    followed and a short pass counts as much as a long one. Invariant: `_spread` stays bounded, so
    that a feature that never varies does not make the others jump."""

    def __init__(self, num_features: int) -> None:
        self.weights = [0.0] * num_features
        self.num_samples = 0
        self._spread = [
            [100.0 if row == column else 0.0 for column in range(num_features)]
            for row in range(num_features)
        ]

    def add(self, features: Sequence[float], seconds: float) -> None:
        if not seconds > 0:
            return
        x = [feature / seconds for feature in features]
        spread = self._spread
        toward = [sum(map(mul, row, x)) for row in spread]
        bounded = sum([spread[i][i] for i in range(len(x))]) < 1e3 * len(x)
        forget = FORGET if bounded else 1.0
        scale = 1.0 / (forget + sum(map(mul, toward, x)))
        miss = 1.0 - sum(map(mul, self.weights, x))
        for i, pull in enumerate(toward):
            gain = pull * scale
            self.weights[i] += gain * miss
            spread[i] = [
                (value - gain * other) / forget
                for value, other in zip(spread[i], toward, strict=True)
            ]
        self.num_samples += 1

    def published(self) -> tuple[float, ...]:
        """The weights; empty while too little was measured to believe them."""
        return tuple(self.weights) if self.num_samples >= MIN_SAMPLES else ()


def prompt_features(num_new: int, start: int, budget: int) -> tuple[float, float, float, float]:
    """Of the passes that feed `num_new` tokens from position `start` on, `budget` tokens each:
    their number, tokens, squares of tokens, and tokens times what lies before them."""
    if num_new <= budget:
        scaled = num_new / TOKENS_UNIT
        return (1.0, scaled, scaled * scaled, scaled * start / TOKENS_UNIT)
    passes = -(-num_new // budget)
    full = passes - 1
    rest = num_new - full * budget
    squares = full * budget * budget + rest * rest
    before = budget * (full * start + budget * full * (full - 1) / 2)
    before += rest * (start + full * budget)
    unit = TOKENS_UNIT * TOKENS_UNIT
    return (float(passes), num_new / TOKENS_UNIT, squares / unit, before / unit)


def decode_features(num_seqs: float, used: float) -> tuple[float, float, float, float]:
    """Of a step that feeds one token to each of `num_seqs` sequences, whose KV together is a
    fraction `used` of the pool."""
    return (1.0, num_seqs / SEQS_UNIT, used, used * used)


def row_features(rows: float, used: float, again: float) -> tuple[float, float, float, float]:
    """Of a pass over so many rows of decodes, drafts among them. `used`: what sequences read, as a
    fraction of the pool; `again`: what their drafts read of the same."""
    return (1.0, rows / SEQS_UNIT, used, again)


def fitted_s(weights: Sequence[float], features: Sequence[float]) -> float:
    return max(0.0, float(sum(map(mul, weights, features))))
