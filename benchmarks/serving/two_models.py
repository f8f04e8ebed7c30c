"""Two models behind one port: whether each answers for itself, and what one's overload costs the
other.

python -m benchmarks.serving.two_models [--workers 1] [--seconds 30] [--rounds 4] [--json OUT]

First 1,000 requests at once, mixed: each answer has to be the one that its model gives alone. Then
turns of three kinds, one after the other: requests to the first model alone; beside three times
the load that the second one can take; and beside matrix products on the cores of its workers,
without requests. What the third kind costs is the machine's, not the server's.

Unless `--no-pin`, workers of the second model, and the load on it, have the last core, and all
else the others: what is left to share are the routers' process, caches and memory. Time to the
first token is the client's; *before the worker* is what the server says of it: all phases up to the
first token but the worker's own. Without Gemma 3 270M the second model is the first one under
another name, whose answers prove nothing of who gave them, and that is said.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx
import torch

from benchmarks.report import json_option, make_console, ms, number_table, write_json
from benchmarks.serving.conversations import http_client
from benchmarks.serving.load import Caller, Load, Offer
from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.engine.model.errors import ModelError
from kvrelay.lab.bench.load import (
    Client,
    LoadSpec,
    make_arrivals,
    make_prompts,
    percentile,
    run_load,
)

FIRST, SECOND = "first", "second"
NUM_PROMPTS, MIXED_LEN, AT_ONCE = 25, 8, 16
INPUT_LEN, OUTPUT_LEN = 60, 16
OVERLOAD, SETTLE_S = 3.0, 8.0
KINDS = "alone", "beside an overload", "beside matrix products"
PROMPTS = [f"In the year {1700 + i} a keeper of a lighthouse saw" for i in range(NUM_PROMPTS)]


def settings(folder: str, checkpoint: str, workers: int) -> dict[str, Any]:
    each = {"prefill": workers, "decode": workers}
    return {
        "model.dtype": "float32",  # so that an answer does not depend on what else is in a step
        "engine.max_model_len": 512,
        "engine.num_blocks": 256,
        "engine.threads": 1,
        "sessions.state_dir": folder,
        "tiers.host_gib": 0,
        "models": [
            {"name": FIRST, "checkpoint": "smollm2-135m", **each},
            {"name": SECOND, "checkpoint": checkpoint, **each},
        ],
    }


async def mixed(url: str, num: int) -> tuple[int, int]:
    """Counts answers that are not what their model says alone, and prompts that both models
    answer alike."""
    async with http_client(url) as http:

        async def ask(model: str, prompt: str) -> str:
            body = {"model": model, "prompt": prompt, "max_tokens": MIXED_LEN, "temperature": 0}
            answer = await http.post("/v1/completions", json=body)
            return str(answer.raise_for_status().json()["choices"][0]["text"])

        alone = {(m, p): await ask(m, p) for m in (FIRST, SECOND) for p in PROMPTS}
        wrong, todo = 0, iter(range(num))

        async def client() -> None:
            nonlocal wrong
            for number in todo:
                asked = (FIRST, SECOND)[number % 2], PROMPTS[number // 2 % NUM_PROMPTS]
                wrong += await ask(*asked) != alone[asked]

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return wrong, sum(alone[FIRST, prompt] == alone[SECOND, prompt] for prompt in PROMPTS)


async def turn(url: str, rate: float, seconds: float, seed: int) -> list[dict[str, float]]:
    """Requests to the first model, at times that do not depend on the server."""
    num = max(1, round(rate * seconds))
    spec = LoadSpec(url, FIRST, num, rate, input_len=INPUT_LEN, output_len=OUTPUT_LEN, seed=seed)
    async with http_client(url) as http:
        client = Client(spec, http, lambda _: None)

        async def one(prompt: str, at: float) -> dict[str, float]:
            await asyncio.sleep(at)
            timing = await client.request(prompt)
            assert timing.error is None, timing.error
            path = f"/requests/{timing.request_id}/explanation"
            shown = await http.get(path, auth=OwnKey())
            phases = [p for p in shown.raise_for_status().json()["phases"] if p["to_first"]]
            before_s = sum(p["seconds"] for p in phases if p["name"] != "prefill")
            return {"ttft_s": timing.ttft_s, "before_s": before_s}

        calls = map(one, make_prompts(spec), make_arrivals(spec))
        return list(await asyncio.gather(*calls))


def capacity(url: str) -> float:
    """Requests/s of the second model that it serves with many at once."""
    spec = LoadSpec(
        url, SECOND, 160, None, 32, INPUT_LEN, OUTPUT_LEN, endpoint="completions", seed=9
    )  # a base model takes no chats
    timings, elapsed_s = asyncio.run(run_load(spec))
    assert not any(timing.error for timing in timings), Counter(each.error for each in timings)
    return len(timings) / elapsed_s


def overload(url: str, rate: float, seconds: float, core: int | None, report: Any) -> None:
    """In a process of its own: what became of its requests goes to `report`."""
    _pin([os.getpid()], core)
    os.nice(5)
    load = Load(url, INPUT_LEN, OUTPUT_LEN, seed=int(time.time()), model=SECOND)
    answers = asyncio.run(load.run([Offer(Caller("", "none"), rate, seconds)], 0.0, lambda _: None))
    report.put(Counter(answer.error or str(answer.status) for answer in answers))


def products(core: int | None) -> None:
    """In a process of its own, until it is ended: reads weights as a model's steps do."""
    _pin([os.getpid()], core)
    torch.set_num_threads(1)
    weights, row = torch.rand(8, 4096, 2048), torch.rand(8, 2048, 4)
    while True:
        weights @ row


def _pin(pids: list[int], *cores: int | None) -> None:
    """All threads of these processes."""
    if None not in cores:
        for pid in pids:
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), {core for core in cores if core is not None})


@contextmanager
def beside(kind: str, url: str, rate: float, seconds: float, core: int | None) -> Iterator[Counter]:
    """While it is open, what belongs to a turn of this kind runs. Yields answers by status, which
    are there at the end."""
    found, spawn = Counter[str](), multiprocessing.get_context("spawn")
    report: Any = spawn.Queue()
    args = (url, OVERLOAD * rate, seconds + SETTLE_S, core, report)
    others: dict[str, Any] = {KINDS[1]: (overload, args), KINDS[2]: (products, (core,))}
    target, given = others.get(kind, (time.sleep, (0.0,)))
    process = spawn.Process(target=target, args=given)
    process.start()
    try:
        time.sleep(SETTLE_S)  # it imports, its queue fills, and what was before has gone
        yield found
        found.update(report.get(timeout=300) if target is overload else {})
    finally:
        process.terminate()
        process.join()


@click.command()
@click.option("--workers", default=1, help="Of each role and model.")
@click.option("--seconds", default=30.0, help="Of a turn.")
@click.option("--rounds", default=4, help="Of the three kinds of turns.")
@click.option("--mixed", "num_mixed", default=1000, help="Requests to both at once.")
@click.option("--rate", default=2.0, help="Requests/s to the first model.")
@click.option("--pin/--no-pin", default=True, help="The second model has the last core alone.")
@json_option()
def main(
    workers: int,
    seconds: float,
    rounds: int,
    num_mixed: int,
    rate: float,
    pin: bool,
    json_path: Path | None,
) -> None:
    """Measure a server of one's own."""
    console, checkpoint = make_console(), "gemma3-270m"
    try:
        resolve_model(checkpoint, progress=lambda _: None)
    except ModelError:
        checkpoint = "smollm2-135m"
    cores = sorted(os.sched_getaffinity(0))
    core = cores[-1] if pin and len(cores) > 1 else None
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with (
        tempfile.TemporaryDirectory() as folder,
        Served(settings(folder, checkpoint, workers)) as server,
        console.status("mixed requests") as progress,
    ):
        url, status = (
            server.url,
            httpx.get(f"{server.url}/status", timeout=60, auth=OwnKey()).json(),
        )
        workers_of = {name: list[int]() for name in (FIRST, SECOND)}
        for each in status["workers"]:
            workers_of[each["model"]].append(each["pid"])
        others = [os.getpid(), server.process.pid, status["controller"]["pid"]]
        others += [each["pid"] for each in status["routers"]] + workers_of[FIRST]
        _pin(workers_of[SECOND], core)
        _pin(others, *(cores[:-1] if core is not None else [None]))
        wrong, alike = asyncio.run(mixed(url, num_mixed))
        most = capacity(url)
        answers: Counter[str] = Counter()
        for number in range(rounds):
            for kind in KINDS[number % 3 :] + KINDS[: number % 3]:
                progress.update(f"round {number + 1} of {rounds}: {kind}")
                with beside(kind, url, most, seconds, core) as its:
                    found[kind] += asyncio.run(turn(url, rate, seconds, 7 + number))
                answers.update(its)
    console.print(
        f"{FIRST}: smollm2-135m, {SECOND}: {checkpoint}, {workers} + {workers} workers each; "
        + (f"core {core} is the second one's" if core is not None else "cores are shared")
    )
    if checkpoint == "smollm2-135m":
        console.print("Gemma 3 270M is not installed: both are one model, so answers prove nothing")
    console.print(
        f"{num_mixed} mixed requests: {wrong} answers differ from what their model says alone; "
        f"{alike} of {NUM_PROMPTS} prompts are answered alike by both"
    )
    console.print(
        f"{SECOND} serves {most:.1f} requests/s; offered {OVERLOAD * most:.1f}: {dict(answers)}"
    )
    heads = [f"{what} {p}" for what in ("TTFT", "before the worker") for p in ("p50", "p90")]
    table = number_table("ms, requests to the first model", "number", *heads, "TTFT p90 moved")
    base = percentile([each["ttft_s"] for each in found[KINDS[0]]], 90) or 1.0
    for kind, samples in found.items():
        columns = [[each[what] for each in samples] for what in ("ttft_s", "before_s")]
        cells = [ms(column, p) for column in columns for p in (50, 90)]
        moved = (percentile(columns[0], 90) or 0.0) / base - 1
        table.add_row(kind, str(len(samples)), *cells, f"{moved:+.1%}")
    console.print(table)
    result = {"checkpoints": ["smollm2-135m", checkpoint], "workers": workers, "pinned": pin}
    counts = {"wrong": wrong, "alike": alike, "capacity_per_s": most, "answers": dict(answers)}
    write_json(json_path, result | counts | {"samples": found})


if __name__ == "__main__":
    main()
