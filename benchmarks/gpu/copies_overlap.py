"""Whether copies of vLLM's KV run beside a step: `python -m benchmarks.gpu.copies_overlap`.

A step is products of matrices on the stream of the model. It is timed alone, and behind the gather
of the blocks that a step before it has filled, whose copies to the host and to the worker's memory
are on the way meanwhile: by CUDA events on a GPU, by the clock of its thread on a CPU. `hidden` is
the part of the copies that the step does not wait for: 1 is all of it.
"""

from __future__ import annotations

import statistics
import time

import click
import torch

from benchmarks.kv.vllm_copies import NUM_BLOCKS, SIZE, Memory
from kvrelay.decode_worker.vllm.copies import Move
from kvrelay.decode_worker.vllm.messages import Begin


class Timer:
    """Measures the stream of the model, whatever other streams and threads do meanwhile."""

    def __init__(self, device: str) -> None:
        count = 2 if device == "cuda" else 0
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        self._times: list[float] = []

    def mark(self) -> None:
        """At the beginning, and at the end."""
        if self._events:
            self._events[len(self._times)].record()
        self._times.append(time.thread_time())

    def ms(self) -> float:
        if not self._events:
            return 1e3 * (self._times[1] - self._times[0])
        first, last = self._events
        last.synchronize()
        return float(first.elapsed_time(last))


class Overlap:
    def __init__(self, device: str, num_layers: int, num_heads: int, products: int) -> None:
        self.device = device
        self.memory = Memory(num_layers, num_heads, 128, device)
        width = 256 if device == "cpu" else 4096
        self._one = torch.randn(width, width, device=device)
        self._products = products

    def step(self) -> None:
        found = self._one
        for _ in range(self._products):
            found = torch.nn.functional.normalize(found @ self._one)

    def copies(self, count: int, *, step: bool) -> tuple[float, float]:
        """Copies so many blocks out, with a step behind the gather. Returns the milliseconds of the
        model's stream, and those until the last block is in the worker's memory."""
        blocks = [(7 * n) % NUM_BLOCKS for n in range(count)]
        num_tokens = SIZE * count
        rows = tuple((5 * n + 3) % NUM_BLOCKS for n in range(count))
        self.memory.copies.begin(Begin("a", (0,) * num_tokens, "", {}, rows), lambda: None)
        began, timer = time.perf_counter(), Timer(self.device)
        timer.mark()
        move = Move("a", lambda: [blocks], range(0), num_tokens)
        self.memory.rank.save(self.memory.copies.plan([move]))
        if step:
            self.step()
        timer.mark()
        self.memory.said.get(timeout=60)
        took_ms = 1e3 * (time.perf_counter() - began)
        self.memory.copies.end("a")
        return timer.ms(), took_ms

    def measured(self, count: int) -> tuple[float, float, float]:
        """Milliseconds of a step alone, of one behind a gather, and of copies alone."""
        timer = Timer(self.device)
        timer.mark()
        self.step()
        timer.mark()
        alone = timer.ms()
        _, copied = self.copies(count, step=False)
        behind, _ = self.copies(count, step=True)
        return alone, behind, copied


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--layers", default=32)
@click.option("--heads", default=8)
@click.option("--products", default=50, help="Of a step.")
@click.option("--rounds", default=15)
def main(device: str, layers: int, heads: int, products: int, rounds: int) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("no CUDA here: --device cpu times the thread that steps")
    overlap = Overlap(device, layers, heads, products)
    for count in (1, 16, 64):
        runs = [overlap.measured(count) for _ in range(rounds)]
        alone, behind, copied = (statistics.median(each) for each in zip(*runs, strict=True))
        hidden = 1 - max(0.0, behind - alone) / copied
        click.echo(
            f"{count:3} blocks: step {alone:.3f} ms, with copies {behind:.3f} ms, copies alone"
            f" {copied:.3f} ms, hidden {hidden:.2f}"
        )


if __name__ == "__main__":
    main()
