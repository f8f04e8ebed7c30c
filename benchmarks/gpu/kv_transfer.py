"""KV from one process's GPU memory to another's through NIXL, beside a copy on the device.

    python -m benchmarks.gpu.kv_transfer

Blocks are those of an 8B model, moved by shuffled lists of indices, and compared byte by byte. Both
processes use the one GPU. Left out where NIXL is not installed. Writes
benchmarks/results/gpu_kv_transfer.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch

from benchmarks.gpu.measure import copy_bandwidth, print_table, write_json
from benchmarks.kv.second_process import second_process
from kvrelay.kvtransfer.agent import CopyBlocks, MoveId

BLOCK_BYTES = 16 * 2 * 32 * 8 * 128 * 2  # tokens, planes, layers, KV heads, head_dim, bytes
NUM_BLOCKS, ROUNDS, DEADLINE_S = 1024, 7, 60.0
COUNTS = (16, 128, 1024)  # blocks of a transfer
PEER = "--peer"


def make_pool(seed: int) -> torch.Tensor:
    """Every block its own bytes."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shape = (NUM_BLOCKS, BLOCK_BYTES)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)


def serve_as_peer() -> None:
    """The second process: its metadata on standard output, then it waits."""
    from kvrelay.kvtransfer.movers.nixl import NixlAgent

    agent = NixlAgent("peer", make_pool(seed=1))
    sys.stdout.write(agent.metadata().hex() + "\n")
    sys.stdout.flush()
    sys.stdin.readline()
    agent.close()


def move(agent: Any, src: list[int], dst: list[int]) -> float:
    """Returns how many seconds a read took."""
    torch.cuda.synchronize()
    began = perf_counter()
    handle = agent.copy(CopyBlocks(MoveId(1), "peer", 1, tuple(src), tuple(dst), DEADLINE_S))
    while (done := agent.poll(handle)) is None:
        if perf_counter() - began > DEADLINE_S:
            raise SystemExit(f"a read of {len(src)} blocks has not ended in {DEADLINE_S:g} s")
        sleep(20e-6)
    if done.error is not None:
        raise SystemExit(done.error)
    return perf_counter() - began


def rows(bandwidth: float) -> Iterator[dict[str, Any]]:
    from kvrelay.kvtransfer.movers.nixl import NixlAgent

    source, pool = make_pool(seed=1), torch.zeros_like(make_pool(seed=2))
    with second_process("benchmarks.gpu.kv_transfer", PEER, deadline_s=DEADLINE_S) as metadata:
        agent = NixlAgent("reader", pool)
        try:
            agent.connect("peer", 1, NUM_BLOCKS, metadata)
            generator = torch.Generator().manual_seed(0)
            for count in COUNTS:
                times = []
                for _ in range(ROUNDS + 1):
                    src, dst = (
                        torch.randperm(NUM_BLOCKS, generator=generator)[:count].tolist()
                        for _ in range(2)
                    )
                    pool.zero_()
                    times.append(move(agent, src, dst))
                    if not torch.equal(pool[dst], source[src]):
                        raise SystemExit(f"a read of {count} blocks brought other bytes")
                rate = count * BLOCK_BYTES / median(times[1:])
                yield {
                    "blocks": count,
                    "MiB": count * BLOCK_BYTES / 2**20,
                    "ms": median(times[1:]) * 1e3,
                    "GB/s": rate / 1e9,
                    "share of a copy": 2 * rate / bandwidth,  # a byte is read and written
                }
        finally:
            agent.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(PEER, action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().peer:
        serve_as_peer()
        return
    if not any(importlib.util.find_spec(name) for name in ("nixl_cu13", "nixl_cu12")):
        print("NIXL is not installed: kv_transfer is left out")
        return
    bandwidth = copy_bandwidth()
    measured = list(rows(bandwidth))
    print_table(measured)
    results = {"copy_bytes_per_s": bandwidth, "block_bytes": BLOCK_BYTES, "rows": measured}
    write_json("gpu_kv_transfer.json", results)


if __name__ == "__main__":
    main()
