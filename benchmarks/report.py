"""What a measurement was made with, beside its numbers."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from benchmarks.revision import commit
from kvrelay.lab.bench.load import percentile

F = TypeVar("F", bound=Callable[..., Any])


def about() -> dict[str, Any]:
    """Machine, versions and commit. A commit with "+" has changes that are not committed."""
    machine = {"cpu": _cpu(), "cores": os.cpu_count()}
    versions = {name: version(name) for name in ("torch", "ray", "nixl-cu12")}
    return {
        "machine": machine,
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
    }


def _cpu() -> str:
    """By name, and its family: what one name covers may be years apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields = dict(line.split(": ", 1) for line in lines if ": " in line)
    facts = {name.strip(): value for name, value in fields.items()}
    name = facts.get("model name", platform.processor() or platform.machine())
    return f"{name}, family {facts['cpu family']}" if "cpu family" in facts else name


def make_console() -> Console:
    """Wide enough for the tables where no terminal says how wide it is."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def number_table(first: str, *others: str, **options: Any) -> Table:
    """A table whose columns but the first hold numbers."""
    table = Table(first, **options)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def json_option(default: Path | None = None) -> Callable[[F], F]:
    """The option `--json`, which `write_json` gets as `json_path`."""
    return click.option(
        "--json", "json_path", type=click.Path(path_type=Path), default=default, show_default=True,
        help="Write the results.",
    )  # fmt: skip


def write_json(path: Path | None, results: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(about() | dict(results), indent=2) + "\n")


def ms(values_s: Sequence[float], percent: float) -> str:
    """A percentile of seconds, as ms, for a table."""
    found = percentile(values_s, percent)
    return "-" if found is None else f"{found * 1e3:,.0f}"
