"""Decodes of a batch over several adapters against those of the model alone, in one process or in
several ranks.

python -m benchmarks.engine.adapters [--ranks 2]: steps of both kinds by turns, and the median of
the ratios of neighbours.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, get_args

import click
import numpy as np
import torch

from kvrelay.engine.adapters import Adapter, read_adapter
from kvrelay.engine.config import EngineSection, ModelSection
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL, resolve_model
from kvrelay.engine.model.parallel.runner import ParallelRunner
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.step import ScheduledSeq, Step, StepDone
from tests.support.adapters import write_adapter

Dtype = Literal["float32", "bfloat16"]
SCALE = 0.02  # numbers that are added to a weight are about so large
BLOCKS = 128  # that each sequence has: enough where layers have several groups


def runner_of(path: Path, threads: int, num_seqs: int, dtype: Dtype, ranks: int = 1) -> Any:
    """Where it has several ranks, `close` ends them."""
    settings = {"num_blocks": num_seqs * BLOCKS, "threads": threads, "tensor_parallel_size": ranks}
    engine = EngineSection(**settings).sized(gpu=False)
    kind = ModelRunner if ranks == 1 else ParallelRunner
    return kind(path, ModelSection(name=str(path), dtype=dtype), engine)


def run(runner: Any, step: Step) -> StepDone:
    """Until no sequence waits for its adapter any more."""
    done: StepDone = runner.execute(step)
    while done.waiting:
        done = runner.execute(step)
    assert not done.unloaded, done.unloaded
    faults = [done.fault(index) for index in range(len(step.seqs))]
    assert not any(faults), faults
    return done


def share_of(
    number: int, context: list[int], start: int, adapter: Adapter | None, sampling: SamplingParams
) -> ScheduledSeq:
    blocks = [*range(number * BLOCKS, (number + 1) * BLOCKS)]
    fed = context[start:]
    return ScheduledSeq(
        f"r{number}", fed, start, blocks, True, sampling, context, len(context), need=adapter
    )


def step_of(contexts: list[list[int]], adapters: list[Adapter | None], *, whole: bool) -> Step:
    greedy = SamplingParams(temperature=0.0, max_tokens=1000)
    pairs = enumerate(zip(contexts, adapters, strict=True))
    shares = [share_of(n, c, 0 if whole else len(c) - 1, a, greedy) for n, (c, a) in pairs]
    return Step(0, shares)


def measure(runner: Any, kinds: list[list[Adapter | None]], steps: int) -> list[float]:
    """Seconds of a decode step of each of `kinds` (the adapters of its sequences), `steps` times,
    by turns."""
    draw = np.random.default_rng(0)
    contexts = [draw.integers(10, 1000, 200).tolist() for _ in kinds[0]]
    seconds: list[list[float]] = [[] for _ in kinds]
    for adapters in kinds:
        run(runner, step_of(contexts, adapters, whole=True))
    for _ in range(steps):
        for adapters, into in zip(kinds, seconds, strict=True):
            step = step_of(contexts, adapters, whole=False)
            began = time.perf_counter()
            run(runner, step)
            into.append(time.perf_counter() - began)
    first, *others = seconds
    click.echo(f"base: {statistics.median(first) * 1e3:.2f} ms a step")
    return [statistics.median(a / b for a, b in zip(first, other, strict=True)) for other in others]


@click.command()
@click.option("--adapters", default=4, show_default=True)
@click.option("--rank", default=16, show_default=True)
@click.option("--batch", default=8, show_default=True)
@click.option("--steps", default=200, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--ranks", default=1, show_default=True, help="They share the threads.")
@click.option("--dtype", default="bfloat16", type=click.Choice(get_args(Dtype)), show_default=True)
@click.option("--model", default=DEFAULT_MODEL, show_default=True)
def main(
    adapters: int,
    rank: int,
    batch: int,
    steps: int,
    threads: int,
    ranks: int,
    dtype: Dtype,
    model: str,
) -> None:
    """Print how fast decode steps with adapters are beside those without."""
    path = resolve_model(model, progress=lambda _: None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        named: list[Adapter | None] = []
        for seed in range(adapters):
            made = write_adapter(
                folder / str(seed), path, seed=seed, rank=rank, scale=SCALE, dtype=torch.bfloat16
            )
            named.append(Adapter(read_adapter(made).digest, str(made)))
        runner = runner_of(path, threads, batch, dtype, ranks)
        mixed = [named[i % adapters] for i in range(batch)]
        half = [each if i % 2 else None for i, each in enumerate(mixed)]
        try:
            ratios = measure(runner, [[None] * batch, mixed, half], steps)
        finally:
            if ranks > 1:
                runner.close()
        title = f"{batch} sequences over {adapters} adapters of rank {rank}, {ranks} processes"
        click.echo(f"{title}: {ratios[0]:.3f} of the model's speed, half of them: {ratios[1]:.3f}")


if __name__ == "__main__":
    main()
