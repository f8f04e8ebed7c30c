"""Real workers under the autoscaler: `python -m benchmarks.scaling [--scalings 100]`.

One server with small workers (few streams each, so that even two cores can hold several), and:

* waves: a sine of load until the workers have been started and drained often enough
* step: four times the load, at once
* zero: silence until no worker is left, then one request

Answers are compared with those of a worker that was alone. At the end every decision is made again
from the log, and by the simulator from the requests; nothing may be left over in the workers.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.report import json_option, make_console, write_json
from benchmarks.scaling.load import Outcome, Talk, silence, sine, step
from benchmarks.scaling.plot import draw
from benchmarks.scaling.simulated import (
    Sent,
    Wanted,
    agreement,
    decisions_of,
    simulated_wanted,
    wanted_of,
)
from benchmarks.serving.first_light import MODEL
from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.cluster.scaling.decisions import Line, read_log
from kvrelay.cluster.scaling.planner import replay_log
from kvrelay.lab.bench.load import percentile

TTFT_TARGET_S = 2.0
TICK_S = 1.0
BLOCK_SIZE = 16
LEAST, MOST, PERIOD_S = -0.8, 1.0, 60.0  # requests a second, none below 0; seconds
SETTINGS: dict[str, object] = {
    "engine.kv_cache_gib": 0.1,
    "engine.max_model_len": 1024,
    "engine.block_size": BLOCK_SIZE,
    "engine.max_num_seqs": 2,
    "engine.threads": 1,
    "tiers.host_gib": 0,
    "scaling.enabled": True,
    "scaling.min_workers": 0,
    "scaling.max_workers": 4,
    "scaling.ttft_target_ms": 1e3 * TTFT_TARGET_S,
    "scaling.itl_target_ms": 200.0,
    "scaling.start_s": 10.0,
    "scaling.tick_s": TICK_S,
    "scaling.warmup_s": 2.0,
    "scaling.memory_s": 10.0,
    "scaling.hold_s": 3.0,
    "scaling.idle_s": 6.0,
}
ZERO_S = 120.0


class Watch:
    """Counts what the autoscaler does. Owned by a run."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.actions: dict[str, int] = {}
        self.history: list[tuple[float, int]] = []  # (seconds since 1970, workers up)

    @property
    def scalings(self) -> int:
        """Workers that were started or drained."""
        return self.actions.get("start", 0) + self.actions.get("drain", 0)

    async def look(self) -> int:
        """Counts workers that are up."""
        status: dict[str, Any] = (await self._http.get("/status")).json()
        up = sum(each["state"] == "up" for each in status["workers"])
        if status.get("scaling"):
            self.actions = status["scaling"]["actions"]
            self.history.append((time.time(), up))
        return up

    async def follow(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(1.0)


def shown(outcome: Outcome) -> dict[str, Any]:
    return {
        "requests": len(outcome.timings),
        "failed": len(outcome.failed),
        "altered": outcome.altered,
        "ttft_p50_s": percentile(outcome.ttfts_s, 50) or 0.0,
        "ttft_p99_s": percentile(outcome.ttfts_s, 99) or 0.0,
        "errors": sorted(set(outcome.failed)),
    }


async def measure(
    url: str, scalings: int, most_s: float, console: Console
) -> tuple[dict[str, Any], list[Sent]]:
    found: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=url, timeout=300.0, auth=OwnKey()) as http:
        talk, watch = Talk(url, MODEL, http, seed=1), Watch(http)
        await talk.learn()
        watching = asyncio.create_task(watch.follow())
        try:
            waves = await talk.follow(
                sine(LEAST, MOST, PERIOD_S), most_s, lambda: watch.scalings >= scalings
            )
            found["waves"] = shown(waves) | {"scalings": watch.scalings}
            console.print(f"waves: {found['waves']}")
            found["zero"] = await zero(talk, watch, http)
            console.print(f"zero: {found['zero']}")
            burst = await talk.follow(step(MOST / 4, MOST, 20.0), 60.0)
            found["step"] = shown(burst)
            console.print(f"step: {found['step']}")
            await talk.follow(silence, 5.0)
            found["left_over"] = await left_over(http)
            found["actions"], found["history"] = watch.actions, watch.history
        finally:
            watching.cancel()
    return found, talk.sent


async def zero(talk: Talk, watch: Watch, http: httpx.AsyncClient) -> dict[str, Any]:
    """Until no worker is left; then the time to the first token of a request."""
    began = time.monotonic()
    while await watch.look():
        if time.monotonic() - began > ZERO_S:
            raise RuntimeError(f"workers are left after {ZERO_S:g} s without a request")
        await asyncio.sleep(0.5)
    ready = (await http.get("/health/ready")).status_code
    to_zero_s = time.monotonic() - began
    woken = await talk.single()
    return {
        "to_zero_s": to_zero_s,
        "ready_while_asleep": ready == 200,
        "first_token_s": woken.ttft_s if woken.error is None else None,
        "error": woken.error,
    }


async def left_over(http: httpx.AsyncClient) -> list[str]:
    audit = (await http.get("/audit", timeout=60.0)).json()
    return [*audit["left"], *audit["wrong"]]


def log_of(folder: Path) -> list[Line]:
    (log_file,) = (folder / "scaling").glob("*.jsonl")
    with log_file.open("rb") as lines:
        return list(read_log(lines))


def replayed(log: Sequence[Line]) -> dict[str, int]:
    """Decisions of the log, and how many of them are the same when they are made again."""
    pairs = replay_log(log)
    return {"decisions": len(pairs), "same": sum(made == again for made, again in pairs)}


def compared(log: Sequence[Line], sent: Sequence[Sent]) -> tuple[dict[str, float], Wanted, Wanted]:
    """The log's decisions beside those of the simulator about the same requests."""
    real, simulated = wanted_of(decisions_of(log)), simulated_wanted(log, sent, BLOCK_SIZE)
    return agreement(real, simulated, TICK_S), real, simulated


@click.command()
@click.option("--scalings", type=click.IntRange(1), default=100, show_default=True)
@click.option("--most-s", type=float, default=1500.0, show_default=True, help="Of the waves.")
@json_option()
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Draw the workers.")
def main(scalings: int, most_s: float, json_path: Path | None, plot_path: Path | None) -> None:
    """Waves, silence and a step, with workers that come and go."""
    console = make_console()
    with tempfile.TemporaryDirectory() as folder:
        settings = SETTINGS | {"sessions.state_dir": folder}
        with Served(settings, "--prefill", "1", "--decode", "1") as served:
            results, sent = asyncio.run(measure(served.url, scalings, most_s, console))
        log = log_of(Path(folder))
    results["log"] = replayed(log)
    results["simulator"], real, simulated = compared(log, sent)
    begin_s = next(line.snapshot.wall_s for line in log if line.snapshot is not None)
    up = [(round(at_s - begin_s, 1), number) for at_s, number in results.pop("history")]
    results |= {"up": up, "wanted": real.by_tick, "wanted_in_simulator": simulated.by_tick}
    table = Table("", *("waves", "step"), title="workers that come and go")
    for key in ("requests", "failed", "altered", "ttft_p50_s", "ttft_p99_s"):
        table.add_row(key, *(f"{results[phase][key]:.4g}" for phase in ("waves", "step")))
    console.print(table)
    for key in ("zero", "log", "simulator", "actions", "left_over"):
        console.print(f"{key}: {results[key]}")
    if plot_path is not None:
        draw(up, real.by_tick, simulated.by_tick, plot_path)
    if json_path is not None:
        write_json(json_path, results)


if __name__ == "__main__":
    main()
