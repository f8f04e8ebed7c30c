"""What copies of vLLM's KV take of a step: `python -m benchmarks.kv.vllm_copies`.

On memory of the layout that vLLM has on CPUs, without vLLM. `each`: a copy for each block and layer
and the checksums, on the step's thread. `at_once`: what a worker does. Both take turns; shown is
the processor time of the step's thread (median), and the time until checksums are there (best).
"""

from __future__ import annotations

import queue
import statistics
import time
from typing import Any

import click
import torch

from kvrelay.decode_worker.vllm.copies import Copies, Move
from kvrelay.decode_worker.vllm.messages import Begin
from kvrelay.decode_worker.vllm.ranks import RankCopies
from kvrelay.engine.kv.window import Windows
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.layout import BlockLayout

SIZE = 32  # tokens of a block
NUM_BLOCKS = 256


class Memory:
    """vLLM's layers, and a worker's copies of them."""

    def __init__(self, num_layers: int, num_heads: int, head_dim: int, device: str = "cpu") -> None:
        shape = num_layers, NUM_BLOCKS, num_heads, SIZE, 2 * head_dim
        self.layers = torch.randn(shape, device=device).bfloat16().unbind(0)
        self.copies, self.said = Copies(windows=Windows.of(SIZE)), queue.SimpleQueue[Any]()
        self.rank = RankCopies(0, self.copies.copied)
        self.rank.register({str(n): each for n, each in enumerate(self.layers)}, NUM_BLOCKS)
        self.copies.layers = self.rank.forms
        spec = self.copies.spec(num_heads)
        assert spec is not None
        self.pool = torch.zeros(NUM_BLOCKS, spec.bytes_per_block, dtype=torch.uint8)
        self.share = BlockLayout(spec).share(0, 1)
        self.copies.report = self.said.put
        self.copies.use(self.pool.numpy(), self.share)
        self.rank.use(self.pool.numpy())

    def each(self, blocks: list[int], rows: list[int]) -> tuple[float, float]:
        began = time.thread_time(), time.perf_counter()
        for block, row in zip(blocks, rows, strict=True):
            at = 0
            for layer in self.layers:
                theirs = layer[block]
                end = at + theirs.numel() * theirs.element_size()
                self.pool[row, at:end].view(theirs.dtype).view(theirs.shape).copy_(theirs)
                at = end
        checksum_blocks(self.pool.numpy(), rows, self.share)
        return time.thread_time() - began[0], time.perf_counter() - began[1]

    def at_once(self, blocks: list[int], rows: list[int]) -> tuple[float, float]:
        num_tokens = SIZE * len(blocks)
        self.copies.begin(Begin("a", (0,) * num_tokens, "", {}, tuple(rows)), lambda: None)
        began = time.thread_time(), time.perf_counter()
        self.rank.save(self.copies.plan([Move("a", lambda: [blocks], range(0), num_tokens)]))
        step = time.thread_time() - began[0]
        self.said.get(timeout=60)
        took = time.perf_counter() - began[1]
        self.copies.end("a")
        return step, took


@click.command()
@click.option("--layers", default=30)
@click.option("--heads", default=3)
@click.option("--head-dim", default=64)
@click.option("--rounds", default=15)
def main(layers: int, heads: int, head_dim: int, rounds: int) -> None:
    torch.set_num_threads(1)
    memory = Memory(layers, heads, head_dim)
    for count in (1, 4, 16, 64):
        blocks = [(7 * n) % NUM_BLOCKS for n in range(count)]
        rows = [(5 * n + 3) % NUM_BLOCKS for n in range(count)]
        found: dict[str, list[tuple[float, float]]] = {"each": [], "at_once": []}
        for _ in range(rounds):
            for name, times in found.items():
                times.append(getattr(memory, name)(blocks, rows))
        line = [f"{count:3} blocks"]
        for name, times in found.items():
            step, whole = (
                statistics.median(each[0] for each in times),
                min(each[1] for each in times),
            )
            line.append(f"{name} {1e3 * step:7.3f} ms of the step, {1e3 * whole:7.3f} in all")
        click.echo("; ".join(line))


if __name__ == "__main__":
    main()
