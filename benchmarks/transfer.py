"""How fast KV blocks move: memcpy, LocalAgent and NIXL between two processes, side by side.

`python -m benchmarks.transfer`: each round moves about `--mib` of blocks by shuffled lists of
indices; all ways take turns within a round, so that a busy machine slows them alike. Medians.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from kvtransfer.agent import Agent

BLOCK_BYTES = (46_080, 368_640, 737_280)
DEADLINE_S = 60.0

Move = Callable[[list[int], list[int]], None]


def move_by(agent: Agent) -> Move:
    """Reads from the peer "p" as a transfer thread does, without its pauses."""

    def move(src: list[int], dst: list[int]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        handle = agent.read("p", src, dst)
        while not agent.poll(handle):
            if time.monotonic() > deadline:
                raise click.ClickException(f"a read has not ended in {DEADLINE_S:g} s")
        agent.release(handle)

    return move


@contextmanager
def second_process(num_blocks: int, block_bytes: int) -> Iterator[bytes]:
    """Runs a NIXL agent whose block i is filled with i % 251; yields its metadata."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.transfer", "--peer", str(num_blocks), str(block_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield bytes.fromhex(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(DEADLINE_S)


def fill(pool: np.ndarray) -> None:
    pool[:] = (np.arange(len(pool)) % 251).astype(np.uint8)[:, None]


def serve_as_peer(num_blocks: int, block_bytes: int) -> None:
    import torch

    from kvtransfer.agents.nixl import NixlAgent

    pool = torch.empty((num_blocks, block_bytes), dtype=torch.uint8)
    fill(pool.numpy())
    agent = NixlAgent("peer", pool)
    sys.stdout.write(agent.metadata().hex() + "\n")
    sys.stdout.flush()
    sys.stdin.readline()
    agent.close()


def measure(block_bytes: int, total_bytes: int, rounds: int) -> dict[str, float]:
    """GiB/s of each way, the median of `rounds`."""
    import torch

    from kvtransfer.agents.local import LocalAgent, LocalRegistry
    from kvtransfer.agents.nixl import NixlAgent

    count = max(1, total_bytes // block_bytes)
    num_blocks = 2 * count
    source = np.empty((num_blocks, block_bytes), np.uint8)
    fill(source)
    tensor = torch.zeros((num_blocks, block_bytes), dtype=torch.uint8)
    pool = tensor.numpy()
    registry = LocalRegistry()
    local = LocalAgent("reader", pool, registry)
    local.connect("p", 1, num_blocks, LocalAgent("peer", source, registry).metadata())
    nixl = NixlAgent("reader", tensor)

    def memcpy(src: list[int], dst: list[int]) -> None:
        for i, j in zip(src, dst, strict=True):
            pool[j] = source[i]

    ways: dict[str, Move] = {"memcpy": memcpy, "LocalAgent": move_by(local)}
    rates: dict[str, list[float]] = {}
    with second_process(num_blocks, block_bytes) as metadata:
        nixl.connect("p", 1, num_blocks, metadata)
        ways["NIXL"] = move_by(nixl)
        rng = random.Random(0)
        for turn in range(rounds + 1):
            src, dst = (rng.sample(range(num_blocks), count) for _ in range(2))
            first = list(range(count))
            lists = [(name, move, src, dst) for name, move in ways.items()]
            lists.append(("NIXL, consecutive", ways["NIXL"], first, first))
            for name, move, sources, destinations in lists:
                pool[destinations] = 255
                start = time.perf_counter()
                move(sources, destinations)
                elapsed = time.perf_counter() - start
                right = pool[destinations, 0] == np.array(sources) % 251
                if not right.all():
                    raise click.ClickException(f"{name}: {int((~right).sum())} blocks are wrong")
                if turn:  # the first connects, and touches the memory
                    rates.setdefault(name, []).append(count * block_bytes / elapsed / 2**30)
        nixl.close()
    return {name: statistics.median(each) for name, each in rates.items()}


@click.command()
@click.option("--mib", default=64, show_default=True, help="Moved in a round.")
@click.option("--rounds", default=9, show_default=True)
@click.option("--peer", nargs=2, type=int, hidden=True)
def main(mib: int, rounds: int, peer: tuple[int, int] | None) -> None:
    """Compare ways to move KV blocks, in GiB/s."""
    if peer is not None:
        serve_as_peer(*peer)
        return
    console = Console()
    rows = {}
    for block_bytes in BLOCK_BYTES:
        with console.status(f"blocks of {block_bytes:,} bytes"):
            rows[block_bytes] = measure(block_bytes, mib * 2**20, rounds)
    transports = os.environ.get("UCX_TLS", "UCX's own choice")
    table = Table(
        title=f"GiB/s, median of {rounds} rounds of {mib} MiB",
        caption=f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()},"
        f" numpy {version('numpy')}, UCX_TLS={transports}",
    )
    table.add_column("bytes per block", justify="right")
    for name in next(iter(rows.values())):
        table.add_column(name, justify="right")
    for block_bytes, rates in rows.items():
        table.add_row(f"{block_bytes:,}", *(f"{rate:.2f}" for rate in rates.values()))
    console.print(table)


if __name__ == "__main__":
    main()
