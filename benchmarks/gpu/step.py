"""A decode step of an 8B model, beside the time that its bytes take at the device's copy bandwidth.

    python -m benchmarks.gpu.step

Bytes are those of the weights and of the KV that is attended to, each read once; the aim is 1.25
times their time. Steps are run as a worker runs them: several passes in a row, tokens seen by the
host. Writes benchmarks/results/gpu_step.json.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu.llama import BLOCK_SIZE, make_model, make_runner, share
from benchmarks.gpu.measure import copy_bandwidth, print_table, write_json
from kvrelay.engine.config import EngineSection
from kvrelay.engine.model.quantize import GROUP
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.step import Step

AIM = 1.25
BATCHES, CONTEXT = (1, 16, 64), 1024
STEPS, WARM = 320, 20  # in a measurement
VARIANTS = {  # graphs, kv_dtype, quantization, attention backend
    "bf16": (True, "auto", "none", "triton"),
    "bf16, no graphs": (False, "auto", "none", "triton"),
    "bf16, FP8 KV": (True, "float8_e4m3", "none", "triton"),
    "int8 weights": (True, "auto", "int8", "triton"),
    "fp8 weights": (True, "auto", "fp8", "triton"),
}
if find_spec("flashinfer"):
    VARIANTS["bf16, FlashInfer"] = (True, "auto", "none", "flashinfer")
INT8_BYTES = 1 + 2 / GROUP  # with their scales


def weight_bytes(runner: ModelRunner, quantization: str) -> float:
    """Counts what a decode pass reads: all but the embedding table. The head is not quantized."""
    config = runner.config
    head = config.vocab_size * config.hidden_size
    layers = config.num_parameters - 2 * head
    return layers * {"none": 2, "int8": INT8_BYTES, "fp8": 1}[quantization] + 2 * head


def pass_seconds(runner: ModelRunner, batch: int, context: int) -> float:
    """Median of a pass's time. Blocks are as the pool has them: zeros are numbers too."""
    each = -(-(context + BLOCK_SIZE) // BLOCK_SIZE)
    start = context // BLOCK_SIZE * BLOCK_SIZE
    seqs = [
        share([7], start, list(range(row * each, (row + 1) * each)), [7] * (start + 1))
        for row in range(batch)
    ]
    assert runner.launch is not None
    runs, times, ended = runner.launch(Step(0, seqs, may_be_followed=True)), [], 0.0
    for number in range(1, STEPS):  # each is launched while the one before runs
        behind = runner.launch(Step(number, seqs, may_be_followed=True))
        assert runs().sampled[0] is not None
        now = perf_counter()
        times.append(now - ended)
        runs, ended = behind, now
    runs()
    return median(times[WARM:])


def rows(bandwidth: float) -> Iterator[dict[str, Any]]:
    model = make_model()
    num_blocks = max(BATCHES) * (CONTEXT // BLOCK_SIZE + 2)
    for name, (graphs, kv_dtype, quantization, attention) in VARIANTS.items():
        runner = make_runner(
            model,
            EngineSection(
                num_blocks=num_blocks,
                block_size=BLOCK_SIZE,
                max_model_len=2 * CONTEXT,
                kv_dtype=kv_dtype,
                max_num_seqs=max(BATCHES),
                cuda_graphs=graphs,
                attention_backend=attention,
            ),
            quantization,
        )
        for batch in BATCHES:
            seconds = pass_seconds(runner, batch, CONTEXT)
            read = weight_bytes(runner, quantization)
            read += batch * CONTEXT * runner.kv_spec.bytes_per_token
            least = read / bandwidth
            yield {
                "variant": name,
                "batch": batch,
                "ms a pass": seconds * 1e3,
                "ms for the bytes": least * 1e3,
                "times as long": seconds / least,
                "tokens/s": batch / seconds,
                "aim": f"<= {AIM}",
            }
        del runner
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s; contexts of {CONTEXT}\n")
    measured = list(rows(bandwidth))
    print_table(measured)
    write_json(
        "gpu_step.json", {"copy_bytes_per_s": bandwidth, "context": CONTEXT, "rows": measured}
    )


if __name__ == "__main__":
    main()
