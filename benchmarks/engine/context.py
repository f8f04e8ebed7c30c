"""What the host of a worker, and a router, take for a context: does it grow with its length?

`python -m benchmarks.engine.context` makes contexts of 8k, 32k, 128k and 1M tokens, of models whose
layers are alike, in 6 groups and in 49, and times with each, without a model:

* step: a decode step of 1, 16 and 64 sequences: the worker's node, and the check before the pass
* waiting: a message, while four sessions wait for memory
* computing: a message, while a long prompt is computed, and short ones wait for memory
* turn: one of a session whose KV is all cached, in device and host memory
* decision: where a prompt goes, among 4, 64 and 512 workers that hold it, with and without windows

Of each it takes the best of several rounds, which go through all contexts in turn. Seconds depend
on the machine; the result is the slope, how many times longer the longest context takes than the
shortest. BOUNDS says what it may be, and `tests/engine/test_context_slopes.py` that it is.

What takes long is left out, unless `--full` is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import click
from rich.progress import Progress

from benchmarks.engine.long_contexts import (
    BLOCK_SIZE,
    KINDS,
    MARKS,
    Computing,
    Decisions,
    Steps,
    Subject,
    Turns,
    Waiting,
)
from benchmarks.report import json_option, make_console, number_table, write_json
from kvrelay.engine.host import settle_memory

CONTEXTS = {"8k": 8192, "32k": 32_768, "128k": 131_072, "1M": 1 << 20}
ROUNDS = 3
MOST_OPERATIONS, ROUND_S = 16, 0.2  # in a round, and the seconds after which there are no more
NOISE_S = 50e-6  # added to both sides of a slope, for short operations


class Measure(NamedTuple):
    make: Callable[[str, int, int], Subject]  # given a kind, a context, a size
    kinds: Sequence[str]
    size_name: str
    sizes: Sequence[int]
    most: int  # entries of block tables, of all sequences or workers; beyond that with --full


MEASURES = {
    "step": Measure(Steps, tuple(KINDS), "sequences", (1, 16, 64), 500_000),
    "waiting": Measure(Waiting, tuple(KINDS), "waiting", (4,), 500_000),
    "computing": Measure(Computing, tuple(KINDS), "waiting", (4,), 500_000),
    "turn": Measure(Turns, tuple(KINDS), "session", (1,), 410_000),
    "decision": Measure(Decisions, tuple(MARKS), "workers", (4, 64, 512), 4_500_000),
}


class Bounds(NamedTuple):
    """The largest slope from 8k tokens."""

    at_128k: float
    at_1m: float


FLAT = Bounds(2.0, 2.0)
TURN = Bounds(2.5, 16.0)  # a prompt's tokens and block table are still copied as a whole
TURN_WINDOWS = Bounds(2.0, 6.0)  # likewise, and its windows take as long in any context
BOUNDS: Mapping[tuple[str, str], Bounds] = {
    ("step", "dense"): FLAT,
    ("step", "6 groups"): FLAT,
    ("step", "49 groups"): FLAT,
    ("waiting", "dense"): FLAT,
    ("waiting", "6 groups"): FLAT,
    ("waiting", "49 groups"): FLAT,
    ("computing", "dense"): FLAT,
    ("computing", "6 groups"): FLAT,
    ("computing", "49 groups"): FLAT,
    ("turn", "dense"): TURN,
    ("turn", "6 groups"): TURN_WINDOWS,
    ("turn", "49 groups"): TURN_WINDOWS,
    ("decision", "no marks"): FLAT,
    ("decision", "marks at the end"): FLAT,
    ("decision", "marks half way"): Bounds(5.0, 30.0),
}


@dataclass(frozen=True, slots=True)
class Row:
    measure: str
    kind: str
    size: int
    seconds: dict[str, float]  # an operation takes, by context

    def slope(self, short: str = "8k", long: str = "128k") -> float | None:
        """How many times longer it takes; None: one of them was not measured."""
        if short not in self.seconds or long not in self.seconds:
            return None
        return (self.seconds[long] + NOISE_S) / (self.seconds[short] + NOISE_S)


def measure(name: str, kind: str, size: int, contexts: Mapping[str, int], rounds: int) -> Row:
    """Returns the best round of each context."""
    subjects = {
        text: MEASURES[name].make(kind, context, size) for text, context in contexts.items()
    }
    settle_memory()  # as servers do
    best: dict[str, float] = {}
    for _ in range(rounds):
        for text, subject in subjects.items():
            seconds = _round(subject)
            best[text] = min(seconds, best.get(text, seconds))
    return Row(name, kind, size, best)


def _round(subject: Subject) -> float:
    """Mean seconds of an operation."""
    count, total = 0, 0.0
    while count < MOST_OPERATIONS and total < ROUND_S:
        total += subject.once()
        count += 1
    return total / count


def contexts_of(name: str, kind: str, size: int, *, full: bool) -> dict[str, int]:
    """Those that are measured, by name."""
    entries = size * max(1, len(KINDS.get(kind, ()))) / BLOCK_SIZE
    most = MEASURES[name].most
    return {text: n for text, n in CONTEXTS.items() if full or n * entries <= most}


@click.command(help=__doc__.splitlines()[0])
@click.option("--full", is_flag=True, help="All contexts and sizes: many minutes, and 20 GB.")
@click.option("--only", multiple=True, type=click.Choice(tuple(MEASURES)), help="Leave out others.")
@click.option("--rounds", type=click.IntRange(min=1), default=ROUNDS, show_default=True)
@json_option()
def main(full: bool, only: tuple[str, ...], rounds: int, json_path: Path | None) -> None:
    cases = [
        (name, kind, size, contexts)
        for name, each in MEASURES.items()
        if not only or name in only
        for kind in each.kinds
        for size in each.sizes
        if len(contexts := contexts_of(name, kind, size, full=full)) > 1
    ]
    console = make_console()
    rows = []
    with Progress(console=console, transient=True) as progress:
        for case in progress.track(cases, description="Measuring"):
            rows.append(measure(*case, rounds))
    times = [f"{text} ms" for text in CONTEXTS]
    table = number_table("", "kind", "", *times, "128k / 8k", "at most", "1M / 8k", "at most")
    for row in rows:
        cells = [f"{row.seconds[t] * 1e3:,.3f}" if t in row.seconds else "-" for t in CONTEXTS]
        bounds = BOUNDS[row.measure, row.kind]
        for text, bound in zip(("128k", "1M"), bounds, strict=True):
            slope = row.slope(long=text)
            cells += ["-" if slope is None else f"{slope:.2f}", f"{bound:g}"]
        size = f"{row.size} {MEASURES[row.measure].size_name}"
        table.add_row(row.measure, row.kind, size, *cells)
    console.print(table)
    write_json(json_path, {"rows": [asdict(row) | _slopes(row) for row in rows]})


def _slopes(row: Row) -> dict[str, dict[str, float]]:
    found = {text: row.slope(long=text) for text in CONTEXTS}
    return {"slopes": {text: slope for text, slope in found.items() if slope is not None}}


if __name__ == "__main__":
    main()
