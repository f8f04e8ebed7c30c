"""`kvrelay sessions`: what a server keeps of conversations, and what is to become of it.

An HTTP client of `/v1/sessions`. With an API key it sees the sessions of that key's tenant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import click
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvrelay.cluster.cli.client import (
    all_of,
    api_key_option,
    ask_json,
    connected,
    json_option,
    line,
    print_answer,
    url_option,
)
from kvrelay.cluster.cli.client import show as show_answer

_STATE_COLOURS = {"active": "green", "idle": "default", "parked": "cyan"}


@click.group()
def sessions() -> None:
    """See, park, resume, fork, pin or close sessions of a running server."""


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that every command has."""
    return url_option(api_key_option(json_option(command)))


def _path(session: str, *action: str) -> str:
    if not session:
        raise click.ClickException("a session's name is not empty")
    return "/".join(["/v1/sessions", quote(session, safe=""), *action])


@sessions.command("list")
@_options
def list_sessions(url: str, api_key: str, as_json: bool) -> None:
    """All sessions, the one used last first."""
    with connected(url, api_key) as client:
        found = all_of(client, "/v1/sessions")
    found.sort(key=lambda session: float(session["last_used_s"]))
    nothing = "there are no sessions; a request with a prompt_cache_key makes one"
    print_answer(found, lambda _: session_table(found) if found else nothing, as_json)


@sessions.command()
@click.argument("session")
@_options
def show(session: str, url: str, api_key: str, as_json: bool) -> None:
    """One session, and which workers hold its KV."""
    show_answer(url, api_key, _path(session), _session_view, as_json)


def _session_view(found: dict[str, Any]) -> Group:
    held = (f"{each['worker']}: {_blocks(each['blocks'], found)}" for each in found["workers"])
    return Group(session_table([found]), *map(Text, held))


@sessions.command()
@click.argument("session")
@click.argument("new")
@_options
def fork(session: str, new: str, url: str, api_key: str, as_json: bool) -> None:
    """Make the session NEW, which begins as SESSION is now."""
    with connected(url, api_key) as client:
        found = ask_json(client, "POST", _path(session, "fork"), json={"id": new})
    text = f"{new} begins with the {found['num_tokens']} tokens of {session}"
    print_answer(found, lambda _: line(text), as_json)


@sessions.command()
@click.argument("session")
@_options
def close(session: str, url: str, api_key: str, as_json: bool) -> None:
    """Forget a session, and drop the KV that no other session uses."""
    with connected(url, api_key) as client:
        found = ask_json(client, "DELETE", _path(session))
    print_answer(found, lambda _: line(f"{session} is closed{_done(found)}"), as_json)


def _add_action(name: str, about: str, said: str) -> None:
    @sessions.command(name, help=about)
    @click.argument("session")
    @_options
    def act(session: str, url: str, api_key: str, as_json: bool) -> None:
        with connected(url, api_key) as client:
            found = ask_json(client, "POST", _path(session, name))
        print_answer(found, lambda _: line(f"{session} is {said}{_done(found)}"), as_json)


_add_action("park", "Move a session's KV out of device memory.", "parked")
_add_action("resume", "Bring a session's KV back, ahead of its next turn.", "resumed")
_add_action("pin", "Keep a session, and its KV rather than other KV.", "pinned")
_add_action("unpin", "Undo pin.", "unpinned")


def _done(found: dict[str, Any]) -> str:
    """What the workers have answered."""
    done = found.get("blocks_done", {})
    parts = [f"{worker} {number} blocks" for worker, number in sorted(done.items())]
    return f": {', '.join(parts)}" if parts else ""


def session_table(found: list[dict[str, Any]]) -> Table:
    """One row each. Blocks are those of the worker that would go on with it."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("session", overflow="fold")
    table.add_column("state", no_wrap=True)
    for name in ("tokens", "blocks", "device", "host", "disk", "idle for", "kept for"):
        table.add_column(name, justify="right", no_wrap=True)
    for session in found:
        state = session["state"]
        colour = _STATE_COLOURS.get(state, "default")
        left_s = max(0.0, session["retention_s"] - session["last_used_s"])
        table.add_row(
            plain(session["id"]),
            f"[{colour}]{state}[/]",
            str(session["num_tokens"]),
            str(session["num_blocks"]),
            *(str(session["blocks"][tier]) for tier in ("device", "host", "disk")),
            duration(session["last_used_s"]),
            "pinned" if session["pinned"] else duration(left_s),
        )
    return table


def plain(text: str) -> str:
    """A name as it is: no markup, and no characters that move the cursor."""
    return escape(
        "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    )


def _blocks(blocks: dict[str, int], session: dict[str, Any]) -> str:
    parts = [f"{count} in {tier}" for tier, count in blocks.items() if count]
    return f"{', '.join(parts) or 'none'} of {session['num_blocks']} blocks"


def duration(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
