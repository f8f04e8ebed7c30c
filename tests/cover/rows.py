"""Rows in which all pairs of values are that go together, by a greedy covering array (library:
`allpairspy`).

The library stops where a row that it has found has nothing new, though with rules more may be left:
for each such pair it is asked again for a row that has it.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product

from allpairspy import AllPairs

from tests.cover.settings import SETTINGS, Row, is_valid

Values = Mapping[str, Sequence[str]]
Combination = tuple[tuple[str, str], ...]


def rows(of: int = 2, seed: int = 0) -> list[Row]:
    """Returns equal rows for an equal seed. `of`: 2 for all pairs, 3 for combinations of three."""
    values = _shuffled(SETTINGS, seed)
    found = list(_made(values, of))
    covered = set[Combination]().union(*(combinations_in(row, of) for row in found))
    for each in sorted(possible(of) - covered):
        if each not in covered and (row := _with(values, each)):
            found.append(row)
            covered |= combinations_in(row, of)
    return found


def combinations_in(row: Row, of: int) -> set[Combination]:
    return set(combinations(((name, row[name]) for name in SETTINGS), of))


def possible(of: int) -> set[Combination]:
    """All that some row may have."""
    every = (
        tuple(zip(names, values, strict=True))
        for names in combinations(SETTINGS, of)
        for values in product(*(SETTINGS[name] for name in names))
    )
    return {each for each in every if is_valid(dict(each)) and _with(SETTINGS, each)}


def refused(of: int = 2) -> Iterator[Combination]:
    """Yields the combinations that no row may have."""
    for names in combinations(SETTINGS, of):
        for values in product(*(SETTINGS[name] for name in names)):
            each = tuple(zip(names, values, strict=True))
            if not is_valid(dict(each)):
                yield each


def _with(values: Values, some: Iterable[tuple[str, str]]) -> Row | None:
    """A row that has these; None: no rule lets one."""
    row = dict(some)
    for name, known in values.items():
        if name not in row:
            fitting = next((each for each in known if is_valid({**row, name: each})), None)
            if fitting is None:
                return None
            row[name] = fitting
    return {name: row[name] for name in SETTINGS}


def _made(values: Values, of: int) -> Iterator[Row]:
    names = list(values)

    def fits(chosen: Sequence[str]) -> bool:
        return is_valid(dict(zip(names, chosen, strict=False)))

    for chosen in AllPairs(OrderedDict(values), filter_func=fits, n=of):
        row = chosen._asdict()
        yield {name: row[name] for name in SETTINGS}


def _shuffled(values: Values, seed: int) -> dict[str, list[str]]:
    """Those with most values first, in an order by the seed."""
    draw = random.Random(seed)
    found = {name: draw.sample(list(known), len(known)) for name, known in values.items()}
    names = draw.sample(list(found), len(found)) if seed else list(found)
    return {name: found[name] for name in sorted(names, key=lambda name: -len(found[name]))}
