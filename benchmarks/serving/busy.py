"""What a fresh server does with long prompts on a machine whose cores others want.

python -m benchmarks.serving.busy [--beside 16] [--prompts 16] [--tokens 3000] [--at-once 16]
                                  [--warm 12] [--json OUT]

One `kvrelay serve`, a prefill and a decode worker, and beside it processes that only compute. First
comes one short prompt, whose speed says nothing of the long ones. Nothing may be refused or fail,
and each prompt is computed once: `attempts` counts what was sent to workers, more than one for a
prompt if a worker was given up.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.report import json_option, write_json
from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.lab.bench.load import percentile

SPIN = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
TIMEOUT_S = 600.0  # that the server's requests have


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes compute until the end, each in a session of its own: Linux shares cores
    among sessions first."""
    command = [sys.executable, "-c", SPIN]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def ask(url: str, prompts: list[list[int]], at_once: int, done: Counter[str]) -> list[float]:
    """Seconds that each answered prompt took; `done` counts answers by what they were."""
    gate, seconds = asyncio.Semaphore(at_once), []
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S + 60) as client:

        async def one(prompt: list[int]) -> None:
            async with gate:
                began = time.monotonic()
                body = {"prompt": prompt, "max_tokens": 16, "temperature": 0}
                answer = await client.post("/v1/completions", json=body)
                if answer.status_code == 200:
                    seconds.append(time.monotonic() - began)
                    done["answered"] += 1
                else:
                    done[f"{answer.status_code}: {answer.json()['error']['message'][:160]}"] += 1

        await asyncio.gather(*map(one, prompts))
    return seconds


def drawn(count: int, tokens: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000, 40_000) for _ in range(tokens)] for _ in range(count)]


@click.command(help=__doc__)
@click.option("--beside", default=16, show_default=True, help="Processes that only compute.")
@click.option("--prompts", default=16, show_default=True)
@click.option("--tokens", default=3000, show_default=True, help="Of a prompt.")
@click.option("--at-once", default=16, show_default=True)
@click.option("--warm", default=12, show_default=True, help="Tokens of the first prompt.")
@json_option()
def main(
    beside: int, prompts: int, tokens: int, at_once: int, warm: int, json_path: Path | None
) -> None:
    settings = {"cluster.prefill": 1, "cluster.decode": 1}
    found: dict[str, Any] = {"beside": beside, "prompts": prompts, "tokens": tokens}
    with Served(settings) as server, busy(beside):
        done: Counter[str] = Counter()
        asyncio.run(ask(server.url, drawn(1, warm, 1), 1, Counter()))
        began = time.monotonic()
        seconds = asyncio.run(ask(server.url, drawn(prompts, tokens, 2), at_once, done))
        status = httpx.get(f"{server.url}/status", timeout=60, auth=OwnKey()).json()
        totals = status["totals"]
        found |= {
            "seconds": time.monotonic() - began,
            "answers": dict(done),
            "p50_s": percentile(seconds, 50),
            "most_s": max(seconds, default=None),
            "attempts": totals["attempts"] - 1,
            "retries": totals["retries"],
        }
    table = Table("what", "found")
    for name, value in found.items():
        table.add_row(name, f"{value:.1f}" if isinstance(value, float) else str(value))
    Console().print(table)
    write_json(json_path, found)


if __name__ == "__main__":
    main()
