"""Untuned loads, and what their clients saw.

* agents: conversations at once, each with a context of its own and turns with time to think
* chat: short prompts at a rate, open loop
* mixed: chats once a second beside a 2,000-token prompt every 4 s
* swing: only prompts, then only decodes, in turns
* streams: so many streams at any time, from short prompts
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from benchmarks.serving.conversations import Conversation, LoadFailed, http_client
from benchmarks.serving.first_light import MODEL, mixed_load
from kvrelay.lab.bench.load import (
    Client,
    LoadSpec,
    RequestTiming,
    make_prompts,
    percentile,
    run_load,
)

Figures = dict[str, float]
CONTEXT, MESSAGE, OUTPUT, TURNS, THINK_S = 3000, 150, 48, 5, 8.0  # tokens; turns; seconds
TTFT_SLO_S, ITL_SLO_S, PHASE_S = 2.0, 0.1, 20.0


async def agents(
    url: str, seed: int, num_agents: int, on_turn: Callable[[], None],
    on_failed: Callable[[str], None],
) -> Figures:  # fmt: skip
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
            except LoadFailed as error:
                if "empty answer" not in str(error):  # else all of its tokens had no text
                    num_failed += 1
                    on_failed(f"agent {i}, turn {turn}: {error}")
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
        **ttft("first", first, (50, 90)),
        **ttft("later", later, (50, 90)),
        "refused": num_failed,
        "silence_s": longest_silence([*first, *later]),
        "cached_of_infinite": sum(t.num_cached_tokens for t in later) / max(1, known),
        "elapsed_s": elapsed_s,
    }


async def chat(url: str, seed: int, rate: float, seconds: float) -> Figures:
    spec = LoadSpec(
        url, MODEL, int(rate * seconds), rate=rate, input_len=128, output_len=64, seed=seed
    )
    timings, _ = await run_load(spec)
    good = [timing for timing in timings if timing.error is None]
    gaps = [gap for timing in good for gap in timing.gaps_s]
    return {
        **ttft("chat", good, (50, 90, 99)),
        "itl_p99_s": percentile(gaps, 99) or 0.0,
        "refused": len(timings) - len(good),
    }


async def mixed(url: str, seed: int, seconds: float) -> Figures:
    gaps, ttfts, long_ttfts = await mixed_load(url, seconds, seed=seed)
    found = {f"chat_ttft_p{p}_s": percentile(ttfts, p) or 0.0 for p in (50, 90)}
    long_ttft = percentile(long_ttfts, 50) or 0.0
    return found | {"itl_p99_s": percentile(gaps, 99) or 0.0, "long_ttft_p50_s": long_ttft}


def ttft(name: str, timings: Sequence[RequestTiming], percents: Sequence[int]) -> Figures:
    values = [timing.ttft_s for timing in timings]
    return {f"{name}_ttft_p{p}_s": percentile(values, p) or 0.0 for p in percents}


def longest_silence(timings: Sequence[RequestTiming]) -> float:
    """Returns the longest pause within a stream."""
    return max((gap for timing in timings for gap in timing.gaps_s), default=0.0)


async def swing(url: str, seed: int, prompts_per_s: float, decodes: int, phases: int) -> Figures:
    """Phases of prompts only (800 tokens in, 2 out, open loop) and of decodes only (`decodes` at
    once, 16 in, 200 out). Goodput: requests a second whose first token and gaps are in time."""
    found: dict[str, list[float]] = {"prompts": [], "decodes": []}
    for phase in range(phases):
        number = seed * 100 + phase
        if phase % 2 == 0:
            count = int(prompts_per_s * PHASE_S)
            spec = LoadSpec(
                url, MODEL, count, rate=prompts_per_s, input_len=800, output_len=2, seed=number
            )
            name = "prompts"
        else:
            spec = LoadSpec(
                url, MODEL, decodes * 3, concurrency=decodes, input_len=16, output_len=200,
                seed=number,
            )  # fmt: skip
            name = "decodes"
        timings, elapsed_s = await run_load(spec)
        good = [timing for timing in timings if is_in_time(timing)]
        found[name].append(len(good) / elapsed_s)
    return {f"{name}_goodput_per_s": sum(values) / len(values) for name, values in found.items()}


async def streams(url: str, seed: int, num_streams: int, output_len: int = 200) -> Figures:
    """Three after each other in each stream: what decodes yield."""
    num = 3 * num_streams
    spec = LoadSpec(
        url, MODEL, num, concurrency=num_streams, input_len=64, output_len=output_len, seed=seed
    )
    timings, elapsed_s = await run_load(spec)
    good = [timing for timing in timings if timing.error is None]
    gaps = [gap for timing in good for gap in timing.gaps_s]
    return {
        "tokens_per_s": sum(timing.num_output_tokens for timing in good) / elapsed_s,
        **{f"itl_p{p}_s": percentile(gaps, p) or 0.0 for p in (50, 99)},
        "refused": len(timings) - len(good),
    }


def is_in_time(timing: RequestTiming) -> bool:
    if timing.error is not None or timing.ttft_s > TTFT_SLO_S:
        return False
    return (percentile(timing.gaps_s, 99) or 0.0) <= ITL_SLO_S
