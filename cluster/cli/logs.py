"""`kvrelay logs`: what the processes of this machine have logged, in the order of time.

It reads the files (docs/logs.md), in both formats, and so works without a server: what ended it may
be in there.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

import click
from rich.console import Console
from rich.text import Text

from kvrelay.cluster.cli.settings import set_option
from kvrelay.cluster.config import ConfigError, load_config
from kvrelay.engine.logs import fields_text, files_of, one_line

POLL_S = 0.3
LEVELS = ("debug", "info", "warning", "error", "critical")
STYLES = {"debug": "dim", "warning": "yellow", "error": "bold red", "critical": "bold red"}
_TEXT = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (?P<level>\w+) +(?P<process>\S+) \S+ "
    r"(?:\[(?:(?P<client_request_id>[\w.:-]+)/)?(?P<request_id>[\w-]+)\] )?(?P<message>.*)"
)
_OWN = ("time", "level", "process", "request_id", "client_request_id", "message", "exception")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_CALL = re.compile(r"[0-9a-f]{32}")
_UP = re.compile(r"(\S+) is up \(epoch \d+, \w+, ([^,]+),.*; log: (.+)")


@dataclass(slots=True)
class Event:
    """A line, and what belongs to it: a traceback, and what libraries have written after it."""

    time: str
    level: str
    process: str
    request: str
    client: str  # what the client calls the request
    message: str
    more: list[str] = field(default_factory=list)

    def is_about(self, requests: set[str]) -> bool:
        named = {self.request, self.client}
        return bool(named & requests) or any(each in self.message for each in requests)


def parse(line: str, process: str) -> Event | None:
    """None: it belongs to the line before. `process`: whose file it is."""
    if found := _TEXT.fullmatch(line):
        return _event(found.groupdict(""))
    try:
        values: dict[str, Any] = json.loads(line) if line.startswith('{"time":') else {}
    except ValueError:
        values = {}
    return _event({"process": process, **values}) if "time" in values else None


def _event(values: dict[str, Any]) -> Event:
    """What is no field of every line follows the message."""
    own = {name: str(values.pop(name, "")) for name in (*_OWN, "logger")}
    time, level, process, request, client, message, exception = (own[name] for name in _OWN)
    message += fields_text(values)
    return Event(time, level, process, request, client, message, exception.splitlines())


def events_of(lines: Iterable[bytes], process: str) -> Iterator[Event]:
    """What comes before the first line with a time is shown with the beginning of time."""
    event: Event | None = None
    for line in lines:
        text = line.decode("utf-8", "replace").rstrip("\n")
        following = parse(text, process)
        if following is not None:
            if event is not None:
                yield event
            event = following
        elif event is not None:
            event.more.append(text)
        elif text:
            event = Event("", "", process, "", "", text)
    if event is not None:
        yield event


def read_events(folder: Path) -> Iterator[Event]:
    """Yields what all files have, in the order of time."""

    def of_file(path: Path) -> Iterator[Event]:
        try:
            with path.open("rb") as file:
                yield from events_of(file, path.name.partition(".")[0])
        except FileNotFoundError:
            return  # it has just become the old one, which was read or will be

    files = sorted(folder.glob("*.log"), key=lambda path: ".old" not in path.name)
    return heapq.merge(*map(of_file, files), key=lambda event: event.time)


def elsewhere(events: Iterable[Event]) -> dict[str, tuple[str, str]]:
    """Worker -> its machine and its file there, of those whose file is not on this machine."""
    found = {}
    for event in events:
        if up := _UP.fullmatch(event.message):
            found[up[1]] = up[2], up[3]
    return {name: place for name, place in found.items() if not Path(place[1]).exists()}


def since_time(text: str) -> str:
    """`text`: how long ago, as 90s, 10m, 2h or 1d, or a time as in the lines, or its beginning.
    Raises click.BadParameter."""
    if ago := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        then = datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: float(ago[1])})
        return then.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
    if re.fullmatch(r"\d{4}-\d\d-\d\d(T[\d:.]*Z?)?", text):
        return text
    raise click.BadParameter(f"{text!r}: expected 90s, 10m, 2h, 1d or a time (UTC): 2026-01-31T08")


class _Tail:
    """Follows one file. Owned by the command."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def skip(self) -> None:
        """What is there was shown."""
        self._file = self._path.open("rb")
        self._file.seek(0, 2)

    def events(self) -> list[Event]:
        """What has come since the last time."""
        try:
            if self._file is None:
                self._file = self._path.open("rb")
            *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
            if self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino:
                self._file.close()
                self._file = None
        except FileNotFoundError:
            return []
        return list(events_of(lines, self._path.stem))


def follow(folder: Path, show: Callable[[Event], None], tails: dict[Path, _Tail]) -> None:
    """Until the user has enough. `tails`: of the files whose content was shown."""
    while True:
        time.sleep(POLL_S)
        for path in folder.glob("*.log"):
            if ".old" not in path.name:
                tails.setdefault(path, _Tail(path))
        new = [event for tail in tails.values() for event in tail.events()]
        for event in sorted(new, key=lambda event: event.time):
            show(event)


def _folder_of(
    config_path: Path | None, overrides: dict[str, Any], base: Path | None, port: int | None
) -> Path:
    """Where the server's files are. `base`: of all servers. Raises click.ClickException."""
    more = {"api.port": port, "log.folder": None if base is None else str(base)}
    given = {key: value for key, value in more.items() if value is not None}
    try:
        config = load_config(config_path, overrides | given)
        folder = config.log.resolved(config.sessions.state_dir, config.api.port).path
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    if any(folder.glob("*.log")):
        return folder
    files = sorted(files_of(folder.parent), key=lambda path: path.stat().st_mtime)
    if files and port is None and config_path is None:
        return files[-1].parent  # the last server that was here
    ports = sorted({path.parent.name for path in files})
    others = f"; servers at these ports have some (--port): {', '.join(ports)}" if ports else ""
    raise click.ClickException(
        f"there are no logs in {folder}{others}. Name the server's settings with --config, or the "
        "folder with --folder: below systemd it is /var/lib/kvrelay/logs"
    )


@click.command()
@click.option(
    "--config",
    "config_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The server's TOML file, which may say where its logs are.",
)
@set_option
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="logs in the server's state directory, where that is not this user's.",
)
@click.option("--port", type=int, help="Of the server, where several have run here.")
@click.option("--worker", default="", help="Of this process: a worker, its ranks; a router; ...")
@click.option("--request", default="", help="About this request, by its id or its client's.")
@click.option("--level", type=click.Choice(LEVELS), default="debug", help="This, and above.")
@click.option("--since", default="", help="90s, 10m, 2h or 1d ago, or a time (UTC).")
@click.option("--lines", default=200, show_default=True, help="The last so many; 0: all.")
@click.option("--follow", "follows", is_flag=True, help="Go on with what comes.")
def logs(
    config_path: Path | None,
    overrides: dict[str, Any],
    folder: Path | None,
    port: int | None,
    worker: str,
    request: str,
    level: str,
    since: str,
    lines: int,
    follows: bool,
) -> None:
    """What the server and its workers on this machine have logged, in the order of time.

    Works without a server. Of workers on other machines it says where their logs are.
    """
    folder = _folder_of(config_path, overrides, folder, port)
    begin = since_time(since) if since else ""
    console = Console(highlight=False)
    requests = _ids(request, read_events(folder)) if request else set()

    def is_wanted(event: Event) -> bool:
        return (
            event.time >= begin
            and (not worker or event.process == worker or event.process.startswith(f"{worker}-r"))
            and (not requests or event.is_about(requests))
            and (event.level not in LEVELS or LEVELS.index(event.level) >= LEVELS.index(level))
        )

    tails = {path: _Tail(path) for path in folder.glob("*.log") if ".old" not in path.name}
    for tail in tails.values():
        tail.skip()
    for event in deque(filter(is_wanted, read_events(folder)), lines or None):
        _show(console, event)
    _tell_elsewhere(folder, worker)
    if follows:
        try:
            follow(folder, lambda event: _show(console, event) if is_wanted(event) else None, tails)
        except KeyboardInterrupt:
            return


def _ids(request: str, events: Iterable[Event]) -> set[str]:
    """How lines name the request: the server's id of what a client has called so, or of an
    answer."""
    ids = {event.request for event in events if request in (event.client, event.request)}
    return {request, *filter(None, ids), *_CALL.findall(request)}


def _tell_elsewhere(folder: Path, worker: str) -> None:
    there = elsewhere(event for event in read_events(folder) if event.process == "controller")
    for name, (host, path) in there.items():
        if worker in ("", name):
            click.echo(f"{name} runs on {host}: its log there is {path}", err=True)


def _show(console: Console, event: Event) -> None:
    request = event.client or event.request
    line = Text.assemble(
        (f"{event.time or '?':<24} ", "dim"),
        (f"{event.level:<8} ", STYLES.get(event.level, "")),
        (f"{event.process:<14} ", "cyan"),
        (f"{request} " if request else "", "dim"),
        one_line(event.message),
    )
    for more in event.more:
        line.append(f"\n    {one_line(more.removeprefix('    '))}", "dim")
    console.print(line, soft_wrap=True)
