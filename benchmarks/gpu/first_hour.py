"""The first hour of vLLM's workers on a machine with GPUs: what was shown on CPUs, there.

`python -m benchmarks.gpu.first_hour [--device cpu] [--only NAME] [--plan] [--page FILE]`

Runs, one after the other, each with a deadline: the tests of a real vLLM (models, images, ranks,
weights, deaths), 10,000 prompts with two images, agents beside `vllm serve`, and whether copies of
KV run beside a step. What needs more GPUs than there are is skipped, and says so. Writes one page,
of which each part is there as soon as it has ended. Needs `make setup-vllm` and `make setup-all`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.report import about
from kvrelay.cluster.config_checks import python_with_vllm
from kvrelay.cluster.prepare import num_gpus

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "results" / "vllm_first_hour.md"
GPUS = {"test_vllm": 4, "test_vllm_weights": 1}  # that the workers of a test need; others: 2
TELLS = re.compile(r"passed|failed|hidden|TTFT|ttft|tokens/s|cached|audit|answers under load")
MOST_LINES = 24
TEST_S, AGENTS_S, COPIES_S = 2400.0, 3600.0, 600.0


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    command: tuple[str, ...]
    timeout_s: float
    num_gpus: int = 0  # that it needs, where it runs on GPUs


@dataclass(frozen=True, slots=True)
class Outcome:
    part: Part
    result: str  # passed, failed (and how), or skipped (and why)
    elapsed_s: float = 0.0
    lines: tuple[str, ...] = ()  # that tell figures


def parts(python: str, device: str) -> Iterator[Part]:
    test = (sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider")
    for file in sorted((ROOT / "tests" / "e2e").glob("test_vllm*.py")):
        name = str(file.relative_to(ROOT))
        yield Part(file.stem, (*test, name), TEST_S, GPUS.get(file.stem, 2))
    names = "tests/engine/test_image_names.py", "tests/worker/test_vllm_images.py"
    yield Part("image_names", (*test, *names), TEST_S)
    agents = "benchmarks.elastic", "agents", "--agents", "16", "--engine", "vllm"
    command = (sys.executable, "-m", *agents, "--vllm-python", python)
    yield Part("agents", command, AGENTS_S, 2)
    on = "cpu" if device == "cpu" else "cuda"
    overlap = (sys.executable, "-m", "benchmarks.gpu.copies_overlap", "--device", on)
    yield Part("copies", overlap, COPIES_S, 1)


def run(part: Part, env: dict[str, str], folder: Path) -> Outcome:
    log, began = folder / f"{part.name}.log", time.monotonic()
    with log.open("w+", encoding="utf-8", errors="replace") as file:
        try:
            done = subprocess.run(
                part.command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=part.timeout_s,
                check=False,
            )
            result = "failed" if done.returncode else "passed"
        except subprocess.TimeoutExpired:
            result = f"failed: not done after {part.timeout_s:g} s"
        file.seek(0)
        lines = [line.rstrip()[:98] for line in file if TELLS.search(line)]
    if result == "passed" and any(re.search(r"\b\d+ skipped", line) for line in lines):
        result = "skipped in part"
    return Outcome(part, result, time.monotonic() - began, tuple(lines[-MOST_LINES:]))


def page(device: str, found: int, outcomes: list[Outcome]) -> str:
    made = about()
    where = f"{made['machine']['cpu']}, {made['machine']['cores']} cores, {found} GPUs"
    rows = [f"| {each.part.name} | {each.result} | {each.elapsed_s:.0f} |" for each in outcomes]
    figures = [
        f"## {each.part.name}\n\n```\n" + "\n".join(each.lines) + "\n```\n"
        for each in outcomes
        if each.lines
    ]
    return "\n".join(
        [
            "# vLLM's workers, the first hour\n",
            f"On {device}: {where}; commit {made['commit']}.",
            f"`python -m benchmarks.gpu.first_hour --device {device}`\n",
            "| part | result | seconds |",
            "| --- | --- | --- |",
            *rows,
            "",
            *figures,
        ]
    )


@click.command()
@click.option("--device", type=click.Choice(["gpu", "cpu"]), default="gpu", show_default=True)
@click.option("--python", default="", help="That has vLLM; else that of make setup-vllm.")
@click.option("--only", multiple=True, help="Names of parts.")
@click.option("--plan", is_flag=True, help="Say what would run, and end.")
@click.option("--page", "target", type=click.Path(path_type=Path), default=PAGE)
def main(device: str, python: str, only: tuple[str, ...], plan: bool, target: Path) -> None:
    python, found = python or python_with_vllm(), num_gpus()
    if not python:
        raise click.UsageError("no environment has vLLM: make setup-vllm, or --python PATH")
    if device == "gpu" and not found:
        raise click.UsageError("no NVIDIA GPU here: --device cpu runs what can run without")
    wanted = [each for each in parts(python, device) if not only or each.name in only]
    if missing := {*only} - {each.name for each in wanted}:
        known = ", ".join(each.name for each in parts(python, device))
        raise click.UsageError(f"{sorted(missing)[0]} is no part; there are {known}")
    env = {**os.environ, "KVRELAY_VLLM_PYTHON": python}
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    target.parent.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for part in wanted:
        lacks = part.num_gpus - found if device == "gpu" else 0
        if plan:
            more = f"  (needs {part.num_gpus} GPUs)" if lacks > 0 else ""
            click.echo(f"{part.name}: {' '.join(part.command)}{more}")
            continue
        if lacks > 0:
            outcomes.append(Outcome(part, f"skipped: it needs {part.num_gpus} GPUs"))
        else:
            click.echo(f"{part.name} ...")
            outcomes.append(run(part, env, target.parent))
            click.echo(f"{part.name}: {outcomes[-1].result}")
        target.write_text(page(device, found, outcomes), encoding="utf-8")
    if any(each.result.startswith("failed") for each in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
