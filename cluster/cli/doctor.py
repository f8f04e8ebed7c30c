"""`kvrelay doctor`: what is wrong with this machine or a server, and what to do about it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from kvrelay.cluster.cli.client import ca_option, connected, get_json, operations_key_option
from kvrelay.cluster.cli.settings import settings_options
from kvrelay.cluster.doctor.findings import Finding, Verdict

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


@click.command()
@settings_options
@click.option("--url", help="A running server, to look at as well.")
@click.option("--json", "as_json", is_flag=True, help="The findings as JSON.")
@operations_key_option
@ca_option
def doctor(
    config_path: Path | None,
    overrides: dict[str, Any],
    url: str | None,
    as_json: bool,
    operations_key: str,
) -> None:
    """Check this machine against the settings, in less than a minute.

    Run it on each machine, with the server's settings and as the user that it runs as. Exits with 1
    if anything fails.
    """
    from kvrelay.cluster.config import ConfigError, load_config
    from kvrelay.cluster.doctor.examine import examine, machine_checks, server_checks

    try:
        checks = machine_checks(load_config(config_path, overrides))
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    if url:
        with connected(url, operations_key, httpx.Timeout(10.0)) as client:
            status = get_json(client, "/status")
            metrics = client.get("/metrics").raise_for_status().text
            checks |= server_checks(status, metrics, time.time())
    findings: list[Finding] = []
    with Console(stderr=True).status("looking at this machine"):
        findings.extend(examine(checks))
    console = Console()
    if as_json:
        console.print_json(data=msgspec.to_builtins(findings))
    else:
        _show(console, findings)
    if any(each.verdict is Verdict.FAIL for each in findings):
        sys.exit(1)


def _show(console: Console, findings: list[Finding]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("check", "", "found"):
        table.add_column(name, no_wrap=name != "found")
    for each in findings:
        verdict = f"[{_STYLES[each.verdict]}]{each.verdict}[/]"
        table.add_row(each.check, verdict, _plain(each.found))
        if each.fix:
            table.add_row("", "", f"[bold]fix:[/] {_plain(each.fix)}")
    console.print(table)
    bad = [each for each in findings if each.fix]
    console.print(f"{len(bad)} to look at" if bad else "nothing to do")


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
