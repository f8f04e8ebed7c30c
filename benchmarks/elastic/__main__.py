"""Two pools beside one pool of the same hardware, and beside a peer, under untuned load.

`python -m benchmarks.elastic [LOAD] [--vllm-python PYTHON] [--engine vllm] [--json FILE]`

Each server is started alone with its default settings (one pool gets the KV memory of both), takes
the load of a round and is stopped, so that idle servers take no cores. Rounds go there and back.
With `--engine vllm` the workers of ours compute with vLLM too, in as much KV memory together; the
copy of it in host memory, and the host tier, come on top.

* agents: conversations at once, each with a context of its own and turns with time to think
* chat: short prompts at a rate, open loop
* mixed: chats once a second beside a 2,000-token prompt every 4 s
* swing: only prompts, then only decodes, in turns of 20 s
* streams: eight streams of 200 tokens at any time
* kill: the decode worker, the prefill worker, and one 3 s after the other, die under 16 streams
* flip: roles change back and forth under load
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

import click
import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.elastic.disturbed import flips, kills
from benchmarks.elastic.load import TURNS, Figures, agents, chat, mixed, streams, swing
from benchmarks.report import json_option, make_console, write_json
from benchmarks.serving.first_light import MODEL, time_one
from benchmarks.serving.served import Served
from benchmarks.serving.vllm_served import (
    BLOCK_SIZE,
    START_TIMEOUT_S,
    VllmServed,
    VllmSetup,
    check_python,
)
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.resolve import resolve_model

KV_GIB = 2.0  # each server's, however many workers it has
SHARED_MEMORY, SETTLE_S = Path("/dev/shm"), 60.0
LOADS = ("agents", "chat", "mixed", "swing", "streams", "kill", "flip", "all")
ONE, TWO, THREE, FOUR, PEER = "one pool", "1 + 1", "1 + 2", "2 + 2", "vLLM"


def ours(
    prefill: int, decode: int, more: Mapping[str, Any], kv_gib: float = KV_GIB
) -> Callable[[], AbstractContextManager[Any]]:
    """Default settings; the memory for KV is divided among the workers."""
    settings = {"engine.kv_cache_gib": kv_gib / (prefill + decode), **more}
    return lambda: Served(settings, "--prefill", str(prefill), "--decode", str(decode))


def by_vllm(python: Path, *, eager: bool) -> dict[str, Any]:
    """Settings with which workers compute with vLLM, as `peer` does."""
    return {
        "engine.arguments": {"enforce_eager": eager},
        "engine.runs": "vllm",
        "engine.python": str(python),
        "engine.block_size": BLOCK_SIZE,
        "model.dtype": "bfloat16",
        "cluster.start_timeout_s": START_TIMEOUT_S,
    }


def peer(
    python: Path, *, eager: bool, kv_gib: float = KV_GIB
) -> Callable[[], AbstractContextManager[Any]]:
    """Starts it with as much KV memory, in bfloat16, on both cores."""
    path = resolve_model(MODEL, progress=lambda _: None)
    per_token = read_config(path).kv_spec(16, "bfloat16").bytes_per_token
    kv_tokens = int(kv_gib * 2**30) // per_token
    setup = VllmSetup(python, path, MODEL, kv_tokens, 8192, "bfloat16", eager=eager)
    return lambda: VllmServed(setup)


def compared(
    console: Console,
    servers: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    rounds: int,
    measure: Callable[[str, int], Figures],
) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {name: [] for name in servers}
    for i in range(rounds):
        for name in list(servers) if i % 2 == 0 else list(servers)[::-1]:
            before = {*SHARED_MEMORY.rglob("*")}
            with console.status(f"round {i + 1}, {name}"), servers[name]() as server:
                for words in ("Hello", "Hello " * 500):  # what only the first prompts pay for
                    time_one(server.url, words)
                found[name].append(measure(server.url, i))
                if isinstance(server, Served):
                    console.print(f"{name}: {audit(server.url)}")
            if left := {*SHARED_MEMORY.rglob("*")} - before:
                console.print(f"{name}: left in shared memory: {', '.join(map(str, left))}")
    return found


def audit(url: str) -> str:
    """What a server has left once it is idle, and its tiers have written what they write."""
    began = time.monotonic()
    while True:
        report = httpx.get(f"{url}/audit", timeout=60, auth=OwnKey()).json()
        took_s = time.monotonic() - began
        if report["clean"] and not report["live"]:
            return f"the audit is clean {took_s:.0f} s after the load"
        if took_s > SETTLE_S:
            return f"left {took_s:.0f} s after the load: {report['left'] + report['wrong']}"
        time.sleep(1.0)


def table(title: str, found: Mapping[str, Sequence[Figures]]) -> Table:
    made = Table("", *found, title=title, caption="medians of the rounds")
    for key in next(iter(found.values()))[0]:
        made.add_row(key, *(f"{median(r[key] for r in runs):.3f}" for runs in found.values()))
    return made


@click.command()
@click.argument("what", type=click.Choice(LOADS), default="all")
@click.option(
    "--agents", "num_agents", type=int, multiple=True, default=(16, 40), show_default=True
)
@click.option("--seconds", type=float, default=40.0, show_default=True, help="Of chat and mixed.")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True)
@click.option("--vllm-python", type=click.Path(path_type=Path), help="Of the peer; see peer.py.")
@click.option(
    "--engine", type=click.Choice(["kvrelay", "vllm"]), default="kvrelay", show_default=True,
    help="Of our workers.",
)  # fmt: skip
@click.option("--eager", is_flag=True, help="vLLM compiles nothing, with which it starts sooner.")
@click.option("--set", "more", multiple=True, help="A setting of ours: NAME=VALUE, in JSON.")
@click.option("--servers", default=f"{ONE},{TWO},{FOUR}", show_default=True)
@json_option()
def main(
    what: str, num_agents: Sequence[int], seconds: float, rounds: int, vllm_python: Path | None,
    engine: str, eager: bool, more: Sequence[str], servers: str, json_path: Path | None,
) -> None:  # fmt: skip
    """Ours in one pool, 1 + 1 and 2 + 2, and a peer, in turns."""
    python = check_python(vllm_python) if vllm_python or engine == "vllm" else None
    settings = by_vllm(python, eager=eager) if python is not None and engine == "vllm" else {}
    settings |= {
        name: json.loads(value) for name, _, value in (each.partition("=") for each in more)
    }
    known = {
        name: ours(*roles, settings)
        for name, roles in {ONE: (0, 1), TWO: (1, 1), THREE: (1, 2), FOUR: (2, 2)}.items()
    }
    chosen = {name: known[name] for name in servers.split(",")}
    if python is not None:
        chosen[PEER] = peer(python, eager=eager)
    console = make_console()
    results: dict[str, Any] = {}

    def run(title: str, measure: Callable[[str, int], Figures]) -> None:
        results[title] = compared(console, chosen, rounds, measure)
        console.print(table(title, results[title]))

    def run_agents(url: str, seed: int, count: int) -> Figures:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(f"{count} agents", total=count * TURNS)
            return asyncio.run(
                agents(url, seed, count, lambda: progress.advance(task), console.print)
            )

    if what in ("agents", "all"):
        for count in num_agents:
            run(f"{count} agents", lambda url, i, n=count: run_agents(url, i, n))
    if what in ("chat", "all"):
        for rate in (1.0, 3.0):
            name = f"chat, {rate:g} a second"
            run(name, lambda url, i, rate=rate: asyncio.run(chat(url, i, rate, seconds)))
    if what in ("mixed", "all"):
        run("chat beside long prompts", lambda url, i: asyncio.run(mixed(url, i, seconds)))
    if what in ("swing", "all"):
        run("swing", lambda url, i: asyncio.run(swing(url, i, 0.7, 12, 4)))
    if what in ("streams", "all"):
        run("8 streams", lambda url, i: asyncio.run(streams(url, i, 8)))
    if what in ("kill", "all"):
        run("kill -9", lambda url, i: asyncio.run(kills(url, i)))
    if what in ("flip", "all"):
        run("roles change", lambda url, i: asyncio.run(flips(url, i)))
    about = {"kv_gib": KV_GIB, "rounds": rounds, "engine": engine, "eager": eager, "set": more}
    write_json(json_path, about | {"results": results})


if __name__ == "__main__":
    main()
