"""`kvrelay fetch`: a model into this machine's cache, before a server or a worker needs it."""

from __future__ import annotations

import sys

import click


@click.command()
@click.argument("model")
@click.option("--revision", default="", help="Commit, tag or branch of the hub; as model.revision.")
def fetch(model: str, revision: str) -> None:
    """Fetch MODEL, as `kvrelay serve` would, and print its folder. What is in the cache already is
    not fetched again."""
    from kvrelay.engine.model.checkpoint.resolve import resolve_model
    from kvrelay.engine.model.errors import ModelError

    try:
        path = resolve_model(model, revision, progress=lambda line: click.echo(line, err=True))
    except ModelError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    click.echo(path)
