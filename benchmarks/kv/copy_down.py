"""What it costs streams that sealed blocks are copied to host memory while they are decoded.

    python -m benchmarks.kv.copy_down [--pairs 6] [--streams 8] [--output 200] [--load chat]

Two servers run side by side, one with host memory for KV and one without, and take the same load in
turns: who goes first changes with each pair. A load has a fixed number of tokens, so that the time
it takes is what it costs.

* chat: as many streams at once, with short prompts
* agents: as many conversations at once, of four turns without time to think
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from benchmarks.serving.conversations import AgentsSpec, run_agents
from benchmarks.serving.first_light import MODEL
from benchmarks.serving.served import Served
from kvrelay.lab.bench.load import LoadSpec, run_load

INPUT = 100  # tokens of each prompt, about
CONTEXT, MESSAGE = 600, 60  # tokens of an agent's first turn and of its later ones, about
TARGET = 0.02

Load = Callable[[str, int, argparse.Namespace], Awaitable[float]]


async def chat(url: str, seed: int, args: argparse.Namespace) -> float:
    spec = LoadSpec(
        *(url, args.model, args.streams),
        concurrency=args.streams,
        input_len=INPUT,
        output_len=args.output,
        seed=seed,
    )
    timings, elapsed_s = await run_load(spec)
    failed = [each.error for each in timings if each.error is not None]
    assert not failed, failed
    return elapsed_s


async def agents(url: str, seed: int, args: argparse.Namespace) -> float:
    spec = AgentsSpec(
        num_agents=args.streams,
        context_len=CONTEXT,
        message_len=MESSAGE,
        output_len=args.output // 4,
        think_s=0.0,
        seed=seed,
    )
    _, elapsed_s = await run_agents(url, args.model, spec, lambda: None, named=True)
    return elapsed_s


LOADS: dict[str, Load] = {"chat": chat, "agents": agents}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--output", type=int, default=200)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--load", choices=LOADS, help="only this one")
    args = parser.parse_args()
    with ExitStack() as stack:
        urls = [
            stack.enter_context(Served({"tiers.host_gib": gib}, args.model)).url
            for gib in (0.0, "auto")
        ]
        for name in [args.load] if args.load else LOADS:
            ratios = asyncio.run(paired(LOADS[name], urls, args))
            cost = statistics.median(ratios) - 1
            said = "within" if cost <= TARGET else "beyond"
            print(
                f"{name}: {cost:+.1%} with copies, {said} {TARGET:.0%}; each pair:",
                *(f"{ratio - 1:+.1%}" for ratio in ratios),
            )


async def paired(load: Load, urls: list[str], args: argparse.Namespace) -> list[float]:
    """How much longer the second server takes, in each pair."""
    for url in urls:
        await load(url, -1, args)  # what only the first requests pay for
    ratios = []
    for pair in range(args.pairs):
        taken_s = [0.0, 0.0]
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            taken_s[which] = await load(urls[which], pair, args)
        ratios.append(taken_s[1] / taken_s[0])
    return ratios


if __name__ == "__main__":
    main()
