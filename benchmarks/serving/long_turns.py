"""Sessions with long contexts on a real server: what a turn and a token of theirs take.

    python -m benchmarks.serving.long_turns [--model gemma3-270m] [--tokens 16000] [--before FOLDER]

Each session begins with a context of its own, then has turns of 40 tokens more, with a second of
thinking between. With `--before`, servers of another checkout take the same load, in turns.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median

import click
from rich.progress import Progress

from benchmarks.elastic.__main__ import table
from benchmarks.report import json_option, make_console, write_json
from benchmarks.serving.conversations import AgentsSpec, run_agents, summarize_agents
from benchmarks.serving.first_light import MODEL
from benchmarks.serving.served import Served
from kvrelay.lab.bench.load import percentile

NOW, BEFORE = "now", "before"


async def measured(url: str, model: str, spec: AgentsSpec, progress: Progress) -> dict[str, float]:
    task = progress.add_task("turns", total=spec.num_agents * spec.num_turns)
    talks, elapsed_s = await run_agents(
        url, model, spec, lambda: progress.advance(task), named=True
    )
    turns = [timing for talk in talks for timing in talk.timings]
    gaps = [after - at for timing in turns for at, after in pairwise(timing.chunk_at)]
    later = [timing for talk in talks for timing in talk.timings[1:]]
    alone = max(later, key=lambda timing: timing.sent_at)  # the last one, with few beside it
    found = summarize_agents(talks, elapsed_s)
    del found["later_tokens_by_source"]
    return found | {
        "later_ttft_p99_s": percentile([timing.ttft_s for timing in later], 99),
        "itl_p50_s": percentile(gaps, 50),
        "itl_p90_s": percentile(gaps, 90),
        "last_itl_p50_s": median([after - at for at, after in pairwise(alone.chunk_at)]),
    }


@click.command()
@click.option("--model", default=MODEL, show_default=True)
@click.option("--sessions", type=click.IntRange(1), default=8, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=16_000, show_default=True)
@click.option("--turns", type=click.IntRange(2), default=4, show_default=True)
@click.option("--output", type=click.IntRange(2), default=48, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True)
@click.option("--before", type=click.Path(path_type=Path, exists=True), help="Another checkout.")
@click.option("--roles", type=(int, int), default=(1, 1), show_default=True)
@json_option()
def main(
    model: str, sessions: int, tokens: int, turns: int, output: int, rounds: int,
    before: Path | None, roles: tuple[int, int], json_path: Path | None,
) -> None:  # fmt: skip
    """Default settings, but for a context that is long enough."""
    console = make_console()
    spec = AgentsSpec(sessions, turns, tokens, output_len=output, think_s=1.0)
    settings = {"engine.max_model_len": spec.final_len * 3 // 2}
    names = [NOW, BEFORE] if before else [NOW]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names if i % 2 == 0 else names[::-1]:
            prefix = ("env", "-C", str(before)) if name == BEFORE else ()
            args = model, "--prefill", str(roles[0]), "--decode", str(roles[1])
            with (
                Progress(console=console, transient=True) as progress,
                Served(settings, *args, prefix=prefix) as server,
            ):
                found[name].append(asyncio.run(measured(server.url, model, spec, progress)))
    console.print(table(f"{sessions} sessions of {tokens} tokens, {model}", found))
    write_json(json_path, asdict(spec) | found)


if __name__ == "__main__":
    main()
