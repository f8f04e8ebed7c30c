"""Settings on the command line: the options of each command that reads them. What they need is
imported when it is used, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

config_option = click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="A TOML file."
)


def _read(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    from kvrelay.cluster.config import ConfigError, parse_override, read_overrides

    found: dict[str, Any] = {}
    try:
        for text in given:
            if text.startswith("@"):
                found |= read_overrides(Path(text[1:]))
            else:
                found |= dict([parse_override(text)])
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    return found


set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    callback=_read,
    help="Any setting of the file, which it wins over; may be repeated. @FILE: those of its JSON.",
)


def settings_options(command: F) -> F:
    """Adds `--config` and `--set`; the command gets `config_path` and `overrides`."""
    return config_option(set_option(command))
