"""How many long sequences a pool holds at once.

`python -m benchmarks.kv.many_sequences`: Gemma 3 270M, 64 sequences of 8,192 tokens of their own in
a pool of 2 GiB, which takes half an hour on two cores. `--stand-in` has the same KV, of a model
that is random and narrow. A sequence has seven eighths of its tokens as a prompt and generates the
rest while the others are computed. Fails where fewer than `--least` had their prompts at one time,
one was preempted, or the audit at the end is not clean.
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import wait
from pathlib import Path
from random import Random

import click
import transformers
from rich.console import Console

from kvrelay.cluster.config import load_config
from kvrelay.cluster.prepare import prepare_model
from kvrelay.engine.config import EngineSection
from kvrelay.engine.request import SamplingParams
from tests.engine.model.tiny import write_checkpoint
from tests.support.local import LocalCluster

MODEL = "gemma3-270m"
GEOMETRY = {  # as Gemma 3 270M has it, so that its KV is that
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "num_attention_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
}
NARROW = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 32}
POLL_S = 0.2


def model_path(folder: Path, *, stand_in: bool) -> Path:
    if not stand_in:
        return prepare_model(load_config(None, {"model.name": MODEL}), 1, lambda _: None).path
    write_checkpoint(transformers.Gemma3TextConfig, GEOMETRY | NARROW, folder)
    return folder


@click.command()
@click.option("--sequences", default=64, show_default=True)
@click.option("--tokens", default=8192, show_default=True)
@click.option("--gib", default=2.0, show_default=True)
@click.option("--least", default=56, show_default=True)
@click.option("--stand-in", is_flag=True)
def main(sequences: int, tokens: int, gib: float, least: int, stand_in: bool) -> None:
    rng, console = Random(1), Console()
    num_output = tokens // 8
    prompts = [
        [rng.randrange(10, 1000) for _ in range(tokens - num_output)] for _ in range(sequences)
    ]
    engine = EngineSection(kv_cache_gib=gib, max_num_seqs=sequences, max_waiting=sequences)
    sampling = SamplingParams(max_tokens=num_output, temperature=0.0)
    with tempfile.TemporaryDirectory() as folder:
        path = model_path(Path(folder), stand_in=stand_in)
        engine = engine.sized(gpu=False)
        with LocalCluster(path, prefill=0, dtype="bfloat16", engine=engine) as cluster:
            core = cluster.workers["decode-0"].node.core  # type: ignore[attr-defined]
            begin, most, timeout_s = time.monotonic(), (0, 0, 0), 4 * 3600.0

            def live() -> tuple[int, int, int]:
                """Sequences that have their prompts, their tokens, and blocks in use."""
                held = [len(seq.tokens) for seq in core.scheduler.running if seq.is_decoding]
                pool = core.kv.pool
                return len(held), sum(held), pool.num_blocks - pool.num_free

            futures = [cluster.submit(each, sampling, timeout_s=timeout_s) for each in prompts]
            while wait(futures, POLL_S).not_done:
                cluster.check()
                most = max(most, cluster.run(live))
            answers = [future.result() for future in futures]
            failed = sum(answer.failed is not None for answer in answers)
            preempted = core.scheduler.num_preemptions
            cluster.wait_idle()
            audit = cluster.audit()
            blocks = core.kv.pool.num_blocks
    console.print(
        f"{most[0]} of {sequences} sequences at once, {most[1]:,} tokens in {most[2]:,} of"
        f" {blocks:,} blocks ({gib:g} GiB); {failed} failed, {preempted} preempted;"
        f" audit {'clean' if audit['clean'] else audit}; {time.monotonic() - begin:.0f} s"
    )
    if most[0] < least or failed or preempted or not audit["clean"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
