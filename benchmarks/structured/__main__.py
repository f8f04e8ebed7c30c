"""How well structured outputs keep JSON schemas that people have written.

`python -m benchmarks.structured schemas FILE [--json FILE]`

FILE is gzipped, with one line a schema: {"name", "schema", "tests": [{"valid", "data"}]}. Each
schema is compiled for the default model, and each instance is given to it as an output. What is
asked for: no invalid instance is accepted, at most 0.2 % of the valid ones are rejected, and a
schema that is refused is refused with the keyword that is not supported.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import llguidance
from rich.progress import track
from rich.table import Table

from benchmarks.report import json_option, make_console, write_json
from benchmarks.structured.ordered import in_schema_order
from kvrelay.cluster.api.constraints.schema import SchemaError, in_one_line, rewrite, schema_grammar
from kvrelay.engine.model.checkpoint.resolve import DEFAULT_MODEL, resolve_model
from kvrelay.engine.model.sampling.grammar import compile_grammar
from kvrelay.engine.model.sampling.vocabulary import GrammarError, read_vocabulary
from kvrelay.lab.bench.load import percentile

SORTS = ("objects", "calls")
BLOCKS_HELP = "Of 16 tokens in device memory: less than all contexts take."
MOST_SCHEMA_CHARS = 600  # a prompt has the schemas of several tools


@dataclass
class Tried:
    """A schema with its instances."""

    name: str
    refused: str = ""  # why
    compile_s: float = 0.0
    num_valid: int = 0
    num_invalid: int = 0
    rejected: list[str] = field(default_factory=list)  # valid instances
    accepted: list[str] = field(default_factory=list)  # invalid instances


def read_schemas(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def try_schema(
    vocabulary: llguidance.LLTokenizer, name: str, schema: Any, tests: Iterable[dict[str, Any]]
) -> Tried:
    tried = Tried(name)
    started = time.perf_counter()
    try:
        matcher = compile_grammar(vocabulary, schema_grammar(schema))
    except (SchemaError, GrammarError) as error:
        tried.refused = in_one_line(str(error))
        return tried
    tried.compile_s = time.perf_counter() - started
    rewritten = rewrite(schema)
    for test in tests:
        text = json.dumps(in_schema_order(rewritten, test["data"]), ensure_ascii=False)
        tokens = vocabulary.tokenize_str(text)
        matcher.reset()
        is_accepted = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        tried.num_valid += test["valid"]
        tried.num_invalid += not test["valid"]
        if is_accepted != test["valid"]:
            (tried.accepted if is_accepted else tried.rejected).append(text)
    return tried


def reason(refused: str) -> str:
    """Without what only one schema has."""
    general = re.sub(r" ?'json-schema:[^']*'", "", refused)
    return re.split(
        r": (?=let |json-schema|min=| \(|required property|Retrieving|Default)", general
    )[0]


def summary(results: Iterable[Tried]) -> dict[str, Any]:
    results = list(results)
    times = [each.compile_s for each in results if not each.refused]
    refused = Counter(reason(each.refused) for each in results if each.refused)
    return {
        "schemas": len(results),
        "refused": dict(refused.most_common()),
        "valid": sum(each.num_valid for each in results),
        "valid_rejected": sum(len(each.rejected) for each in results),
        "invalid": sum(each.num_invalid for each in results),
        "invalid_accepted": sum(len(each.accepted) for each in results),
        "compile_ms": {
            **{f"p{p}": round((percentile(times, p) or 0.0) * 1e3, 2) for p in (50, 99)},
            "max": round(max(times, default=0.0) * 1e3, 2),
        },
    }


@click.group()
def main() -> None:
    """Measure structured outputs beside free text."""


@main.command()
@click.argument("corpus", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@json_option()
def schemas(corpus: Path, json_path: Path | None) -> None:
    """A corpus of JSON schemas with valid and invalid instances."""
    console = make_console()
    vocabulary = read_vocabulary(resolve_model(DEFAULT_MODEL, progress=lambda _: None), ())
    lines = list(read_schemas(corpus))
    tried = [try_schema(vocabulary, **line) for line in track(lines, "schemas", console=console)]
    found = summary(tried)
    table = Table("", "", title=f"{found['schemas']:,} JSON schemas of {corpus.name}")
    table.add_row("refused", f"{sum(found['refused'].values()):,}")
    for why, count in found["refused"].items():
        table.add_row(f"  {why}", f"{count:,}")
    for kind, count in (("valid", found["valid_rejected"]), ("invalid", found["invalid_accepted"])):
        wrong = "rejected" if kind == "valid" else "accepted"
        share = count / max(1, found[kind])
        table.add_row(f"{kind} instances {wrong}", f"{count:,} of {found[kind]:,}, {share:.2%}")
    for name, value in found["compile_ms"].items():
        table.add_row(f"compile time {name}, ms", f"{value:,.1f}")
    console.print(table)
    for each in tried:
        for text in each.rejected + each.accepted:
            console.print(f"{each.name}: {text[:200]}", markup=False)
    wrong_ones = [asdict(each) for each in tried if each.rejected or each.accepted]
    write_json(json_path, found | {"wrong": wrong_ones})


@main.command()
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@json_option()
def speed(rounds: int, threads: int, json_path: Path | None) -> None:
    """What masks cost a step of 8, and what forced and predicted tokens bring."""
    from benchmarks.structured.speed import forced_tokens, masked_steps, predicted

    console = make_console()
    model = resolve_model(DEFAULT_MODEL, progress=lambda _: None)
    table = Table("", "without", "with", "ratio", title="Structured output on the default model")
    found = {}
    with console.status("steps"):
        found["steps"] = steps = masked_steps(model, rounds, threads)
    times = (f"{steps[name]:.2f} ms" for name in ("plain_ms", "masked_ms"))
    table.add_row("masks: a step of 8 decodes", *times, f"{steps['ratio']:.3f}")
    for batch in (1, 8):
        with console.status(f"{batch} at once"):
            found[f"forced_{batch}"] = forced = forced_tokens(model, rounds, batch)
        speeds = (f"{forced[name]:.0f} tokens/s" for name in ("tokens_s", "drafted_tokens_s"))
        row = f"forced tokens as drafts: {batch} at once"
        table.add_row(row, *speeds, f"{forced['ratio']:.2f}")
    with console.status("a prediction"):
        found["predicted"] = drafted = predicted(model, rounds)
    speeds = (f"{drafted[name]:.0f} tokens/s" for name in ("tokens_s", "predicted_tokens_s"))
    table.add_row("a prediction, nine tenths right", *speeds, f"{drafted['ratio']:.2f}")
    console.print(table)
    write_json(json_path, found)


@main.command()
@click.argument("corpus", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--count", type=click.IntRange(1), default=200, show_default=True)
@click.option("--kill", is_flag=True, help="And again while workers die.")
@json_option()
def generate(corpus: Path, count: int, kill: bool, json_path: Path | None) -> None:
    """Objects that the served model makes, judged by the package jsonschema."""
    from benchmarks.serving.served import Served
    from benchmarks.structured.generated import disturbed, judged, make_all

    console = make_console()
    lines = list(read_schemas(corpus))
    vocabulary = read_vocabulary(resolve_model(DEFAULT_MODEL, progress=lambda _: None), ())
    known = [each["schema"] for each in lines if not try_schema(vocabulary, **each).refused]
    chosen = known[:: max(1, len(known) // count)][:count]
    with Served({}) as served, console.status(f"{len(chosen)} objects"):
        made = asyncio.run(make_all(served.url, chosen))
        found = judged(chosen, made)
        if kill:
            again, found["workers_killed"] = asyncio.run(disturbed(served.url, chosen))
            found["altered"] = sum(a != b for a, b in zip(made, again, strict=True))
    table = Table("", "", title=f"Objects of {len(chosen)} schemas")
    for name, number in found.items():
        table.add_row(name.replace("_", " "), f"{number:,}")
    console.print(table)
    write_json(json_path, found)


@main.command()
@click.argument("corpus", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--count", type=click.IntRange(1), default=200, show_default=True)
@click.option("--model", default=DEFAULT_MODEL, show_default=True)
@click.option("--blocks", type=click.IntRange(64), default=336, show_default=True, help=BLOCKS_HELP)
@click.option("--what", "sorts", multiple=True, type=click.Choice(SORTS), default=SORTS)
@json_option()
def kinds(
    corpus: Path,
    count: int,
    model: str,
    blocks: int,
    sorts: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Objects and tool calls with exact and approximate KV, and by Quest."""
    from benchmarks.serving.served import Served
    from benchmarks.structured.kinds import SETTINGS, by_kind

    console = make_console()
    vocabulary = read_vocabulary(resolve_model(model, progress=lambda _: None), ())
    lines = [line for line in read_schemas(corpus) if line["schema"].get("type") == "object"]
    short = [line for line in lines if len(json.dumps(line["schema"])) < MOST_SCHEMA_CHARS]
    known = [each["schema"] for each in short if not try_schema(vocabulary, **each).refused]
    chosen = known[:: max(1, len(known) // count)][:count]
    found: dict[str, dict[str, Any]] = {}

    async def measure(url: str) -> None:
        async for name, facts in by_kind(url, model, chosen, sorts):
            found[name] = facts
            console.print(f"{name}: {facts}")

    settings = SETTINGS | {"model.name": model, "engine.num_blocks": blocks}
    with Served(settings) as served:
        asyncio.run(measure(served.url))
    table = Table("what, KV", *(name.replace("_", " ") for name in next(iter(found.values()))))
    for name, facts in found.items():
        table.add_row(name, *map(str, facts.values()))
    console.print(table)
    write_json(json_path, {"model": model, "schemas": len(chosen), "found": found})


@main.command()
@json_option()
def beside(json_path: Path | None) -> None:
    """What refused schemas cost the streams beside them."""
    from benchmarks.serving.served import Served
    from benchmarks.structured.beside import measure

    console = make_console()
    with Served({}) as served, console.status("two streams, and refused schemas beside them"):
        found = asyncio.run(measure(served.url))
    table = Table("ms between tokens", "p50", "p90", "p99", "longest")
    for name, times in found["ms"].items():
        table.add_row(name, *(f"{each:.1f}" for each in times.values()))
    console.print(table)
    table = Table("schema", "answer", "slowest, s")
    for name, answer in found["answers"].items():
        table.add_row(name, answer, f"{found['slowest_s'][name]:.2f}")
    console.print(table)
    write_json(json_path, found)


if __name__ == "__main__":
    main()
