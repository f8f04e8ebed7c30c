"""`kvrelay backup` and `kvrelay restore`: what a server has to find again, in a folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from kvrelay.cluster.cli.settings import set_option
from kvrelay.cluster.config import Config, ConfigError, load_config
from kvrelay.cluster.state.backup import BackupError, Manifest, back_up
from kvrelay.cluster.state.backup import restore as restore_from

T = TypeVar("T")

_config = click.option(
    "--config",
    "config_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The server's TOML file, which may say where its state is.",
)
_kv = click.option("--kv", is_flag=True, help="The disk tier too, which may be large.")
_folder = click.argument("folder", type=click.Path(file_okay=False, path_type=Path))


@click.command()
@_folder
@_config
@set_option
@_kv
def backup(folder: Path, config_path: Path | None, overrides: dict[str, Any], kv: bool) -> None:
    """Copy sessions, stored answers, secrets and certificates into FOLDER, a new one.

    The server may run meanwhile. FOLDER holds secrets: keep it as you keep those.
    """
    config = _in_words(lambda: load_config(config_path, overrides))
    state, console = config.sessions.state_path, Console(stderr=True, highlight=False)
    store = _kv_folder(config) if kv else None
    with console.status("") as shown:
        made = _in_words(
            lambda: back_up(
                state,
                folder,
                kvrelay=version("kvrelay"),
                now=time.time(),
                kv=store,
                tell=shown.update,
            )
        )
    console.print(f"{folder}: {_about(made)}, from {state}", markup=False, soft_wrap=True)
    if config.state.url:
        console.print("sessions and the prefix index are in Redis: back that up by its own means")


@click.command()
@_folder
@_config
@set_option
@_kv
@click.option("--overwrite", is_flag=True, help="Replace what is there.")
def restore(
    folder: Path, config_path: Path | None, overrides: dict[str, Any], kv: bool, overwrite: bool
) -> None:
    """Copy what `kvrelay backup` has put into FOLDER to where a server looks for it.

    No server may run on that state meanwhile.
    """
    config = _in_words(lambda: load_config(config_path, overrides))
    state, console = config.sessions.state_path, Console(stderr=True, highlight=False)
    store = _kv_folder(config) if kv else None
    with console.status("") as shown:
        found = _in_words(
            lambda: restore_from(
                folder,
                state,
                kv=store,
                overwrite=overwrite,
                tell=shown.update,
            )
        )
    made_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.created_at))
    console.print(
        f"{state}: {_about(found)}, of {found.host} at {made_at}", markup=False, soft_wrap=True
    )


def _kv_folder(config: Config) -> Path:
    from kvrelay.kvtransfer.store.folder import default_folder  # it brings torch

    path = config.tiers.disk_path
    return Path(path).expanduser() if path else default_folder()


def _about(manifest: Manifest) -> str:
    return f"{len(manifest.files)} files{' and the disk tier' if manifest.has_kv else ''}"


def _in_words(call: Callable[[], T]) -> T:
    try:
        return call()
    except (BackupError, ConfigError) as error:
        raise click.ClickException(str(error)) from error
