"""`python -m tests.gpu [NAME...]`, or `make gpu-check`: all that a GPU alone can show, what would
fail first before the rest, within 25 minutes on one card.

Each part is a process of its own with a deadline, and the next begins whatever became of it. What
is printed at the end is also written to gpu-check.md, with the device and the versions.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
PAGE = "gpu-check.md"
LINES_OF_A_FAILURE = 40


@dataclass(frozen=True, slots=True)
class Part:
    """Arguments of the interpreter, and how long it may take."""

    name: str
    args: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    part: Part
    seconds: float
    result: str  # "passed", or what became of it
    last: tuple[str, ...]  # lines of its output


def _tests(name: str, limit_s: float, *paths: str) -> Part:
    args = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=20", "-m", "gpu", *paths)
    return Part(name, args, limit_s)


FOLDER = "tests/engine/model/gpu/"
PARTS = (
    Part(
        "environment", ("-c", "from kvrelay.cluster.cli.main import main; main(['doctor'])"), 60.0
    ),
    _tests("memory and transfers", 120.0, "tests/gpu/test_memory.py"),
    _tests("attention", 150.0, "tests/gpu/test_attention.py"),
    _tests("operations", 120.0, FOLDER + "test_triton_ops.py"),
    _tests("routing to experts", 60.0, FOLDER + "test_triton_routing.py"),
    _tests("recurrent layers", 120.0, FOLDER + "test_triton_recurrent.py"),
    _tests("steps, graphs, sized pools", 300.0, "tests/gpu/test_steps.py"),
    _tests("steps beside torch", 150.0, FOLDER + "test_triton_steps.py"),
    _tests("steps ahead", 60.0, FOLDER + "test_launches.py"),
    _tests("ranks", 120.0, FOLDER + "test_triton_ranks.py"),
    _tests("FlashInfer", 120.0, "tests/gpu/test_flashinfer.py"),
    Part("speed of a step", ("-m", "benchmarks.gpu", "step"), 120.0),
)


def run(part: Part) -> Outcome:
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *part.args],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=part.limit_s,
        )
        output, result = done.stdout, "passed" if not done.returncode else "failed"
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        result = f"not done in {part.limit_s:.0f} s"
    lines = output.strip().splitlines() or ["no output"]
    return Outcome(part, time.monotonic() - began, result, tuple(lines[-LINES_OF_A_FAILURE:]))


def page_of(outcomes: list[Outcome], device: str) -> str:
    """A page of Markdown that lists them, and what failed with its last lines."""
    rows = [f"| {o.part.name} | {o.result} | {o.seconds:.0f} | {o.last[-1]} |" for o in outcomes]
    text = [f"# What a GPU showed\n\n{device}\n", "| part | result | s | last line |"]
    text += ["|---|---|---|---|", *rows]
    for outcome in outcomes:
        if outcome.result != "passed":
            text.append(f"\n## {outcome.part.name}\n\n```\n" + "\n".join(outcome.last) + "\n```")
    return "\n".join(text) + "\n"


def device_line() -> str:
    """Raises click.UsageError without a GPU."""
    import torch
    import triton

    if not torch.cuda.is_available():
        raise click.UsageError("torch sees no GPU here: `kvrelay doctor` says why")
    where = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return f"{where[0]}, sm_{where[1][0]}{where[1][1]}, torch {torch.__version__}, Triton " + (
        triton.__version__
    )


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
def main(names: tuple[str, ...]) -> None:
    known = [part.name for part in PARTS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.UsageError(f"{unknown[0]!r} is no part; there are: {', '.join(known)}")
    console, device, outcomes = Console(), device_line(), []
    for part in PARTS:
        if names and part.name not in names:
            continue
        with console.status(f"{part.name} (at most {part.limit_s:.0f} s)"):
            outcomes.append(run(part))
        last = outcomes[-1]
        console.print(f"{part.name}: {last.result}, {last.seconds:.0f} s; {last.last[-1]}")
    table = Table("part", "result", "s", title=device)
    for outcome in outcomes:
        table.add_row(outcome.part.name, outcome.result, f"{outcome.seconds:.0f}")
    console.print(table)
    (ROOT / PAGE).write_text(page_of(outcomes, device))
    console.print(f"written to {PAGE}")
    sys.exit(any(outcome.result != "passed" for outcome in outcomes))


if __name__ == "__main__":
    main()
