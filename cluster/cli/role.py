"""`kvrelay role`: what a worker is preferred for, changed while it serves.

Its weights and its KV stay where they are. What decodes on a worker that is to compute prompts
moves to others; what finds no room there is finished where it is.
"""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

import click
import httpx
from rich.console import Console

from kvrelay.cluster.cli.client import (
    ask_json,
    get_json,
    key_headers,
    operations_key_option,
    plain_errors,
    url_option,
)
from kvrelay.engine.stats import Role

POLL_S = 0.05


@click.command()
@url_option
@click.argument("worker")
@click.argument("role", type=click.Choice([str(role) for role in Role]))
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="For the router to know of it, and for what decodes there to have moved.",
)
@operations_key_option
def role(url: str, worker: str, role: str, wait_s: float, operations_key: str) -> None:
    """Prefer WORKER for prompts (prefill), for decoding (decode) or for both, from now on."""
    console = Console()
    deadline = time.monotonic() + wait_s
    headers, timeout = key_headers(operations_key), httpx.Timeout(30.0)
    with (
        plain_errors(url),
        httpx.Client(base_url=url, timeout=timeout, headers=headers) as client,
    ):
        began = time.monotonic()
        path = f"/workers/{quote(worker, safe='')}/role"
        was = ask_json(client, "POST", path, json={"role": role})["was"]
        while True:
            found = _worker(get_json(client, "/status"), worker)
            num_decoding = found.get("num_decoding", 0) if role == Role.PREFILL else 0
            is_done = found.get("role") == role and not num_decoding
            if is_done or time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
    elapsed_s = time.monotonic() - began
    if found.get("role") != role:
        raise click.ClickException(f"the router does not know of it after {elapsed_s:.1f} s")
    news = "was that already" if was == role else f"was {was}"
    console.print(f"{worker}: {role} ({news}), after {elapsed_s:.2f} s", highlight=False)
    if num_decoding:
        console.print(f"{num_decoding} requests found no room elsewhere, and finish there")


def _worker(status: dict[str, Any], worker: str) -> dict[str, Any]:
    return next((w for w in status["workers"] if w["worker"] == worker), {})
