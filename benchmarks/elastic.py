"""Two pools beside one pool of the same hardware, and beside a peer, under untuned load.

`python -m benchmarks.elastic [agents|chat|mixed|all] [--vllm-python PYTHON] [--json FILE]`

Each server is started alone with its default settings (one pool gets the KV memory of both), takes
the load of a round and is stopped, so that idle servers take no cores. Rounds go there and back.

* agents: conversations at once, each with a context of its own and turns with time to think
* chat: short prompts at a rate, open loop
* mixed: chats once a second beside a 2,000-token prompt every 4 s
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.report import make_console, write_json
from benchmarks.serving.conversations import Conversation, LoadFailed, http_client
from benchmarks.serving.first_light import MODEL, mixed_load, time_one
from benchmarks.serving.served import Served
from benchmarks.serving.vllm_served import VllmServed, VllmSetup, check_python
from engine.model.checkpoint.families import read_config
from engine.model.checkpoint.resolve import resolve_model
from lab.bench.load import Client, LoadSpec, Timing, make_prompts, percentile, run_load

KV_GIB = 2.0  # of each server, however many workers it has
ONE, TWO, FOUR, PEER = "one pool", "1 + 1", "2 + 2", "vLLM"
Figures = dict[str, float]
CONTEXT, MESSAGE, OUTPUT, TURNS, THINK_S = 3000, 150, 48, 5, 8.0  # tokens; turns; seconds


def ours(prefill: int, decode: int) -> Callable[[], AbstractContextManager[Any]]:
    """Default settings; the memory for KV is divided among the workers."""
    settings = {"engine.kv_cache_gib": KV_GIB / (prefill + decode)}
    return lambda: Served(settings, "--prefill", str(prefill), "--decode", str(decode))


def peer(python: Path) -> Callable[[], AbstractContextManager[Any]]:
    """The same KV memory in bfloat16, both cores."""
    path = resolve_model(MODEL, progress=lambda _: None)
    per_token = read_config(path).kv_spec(16, "bfloat16").bytes_per_token
    setup = VllmSetup(python, path, MODEL, int(KV_GIB * 2**30) // per_token, 8192, "bfloat16")
    return lambda: VllmServed(setup)


async def agents(url: str, seed: int, num_agents: int, on_turn: Callable[[], None]) -> Figures:
    """All begin at once. A conversation with a turn that fails ends there."""
    spec = LoadSpec(url, MODEL, num_agents, concurrency=1, output_len=OUTPUT)
    contexts = make_prompts(LoadSpec("", "", num_agents, input_len=CONTEXT, seed=seed))
    talks = [Conversation(f"agent-{seed}-{i}") for i in range(num_agents)]
    num_failed = 0

    async def live(client: Client, i: int) -> None:
        nonlocal num_failed
        rng = Random(seed * 1009 + i)
        texts = make_prompts(LoadSpec("", "", TURNS, input_len=MESSAGE, seed=rng.randrange(2**32)))
        for turn in range(TURNS):
            if turn:
                await asyncio.sleep(THINK_S * rng.uniform(0.5, 1.5))
            try:
                await talks[i].say(client, texts[turn] if turn else contexts[i])
            except LoadFailed:
                num_failed += 1
                return
            finally:
                on_turn()

    async with http_client(url) as http:
        client = Client(spec, http, lambda _: None)
        await asyncio.gather(*(live(client, i) for i in range(num_agents)))
        elapsed_s = client.now()
    first = [talk.timings[0] for talk in talks if talk.timings]
    later = [timing for talk in talks for timing in talk.timings[1:]]
    # An infinite cache would have all of a turn that its predecessor sent and got.
    known = sum(
        before.num_prompt_tokens + before.num_output_tokens
        for talk in talks
        for before in talk.timings[:-1]
    )
    return {
        **_ttft("first", first, (50, 90)),
        **_ttft("later", later, (50, 90)),
        "refused": num_failed,
        "silence_s": _silence([*first, *later]),
        "cached_of_infinite": sum(t.num_cached_tokens for t in later) / max(1, known),
        "elapsed_s": elapsed_s,
    }


async def chat(url: str, seed: int, rate: float, seconds: float) -> Figures:
    spec = LoadSpec(
        url, MODEL, int(rate * seconds), rate=rate, input_len=128, output_len=64, seed=seed
    )
    timings, _ = await run_load(spec)
    good = [timing for timing in timings if timing.error is None]
    gaps = [gap for timing in good for gap in _gaps(timing)]
    return {
        **_ttft("chat", good, (50, 90, 99)),
        "itl_p99_s": percentile(gaps, 99) or 0.0,
        "refused": len(timings) - len(good),
    }


async def mixed(url: str, seed: int, seconds: float) -> Figures:
    gaps, ttfts, long_ttfts = await mixed_load(url, seconds, seed=seed)
    found = {f"chat_ttft_p{p}_s": percentile(ttfts, p) or 0.0 for p in (50, 90)}
    long_ttft = percentile(long_ttfts, 50) or 0.0
    return found | {"itl_p99_s": percentile(gaps, 99) or 0.0, "long_ttft_p50_s": long_ttft}


def _ttft(name: str, timings: Sequence[Timing], percents: Sequence[int]) -> Figures:
    values = [timing.ttft_s for timing in timings]
    return {f"{name}_ttft_p{p}_s": percentile(values, p) or 0.0 for p in percents}


def _gaps(timing: Timing) -> list[float]:
    return [b - a for a, b in zip(timing.chunk_at, timing.chunk_at[1:], strict=False)]


def _silence(timings: Sequence[Timing]) -> float:
    """The longest pause within a stream."""
    return max((gap for timing in timings for gap in _gaps(timing)), default=0.0)


def compared(
    console: Console,
    servers: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    rounds: int,
    measure: Callable[[str, int], Figures],
) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {name: [] for name in servers}
    for i in range(rounds):
        for name in list(servers) if i % 2 == 0 else list(servers)[::-1]:
            with console.status(f"round {i + 1}, {name}"), servers[name]() as server:
                for words in ("Hello", "Hello " * 500):  # what only the first prompts pay for
                    time_one(server.url, words)
                found[name].append(measure(server.url, i))
    return found


def table(title: str, found: Mapping[str, Sequence[Figures]]) -> Table:
    made = Table("", *found, title=title, caption="medians of the rounds")
    for key in next(iter(found.values()))[0]:
        made.add_row(key, *(f"{median(r[key] for r in runs):.3f}" for runs in found.values()))
    return made


@click.command()
@click.argument("what", type=click.Choice(["agents", "chat", "mixed", "all"]), default="all")
@click.option(
    "--agents", "num_agents", type=int, multiple=True, default=(16, 40), show_default=True
)
@click.option("--seconds", type=float, default=40.0, show_default=True, help="Of chat and mixed.")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True)
@click.option("--vllm-python", type=click.Path(path_type=Path), help="Of the peer; see peer.py.")
@click.option("--servers", default=f"{ONE},{TWO},{FOUR}", show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results.")
def main(
    what: str, num_agents: Sequence[int], seconds: float, rounds: int, vllm_python: Path | None,
    servers: str, json_path: Path | None,
) -> None:  # fmt: skip
    """Ours in one pool, 1 + 1 and 2 + 2, and a peer, in turns."""
    known = {ONE: ours(0, 1), TWO: ours(1, 1), FOUR: ours(2, 2)}
    chosen = {name: known[name] for name in servers.split(",")}
    if vllm_python is not None:
        chosen[PEER] = peer(check_python(vllm_python))
    console = make_console()
    results: dict[str, Any] = {}

    def run(title: str, measure: Callable[[str, int], Figures]) -> None:
        results[title] = compared(console, chosen, rounds, measure)
        console.print(table(title, results[title]))

    def run_agents(url: str, seed: int, count: int) -> Figures:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(f"{count} agents", total=count * TURNS)
            return asyncio.run(agents(url, seed, count, lambda: progress.advance(task)))

    if what in ("agents", "all"):
        for count in num_agents:
            run(f"{count} agents", lambda url, i, n=count: run_agents(url, i, n))
    if what in ("chat", "all"):
        for rate in (1.0, 3.0):
            name = f"chat, {rate:g} a second"
            run(name, lambda url, i, rate=rate: asyncio.run(chat(url, i, rate, seconds)))
    if what in ("mixed", "all"):
        run("chat beside long prompts", lambda url, i: asyncio.run(mixed(url, i, seconds)))
    write_json(json_path, {"kv_gib": KV_GIB, "rounds": rounds, "results": results})


if __name__ == "__main__":
    main()
