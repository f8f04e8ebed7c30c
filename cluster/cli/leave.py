"""`kvrelay leave`: the workers of this machine go elsewhere before it ends, or its pod does.

Ray is asked to drain this machine's node, as its autoscaler and clouds do: then the controller
places nothing there any more, and lets its workers go, one after the other, while their requests
go on at others (`cluster.control.machines`)."""

from __future__ import annotations

import sys
import time

import click

POLL_S = 0.2


@click.command()
@click.option(
    "--timeout-s",
    type=click.IntRange(min=1),
    default=60,
    show_default=True,
    help="Whatever is left then is left as it is; exits with 1.",
)
def leave(timeout_s: int) -> None:
    """Have the workers of this machine go elsewhere, and wait until none is left."""
    from kvrelay.cluster.processes.ray_access import NotDrained, drain_this_node
    from kvrelay.worker.processes import workers_here

    deadline = time.monotonic() + timeout_s
    try:
        drain_this_node(timeout_s)
    except NotDrained as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    while left := workers_here():
        if time.monotonic() > deadline:
            click.echo(f"error: after {timeout_s} s there are still {', '.join(left)}", err=True)
            sys.exit(1)
        time.sleep(POLL_S)
    click.echo("no worker is left here")
