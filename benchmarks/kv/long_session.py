"""What a worker's death costs the stream of a long session, and the others' streams.

    python -m benchmarks.kv.long_session [--tokens 100000] [--left 40000] [--streams 8] [--rounds 3]
        [--deaths 1] [--length 3000]

One `kvrelay serve` of a small random model with a long context, two decode workers and host memory
that outlives them. Sessions are computed until the workers have `--left` blocks each, one of them
with `--tokens` tokens. Then that one and others stream, and its worker is killed. Printed: how long
the session is silent, how much of it is computed again, and the time between tokens of the
streams that were on the other worker, for 3 s before the kill and for 3 s after it. With
`--deaths 2` the worker that has taken the session over dies 3 s after the first. Its answer must be
the one that an undisturbed run has given.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serving.conversations import http_client
from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.lab.bench.load import Client, LoadSpec, RequestTiming, percentile
from tests.support.random_model import make_model

BLOCK_SIZE, SECONDS = 16, 3.0
OTHER = 8000  # tokens of the other sessions
CONTEXT = 131_072
NAME = "long"  # the model's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--left", type=int, default=40_000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deaths", type=int, choices=(1, 2), default=1)
    parser.add_argument("--length", type=int, default=3000, help="Tokens of the answer.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", context=CONTEXT)
        settings: dict[str, object] = {
            "engine.num_blocks": args.left * 2,
            "engine.max_model_len": CONTEXT,
            "engine.threads": 1,  # a core each, so that streams are at both
            "tiers.host_gib": 1.0,
            "api.max_body_bytes": 32 * 2**20,
        }
        with Served(settings, f"{NAME}={model}", "--prefill", "0", "--decode", "2") as served:
            for number in range(args.rounds):
                asyncio.run(one_round(served.url, args, number))


def prompt_of(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(num_tokens)]


async def one_round(url: str, args: argparse.Namespace, number: int) -> None:
    rng, spec = random.Random(number), LoadSpec(url, NAME, 1, 1, timeout_s=600.0)
    async with http_client(url) as http, httpx.AsyncClient(base_url=url, auth=OwnKey()) as own:
        client = Client(spec, http, lambda _: None)

        async def ask(prompt: list[int], max_tokens: int) -> RequestTiming:
            body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
            body |= {"temperature": 0, "ignore_eos": True}
            timing = await client.send("/v1/completions", body)
            assert timing.error is None, timing.error
            return timing

        session = prompt_of(rng, args.tokens)
        begun = await ask(session, 1)
        victim = (await explained(own, begun.request_id))["attempts"][-1]["decode"]
        while min(await held(own)) < args.left:
            await asyncio.gather(*(ask(prompt_of(rng, OTHER), 1) for _ in range(8)))
        reference = await ask(session, args.length)
        long = asyncio.create_task(ask(session, args.length))
        others = [
            asyncio.create_task(ask(prompt_of(rng, 100), 3000)) for _ in range(2 * args.streams)
        ]
        await asyncio.sleep(2.0 + SECONDS)
        kill_at = client.now()
        os.kill((await worker(own, victim))["pid"], signal.SIGKILL)
        if args.deaths == 2:
            await asyncio.sleep(SECONDS)
            assert not long.done(), "the session has ended before the second death"
            second = next(name for name in await names(own) if name != victim)
            os.kill((await worker(own, second))["pid"], signal.SIGKILL)
        timings = await asyncio.gather(*others)
        timing = await long
        assert timing.text == reference.text, "the answer is another one than undisturbed"
        stayed = [each for each in timings if await attempts(own, each) == 1]
        before = gaps(stayed, kill_at - SECONDS, kill_at)
        after = gaps(stayed, kill_at, kill_at + SECONDS)
        ratio = (percentile(after, 99) or 0.0) / (percentile(before, 99) or 1.0)
        print(
            f"session of {args.tokens:,} tokens: silent for {max(timing.gaps_s):.3f} s, the same"
            f" answer,"
            f" {await recomputed(own, timing):,} computed again; {len(stayed)} streams of the other"
            f" worker: ITL p99 {shown(before, 99)} before, {shown(after, 99)} after ({ratio:.2f}),"
            f" longest {shown(before, 100)}, {shown(after, 100)}",
            flush=True,
        )
        deadline = time.monotonic() + 120.0
        for name in await names(own):
            while (await worker(own, name))["state"] != "up":
                assert time.monotonic() < deadline, f"{name} is not back"
                await asyncio.sleep(0.2)


def gaps(timings: list[RequestTiming], since: float, until: float) -> list[float]:
    """Those that ended in that time."""
    return [
        gap
        for timing in timings
        for at, gap in zip(timing.chunk_at[1:], timing.gaps_s, strict=True)
        if since <= at < until
    ]


def shown(values: list[float], percent: int) -> str:
    value = max(values, default=0.0) if percent == 100 else percentile(values, percent) or 0.0
    return f"{1e3 * value:.1f} ms"


async def held(own: httpx.AsyncClient) -> list[int]:
    """Blocks that each worker has in host memory."""
    workers = (await own.get("/status")).raise_for_status().json()["workers"]
    found = [each["num_host_blocks"] for each in workers if each["state"] == "up"]
    return [*found, 0, 0][:2]


async def explained(own: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    answer = await own.get(f"/requests/{request_id}/explanation")
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


async def attempts(own: httpx.AsyncClient, timing: RequestTiming) -> int:
    return len((await explained(own, timing.request_id))["attempts"])


async def recomputed(own: httpx.AsyncClient, timing: RequestTiming) -> int:
    """Tokens that were computed a second time."""
    return int(sum((await explained(own, timing.request_id))["recomputed_tokens"].values()))


async def names(http: httpx.AsyncClient) -> list[str]:
    return [each["worker"] for each in (await http.get("/status")).json()["workers"]]


async def worker(http: httpx.AsyncClient, name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = (await http.get("/status")).json()["workers"]
    return next(each for each in found if each["worker"] == name)


if __name__ == "__main__":
    main()
