"""`kvrelay scaling`: what the autoscaler does, and why; or whether a log of it makes sense.

An HTTP client of `/status`, or a reader of the log, from which every decision is made again.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console, Group
from rich.table import Table

from kvrelay.cluster.cli.client import (
    get_json,
    key_headers,
    operations_key_option,
    plain_errors,
    url_option,
)

_TIMEOUT = httpx.Timeout(30.0)
MAX_DIFFERENCES = 5  # shown


@click.command()
@url_option
@operations_key_option
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.option(
    "--check",
    "log_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Make each decision of this log again instead, and compare.",
)
def scaling(url: str, operations_key: str, as_json: bool, log_file: Path | None) -> None:
    """Show what the autoscaler does or does not do, and why.

    Its log is scaling/*.jsonl in the state directory.
    """
    console = Console(highlight=False)
    if log_file is not None:
        _check(console, log_file)
        return
    headers = key_headers(operations_key)
    with (
        plain_errors(url),
        httpx.Client(base_url=url, timeout=_TIMEOUT, headers=headers) as client,
    ):
        state = get_json(client, "/status").get("scaling")
    if as_json:
        console.print_json(data=state)
    elif state is None:
        console.print("no autoscaler runs: scaling.enabled is false (or there is no controller)")
    else:
        console.print(scaling_view(state))


def scaling_view(state: dict[str, Any]) -> Group:
    """What it says now, and a row per decision that said something new, the last at the end."""
    table = Table(title="autoscaler", title_justify="left")
    for name in ("at", "why", "workers", "of them decode", "done"):
        table.add_column(name, no_wrap=name != "done")
    for each in state["decisions"]:
        done = [f"+{role}" for role in each["starts"]]
        done += [f"-{worker}" for worker in each["drains"]] + list(each["flips"])
        at = time.strftime("%H:%M:%S", time.localtime(each["at_s"]))
        counts = str(each["wanted"]), str(each["wanted_decode"])
        table.add_row(at, each["reason"], *counts, ", ".join(done) or "nothing")
    limits = f"from {state['least']} to {state['most']} workers may be"
    coming = f"{state['coming']} coming, {state['draining']} draining"
    return Group(table, f"now: {state['why']}", f"{limits}; {coming}")


def _check(console: Console, log_file: Path) -> None:
    """Exit code 1: a decision differs, or there is none."""
    import msgspec

    from kvrelay.cluster.scaling.decisions import read_log
    from kvrelay.cluster.scaling.planner import replay_log

    try:
        with log_file.open("rb") as lines:
            pairs = replay_log(read_log(lines))
    except msgspec.DecodeError as error:
        raise click.ClickException(f"{log_file} is not a log of decisions: {error}") from error
    if not pairs:
        raise click.ClickException(f"{log_file} has no decision after a line with settings")
    differing = [(made, again) for made, again in pairs if made != again]
    for made, again in differing[:MAX_DIFFERENCES]:
        console.print(f"at {made.at_s:.1f} s it was: {made.text}")
        console.print(f"  and would be now: {again.text}")
    acts = sum(made.acts for made, _ in pairs)
    console.print(
        f"{len(pairs)} decisions, of them {acts} that act: "
        f"{len(pairs) - len(differing)} are the same when they are made again"
    )
    if differing:
        raise SystemExit(1)
