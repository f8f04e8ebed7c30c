"""What is lost when a decode worker is killed: how long its streams are silent, and what the next
turns of its conversations compute again.

    python -m benchmarks.kv.outlive [--rounds 5] [--streams 16] [--output 400] [--second 3]
                                    [--ranks 2] [--explain]
                                    [--model gemma3-270m --endpoint completions]

Each round has texts that no worker has seen. They are streamed, the worker is killed in mid-stream,
and when its successor is up the same conversations go on. With `--second` the other worker, which
has taken the streams over, is killed so many seconds after it. Last, the same requests run
undisturbed: the answers must be the same. `--explain` says where the longest silence went.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import httpx

from benchmarks.elastic.load import longest_silence
from benchmarks.serving.first_light import MODEL
from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.lab.bench.load import LoadSpec, RequestTiming, make_prompts, run_load

BACK_S = 60.0
INPUT = 100  # tokens of each prompt, about
PARKED = 1000  # those of the first turn of each session that is parked
NEXT_TURN = "Go on, in other words."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--output", type=int, default=400)
    parser.add_argument("--begun", type=float, default=6.0, help="seconds before the kill")
    parser.add_argument("--second", type=float, default=0.0, help="seconds after it; 0: none")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="of each worker")
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    parser.add_argument("--explain", action="store_true")
    args = parser.parse_args()
    names = ("--prefill", str(args.prefill), "--decode", "1")
    settings = {"engine.tensor_parallel_size": args.ranks}
    with Served(settings, args.model, *names) as served:
        rounds = [asyncio.run(one_round(served.url, seed, args)) for seed in range(args.rounds)]
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        print(f"{name:16}{statistics.median(values):9.3f}   ", *(f"{v:.3f}" for v in values))


async def one_round(url: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    number = seed + int(time.time())  # texts of no earlier run either
    spec = LoadSpec(
        *(url, args.model, args.streams),
        concurrency=args.streams,
        input_len=INPUT,
        output_len=args.output,
        endpoint=args.endpoint,
        seed=number,
    )
    async with httpx.AsyncClient(base_url=url, timeout=120.0, auth=OwnKey()) as http:
        parked = await park(http, replace(spec, input_len=PARKED, seed=number + 1_000_000))
        running = asyncio.ensure_future(run_load(spec))
        await asyncio.sleep(args.begun)
        before = await worker(http)
        os.kill(before["pid"], signal.SIGKILL)
        killed_at = time.monotonic()
        if args.second:
            other = await worker(http, "prefill-0")
            await asyncio.sleep(args.second)
            os.kill(other["pid"], signal.SIGKILL)
        timings, _ = await running
        failed = Counter(each.error for each in timings if each.error is not None)
        assert failed.total() < len(timings), f"all streams have failed: {failed}"
        deadline = time.monotonic() + BACK_S
        while (now := await worker(http))["state"] != "up" or now["pid"] == before["pid"]:
            assert time.monotonic() < deadline, f"the decode worker is not back: {now}"
            await asyncio.sleep(0.05)
        back_s = time.monotonic() - killed_at
        parked_cached = await share_cached(http, args, parked)
        good = [each for each in zip(make_prompts(spec), timings, strict=True) if not each[1].error]
        turns = [(prompt, timing.text, "") for prompt, timing in good]
        cached = await share_cached(http, args, turns)
        if args.explain:
            print(await longest_explained(http, timings))
            print(f"  {before['num_host_blocks']} blocks were in host memory before the kill")
    reference, _ = await run_load(spec)
    texts = sorted(each.text for each in reference)
    good = [each for each in timings if each.error is None]
    return {
        "failed": failed.total(),
        "altered": sum(each.text not in texts for each in good),
        "silence_s": longest_silence(good),
        "undisturbed_s": longest_silence(reference),
        "next_cached": cached,
        "parked_cached": parked_cached,
        "back_s": back_s,
    }


async def longest_explained(http: httpx.AsyncClient, timings: list[RequestTiming]) -> str:
    """When the longest silence was, and the phases of its request."""
    timing = max(timings, key=lambda each: longest_silence([each]))
    gap_s = longest_silence([timing])
    begun_s = next(
        (at for at, gap in zip(timing.chunk_at, timing.gaps_s, strict=False) if gap == gap_s), 0.0
    )
    answer = await http.get(f"/requests/{timing.request_id}/explanation")
    found = answer.raise_for_status().json()
    lines = [f"{timing.request_id}: silent for {gap_s:.3f} s from {begun_s:.3f} s on"]
    lines += [
        f"  attempt {each['number']} on {each['decode']}: {each['cause'] or 'went well'}"
        for each in found["attempts"]
    ]
    lines += [
        f"  {each['name']:14} attempt {each['attempt']} {each['worker']:12} {each['seconds']:7.3f}"
        for each in found["phases"]
    ]
    name = found["attempts"][-1]["decode"]
    counters = (await worker(http, name)).get("counters") or {}
    shown = {n: v for n, v in counters.items() if n.startswith(("blocks_from_", "left_kv_"))}
    return "\n".join([*lines, f"  {name} since its start: {shown}"])


async def park(http: httpx.AsyncClient, spec: LoadSpec) -> list[tuple[str, str, str]]:
    """Begins a session with each prompt and parks it. Returns prompts, answers and keys."""
    found = []
    for number, prompt in enumerate(make_prompts(spec)):
        key = f"parked-{spec.seed}-{number}"
        answer = await turn(http, spec, prompt, "", key, 32)
        choice = answer["choices"][0]
        text = choice["text"] if spec.endpoint == "completions" else choice["message"]["content"]
        parked = await http.post(f"/v1/sessions/{key}/park")
        assert parked.is_success, parked.text
        found.append((prompt, text, key))
    return found


async def turn(
    http: httpx.AsyncClient, spec: Any, prompt: str, text: str, key: str, most: int
) -> dict[str, Any]:
    """The first turn of a conversation, or with `text`, its answer, the second."""
    body: dict[str, Any] = {"model": spec.model, "max_tokens": most, "temperature": 0}
    body |= {"prompt_cache_key": key} if key else {}
    path = "/v1/chat/completions"
    if spec.endpoint == "completions":
        path, body["prompt"] = "/v1/completions", f"{prompt}{text} {NEXT_TURN}" if text else prompt
    else:
        turns = [("user", prompt)]
        turns += [("assistant", text), ("user", NEXT_TURN)] if text else []
        body["messages"] = [{"role": role, "content": content} for role, content in turns]
    answer = await http.post(path, json=body)
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def share_cached(
    http: httpx.AsyncClient, args: argparse.Namespace, turns: list[tuple[str, str, str]]
) -> float:
    """The share of the conversations' tokens that their next turns find in a cache."""
    asked = (turn(http, args, prompt, text, key, 4) for prompt, text, key in turns)
    usages = [answer["usage"] for answer in await asyncio.gather(*asked)]
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usages)
    return cached / sum(each["prompt_tokens"] for each in usages)


async def worker(http: httpx.AsyncClient, name: str = "decode-0") -> dict[str, Any]:
    found: list[dict[str, Any]] = (await http.get("/status")).json()["workers"]
    return next(each for each in found if each["worker"] == name)


if __name__ == "__main__":
    main()
