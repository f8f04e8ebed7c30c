"""What a hand-over between two workers of vLLM takes, by part:
`python -m benchmarks.kv.vllm_handover`.

On memory of the layout that vLLM has on CPUs, without vLLM. `by blocks`: what a step has filled is
written to the worker's memory, and checksums are taken there; the other worker reads it over NIXL,
takes checksums as it comes and again before vLLM hears of it, and writes it to vLLM's memory.
`straight`: checksums are taken where vLLM has it, and NIXL reads it from there to where the other
vLLM will have it; what tiers, sessions and other readers need of it is copied behind. `gathered`:
as `by blocks`, by torch's gather and scatter. Parts take turns; medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import click
import numpy as np
import torch

from benchmarks.kv.second_process import second_process
from benchmarks.kv.transfer_ways import DEADLINE_S, moves
from kvrelay.decode_worker.vllm.memory import (
    gather,
    layer_of,
    regions_of,
    scatter,
    scatter_at_once,
    unpack,
)
from kvrelay.kvtransfer.checksum import checksum_blocks
from kvrelay.kvtransfer.movers.nixl import NixlAgent

SIZE = 32  # tokens of a block
LOCAL = "out", "in", "gather", "gathered out", "scatter", "checksums", "checksums in place"


class Handover:
    """A worker's two memories of blocks, and agents that read those of the peer."""

    def __init__(self, num_blocks: int, num_layers: int, layer_bytes: int, stack: ExitStack):
        self._count = num_blocks
        self.layers = np.ones((num_layers * 2 * num_blocks, layer_bytes), np.uint8)
        self.pool = np.ones((2 * num_blocks, num_layers * layer_bytes), np.uint8)
        tensors = torch.from_numpy(self.layers).view(num_layers, 2 * num_blocks, -1).unbind(0)
        layers = [layer_of(each, 2 * num_blocks) for each in tensors]
        self._regions = regions_of([each for each in layers if each is not None])
        rng = np.random.default_rng(0)
        self._ids, self._rows = (
            rng.permutation(2 * num_blocks)[:num_blocks].tolist() for _ in "ab"
        )
        self._gathered = gather(self._regions, self._ids)
        self._reads = {
            "NIXL, blocks": self._reader(self.pool, stack),
            "NIXL, layers of blocks": self._reader(self.layers, stack),
        }

    @staticmethod
    def _reader(memory: np.ndarray, stack: ExitStack) -> Callable[[list[int], list[int]], None]:
        shape = map(str, memory.shape)
        metadata = stack.enter_context(
            second_process("benchmarks.kv.transfer", "--peer", *shape, deadline_s=DEADLINE_S)
        )
        agent = NixlAgent("reader", memory)
        stack.callback(agent.close)
        agent.connect("peer", 1, len(memory), metadata)
        return moves(agent, "peer")

    def _places(self, blocks: list[int]) -> list[int]:
        """Returns where the layers of these blocks are in `layers`."""
        num_layers = len(self.layers) // (2 * self._count)
        return [n * 2 * self._count + block for block in blocks for n in range(num_layers)]

    def part(self, name: str) -> None:
        pool, regions = torch.from_numpy(self.pool), self._regions
        match name:
            case "out":
                unpack(regions, [each.view for each in regions], self._ids, self._rows, pool)
            case "in":
                scatter(regions, self._ids, self._rows, pool)
            case "gather":
                self._gathered = gather(regions, self._ids)
            case "gathered out":
                unpack(regions, self._gathered, range(self._count), self._rows, pool)
            case "scatter":
                scatter_at_once(regions, self._ids, self._rows, pool)
            case "checksums":
                checksum_blocks(self.pool, self._rows)
            case "checksums in place":
                checksum_blocks(self.layers, self._places(self._ids))
            case "NIXL, blocks":
                self._reads[name](self._ids, self._rows)
            case _:
                self._reads[name](self._places(self._ids), self._places(self._rows))

    @property
    def parts(self) -> tuple[str, ...]:
        return (*LOCAL, *self._reads)


WAYS = {
    "by blocks": {"out": 1, "checksums": 3, "NIXL, blocks": 1, "in": 1},
    "straight": {"checksums in place": 2, "NIXL, layers of blocks": 1},
    "behind it": {"out": 2, "checksums": 2},
    "gathered": {
        "gather": 1,
        "gathered out": 1,
        "checksums": 3,
        "NIXL, blocks": 1,
        "scatter": 1,
    },
}
"""How often each part is in a way."""


@click.command()
@click.option("--layers", default=30)
@click.option("--layer-bytes", default=3 * 2 * 64 * 2 * SIZE, help="Of a block in a layer.")
@click.option("--rounds", default=15)
@click.option("--tokens", default=(2048, 8192), multiple=True)
def main(layers: int, layer_bytes: int, rounds: int, tokens: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    for count in tokens:
        num_bytes = count // SIZE * layers * layer_bytes
        with ExitStack() as stack:
            handover = Handover(count // SIZE, layers, layer_bytes, stack)
            times: dict[str, list[float]] = {name: [] for name in handover.parts}
            for turn in range(rounds + 1):
                for name, found in times.items():
                    began = time.perf_counter()
                    handover.part(name)
                    if turn:  # the first connects, and touches the memory
                        found.append(time.perf_counter() - began)
        medians = {name: statistics.median(found) for name, found in times.items()}
        click.echo(f"{count} tokens, {num_bytes / 2**20:.0f} MiB")
        for name, took in medians.items():
            click.echo(f"  {name:24} {1e3 * took:8.1f} ms {num_bytes / took / 1e9:6.2f} GB/s")
        for name, each in WAYS.items():
            took = sum(times * medians[part] for part, times in each.items())
            click.echo(f"  {name + ', sum':24} {1e3 * took:8.1f} ms")


if __name__ == "__main__":
    main()
