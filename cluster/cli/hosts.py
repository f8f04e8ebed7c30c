"""`kvrelay up` and `kvrelay down`: a cluster on machines that one owns, over ssh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from kvrelay.cluster.cli.flags import shown_secrets, warn_of_secrets
from kvrelay.cluster.cli.settings import set_option
from kvrelay.cluster.config import ConfigError, load_config
from kvrelay.cluster.hosts.agent import Answer
from kvrelay.cluster.hosts.launch import (
    Hosts,
    Launch,
    LaunchError,
    drain_of,
    read_hosts,
    settings_text,
)

hosts_argument = click.argument(
    "hosts_file",
    metavar="HOSTS.toml",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)


class Board:
    """What each machine does now, as a table that changes while one looks."""

    def __init__(self, hosts: Hosts, console: Console) -> None:
        self._rows = {host.name: ("", "waits") for host in hosts.host}
        self._console = console
        self.live = Live(self._table(), console=console, auto_refresh=False)

    def on_step(self, host: str, step: str, answer: Answer | None) -> None:
        if answer is None:
            state = "[yellow]...[/]"
        elif answer.error:
            state = f"[bold red]{escape(answer.error)}[/]"
        else:
            state = f"[green]{escape(answer.result or 'done')}[/]"
        self._rows[host] = (step, state)
        if self._console.is_terminal:
            self.live.update(self._table(), refresh=True)
        elif answer is not None:
            self._console.print(f"{host}: {step}: {state}")

    def _table(self) -> Table:
        table = Table("machine", "step", "", box=None, pad_edge=False)
        for host, row in self._rows.items():
            table.add_row(host, *row)
        return table


@click.command()
@hosts_argument
@set_option
def up(hosts_file: Path, overrides: dict[str, Any]) -> None:
    """Bring up a cluster on the machines of HOSTS.toml, over ssh.

    KVRelay has to be installed on each of them. What runs already is left alone, so a launch that
    failed is repeated as it is.
    """
    console = Console(highlight=False)
    try:
        hosts = read_hosts(hosts_file)
        if shown := shown_secrets(hosts.serve.args):
            raise ConfigError(
                f"{hosts_file}: serve.args: all users of {hosts.head.name} could read"
                f" {', '.join(shown)} in the command line there: set it in the file that"
                " serve.config names"
            )
        warn_of_secrets(console)
        settings = settings_text(hosts_file, hosts)
        board = Board(hosts, console)
        launch = Launch(hosts, board.on_step)
        config = load_config(None, overrides)  # what is wrong is told before anything starts
        if "model.chat_template" in overrides:  # a file is here, not there
            overrides["model.chat_template"] = config.model.chat_template
        with board.live:
            where = launch.up(settings, overrides)
    except (ConfigError, LaunchError) as error:
        raise click.ClickException(str(error)) from error
    console.print(f"up: {where}", markup=False)
    console.print(f"kvrelay down {hosts_file} ends it", markup=False)
    head = hosts.head
    folder = hosts.ssh.folder.replace("{host}", head.name)
    console.print(
        f"Nothing starts the server again if it ends: its last words are in {folder}/server.log of "
        f"{head.name}, and kvrelay up starts it. systemd would: deploy/README.md",
        markup=False,
        soft_wrap=True,
    )
    if launch.left_out:
        missing = "\n".join(launch.left_out)
        raise click.ClickException(f"machines are left out; try again to add them:\n{missing}")


@click.command()
@hosts_argument
def down(hosts_file: Path) -> None:
    """End what `kvrelay up` has started on the machines of HOSTS.toml."""
    console = Console(highlight=False)
    try:
        hosts = read_hosts(hosts_file)
        board = Board(hosts, console)
        with board.live:
            Launch(hosts, board.on_step).down(drain_of(hosts_file, hosts))
    except (ConfigError, LaunchError) as error:
        raise click.ClickException(str(error)) from error
