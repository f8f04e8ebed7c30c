"""`kvrelay audit`: does every block of the cluster add up, and does any leak?

What has just ended may still be settling, so it looks again for a while before it complains.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import click
import httpx
from rich.console import Console
from rich.table import Table

from kvrelay.cluster.cli.client import (
    get_json,
    key_headers,
    operations_key_option,
    plain_errors,
    url_option,
)
from kvrelay.engine.kv.tier import LOWER_TIERS

ASK_AGAIN_S = 0.5


@click.command()
@url_option
@click.option("--json", "as_json", is_flag=True, help="The audit as JSON.")
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="What is left over may take this long to settle.",
)
@operations_key_option
def audit(url: str, as_json: bool, wait_s: float, operations_key: str) -> None:
    """Count the blocks of every worker, and what is held for no request. Exits with 1 if anything
    is left over or does not add up."""
    console = Console()
    deadline = time.monotonic() + wait_s
    headers, timeout = key_headers(operations_key), httpx.Timeout(30.0)
    with (
        plain_errors(url),
        httpx.Client(base_url=url, timeout=timeout, headers=headers) as client,
    ):
        found = get_json(client, "/audit")
        while not found["clean"] and time.monotonic() < deadline:
            time.sleep(ASK_AGAIN_S)
            found = get_json(client, "/audit")
    if as_json:
        console.print_json(data=found)
    else:
        _show(console, found)
    if not found["clean"]:
        sys.exit(1)


def _show(console: Console, found: dict[str, Any]) -> None:
    console.print(audit_table(found["workers"]))
    if found["live"]:
        console.print(f"{found['live']} requests are live: what they hold is not left over")
    for line in (*found["wrong"], *([] if found["live"] else found["left"])):
        console.print(line, style="red", markup=False, soft_wrap=True)
    if found["clean"] and not found["live"]:
        console.print("nothing is left over")


def audit_table(workers: list[dict[str, Any]]) -> Table:
    """One row per worker and tier; what is counted are KV blocks."""
    table = Table()
    table.add_column("worker", no_wrap=True)
    table.add_column("tier")
    for name in ("blocks", "in use", "cached", "blank", "transfers", "leases"):
        table.add_column(name, justify="right")
    for worker in workers:
        counts = worker["counts"]
        device = [counts[f"device.{part}"] for part in ("blocks", "in_use", "evictable", "blank")]
        ends = [counts["transfers"], counts["leases"]]
        table.add_row(worker["worker"], "device", *map(str, (*device, *ends)))
        for tier in LOWER_TIERS:
            blocks = counts[f"{tier}.blocks"]
            if blocks:
                used, pinned = counts[f"{tier}.used"], counts[f"{tier}.pinned"]
                table.add_row("", tier, *map(str, (blocks, pinned, used, blocks - used)))
    return table
