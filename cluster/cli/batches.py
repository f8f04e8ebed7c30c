"""`kvrelay batches`: requests for which nobody waits. An HTTP client of `/v1/files`, `/v1/batches`.

With an API key it sees the batches of that key's tenant.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import httpx
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

from kvrelay.cluster.cli.client import (
    all_of,
    api_key_option,
    ask_json,
    connected,
    get_json,
    json_option,
    line,
    print_answer,
    url_option,
)
from kvrelay.cluster.cli.client import show as show_answer
from kvrelay.cluster.cli.sessions import duration, plain

POLL_S = 1.0
AWAY_S = 600.0  # that the server may be away while a batch is waited for
TIMEOUT = httpx.Timeout(30.0, read=300.0, write=300.0)
ENDS = ("completed", "failed", "expired", "cancelled")
_MAX_LINE = 16 * 2**20
_COLOURS = {"completed": "green", "in_progress": "cyan", "failed": "red", "expired": "red"}


@click.group()
def batches() -> None:
    """See, cancel or run batches of requests, which a server answers when it has time."""


def _options(command: Callable[..., None]) -> Callable[..., None]:
    return url_option(api_key_option(json_option(command)))


def _path(batch: str) -> str:
    if not batch:
        raise click.ClickException("a batch's name is not empty")
    return f"/v1/batches/{quote(batch, safe='')}"


@batches.command("list")
@_options
def list_batches(url: str, api_key: str, as_json: bool) -> None:
    """All batches, the youngest first."""
    with connected(url, api_key) as client:
        found = all_of(client, "/v1/batches")
    nothing = "there are no batches; kvrelay batches run FILE makes one"
    print_answer(found, lambda _: _table(found) if found else nothing, as_json)


@batches.command()
@click.argument("batch")
@_options
def show(batch: str, url: str, api_key: str, as_json: bool) -> None:
    """One batch: how far it is, and what is wrong with it."""
    show_answer(url, api_key, _path(batch), _view, as_json)


@batches.command()
@click.argument("batch")
@_options
def cancel(batch: str, url: str, api_key: str, as_json: bool) -> None:
    """End a batch. It keeps the answers that it has."""
    with connected(url, api_key) as client:
        found = ask_json(client, "POST", f"{_path(batch)}/cancel")
    print_answer(found, _view, as_json)


@batches.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="For answers."
)
@url_option
@api_key_option
def run(file: Path, out: Path, url: str, api_key: str) -> None:
    """Send the requests of FILE, wait until all have ended, and write their answers.

    FILE has one request a line, as OpenAI's batches have. Requests without an answer go to OUT with
    `.errors` at its end, and the exit code is 1.
    """
    endpoint, console = _endpoint(file), Console(stderr=True, highlight=False)
    with connected(url, api_key, TIMEOUT) as client:
        with file.open("rb") as opened:
            made = ask_json(
                client,
                "POST",
                "/v1/files",
                data={"purpose": "batch"},
                files={"file": (file.name, opened)},
            )
        asked = {"input_file_id": made["id"], "endpoint": endpoint, "completion_window": "24h"}
        batch = ask_json(client, "POST", "/v1/batches", json=asked)
        console.print(line(f"{batch['id']} goes on if this ends"))
        batch = _waited(client, batch, console)
        is_whole = batch["status"] == "completed" and not batch["error_file_id"]
        for kind, path in (("output", out), ("error", Path(f"{out}.errors"))):
            if name := batch[f"{kind}_file_id"]:
                _download(client, name, path)
                console.print(line(f"{kind}: {path}"))
    if not is_whole:
        console.print(_view(batch))
        sys.exit(1)


def _endpoint(file: Path) -> str:
    """By the first request of a file. Raises click.ClickException."""
    with file.open("rb") as opened:
        first = opened.readline(_MAX_LINE)
    try:
        url = json.loads(first)["url"]
    except (ValueError, KeyError, TypeError) as error:
        raise click.ClickException(
            f'{file}: the first line is no request: expected {{"custom_id": ..., "method": "POST",'
            f' "url": "/v1/chat/completions", "body": {{...}}}}, got {first[:60]!r}'
        ) from error
    return str(url)


def _waited(client: httpx.Client, batch: dict[str, Any], console: Console) -> dict[str, Any]:
    """Returns it when it has ended. The server may be away for a while."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    seen_at = time.monotonic()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(batch["status"], total=None)
        while batch["status"] not in ENDS:
            time.sleep(POLL_S)
            try:
                batch = get_json(client, _path(batch["id"]))
                seen_at = time.monotonic()
            except httpx.TransportError:
                if time.monotonic() - seen_at > AWAY_S:
                    raise
            counts = batch["request_counts"]
            progress.update(
                task,
                description=batch["status"],
                total=counts["total"] or None,
                completed=counts["completed"] + counts["failed"],
            )
    return batch


def _download(client: httpx.Client, name: str, path: Path) -> None:
    """Writes the file as a whole, or not at all."""
    part = Path(f"{path}.part")
    with client.stream("GET", f"/v1/files/{name}/content") as response, part.open("wb") as file:
        response.raise_for_status()
        for data in response.iter_bytes():
            file.write(data)
    part.replace(path)


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in ("batch", "status"):
        table.add_column(name, no_wrap=True)
    for name in ("requests", "answered", "failed", "window"):
        table.add_column(name, justify="right", no_wrap=True)
    for batch in found:
        status, counts = batch["status"], batch["request_counts"]
        left_s = batch["expires_at"] - time.time()
        table.add_row(
            plain(batch["id"]),
            f"[{_COLOURS.get(status, 'default')}]{status}[/]",
            *(str(counts[name]) for name in ("total", "completed", "failed")),
            "" if status in ENDS else duration(max(0.0, left_s)),
        )
    return table


def _view(batch: dict[str, Any]) -> Group:
    counts = batch["request_counts"]
    ended = counts["completed"] + counts["failed"]
    errors = (batch["errors"] or {"data": []})["data"]
    lines = (
        line(("" if each["line"] is None else f"line {each['line']}: ") + each["message"], "red")
        for each in errors
    )
    files = (
        line(f"{kind}: {name}")
        for kind in ("input", "output", "error")
        if (name := batch[f"{kind}_file_id"])
    )
    bar = ProgressBar(total=max(1, counts["total"]), completed=ended, width=60)
    return Group(_table([batch]), bar, batch["endpoint"], *files, *lines)
