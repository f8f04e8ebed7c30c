"""`kvrelay keys` and `kvrelay usage`: who may call a server, and what was used by whom.

An HTTP client of `/v1/organization/admin_api_keys` and `/v1/organization/usage/completions`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import click
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from kvrelay.cluster.cli.client import (
    all_of,
    ask_json,
    connected,
    get_json,
    json_option,
    line,
    operations_key_option,
    print_answer,
    url_option,
)

KEYS = "/v1/organization/admin_api_keys"
USAGE = "/v1/organization/usage/completions"
_UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_LIMITS = {
    "requests_per_minute": "requests/min",
    "tokens_per_minute": "tokens/min",
    "tokens_per_day": "tokens/day",
}
_BY = {"key": "api_key_id", "tenant": "project_id", "model": "model"}
_COLOURS = {"active": "green", "expired": "yellow", "revoked": "red"}
_MAX_DAYS = 400


class Duration(click.ParamType[int]):
    """A time such as 90m, 12h, 30d or 4w; as seconds."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        found = re.fullmatch(r"([1-9]\d{0,5})([mhdw])", str(value))
        if found is None:
            self.fail(f"{value!r} is not a time such as 90m, 12h, 30d or 4w", param, ctx)
        return int(found[1]) * _UNITS[found[2]]


@click.group()
def keys() -> None:
    """Make, list and revoke API keys of a running server."""


def _options(command: Callable[..., None]) -> Callable[..., None]:
    return url_option(operations_key_option(json_option(command)))


def _limit(name: str, text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(f"--{name}", type=click.IntRange(min=1), help=f"{text}, at all routers.")


@keys.command()
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(["generate", "metrics", "operate"]),
    help="What it is good for; several may be given. Default: generate.",
)
@click.option("--tenant", default="", help="Whose calls its calls are, where there are several.")
@click.option("--expires-in", type=Duration(), help="Such as 12h or 30d. Default: never.")
@_limit("requests-per-minute", "Requests a minute")
@_limit("tokens-per-minute", "Tokens a minute")
@_limit("tokens-per-day", "Tokens a day of UTC")
@_options
def create(
    name: str,
    scopes: tuple[str, ...],
    tenant: str,
    expires_in: int | None,
    url: str,
    operations_key: str,
    as_json: bool,
    **limits: int | None,
) -> None:
    """Make a key that is called NAME, and print it. It is not shown again."""
    given: dict[str, Any] = {"name": name, "expires_in_seconds": expires_in, "tenant": tenant}
    given |= {"scopes": list(scopes)} | limits
    body = {field: value for field, value in given.items() if value}
    with connected(url, operations_key) as client:
        made = ask_json(client, "POST", KEYS, json=body)
    print_answer(made, lambda _: Group(_table([made]), line(f"\n{made['value']}")), as_json)


@keys.command("list")
@click.option("--all", "with_ended", is_flag=True, help="With those that have ended.")
@_options
def list_keys(with_ended: bool, url: str, operations_key: str, as_json: bool) -> None:
    """Keys that were made, the youngest first."""
    with connected(url, operations_key) as client:
        found = all_of(client, KEYS)
    shown = [each for each in found if with_ended or each["state"] == "active"]
    nothing = "there are no keys; kvrelay keys create NAME makes one"
    print_answer(shown, lambda _: _table(shown) if shown else nothing, as_json)


@keys.command()
@click.argument("key")
@_options
def revoke(key: str, url: str, operations_key: str, as_json: bool) -> None:
    """End the key with the id KEY: no router takes it 2 s later."""
    if not key.startswith("key_"):
        raise click.ClickException("name the key by its id, key_..., as kvrelay keys list says it")
    with connected(url, operations_key) as client:
        done = ask_json(client, "DELETE", f"{KEYS}/{quote(key, safe='')}")
    print_answer(done, lambda _: line(f"{key} is revoked"), as_json)


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for head in ("id", "name", "key", "state", "scopes", "tenant", "limits", "last used", "ends"):
        table.add_column(head, no_wrap=head == "id")
    for each in found:
        limits = [f"{each[name]} {text}" for name, text in _LIMITS.items() if each[name]]
        state = each["state"]
        table.add_row(
            each["id"],
            line(each["name"]),
            each["redacted_value"],
            f"[{_COLOURS[state]}]{state}[/]",
            ", ".join(each["scopes"]),
            line(each["tenant"]),
            ", ".join(limits),
            _time(each["last_used_at"]),
            _time(each["revoked_at"] or each["expires_at"]),
        )
    return table


def _time(at: int | None) -> str:
    return "" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}"


@click.command()
@click.option("--by", type=click.Choice(list(_BY)), default="tenant", show_default=True)
@click.option(
    "--since",
    type=Duration(),
    default="7d",
    show_default=True,
    help="Whole days of UTC, from the one that was then.",
)
@_options
def usage(by: str, since: int, url: str, operations_key: str, as_json: bool) -> None:
    """Requests and tokens by key, tenant or model, and day. What calls without a key that was made
    have used is in the row without a name."""
    asked = {"start_time": int(time.time()) - since, "limit": _MAX_DAYS, "group_by": _BY[by]}
    names: dict[str, str] = {}
    with connected(url, operations_key) as client:
        found = get_json(client, USAGE, **asked)["data"]
        if by == "key" and not as_json:
            names = {each["id"]: each["name"] for each in all_of(client, KEYS)}
    print_answer(found, lambda _: _usage_table(found, by, names), as_json)


def _usage_table(buckets: list[dict[str, Any]], by: str, names: dict[str, str]) -> Table:
    heads = ("requests", "input", "cached", "output")
    counts = ("num_model_requests", "input_tokens", "input_cached_tokens", "output_tokens")
    table = Table(box=SIMPLE_HEAD)
    table.add_column("day")
    table.add_column(by)
    for head in heads:
        table.add_column(head, justify="right")
    sums = [0, 0, 0, 0]
    for bucket in buckets:
        day = f"{datetime.fromtimestamp(bucket['start_time'], UTC):%Y-%m-%d}"
        for each in bucket["results"]:
            had = [each[name] for name in counts]
            sums = [a + b for a, b in zip(sums, had, strict=True)]
            who = each[_BY[by]]
            shown = f"{names[who]} ({who})" if who in names else who
            table.add_row(day, line(shown), *map(str, had))
    table.add_section()
    table.add_row("all", "", *map(str, sums))
    return table
