"""What two pools, a prefix cache and continuous batching are worth, side by side in one run.

python -m benchmarks.serving.first_light [prefix|hit-rate|batching|stall|all] [--json OUT]

Each measurement starts its own `kvrelay serve`, over HTTP, and prints a ratio; only ratios within
one run mean anything on a shared machine.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import click
import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.report import json_option, write_json
from benchmarks.serving.served import Served
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.kv.block_hash import hash_blocks
from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.lab.bench.load import (
    Client,
    LoadSpec,
    RequestTiming,
    make_prompts,
    percentile,
    run_load,
    summarize,
)

MODEL = "smollm2-135m"
BLOCK_SIZE = 16
Row = tuple[str, str]


def load(spec: LoadSpec) -> dict[str, Any]:
    timings, elapsed_s = asyncio.run(run_load(spec))
    result = summarize(spec, timings, elapsed_s)
    assert not result["errors"], result["errors"]
    return result


def time_one(url: str, prompt: str, output_len: int = 8) -> RequestTiming:
    """One streamed chat request, alone."""

    async def ask() -> RequestTiming:
        spec = LoadSpec(url, MODEL, num_requests=1, concurrency=1, output_len=output_len)
        done: list[RequestTiming] = []
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            run = Client(spec, client, done.append)
            return await run.request(prompt)

    timing = asyncio.run(ask())
    assert timing.error is None, timing.error
    return timing


def prefix(rounds: int = 5) -> tuple[list[Row], dict[str, Any]]:
    """Measures TTFT of a 2,000-token prefix for the first and for the second time."""
    cold, warm, cached = [], [], []
    with Served({}) as server:
        url = server.url
        time_one(url, "Hello")
        for i in range(rounds):
            text = make_prompts(LoadSpec(url, MODEL, 1, input_len=2000, seed=100 + i))[0]
            cold.append(time_one(url, f"{text} What is the first word?").ttft_s)
            again = time_one(url, f"{text} Which word comes last, and why?")
            warm.append(again.ttft_s)
            cached.append(again.num_cached_tokens)
    ratio = statistics.median(cold) / statistics.median(warm)
    rows = [
        ("TTFT, first time", f"{statistics.median(cold) * 1e3:,.0f} ms (median of {rounds})"),
        ("TTFT, same prefix", f"{statistics.median(warm) * 1e3:,.0f} ms"),
        ("cached tokens reported", f"{min(cached)} to {max(cached)}"),
        ("ratio (wanted: at least 5)", f"{ratio:.1f}"),
    ]
    return rows, {"cold_s": cold, "warm_s": warm, "cached": cached, "ratio": ratio}


def infinite_cache_tokens(prompts: list[str], tokenizer: Tokenizer) -> int:
    """Prompt tokens that one cache of unlimited size would have, in the order of arrival."""
    known: set[bytes] = set()
    total = 0
    for prompt in prompts:
        tokens = tokenizer.chat_prompt([{"role": "user", "content": prompt}]).tokens
        names = hash_blocks(b"", CacheScope(), tokens, BLOCK_SIZE)
        usable = names[: (len(tokens) - 1) // BLOCK_SIZE]
        total += BLOCK_SIZE * next((i for i, n in enumerate(usable) if n not in known), len(usable))
        known.update(names)
    return total


def hit_rate() -> tuple[list[Row], dict[str, Any]]:
    """2 + 2 workers, 8 groups of shared prefixes, room for 6 of them in each worker."""
    tokenizer = Tokenizer(resolve_model(MODEL, progress=lambda _: None))
    spec = LoadSpec(
        "", MODEL, 96, concurrency=3, input_len=20, output_len=4, prefix_groups=8, prefix_len=400
    )
    ceiling = infinite_cache_tokens(make_prompts(spec), tokenizer)
    rows: list[Row] = [("one infinite cache", f"{ceiling:,} tokens")]
    result: dict[str, Any] = {"infinite": ceiling}
    for policy in ("prefix", "round_robin"):
        settings = {"router.policy": policy, "engine.num_blocks": 6 * 27}
        with Served(settings, "--prefill", "2", "--decode", "2") as server:
            timings, _ = asyncio.run(run_load(LoadSpec(**{**_fields(spec), "url": server.url})))
        assert not [t.error for t in timings if t.error]
        hits = sum(t.num_cached_tokens for t in timings)
        result[policy] = hits
        rows.append((policy, f"{hits:,} tokens = {hits / ceiling:.1%} of the infinite cache"))
    rows.append(("wanted: prefix at least", "95 %"))
    return rows, result


def _fields(spec: LoadSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def batching() -> tuple[list[Row], dict[str, Any]]:
    """Tokens per second of 32 requests at once against one at a time."""
    rates: dict[int, float] = {}
    with Served({}) as server:
        url = server.url
        time_one(url, "Hello")
        for concurrency, count in ((1, 6), (32, 64)):
            spec = LoadSpec(
                url, MODEL, count, concurrency=concurrency, input_len=16, output_len=64,
                seed=concurrency,
            )  # fmt: skip
            rates[concurrency] = load(spec)["output_tokens_per_s"]
    ratio = rates[32] / rates[1]
    rows = [
        ("one at a time", f"{rates[1]:.1f} tokens/s"),
        ("32 at once", f"{rates[32]:.1f} tokens/s"),
        ("ratio (wanted: at least 4)", f"{ratio:.1f}"),
    ]
    return rows, {"tokens_per_s": rates, "ratio": ratio}


async def mixed_load(
    url: str, duration_s: float, seed: int = 0
) -> tuple[list[float], list[float], list[float]]:
    """Short chats at one a second, a 2,000-token prompt every 4 s; ITLs and TTFTs of the chats,
    TTFTs of the prompts."""
    rng = Random(5 + seed)
    chat = LoadSpec(url, MODEL, 1, concurrency=1, output_len=32)
    long = LoadSpec(url, MODEL, 1, concurrency=1, output_len=2)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        chats, longs = Client(chat, client, lambda _: None), Client(long, client, lambda _: None)
        chat_tasks, long_tasks = [], []
        for second in range(int(duration_s)):
            if second % 4 == 1:
                text = make_prompts(
                    LoadSpec(url, MODEL, 1, input_len=2000, seed=1000 * seed + second)
                )[0]
                long_tasks.append(asyncio.create_task(longs.request(text)))
            question = f"Question {rng.random()}: tell me about the number {second}."
            chat_tasks.append(asyncio.create_task(chats.request(question)))
            await asyncio.sleep(1.0)
        timings = await asyncio.gather(*chat_tasks)
        long_timings = await asyncio.gather(*long_tasks)
    errors = [timing.error for timing in (*timings, *long_timings) if timing.error]
    assert not errors, errors
    gaps = [gap for timing in timings for gap in timing.gaps_s]
    chat_ttfts, long_ttfts = ([t.ttft_s for t in done] for done in (timings, long_timings))
    return gaps, chat_ttfts, long_ttfts


def stall(duration_s: float = 32.0) -> tuple[list[Row], dict[str, Any]]:
    """ITL of short chats beside long prompts: one pool against two, on the same cores."""
    rows: list[Row] = []
    result: dict[str, Any] = {}
    small_chunks = {"engine.itl_target_ms": 100.0}  # what a pool of its own can do for its ITL
    for name, prefill, settings in (
        ("one pool", "0", {}),
        ("one pool, ITL target 100 ms", "0", small_chunks),
        ("two pools", "1", {}),
    ):
        with Served(settings, "--prefill", prefill) as server:
            time_one(server.url, "Hello")
            gaps, ttfts, _ = asyncio.run(mixed_load(server.url, duration_s))
        itl = {p: (percentile(gaps, p) or 0.0) * 1e3 for p in (50, 90, 99)}
        ttft = (percentile(ttfts, 50) or 0.0) * 1e3
        result[name] = {"itl_ms": itl, "ttft_ms_p50": ttft}
        shown = ", ".join(f"p{p} {value:,.0f}" for p, value in itl.items())
        rows.append((name, f"ITL {shown} ms; TTFT p50 {ttft:,.0f} ms"))
    ratio = result["one pool"]["itl_ms"][99] / result["two pools"]["itl_ms"][99]
    rows.append(("ITL p99 ratio (wanted: at least 5)", f"{ratio:.1f}"))
    return rows, result | {"ratio": ratio}


CASES: dict[str, Callable[[], tuple[list[Row], dict[str, Any]]]] = {
    "prefix": prefix,
    "hit-rate": hit_rate,
    "batching": batching,
    "stall": stall,
}


@click.command()
@click.argument("case", type=click.Choice([*CASES, "all"]), default="all")
@json_option()
def main(case: str, json_path: Path | None) -> None:
    """Measure CASE, or all of them."""
    console = Console()
    results = {}
    for name in CASES if case == "all" else [case]:
        with console.status(f"measuring {name}"):
            rows, results[name] = CASES[name]()
        table = Table(title=name, show_header=False)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    write_json(json_path, results)


if __name__ == "__main__":
    main()
