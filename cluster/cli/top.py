"""`kvrelay top`: a live table of the cluster, like `top` of a machine.

An HTTP client of `/console/snapshot`, so it shows the same figures as the console.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
import httpx
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvrelay.cluster.cli.client import connected, get_json, operations_key_option, url_option
from kvrelay.router.explain import seconds_text

BAR = 10  # characters for all blocks of a worker
WIDE, MEDIUM, NARROW = 116, 100, 78  # columns of a terminal that has room for more figures
_TIMEOUT = httpx.Timeout(10.0)
_STATE_STYLES = {"up": "green", "backoff": "yellow", "silent": "yellow", "down": "bold red"}
_ROLE_STYLES = {"prefill": "yellow", "decode": "cyan", "both": "magenta"}
_ROLES = ("prefill", "decode", "both")

Row = dict[str, Any]
SORTS: dict[str, Callable[[Row], Any]] = {
    "name": lambda row: _natural(row["worker"]),
    "kv": lambda row: -_share(row),
    "running": lambda row: -(row["num_running"] or 0),
    "waiting": lambda row: -(row["num_waiting"] or 0),
}


@click.command()
@url_option
@click.option("--once", is_flag=True, help="Show it once, all workers, and end.")
@click.option("--json", "as_json", is_flag=True, help="With --once: as JSON.")
@click.option("--interval-s", type=click.FloatRange(min=0.1), default=1.0, show_default=True)
@click.option("--sort", type=click.Choice(list(SORTS)), default="name", show_default=True)
@operations_key_option
def top(
    url: str, once: bool, as_json: bool, interval_s: float, sort: str, operations_key: str
) -> None:
    """Show workers, their load and the latencies, again and again.

    Keys: q ends it, s sorts by the next column. Latencies and rates are those of the last 10 s at
    the router that is asked.
    """
    if as_json and not once:
        raise click.UsageError("--json goes with --once")
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=WIDE)
    with connected(url, operations_key, _TIMEOUT) as client:
        snapshot = Snapshot(get_json(client, "/console/snapshot"))
        if as_json:
            console.print_json(data=snapshot.plain())
        elif once:
            console.print(screen(snapshot, sort, width=console.width))
        else:
            _watch(client, console, snapshot, interval_s, sort)


def _watch(
    client: httpx.Client, console: Console, snapshot: Snapshot, interval_s: float, sort: str
) -> None:
    """Show it until Ctrl-C or q."""
    live = Live(console=console, screen=console.is_terminal, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), _keys() as wait_key, live:
        due = time.monotonic() + interval_s
        while True:
            most = max(1, console.height - 9) if console.is_terminal else None
            live.update(screen(snapshot, sort, most, console.width), refresh=True)
            key = wait_key(due - time.monotonic())
            if key == "q":
                return
            if key == "s":
                sorts = list(SORTS)
                sort = sorts[(sorts.index(sort) + 1) % len(sorts)]
            if time.monotonic() >= due:
                snapshot = Snapshot(get_json(client, "/console/snapshot"))
                due = time.monotonic() + interval_s


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key; "": none was pressed."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def wait(seconds: float) -> str:
        ready = select.select([file], [], [], max(0.0, seconds))[0]
        if not ready:
            return ""
        try:
            return os.read(file, 1).decode(errors="replace") or "q"
        except OSError:  # the terminal is gone
            return "q"

    try:
        tty.setcbreak(file)
        yield wait
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> str:
    time.sleep(max(0.0, seconds))
    return ""


class Snapshot:
    """What `/console/snapshot` answers, by name."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.parts: dict[str, Any] = answer["parts"]
        fields = answer["worker_fields"]
        self.workers: list[Row] = [
            dict(zip(fields, row, strict=True)) for row in answer["workers"].values()
        ]
        points = answer["points"]
        newest = points[-1] if points else [None] * len(answer["point_fields"])
        self.point: Row = dict(zip(answer["point_fields"], newest, strict=True))

    def plain(self) -> dict[str, Any]:
        return {**self.parts, "now": self.point, "workers": self.workers}


def screen(
    snapshot: Snapshot, sort: str = "name", most: int | None = None, width: int = WIDE
) -> Group:
    """Totals above, then a row for each worker. most: rows that fit, None: all; width: columns."""
    workers = sorted(snapshot.workers, key=lambda row: (SORTS[sort](row), _natural(row["worker"])))
    shown = workers if most is None or len(workers) <= most else workers[: most - 1]
    parts: list[Any] = [*head(snapshot), workers_table(shown, sort, width)]
    if len(shown) < len(workers):
        parts.append(Text(f"{len(workers) - len(shown):,} more workers", style="dim"))
    return Group(*parts)


def head(snapshot: Snapshot) -> Iterator[Text]:
    parts, now = snapshot.parts, snapshot.point
    load = parts["load"]
    workers = snapshot.workers
    num_up = sum(worker["state"] == "up" for worker in workers)
    names = ", ".join(each["model"] for each in parts["models"]) or parts["model"]
    line = Text(names or "KVRelay", style="bold")
    line.append(f"  {parts['router']['router'] or ''}  ", style="dim")
    line.append(f"{num_up} of {len(workers)} workers up", "" if num_up == len(workers) else "red")
    roles = [f"{_of_role(workers, role)} {role}" for role in _ROLES if _of_role(workers, role)]
    line.append(f" ({', '.join(roles)})" if roles else "", style="dim")
    yield line
    yield _figures(
        ("live", _count(load["num_live"])),
        ("queued", _count(load["num_queued"])),
        ("requests/s", _count(now["requests"])),
        ("tokens/s", f"{_count(now['prompt_tokens'])} in, {_count(now['output_tokens'])} out"),
        ("hit rate", _percent(load["cache_hit_rate"])),
    )
    yield _figures(
        *(
            (name, " / ".join(_seconds(now[f"{key}_{p}"]) for p in ("p50", "p90", "p99")))
            for name, key in (("TTFT p50/p90/p99", "ttft"), ("ITL", "itl"))
        )
    )


def workers_table(workers: Sequence[Row], sort: str = "name", width: int = WIDE) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    marked = {"name": "worker", "kv": "KV held"}.get(sort, sort)
    several = len({row["model"] for row in workers}) > 1 and width >= MEDIUM
    for name in ("worker", *(["model"] if several else []), "role", "state", "KV held"):
        table.add_column(_titled(name, marked), no_wrap=True)
    figures = {name: cell for name, (least, cell) in _FIGURES.items() if width >= least}
    for name in figures:
        table.add_column(_titled(name, marked), justify="right", no_wrap=True)
    for row in workers:
        state, role = str(row["state"]), str(row["role"])
        table.add_row(
            Text(str(row["worker"])),
            *([Text(str(row["model"]))] if several else []),
            Text(role, _ROLE_STYLES.get(role, "")),
            Text(state, _STATE_STYLES.get(state, "")),
            _bar(_share(row)),
            *(Text(cell(row)) for cell in figures.values()),
        )
    return table


def _titled(name: str, marked: str) -> Text:
    return Text(name, "bold reverse" if name == marked else "bold")


def _of_role(workers: Sequence[Row], role: str) -> int:
    return sum(worker["role"] == role for worker in workers)


def _figures(*pairs: tuple[str, str]) -> Text:
    line = Text()
    for name, value in pairs:
        line.append(f"{name} ", style="dim").append(f"{value}   ")
    return line


def _bar(share: float) -> Text:
    full = round(share * BAR)
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
    text = Text("█" * full, style)
    return text.append("░" * (BAR - full), "dim").append(f" {share:4.0%}", "default")


def _share(row: Row) -> float:
    return float(row["num_used_blocks"] or 0) / (row["num_blocks"] or 1)


def _count(value: float | None) -> str:
    """In at most six characters."""
    if value is None:
        return "-"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= max(size, 1e4):
            return f"{float(f'{value / size:.3g}'):g}{unit}"
    return f"{value:.0f}" if value == int(value) or value >= 100 else f"{value:.1f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds_text(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts decode-2 before decode-10."""
    words = name.replace("/", "-").split("-")
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in words]


# Title -> the width of a terminal that has room for it, and what stands there.
_FIGURES: dict[str, tuple[int, Callable[[Row], str]]] = {
    "cached": (MEDIUM, lambda row: _count(row["num_cached_blocks"])),
    "host": (WIDE, lambda row: _count(row["num_host_blocks"])),
    "disk": (WIDE, lambda row: _count(row["num_disk_blocks"])),
    "running": (0, lambda row: _count(row["num_running"])),
    "waiting": (0, lambda row: _count(row["num_waiting"])),
    "prefill/s": (MEDIUM, lambda row: _count(row["prefill_tokens_per_s"])),
    "step": (NARROW, lambda row: _seconds(row["decode_step_s"] or None)),
    "hits": (0, lambda row: _percent(row["cache_hit_rate"])),
}
