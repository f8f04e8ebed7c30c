"""`kvrelay update`: other weights for a model while its server serves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvrelay.cluster.cli.client import (
    ask_json,
    connected,
    get_json,
    operations_key_option,
    url_option,
)
from kvrelay.engine.weights import UpdateMode

POLL_S = 0.2


@click.command()
@url_option
@click.argument("model")
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option("--name", default="", help="Of the version; else its digest begins it.")
@click.option(
    "--mode",
    type=click.Choice([str(each) for each in UpdateMode]),
    default=str(UpdateMode.RECOMPUTE),
    show_default=True,
    help="What becomes of the requests that a worker has.",
)
@click.option("--back", is_flag=True, help="Go back to the weights before the last update.")
@click.option("--wait-s", type=click.FloatRange(min=0), default=900.0, show_default=True)
@operations_key_option
def update(
    url: str,
    model: str,
    folder: Path | None,
    name: str,
    mode: str,
    back: bool,
    wait_s: float,
    operations_key: str,
) -> None:
    """Give MODEL the weights in FOLDER, of the same architecture and shape, one worker after the
    other. FOLDER has to be there on every machine."""
    if back == (folder is not None):
        raise click.UsageError("expected FOLDER, or --back")
    body: dict[str, Any] = {"model": model, "mode": mode, "back": back}
    body |= {"path": str(folder.absolute())} if folder else {}
    body |= {"name": name} if name else {}
    deadline = time.monotonic() + wait_s
    with connected(url, operations_key) as client:
        before = {each["number"] for each in _weights(client)}
        asked = ask_json(client, "POST", "/v1/weights", json=body)
        while True:
            now = [each for each in _weights(client) if each["number"] not in before]
            refused = now[0].get("refused") if now else None  # the last one, of whoever asked
            if (
                refused is not None
                and refused["number"] not in before
                and refused.get("name", "") == asked.get("name", "")
            ):
                raise click.ClickException(f"refused: {refused['why']}")
            if now and now[0]["state"] != "updating":
                break
            if time.monotonic() >= deadline:
                raise click.ClickException(f"not over after {wait_s:g} s: see the server's log")
            time.sleep(POLL_S)
    state = now[0]
    if state["state"] == "stopped":
        raise click.ClickException(f"{asked['model']} stays as it was: {state['why']}")
    pause_ms = 1e3 * state.get("pause_s", 0.0)
    text = f"{asked['model']} has the weights {state['current']}; no step ran for {pause_ms:.0f} ms"
    Console().print(text, highlight=False, soft_wrap=True)


def _weights(client: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = get_json(client, "/v1/weights")["data"]
    return [{"number": 0, "state": "", **each} for each in found]
