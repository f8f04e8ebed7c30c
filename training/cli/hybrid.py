"""`kvrelay train-hybrid`: a small model with recurrent layers, for tests and trials."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


@click.command("train-hybrid")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def train_hybrid(folder: Path) -> None:
    """Train a hybrid model of 5 million parameters into FOLDER: kvrelay serve FOLDER.

    A few minutes on two cores. It has the words of Python's reference, and answers from what a
    conversation has told it, which its gated delta nets keep in their states.
    """
    from kvrelay.training.hybrid import train

    if folder.exists() and any(folder.iterdir()):
        raise click.BadParameter(f"{str(folder)!r} is not empty", param_hint="FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("training", total=None)

        def tell(done: int, total: int, loss: float) -> None:
            what = f"training, loss {loss:.2f}"
            progress.update(task, description=what, completed=done, total=total)

        trained = train(folder, tell)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("parameters", f"{trained.num_parameters:,}")
    table.add_row("tokens", f"{trained.num_tokens:,}")
    table.add_row("loss of sentences held out", f"{trained.loss:.2f} nats a token")
    table.add_row("answers that are right", f"{trained.recall:.1%}")
    table.add_row("seconds", f"{trained.seconds:,.0f}")
    table.add_row("CPU seconds", f"{trained.cpu_seconds:,.0f}")
    Console().print(table)
    click.echo(f"written to {folder}: kvrelay serve {folder}")
