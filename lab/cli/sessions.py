"""`kvrelay replay` with sessions of agents: its options, and the search for how many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console

from kvrelay.lab.cli.figures import write_json
from kvrelay.lab.cli.progress import progress_bar, teller
from kvrelay.lab.replay.agents import Draw
from kvrelay.lab.replay.config import ReplayConfig
from kvrelay.lab.replay.trace import Trace

if TYPE_CHECKING:
    from kvrelay.lab.replay.replay import OnProgress

F = TypeVar("F", bound=Callable[..., Any])


def session_options(command: F) -> F:
    """The options of a trace of sessions, for a command."""
    above_0 = click.FloatRange(min=0, min_open=True)
    for option in reversed(
        (
            click.option("--sessions", type=click.IntRange(min=1), help="Drawn by --seed."),
            click.option("--start-rate", type=above_0, help="Sessions/s; default: all at once."),
            click.option("--think-scale", type=click.FloatRange(min=0), help="Of think times."),
            click.option("--max-think-s", type=above_0, help="Longer think times count as this."),
            click.option("--max-input", type=click.IntRange(min=1), help="Of a session's prompts."),
            click.option(
                "--at-once", type=click.IntRange(min=1), help="At most; then as one ends."
            ),
            click.option(
                "--find-at-once", is_flag=True, help="How many keep p90 in --ttft-slo-ms."
            ),
            click.option(
                "--share-prompts", is_flag=True, help="Equally long system prompts are equal."
            ),
        )
    ):
        command = option(command)
    return command


def draw_of(options: dict[str, Any]) -> Draw:
    names = (
        "sessions",
        "start_rate",
        "think_scale",
        "max_think_s",
        "max_input",
        "share_prompts",
        "seed",
    )
    return Draw(**{name: options[name] for name in names if options[name] is not None})


def found_at_once(
    console: Console,
    trace: Trace,
    configs: Sequence[ReplayConfig],
    ttft_ms: float,
    json_path: Path | None,
) -> None:
    """Search for each policy, show and write."""
    from kvrelay.lab.replay.at_once import most_at_once
    from kvrelay.lab.replay.report import at_once_json, at_once_table

    found = {}
    with progress_bar(console) as progress:
        for config in configs:

            def tell(at_once: int, policy: str = config.policy) -> OnProgress:
                return teller(progress, f"{policy}, {at_once} at once")

            found[config.policy] = most_at_once(trace, config, ttft_ms / 1e3, tell)
    if str(json_path) != "-":
        Console().print(at_once_table(trace.name, found, ttft_ms))
    if json_path is not None:
        write_json(json_path, at_once_json(trace.name, found, ttft_ms))
