"""`kvrelay models`: which are served; and to add and remove one while the server serves."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
from rich.console import Console

from kvrelay.cluster.cli.client import (
    ask_json,
    connected,
    get_json,
    json_option,
    models_table,
    operations_key_option,
    print_answer,
    url_option,
)
from kvrelay.cluster.cli.operate import follow_order, wait_option
from kvrelay.cluster.config import OWN_SECTIONS, ConfigError, parse_override

DRAIN_S = 86_400


@click.group(invoke_without_command=True)
@url_option
@json_option
@operations_key_option
@click.pass_context
def models(context: click.Context, url: str, as_json: bool, operations_key: str) -> None:
    """List the models that are served; or add and remove one."""
    if context.invoked_subcommand is None:
        with connected(url, operations_key) as client:
            found = get_json(client, "/status")["models"]
        only = "one model is served, which has no name of its own"
        print_answer(found, lambda rows: models_table(rows) if rows else only, as_json)


@models.command()
@click.argument("name")
@click.argument("checkpoint")
@click.option("--prefill", type=click.IntRange(min=0), help="Workers.  [default: 1]")
@click.option("--decode", type=click.IntRange(min=1), help="Workers.  [default: 1]")
@click.option("--alias", "aliases", multiple=True, help="Another name that clients may use.")
@click.option("--tenant", "tenants", multiple=True, help="That may use it; else all may.")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Of it alone.")
@url_option
@wait_option
@operations_key_option
def add(
    name: str,
    checkpoint: str,
    overrides: tuple[str, ...],
    url: str,
    wait_s: float,
    operations_key: str,
    **entry: Any,
) -> None:
    """Serve CHECKPOINT as NAME too. It is offered when its workers are up, and stays when the
    server starts anew."""
    here = Path(checkpoint).expanduser()
    checkpoint = str(here.absolute()) if here.exists() else checkpoint
    body: dict[str, Any] = {"name": name, "checkpoint": checkpoint}
    body |= {key: value for key, value in entry.items() if value not in (None, ())}
    for text in overrides:
        section, key, value = _own(text)
        body[section] = {**body.get(section, {}), key: value}
    with connected(url, operations_key) as client:
        order = partial(ask_json, client, "POST", "/models", json=body)
        follow_order(client, order, wait_s, f"{name} is not added")
    Console().print(f"{name} is served", highlight=False)


def _own(text: str) -> tuple[str, str, Any]:
    try:
        name, value = parse_override(text)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    section, _, key = name.partition(".")
    if section not in OWN_SECTIONS:
        raise click.UsageError(f"{text}: a model may have its own {', '.join(OWN_SECTIONS)}")
    return section, key, value


@models.command()
@click.argument("name")
@click.option("--drain", is_flag=True, help="However long its requests take, let them end.")
@url_option
@wait_option
@operations_key_option
def remove(name: str, drain: bool, url: str, wait_s: float, operations_key: str) -> None:
    """Serve NAME no more. Its requests have cluster.drain_s to end."""
    path = f"/models/{quote(name, safe='')}" + (f"?drain_s={DRAIN_S}" if drain else "")
    with connected(url, operations_key) as client:
        follow_order(client, lambda: ask_json(client, "DELETE", path), wait_s, f"{name} stays")
    Console().print(f"{name} is gone", highlight=False)
