"""What a chat and agents lose beside a load of a low class of service, and what that load gets.

python -m benchmarks.serving.classes [--seconds 30] [--streams 32] [--agents 16] [--rounds 1]
                                     [--set NAME=VALUE] [--json OUT]

One `kvrelay serve` with one pool, over HTTP. Chats come at one a second: alone, beside streams of
low class, and beside the same streams of the default class. Agents take three turns each, alone and
beside the streams. Only ratios within one run mean anything on a shared machine.

The idle share is that of the time in which no chat was under way, when there were only chats.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from benchmarks.report import json_option, write_json
from benchmarks.serving.conversations import (
    AgentsSpec,
    http_client,
    run_agents,
    summarize_agents,
)
from benchmarks.serving.first_light import MODEL, time_one
from benchmarks.serving.served import Served
from kvrelay.lab.bench.load import Client, LoadSpec, RequestTiming, make_prompts, percentile

CHAT = LoadSpec("", MODEL, 1, concurrency=1, output_len=32, input_len=60)
ROW = LoadSpec("", MODEL, 1, concurrency=1, output_len=64, input_len=200)
Measured = TypeVar("Measured")


async def chats(url: str, seconds: int, seed: int) -> list[RequestTiming]:
    """A new chat begins every second."""
    async with http_client(url) as http:
        client, tasks = Client(CHAT, http, lambda _: None), []
        spec = LoadSpec("", MODEL, seconds, input_len=CHAT.input_len, seed=seed)
        for prompt in make_prompts(spec):
            tasks.append(asyncio.create_task(client.request(prompt)))
            await asyncio.sleep(1.0)
        timings = await asyncio.gather(*tasks)
    errors = [timing.error for timing in timings if timing.error]
    assert not errors, errors
    return list(timings)


async def beside_streams(
    url: str, tier: str, num_streams: int, seed: int, measure: Callable[[], Awaitable[Measured]]
) -> tuple[Measured, float]:
    """What `measure` says while `num_streams` requests of `tier` run at any time, and tokens of
    output per second that those had."""
    done: list[RequestTiming] = []
    async with http_client(url) as http:
        client = Client(ROW, http, done.append)
        prompts = iter(make_prompts(LoadSpec("", MODEL, 4096, input_len=200, seed=seed)))

        async def stream() -> None:
            while True:
                message = {"role": "user", "content": next(prompts)}
                await client.chat([message], service_tier=tier)

        tasks = [asyncio.create_task(stream()) for _ in range(num_streams)]
        await asyncio.sleep(5.0)  # they have begun
        done.clear()
        began = client.now()
        measured = await measure()
        elapsed_s, num_tokens = client.now() - began, sum(t.num_output_tokens for t in done)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    errors = {timing.error for timing in done if timing.error}
    assert not errors, errors
    return measured, num_tokens / elapsed_s


def idle_share(timings: list[RequestTiming], seconds: float) -> float:
    """The part of the time in which none of these was under way."""
    busy_s, until = 0.0, 0.0
    for timing in sorted(timings, key=lambda each: each.sent_at):
        busy_s += max(0.0, timing.ended_at - max(until, timing.sent_at))
        until = max(until, timing.ended_at)
    return max(0.0, 1.0 - busy_s / seconds)


def of_chats(timings: list[RequestTiming]) -> dict[str, float]:
    gaps = [gap for timing in timings for gap in timing.gaps_s]
    ttfts = [timing.ttft_s for timing in timings]
    return {
        "ttft_p50_ms": 1e3 * (percentile(ttfts, 50) or 0.0),
        "ttft_p90_ms": 1e3 * (percentile(ttfts, 90) or 0.0),
        "itl_p50_ms": 1e3 * (percentile(gaps, 50) or 0.0),
        "itl_p99_ms": 1e3 * (percentile(gaps, 99) or 0.0),
    }


def one_round(url: str, seconds: int, streams: int, agents: int, seed: int) -> dict[str, Any]:
    """All cases, one after the other."""
    alone = asyncio.run(chats(url, seconds, seed))
    found: dict[str, Any] = {"chats alone": of_chats(alone)}
    found["chats alone"]["idle_share"] = idle_share(alone, float(seconds))

    async def nothing() -> None:
        await asyncio.sleep(seconds)

    _, rate = asyncio.run(beside_streams(url, "batch", streams, seed + 1, nothing))
    found["batch alone"] = {"tokens_per_s": rate}
    for number, tier in enumerate(("batch", "default")):
        measured, rate = asyncio.run(
            beside_streams(
                *(url, tier, streams, seed + 2 + number),
                partial(chats, url, seconds, seed + 4 + number),
            )
        )
        found[f"chats beside {tier}"] = of_chats(measured) | {"tokens_per_s": rate}
    spec = AgentsSpec(num_agents=agents, num_turns=3, context_len=600, think_s=8.0, seed=seed + 6)
    talks, elapsed_s = asyncio.run(run_agents(url, MODEL, spec, lambda: None, named=True))
    found["agents alone"] = summarize_agents(talks, elapsed_s)
    for number, tier in enumerate(("batch", "default")):
        again = AgentsSpec(**{**_fields(spec), "seed": seed + 7 + number})
        (talks, elapsed_s), rate = asyncio.run(
            beside_streams(
                *(url, tier, streams, seed + 9 + number),
                partial(run_agents, url, MODEL, again, lambda: None, named=True),
            )
        )
        found[f"agents beside {tier}"] = summarize_agents(talks, elapsed_s)
        found[f"agents beside {tier}"]["tokens_per_s"] = rate
    return found


def _fields(spec: AgentsSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def report(console: Console, found: dict[str, Any]) -> dict[str, float]:
    """Shows a round; returns the ratios that count."""
    table = Table(title="TTFT and ITL of chats (ms); tokens/s of the streams")
    columns = ("ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "itl_p99_ms", "tokens_per_s")
    for name in ("", *columns):
        table.add_column(name, justify="right")
    for name in ("chats alone", "batch alone", "chats beside batch", "chats beside default"):
        row = found[name]
        table.add_row(name, *(f"{row[key]:,.0f}" if key in row else "" for key in columns))
    console.print(table)
    alone, beside = found["chats alone"], found["chats beside batch"]
    share = beside["tokens_per_s"] / found["batch alone"]["tokens_per_s"]
    agents = found["agents alone"]["later_cached_share"]
    ratios = {
        "TTFT p90 of chats beside batch, to alone": beside["ttft_p90_ms"] / alone["ttft_p90_ms"],
        "ITL p99 of chats beside batch, to alone": beside["itl_p99_ms"] / alone["itl_p99_ms"],
        "idle share of the time with chats alone": alone["idle_share"],
        "share of its tokens/s that batch has beside chats": share,
    }
    for tier in ("batch", "default"):
        cached = found[f"agents beside {tier}"]["later_cached_share"]
        ratios[f"cached share of agents' later turns beside {tier}, to alone"] = cached / agents
    for name, value in ratios.items():
        console.print(f"{name}: {value:.2f}")
    return ratios


@click.command()
@click.option("--seconds", default=30, help="Of each case with chats.")
@click.option("--streams", default=32, help="Of the load, at any time.")
@click.option("--agents", default=16)
@click.option("--rounds", default=1)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Of the server.")
@json_option()
def main(
    seconds: int,
    streams: int,
    agents: int,
    rounds: int,
    settings: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Measure what classes of service are worth."""
    console, results = Console(), []
    pairs = (each.split("=", 1) for each in settings)
    given = {name: json.loads(value) for name, value in pairs}
    with Served(given, "--prefill", "0") as server:
        time_one(server.url, "Hello")
        for number in range(rounds):
            with console.status(f"round {number + 1} of {rounds}"):
                found = one_round(server.url, seconds, streams, agents, 1000 * number)
            results.append(found | {"ratios": report(console, found)})
    write_json(json_path, {"settings": given, "rounds": results})


if __name__ == "__main__":
    main()
