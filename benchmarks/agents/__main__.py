"""Sessions of coding agents, as they were published, through ours and a peer.

`python -m benchmarks.agents PATH [--sessions 16] [--memory 0.33] [--vllm-python PYTHON] [--json F]`

PATH is what `kvrelay replay` reads: a file or a folder of sessions. They are scaled to the machine
(tokens / 32, think times / 10): prompts keep what they share, a turn is sent when its agent has
thought, answers are part of the next prompt. Each server is started alone with its default
settings, and `--memory` as KV memory: the share of all these sessions that it holds in bfloat16.
The host tier of ours comes on top; `--no-host` leaves it out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from benchmarks.agents.scaled import Scale, figures, most_tokens, run_sessions
from benchmarks.elastic.__main__ import ONE, PEER, TWO, compared, ours, peer, table
from benchmarks.elastic.load import Figures
from benchmarks.report import json_option, make_console, write_json
from benchmarks.serving.first_light import MODEL
from benchmarks.serving.vllm_served import check_python
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.lab.replay.agents import Draw
from kvrelay.lab.replay.readers import read_trace

THINK_SCALE = 0.1


@click.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@click.option("--sessions", type=click.IntRange(1), default=16, show_default=True)
@click.option("--turns", type=click.IntRange(2), default=16, show_default=True, help="Of an agent.")
@click.option("--start-rate", type=float, default=1.0, show_default=True, help="Sessions a second.")
@click.option("--memory", type=float, default=0.33, show_default=True, help="Share of sessions.")
@click.option(
    "--max-input",
    type=click.IntRange(64),
    default=3000,
    show_default=True,
    help="Tokens of a prompt: a session ends before a longer one. Each pool has to hold one.",
)
@click.option("--no-host", is_flag=True, help="Ours have no host tier.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True)
@click.option("--servers", default=TWO, show_default=True, help="Of ours.")
@click.option("--vllm-python", type=click.Path(path_type=Path), help="Of the peer.")
@click.option("--eager", is_flag=True, help="vLLM compiles nothing.")
@json_option()
def main(
    path: Path, sessions: int, turns: int, start_rate: float, memory: float, max_input: int,
    no_host: bool, seed: int, rounds: int, servers: str, vllm_python: Path | None, eager: bool,
    json_path: Path | None,
) -> None:  # fmt: skip
    """Sends the same sessions to each server, in turns."""
    scale = Scale(most_turns=turns)
    model = read_config(resolve_model(MODEL, progress=lambda _: None))
    draw = Draw(
        sessions, start_rate, THINK_SCALE, max_input * scale.tokens, share_prompts=True, seed=seed
    )
    trace = read_trace(path, draw=draw)
    per_token = model.kv_spec(16, "bfloat16").bytes_per_token
    kv_gib = most_tokens(trace, scale) * memory * per_token / 2**30
    more = {"tiers.host_gib": 0.0} if no_host else {}
    known: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        name: ours(*roles, more, kv_gib) for name, roles in {ONE: (0, 1), TWO: (1, 1)}.items()
    }
    chosen = {name: known[name] for name in servers.split(",") if name}
    if vllm_python is not None:
        chosen[PEER] = peer(check_python(vllm_python), eager=eager, kv_gib=kv_gib)
    console = make_console()
    console.print(
        f"{trace.name}, {kv_gib:.2f} GiB for KV: {memory:.0%} of their "
        f"{most_tokens(trace, scale):,} tokens"
    )

    def measure(url: str, _: int) -> Figures:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("turns", total=None)
            run = run_sessions(url, MODEL, trace, scale, seed, lambda: progress.advance(task))
            sent, elapsed_s = asyncio.run(run)
        errors = Counter(each.timing.error for each in sent.values() if each.timing)
        del errors[None]
        for error, count in errors.items():
            console.print(f"{count} turns: {error}; those after them were not sent")
        return figures(trace, scale, sent, elapsed_s)

    found = compared(console, chosen, rounds, measure)
    keys = dict.fromkeys(key for runs in found.values() for run in runs for key in run)
    found = {
        name: [{k: run.get(k, 0.0) for k in keys} for run in runs] for name, runs in found.items()
    }
    console.print(table(trace.name, found))
    about = {"sessions": sessions, "turns": turns, "seed": seed, "memory": memory, "kv_gib": kv_gib}
    write_json(json_path, about | {"results": found})


if __name__ == "__main__":
    main()
