"""Streams while something happens to their workers: each must say what it says undisturbed.

The same greedy requests run twice on one server: first undisturbed, which gives the reference, then
while workers die or change roles.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from benchmarks.elastic.load import Figures, longest_silence
from benchmarks.serving.first_light import MODEL
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.lab.bench.load import LoadSpec, RequestTiming, make_prompts, percentile, run_load

STREAMS, INPUT, OUTPUT = 16, 100, 200
NUM_FLIPS = 50
BEGUN_S = 1.5  # so long after the start, streams have begun
APART_S = 3.0  # the death of a worker, and of the one that has taken its streams over
BACK_S = 60.0


async def kills(url: str, seed: int) -> Figures:
    """The first worker of each role dies by SIGKILL while streams run, and then one after the
    other."""
    found: Figures = {}
    async with httpx.AsyncClient(base_url=url, timeout=60.0, auth=OwnKey()) as http:
        first = [f"{role}-0" for role in ("decode", "prefill")]
        cases = {"decode": first[:1], "prefill": first[1:], "both": first}
        for number, (name, victims) in enumerate(cases.items()):
            if not set(victims) <= {each["worker"] for each in await _workers(http)}:
                continue

            async def kill(victims: Sequence[str] = victims) -> None:
                await asyncio.sleep(BEGUN_S)
                for count, worker in enumerate(victims):
                    await asyncio.sleep(APART_S * bool(count))
                    os.kill((await _worker(http, worker))["pid"], signal.SIGKILL)

            several = len(victims) > 1
            figures = await _disturbed(url, 10 * seed + number, kill, repeat=several)
            found |= {f"{name}_{key}": value for key, value in figures.items()}
            await asyncio.gather(*(_until_back(http, worker) for worker in victims))
    return found


async def _until_back(http: httpx.AsyncClient, worker: str) -> None:
    began = time.monotonic()
    while (await _worker(http, worker))["state"] != "up":
        if time.monotonic() > began + BACK_S:
            raise RuntimeError(f"{worker} is not back after {BACK_S:g} s")
        await asyncio.sleep(0.1)


async def flips(url: str, seed: int) -> Figures:
    """Two workers swap their roles again and again; at the end nothing may be left over."""
    times: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=60.0, auth=OwnKey()) as http:
        workers = [each["worker"] for each in await _workers(http)]

        async def flip() -> None:
            roles = {worker: worker.partition("-")[0] for worker in workers}
            swapped = {"prefill": "decode", "decode": "prefill"}
            for number in range(NUM_FLIPS):
                began = time.monotonic()
                for worker, role in roles.items():
                    now = swapped[role] if number % 2 == 0 else role
                    answer = await http.post(f"/workers/{worker}/role", json={"role": now})
                    answer.raise_for_status()
                    roles_now = {w["worker"]: w["role"] for w in await _workers(http)}
                    while roles_now[worker] != now:
                        await asyncio.sleep(0.01)
                        roles_now = {w["worker"]: w["role"] for w in await _workers(http)}
                times.append(time.monotonic() - began)
                await asyncio.sleep(0.4)

        found = await _disturbed(url, seed, flip, repeat=True)
        await asyncio.sleep(5.0)
        audit = (await http.get("/audit")).json()
        totals = (await http.get("/status")).json()["totals"]
    return found | {
        "flips": len(times),
        "flip_p50_s": percentile(times, 50) or 0.0,
        "flip_p99_s": percentile(times, 99) or 0.0,
        "migrations": totals["migrations"],
        "left_over": len(audit["left"]) + len(audit["wrong"]),
    }


async def _disturbed(
    url: str, seed: int, disturb: Callable[[], Awaitable[None]], *, repeat: bool = False
) -> Figures:
    """`repeat`: the streams again and again, until `disturb` is done."""
    spec = LoadSpec(
        url, MODEL, STREAMS, concurrency=STREAMS, input_len=INPUT, output_len=OUTPUT, seed=seed
    )
    prompts = make_prompts(spec)
    reference, elapsed_s = await run_load(spec)
    texts = sorted(timing.text for timing in reference)
    disturbing = asyncio.ensure_future(disturb())
    timings: list[RequestTiming] = []
    altered = failed = 0
    began = time.monotonic()
    while True:
        again, _ = await run_load(spec)
        timings += again
        good = [timing.text for timing in again if timing.error is None]
        failed += len(prompts) - len(good)
        altered += sum(text not in texts for text in good)
        if not repeat or disturbing.done():
            break
    took_s = time.monotonic() - began
    await disturbing
    return {
        "streams": len(timings),
        "failed": failed,
        "altered": altered,
        "silence_s": longest_silence([t for t in timings if t.error is None]),
        "undisturbed_silence_s": longest_silence(reference),
        "slower": took_s * len(reference) / len(timings) / elapsed_s,
    }


async def _workers(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await http.get("/status")).json()["workers"]
    return found


async def _worker(http: httpx.AsyncClient, name: str) -> dict[str, Any]:
    return next(each for each in await _workers(http) if each["worker"] == name)
