"""`kvrelay draft`: a head that drafts tokens for a model, trained on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL

LENGTH = 768  # tokens of a prompt and its answer
CONTEXT = 256  # tokens before the step whose time is taken
MEASURED = 24  # answers of each temperature

_model = click.argument("model", default=DEFAULT_MODEL)
_threads = click.option("--threads", type=click.IntRange(0), default=0, help="0: all cores.")
_prompts = click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What the model is asked, a prompt a line; without, questions that come with this.",
)


@click.group()
def draft() -> None:
    """Train a head that drafts tokens for a model, and measure it."""


@draft.command()
@_model
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the head; without, in the user's cache directory.",
)
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=45.0, show_default=True)
@click.option("--draft-vocab", type=click.IntRange(1), default=4096, show_default=True)
@click.option("--seed", type=int, default=48, show_default=True)
@_threads
@_prompts
def train(
    model: str,
    out: Path | None,
    minutes: float,
    draft_vocab: int,
    seed: int,
    threads: int,
    prompts: Path | None,
) -> None:
    """Train a head for MODEL on its own answers to questions.

    A run that was stopped goes on when the same command is given again.
    """
    from kvrelay.training.draft.prompts import read_prompts
    from kvrelay.training.draft.train import Recipe, Trained
    from kvrelay.training.draft.train import train as train_head

    recipe = Recipe(minutes=minutes, seed=seed, draft_vocab_size=draft_vocab)
    with _failing_clearly():
        own = read_prompts(prompts) if prompts else []
        target, tokenizer, digest = _target(model, recipe.num_prompts, threads)
        folder = out or _default_folder(digest)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("answers", total=1.0)

            def tell(what: str, part: float) -> None:
                progress.update(task, description=what, completed=part)

            trained: Trained = train_head(
                target, tokenizer, folder, recipe, tell, digest=digest, prompts=own
            )
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("tokens of answers", f"{trained.num_tokens:,}")
    table.add_row("of the draft vocabulary", f"{trained.coverage:.1%}")
    table.add_row("steps", f"{trained.num_steps:,}")
    minutes_of = f"{trained.answers_s / 60:.1f}, {trained.steps_s / 60:.1f}"
    table.add_row("minutes of answers and steps", minutes_of)
    console = Console()
    console.print(table)
    _print_worth(console, trained.head, target, [each.first(MEASURED) for each in trained.held_out])
    click.echo(f"written to {folder}: kvrelay serve {model} --drafter {folder}")


@draft.command()
@click.argument("head", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_model
@click.option("--seed", type=int, default=48, show_default=True)
@click.option("--answers", type=click.IntRange(1), default=MEASURED, show_default=True)
@_threads
@_prompts
def measure(
    head: Path, model: str, seed: int, answers: int, threads: int, prompts: Path | None
) -> None:
    """Say how many of the tokens that HEAD drafts MODEL accepts.

    Measured on answers to questions that no training asks, or to all --prompts.
    """
    from kvrelay.training.draft import data
    from kvrelay.training.draft.head import Head
    from kvrelay.training.draft.prompts import Questions, read_prompts
    from kvrelay.training.draft.train import Recipe

    with _failing_clearly():
        loaded = Head.load(head)
        target, tokenizer, digest = _target(model, answers, threads)
        if loaded.shape.model_digest not in ("", digest):
            click.echo(f"{head} was trained for other weights than those of {model}", err=True)
        questions = read_prompts(prompts, least=1)[:answers] if prompts else []
        questions = questions or Questions(seed, held_out=True).take(answers)
        tokens = [data.tokens_of(tokenizer, each) for each in questions]
        made = [
            data.answer(target, tokens, temperature, seed, Recipe().max_tokens)
            for temperature in data.TEMPERATURES
        ]
    _print_worth(Console(), loaded, target, made)


@contextmanager
def _failing_clearly() -> Iterator[None]:
    from kvrelay.cluster.api.text.tokenizer import TokenizerError
    from kvrelay.engine.model.errors import ModelError

    try:
        yield
    except (ModelError, TokenizerError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _target(model: str, num_seqs: int, threads: int) -> tuple[Any, Any, str]:
    """The model, its tokenizer and its digest."""
    from kvrelay.cluster.api.text.tokenizer import Tokenizer
    from kvrelay.engine.model.checkpoint.resolve import resolve_model
    from kvrelay.training.draft.target import Target

    path = resolve_model(model, progress=lambda line: click.echo(line, err=True))
    target = Target(path, num_seqs, LENGTH, threads or len(os.sched_getaffinity(0)))
    return target, Tokenizer(path), target.config.digest(path).hex()


def _default_folder(digest: str) -> Path:
    return default_cache_dir() / "draft-heads" / digest[:16]


def _print_worth(console: Console, head: Any, target: Any, answers: list[Any]) -> None:
    from kvrelay.training.draft.measure import MOST_DRAFTS, accepted, draft_share

    row_s = [target.step_s(rows, CONTEXT) for rows in range(1, MOST_DRAFTS + 2)]
    draft_s = row_s[0] * draft_share(head, target)
    steps = ", ".join(f"{1e3 * each:.1f}" for each in row_s)
    console.print(
        f"a step of 1 to {len(row_s)} rows takes {steps} ms, a draft about {1e3 * draft_s:.1f}"
    )
    table = Table(
        "temperature", "drafts", "the last is accepted", "tokens a round", "times as fast"
    )
    for each in accepted(head, target, answers):
        columns = each.by_place, each.per_round, each.gains(row_s, draft_s)
        for count, (share, tokens, gain) in enumerate(zip(*columns, strict=True), 1):
            temperature = f"{each.temperature:g}"
            table.add_row(temperature, f"{count}", f"{share:.0%}", f"{tokens:.2f}", f"{gain:.2f}")
    console.print(table)
