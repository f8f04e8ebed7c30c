"""Whether tokens depend on what drafts them, or on where.

`python -m benchmarks.engine.drafted_tokens` answers the same requests with each drafter, in one
pool and two, while they move between a worker with the drafter and one without, and while a worker
is killed. It ends with 1 if a token differs.

Without `--model` the model is tiny and random, and so are heads A and B; the draft model is the
model itself, which is right nearly always. Requests with n-grams expect nearly what they will get.
Drafts are made however little they gain.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import click
import llguidance

from benchmarks.report import json_option, make_console, number_table, write_json
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.config import EngineSection
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.scheduling import selection
from kvrelay.engine.stats import Role
from kvrelay.engine.step import Step, StepDone
from kvrelay.training.corpus import make_tokenizer
from kvrelay.training.draft.data import tokens_of
from kvrelay.training.draft.prompts import Questions
from tests.engine.model.heads import make_head
from tests.engine.model.tiny import make_padded
from tests.local.test_local import REMOTE
from tests.local.test_local_drafts import counted
from tests.local.test_migration import chase, num_taken_over
from tests.support.local import Completion, LocalCluster

NONE, NGRAMS = "none", "n-grams"
WAYS = ("one pool", "two pools", "moved", "killed")
COUNTERS = ("draft_tokens", "draft_tokens_accepted", "drafter_tokens", "drafter_tokens_accepted")
TEMPERATURES = 0.0, 0.7, 1.0
TIMEOUT_S = 1800.0
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
KINDS: dict[str, dict[str, Any]] = {  # requests that are asked together
    "plain": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.05, "top_p": 0.98},
    "grammar": {"grammar": llguidance.LLMatcher.grammar_from_json_schema(SCHEMA)},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {300: 2.0, 17: -100.0}},
    "logprobs": {"logprobs": 2},
}
Request = tuple[str, list[int], SamplingParams]  # with its kind


def requests(path: Path, number: int, max_tokens: int) -> list[Request]:
    """As many of each kind; temperatures in turn."""
    tokenizer, kinds, stops = Tokenizer(path), [*KINDS], read_config(path).eos_token_ids
    asked = []
    for at, question in enumerate(Questions(7, held_out=False).take(number)):
        kind = kinds[at * len(kinds) // number]
        heat = TEMPERATURES[at % len(TEMPERATURES)]
        fields = {"seed": at, "stop_token_ids": stops, **KINDS[kind]}
        sampling = SamplingParams(max_tokens, heat, **fields)
        asked.append((kind, tokens_of(tokenizer, question), sampling))
    return asked


def expecting(asked: Sequence[Request], answers: Sequence[Sequence[int]]) -> list[Request]:
    """Each predicts its answer, but for some tokens."""
    changed = (
        tuple(token ^ (at % 13 == 7) for at, token in enumerate(answer)) for answer in answers
    )
    return [
        (kind, prompt, replace(sampling, prediction=prediction))
        for (kind, prompt, sampling), prediction in zip(asked, changed, strict=True)
    ]


@contextmanager
def unhurried() -> Iterator[None]:
    """Steps take a while, so that requests still run when something happens to them."""
    execute = ModelRunner.execute

    def slowly(self: ModelRunner, step: Step) -> StepDone:
        time.sleep(0.01)
        return execute(self, step)

    with patch.object(ModelRunner, "execute", slowly):
        yield


def answers_of(cluster: LocalCluster, way: str, asked: Sequence[Request]) -> list[Completion]:
    before = cluster.status().totals.output_tokens
    futures = [cluster.submit(*rest, timeout_s=TIMEOUT_S) for _, *rest in asked]
    if way == "moved":
        return chase(cluster, futures, TIMEOUT_S)
    if way == "killed":
        while cluster.status().totals.output_tokens < before + 8 * len(asked):
            time.sleep(0.01)
        cluster.kill("decode-0")
        cluster.revive("decode-0")
    return [future.result(TIMEOUT_S) for future in futures]


def serve(
    path: Path, way: str, engine: dict[str, Any], asked: Sequence[Request]
) -> tuple[list[list[int]], dict[str, int]]:
    """All answers, and what was counted. Raises RuntimeError if one failed."""
    own, plain = EngineSection(**engine), EngineSection(**engine | {"drafter": ""})
    options: dict[str, Any] = {
        "one pool": {"prefill": 0},
        "two pools": {"router": REMOTE},
        "moved": {"engines": {Role.PREFILL: plain}},
        "killed": {"prefill": 0, "decode": 2},
    }[way]
    said: list[list[int]] = []
    with LocalCluster(path, engine=own, **options) as cluster:
        for _, each in groupby(asked, itemgetter(0)):
            for answer in answers_of(cluster, way, [*each]):
                if answer.failed:
                    raise RuntimeError(f"{way}: {answer.failed}")
                said.append(answer.tokens)
        totals, taken_over = cluster.status().totals, num_taken_over(cluster)
        moves = {"two pools": totals.handoffs, "moved": taken_over}
        moves["killed"] = sum(totals.retries.values())
        counts = {name: int(counted(cluster, name)) for name in COUNTERS}
        cluster.wait_idle(60.0)
    return said, {"moves": moves.get(way, 0), **counts}


@click.command()
@click.option("--model", default="", help="In place of a tiny one.")
@click.option("--drafter", "own", multiple=True, help="NAME=PATH, in place of all others.")
@click.option("--ways", default=",".join(WAYS), show_default=True)
@click.option("--requests", "number", default=200, show_default=True)
@click.option("--max-tokens", default=48, show_default=True)
@json_option()
def main(
    model: str,
    own: tuple[str, ...],
    ways: str,
    number: int,
    max_tokens: int,
    json_path: Path | None,
) -> None:
    """Answer, compare, and print a table."""
    console = make_console()
    selection.MIN_GAIN, selection.MAX_SLOWDOWN = 0.0, 100.0
    with TemporaryDirectory() as folder, unhurried():
        path = Path(folder)
        if model:
            path = resolve_model(model, progress=lambda _: None)
        else:
            make_tokenizer().save(str(path / "tokenizer.json"))
            (path / "tokenizer_config.json").write_text("{}")
            (path / "model").mkdir()
            make_padded(path, path := path / "model", 0)
        drafters = {NONE: "", NGRAMS: ""}
        if not own:
            for name, seed in (("head A", 0), ("head B", 5)):
                make_head(Path(folder) / name, "own", seed=seed)
                drafters[name] = str(Path(folder) / name)
            drafters["draft model"] = str(path)
        drafters |= dict(each.split("=", 1) for each in own)
        asked, rows = requests(path, number, max_tokens), dict[str, dict[str, int]]()
        engine = {"num_blocks": 2_000, "max_num_seqs": 32, "threads": 1}
        expected: list[list[int]] = []
        table = number_table("drafter, way", "tokens", "differ", "moves", *COUNTERS)
        for name, way in ((name, way) for name in drafters for way in ways.split(",")):
            drafts = 0 if name == NONE else 5
            settings = engine | {"num_speculative_tokens": drafts, "drafter": drafters[name]}
            now = expecting(asked, expected) if name == NGRAMS else asked
            said, counts = serve(path, way, settings, now)
            expected = expected or said
            differ = sum(one != other for one, other in zip(said, expected, strict=True))
            row = {"tokens": sum(map(len, said)), "differ": differ, **counts}
            rows[f"{name}, {way}"] = row
            table.add_row(f"{name}, {way}", *(f"{each:,}" for each in row.values()))
            console.print(f"{name}, {way}: {row}", highlight=False, soft_wrap=True)
    console.print(table)
    write_json(json_path, {"model": model or "tiny", "requests": number, "rows": rows})
    sys.exit(any(row["differ"] for row in rows.values()))


if __name__ == "__main__":
    main()
