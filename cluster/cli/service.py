"""`kvrelay drain` and `kvrelay restart`: the end of a server, and every process of it anew."""

from __future__ import annotations

import time
from typing import Any

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

POLL_S = 0.5


@click.command()
@url_option
@operations_key_option
def drain(url: str, operations_key: str) -> None:
    """Let the server finish what it has, and end. It takes no new request from now on, and
    /health/ready says so; what is not done after cluster.drain_s is cut off."""
    with plain_errors(url), _client(url, operations_key) as client:
        ask_json(client, "POST", "/drain", json={})
    Console().print("the server takes no new requests, and ends with those it has")


@click.command()
@url_option
@operations_key_option
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0),
    default=900.0,
    show_default=True,
    help="For all to be up again.",
)
def restart(url: str, operations_key: str, wait_s: float) -> None:
    """Start every process anew, one after the other; requests go on all the while."""
    console, deadline = Console(), time.monotonic() + wait_s
    with plain_errors(url), _client(url, operations_key) as client:
        before = get_json(client, "/status")
        ask_json(client, "POST", "/restart", json={})
        shown: set[str] = set()
        while True:
            state = _status(client)
            news = _news(before, state)
            for line in sorted(news - shown):
                console.print(line, highlight=False)
            shown |= news
            if _is_over(before, state):
                break
            if time.monotonic() >= deadline:
                raise click.ClickException(f"not over after {wait_s:g} s: see the server's log")
            time.sleep(POLL_S)
    console.print("all have been started anew", highlight=False)


def _client(url: str, operations_key: str) -> httpx.Client:
    return httpx.Client(
        base_url=url, timeout=httpx.Timeout(30.0), headers=key_headers(operations_key)
    )


def _status(client: httpx.Client) -> dict[str, Any]:
    """Empty while the router itself starts."""
    try:
        state: dict[str, Any] = get_json(client, "/status")
        return state
    except httpx.TransportError:
        return {}


def _news(before: dict[str, Any], state: dict[str, Any]) -> set[str]:
    """What is up again, one line each."""
    news = set()
    for kind, name in (("workers", "worker"), ("routers", "router")):
        old = {entry[name]: entry.get("epoch", 0) for entry in before.get(kind, ())}
        for entry in state.get(kind, ()):
            epoch = entry.get("epoch", 0)
            if entry["state"] == "up" and epoch > old.get(entry[name], 0):
                news.add(f"{entry[name]}: up")
    return news


def _is_over(before: dict[str, Any], state: dict[str, Any]) -> bool:
    """The controller is the last."""
    epochs = [each.get("controller", {}).get("epoch", 0) for each in (before, state)]
    return epochs[1] > epochs[0] and all(w["state"] == "up" for w in state["workers"])
