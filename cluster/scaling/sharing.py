"""How many workers each of several models may have, where they share machines.

Each model has an autoscaler of its own, which says how many workers it needs; here the number that
all may have together is divided by need: a model that has nothing to do gives way to one that has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Demand(NamedTuple):
    """Workers of one model. Invariant: `least <= most`."""

    least: int
    needed: int  # for what comes to it; 0: it may have none
    most: int


def shares(total: int, demands: Mapping[str, Demand]) -> dict[str, int]:
    """The most workers that each model may have: its least in any case, and `total` together where
    that leaves room. Each that needs any gets one; each further one goes to the model that has the
    smallest part of what it needs, and what nobody needs goes around likewise, as room to grow."""
    given = {model: demand.least for model, demand in demands.items()}
    left = total - sum(given.values())
    rounds = (
        {m: min(1, d.needed, d.most) for m, d in demands.items()},
        {m: min(d.needed, d.most) for m, d in demands.items()},
        {m: d.most for m, d in demands.items()},
    )
    for wanted in rounds:
        while left > 0:
            short = [model for model in demands if given[model] < wanted[model]]
            if not short:
                break
            first = min(short, key=lambda model: (given[model] + 1) / max(1, wanted[model]))
            given[first] += 1
            left -= 1
    return given
