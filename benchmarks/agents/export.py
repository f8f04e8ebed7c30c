"""Writes scaled sessions in the format in which they were published, for tools that replay it.

`python -m benchmarks.agents.export PATH FOLDER [--sessions 16] [--turns 16]`, then for example

    aiperf profile --model MODEL --url http://127.0.0.1:8000 --endpoint-type chat --streaming \\
      --input-file FOLDER --custom-dataset-type weka_trace --use-think-time-only

Where so many blocks are the same as in another prompt, the scaled block is.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import click

from benchmarks.agents.__main__ import THINK_SCALE
from benchmarks.agents.scaled import Scale
from kvrelay.lab.replay.agents import texts_of

TIMES = ("t", "api_time", "think_time", "ttft", "duration_ms")
TOKENS = ("in", "out", "tool_tokens", "system_tokens", "total_tokens")


def scaled(line: dict[str, Any], scale: Scale, names: dict[tuple[int, ...], int]) -> dict[str, Any]:
    """A session, a request or a subagent of one, with what is nested in it."""
    made = dict(line)
    made |= {key: made[key] * THINK_SCALE for key in TIMES if made.get(key) is not None}
    made |= {key: -(-made[key] // scale.tokens) for key in TOKENS if made.get(key) is not None}
    if "requests" in line:
        made["requests"] = [scaled(r, scale, names) for r in line["requests"][: scale.most_turns]]
    if "hash_ids" in line:
        ids, size = line["hash_ids"], scale.tokens
        groups = [tuple(ids[at : at + size]) for at in range(0, len(ids) - size + 1, size)]
        made["hash_ids"] = [names.setdefault(group, len(names)) for group in groups]
    made.pop("totals", None)
    return made


@click.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--sessions", type=click.IntRange(1), default=16, show_default=True)
@click.option("--turns", type=click.IntRange(2), default=16, show_default=True, help="Of an agent.")
@click.option("--max-input", type=click.IntRange(1), default=8000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(path: Path, folder: Path, sessions: int, turns: int, max_input: int, seed: int) -> None:
    """Writes a file for each session."""
    scale = Scale(most_turns=turns)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(text) for _, _, text in texts_of(path)]
    Random(seed).shuffle(lines)
    numbers = count()
    for line in lines:
        made = scaled(line, scale, {})
        requests = [r for each in made["requests"] for r in each.get("requests", [each])]
        if max(r["in"] + r["out"] for r in requests) <= max_input:
            (folder / f"{made['id']}.json").write_text(json.dumps(made), encoding="utf-8")
            if next(numbers) + 1 == sessions:
                break


if __name__ == "__main__":
    main()
