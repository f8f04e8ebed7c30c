"""Seeds over the production nodes, in CI. A failing one says how to repeat it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

from kvrelay.lab.cli.fuzz import repeat_command
from kvrelay.lab.sim.breakage import Break
from kvrelay.lab.sim.run import Report, run_seed

NUM_SEEDS = 24  # `kvrelay fuzz` takes thousands
SOONER = {  # seeds that show it, where the first ones do not; later changes may move them
    Break.CONFIRM: (68,),
    Break.CHECKSUM: (11,),
    Break.LEAVE: (6,),
    Break.LEFT: (4,),
    Break.CLASSES: (3,),
    Break.APART: (7,),
    Break.RESCUE: (83,),
    Break.WAIT: (20,),
    Break.SUSPECT: (6,),
    Break.TURNS: (2,),
    Break.CALLERS: (17,),
    Break.FITS: (73,),
    Break.PASSES: (2,),
    Break.STATES: (0,),
    Break.AGAIN: (13,),
    Break.VERSIONS: (6,),
}
GROUP = 12


@cache
def report_of(seed: int) -> Report:
    return run_seed(seed)


def describe(report: Report) -> str:
    lines = [f"{v.at_s:.6f} s {v.kind}: {v.text}" for v in report.violations[:5]]
    return "\n".join([*lines, f"repeat it: {repeat_command(report.seed)}"])


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, GROUP))
def test_no_seed_finds_a_violation(first: int) -> None:
    for seed in range(first, first + GROUP):
        report = report_of(seed)
        assert not report.violations, describe(report)


@pytest.mark.parametrize("seed", [2, 251, 362, 517, 880, 1028, 1749, 20093, 20363, 60226])
def test_seeds_that_once_found_something_do_not(seed: int) -> None:
    """2: what a full worker had refused went before those that waited there, as if it was cached.
    251: both attempts of a migration waited for memory while a third worker had some. 362: KV that
    a dead worker had left was gone before all ranks had found it. 517: one that fails wherever it
    is moved to waited for memory. 880: more came back to the router's queue than there were slots
    at one time. 1028: new weights waited for those that were tried apart, which had ended. 1749: a
    request ended while its peer's blocks were confirmed and its own could not be read. 20093: the
    checker did not know that requests wait for the next weights. 20363: what a worker did for an
    earlier order of weights was not heard. 60226: the checker did not know how long a worker waits
    for a step whose steps have seemed to take 300 times as long as they did."""
    report = report_of(seed)
    assert not report.violations, describe(report)


def test_the_seeds_see_every_outcome_and_every_fault() -> None:
    """A simulator in which nothing happens finds nothing."""
    outcomes: set[str] = set()
    injected: set[str] = set()
    sources: set[str] = set()
    for seed in (*range(NUM_SEEDS), 82):  # where host memory of a dead worker is read
        report = report_of(seed)
        outcomes |= set(report.outcomes)
        injected |= set(report.injected)
        sources |= set(report.sources)
    assert {"finished: stop", "finished: length", "cancelled"} <= outcomes
    assert "failed: deadline_exceeded" in outcomes
    assert sources == {"host", "orphaned", "disk", "peer"}
    assert injected == {
        "clock wrong",
        "connect error",
        "crash",
        "disk error",
        "disk rots",
        "disk slow",
        "exit",
        "handover",
        "host KV left",
        "host rots",
        "killed",
        "link broken",
        "message cut off",
        "message delayed",
        "message duplicated",
        "message lost",
        "paused",
        "read error",
        "read hangs",
        "read slow",
        "read stalled",
        "poisoned row",
        "poisoned step",
        "role change",
        "row error",
        "slot flipped",
        "step error",
        "step hangs",
        "step slow",
        "steps all fail",
        "weights changed",
        "weights not changed",
        "stopped",
        "store error",
    }


@pytest.mark.slow
def test_the_same_seed_gives_the_same_events_in_every_process() -> None:
    program = (
        "from kvrelay.lab.sim.run import run_seed\n"
        "for seed in range(4): print(run_seed(seed).event_hash)\n"
    )
    here = [report_of(seed).event_hash for seed in range(4)]
    assert len(set(here)) == len(here)
    for hash_seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.split() == here


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "kinds"),
    [
        (Break.CONFIRM, {"block used with wrong content", "wrong tokens"}),
        (
            Break.DRAIN,
            {"block in use while a transfer can write to it", "two transfers write to one block"},
        ),
        (
            Break.CHECKSUM,
            {"block used with wrong content", "a move reads a block that is being written"},
        ),
        (Break.LEAVE, {"left over"}),
        (Break.RESCUE, {"starved"}),
        (Break.ROLE, {"role differs"}),
        (
            Break.UNSETTLED,
            {"block in use while a transfer can write to it", "two transfers write to one block"},
        ),
        (Break.WAIT, {"silent"}),
        (Break.WATCH, {"no progress"}),
        (Break.SUSPECT, {"no progress"}),
        (
            Break.RANKS,
            {"block in use while a transfer can write to it", "two transfers write to one block"},
        ),
        (Break.LEFT, {"silent"}),
        (Break.OUTPUTS, {"wrong prompt outputs"}),
        (Break.AHEAD, {"block freed while a step writes to it"}),
        (Break.STATES, {"block used with wrong content"}),
        (Break.AGAIN, {"block used with wrong content"}),
        (Break.VERSIONS, {"block used with wrong content"}),
        (Break.APART, {"failed without reason"}),
        (Break.TURNS, {"unfair"}),
        (Break.CALLERS, {"unfair to a caller"}),
        (Break.FITS, {"kept waiting"}),
        (Break.PASSES, {"overtaken"}),
        (Break.CLASSES, {"class inversion"}),
        (Break.VERDICT, {"failed without reason"}),
    ],
)
def test_the_checkers_notice_a_missing_safeguard(broken: Break, kinds: set[str]) -> None:
    found: set[str] = set()
    for seed in (*SOONER.get(broken, ()), *range(200)):
        found |= {violation.kind for violation in run_seed(seed, broken).violations}
        if found & kinds:
            return
    pytest.fail(f"200 seeds without {broken}, and the checkers saw only {found}")
