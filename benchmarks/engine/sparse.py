"""What sparse attention costs on a CPU, beside dense attention over the same weights.

python -m benchmarks.engine.sparse: CPU time of a decode and of a chunk of 64 tokens behind contexts
of several lengths, a model with DeepSeek V3.2's latents and index keys, two layers and a quarter of
the heads. Both are run in turn; the least of each counts, and their ratio.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click
import torch
import transformers

from kvrelay.engine.model.checkpoint.families import read_config
from tests.engine.model import tiny

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "index_n_heads": 16,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 512,
    "max_position_embeddings": 1 << 14,
    "vocab_size": tiny.VOCAB,
    "initializer_range": 0.05,
}
CONTEXTS, CHUNK = (500, 2_000, 4_000, 8_000), 64


def least_s(drivers: list[tiny.Driver], count: int, times: int) -> list[float]:
    """CPU seconds of a step of `count` tokens of each."""
    found: list[list[float]] = [[] for _ in drivers]
    for seed in range(times):
        for driver, each in zip(drivers, found, strict=True):
            began = time.process_time()
            driver.feed(("a", tiny.tokens_of(count, seed)))
            each.append(time.process_time() - began)
    return [min(each) for each in found]


@click.command()
@click.option("--topk", default=1024)
@click.option("--times", default=5)
def main(topk: int, times: int) -> None:
    tiny.MAX_LEN, tiny.NUM_BLOCKS = 1 << 14, 640
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        fields = {**SIZES, "index_topk": topk}
        tiny.write_checkpoint(transformers.DeepseekV32Config, fields, path)
        config = read_config(path)
        assert config.latent is not None
        dense = replace(config, latent=replace(config.latent, indexer=None), layer_heads=())
        options = {"dtype": torch.bfloat16, "threads": 1}
        drivers = [tiny.Driver(path, "cpu", each, **options) for each in (config, dense)]
        at = 0
        for context in CONTEXTS:
            for driver in drivers:
                driver.feed(("a", tiny.tokens_of(context - at, context)), mute=("a",))
            rows = []
            for count in (1, CHUNK):
                sparse_s, dense_s = least_s(drivers, count, times)
                rows.append(
                    f"{1e3 * sparse_s:.1f} of {1e3 * dense_s:.1f} ms: {sparse_s / dense_s:.2f}"
                )
            at = context + times * (1 + CHUNK)
            click.echo(f"{context:6,} tokens, index_topk {topk}: decode {rows[0]}, chunk {rows[1]}")


if __name__ == "__main__":
    main()
