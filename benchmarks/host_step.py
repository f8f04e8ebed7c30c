"""What the host takes for a decode step, on a device that takes no time.

    python -m benchmarks.host_step [--sequences 16 64 256] [--context 1024] [--profile]

A worker's own node and its own runner, with the passes of a GPU answered at once and its memory on
the host: from the answer to a step until the next one is launched, which is what a GPU waits for,
and what comes after that while the next one runs (frames to routers). Sequences are at random
places in their blocks, as in service.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import transformers

from benchmarks.gpu.measure import print_table
from benchmarks.report import write_json
from cluster.worker.node import make_worker
from decode_worker.messages import Decode
from engine.config import WorkerConfig
from engine.messages import TokenDeltas
from engine.model.gpu.decode import DecodePasses
from engine.model.gpu.steps import GpuSteps
from engine.model.runner import ModelRunner
from engine.node import Effect, Send
from engine.request import SamplingParams
from engine.stats import Role
from engine.step import Execute, Sampled, Step, StepDone

BLOCK_SIZE, VOCAB = 16, 32_000
MAX_TOKENS, ROUTER = 4096, "router-0"
STEPS, WARM = 150, 20


class InstantPasses(DecodePasses):
    """Passes whose tokens are there at once."""

    launched_at = 0.0

    def launch(self, size: int, index: int) -> None:
        self.launched_at = perf_counter()

    def result(self, index: int, num_rows: int) -> list[int]:
        return [3 + (row + index) % 7 for row in range(num_rows)]


class Host:
    """A worker's node and runner, driven from one thread."""

    def __init__(self, num_seqs: int, context: int) -> None:
        longest = context + MAX_TOKENS
        num_blocks = num_seqs * (-(-longest // BLOCK_SIZE) + 1)
        self.config = WorkerConfig(
            node_id="decode-0",
            role=Role.DECODE,
            epoch=1,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            bytes_per_block=1,
            max_model_len=longest,
            fingerprint=b"fingerprint",
            max_num_batched_tokens=8192,
            max_num_seqs=num_seqs,
            max_waiting=num_seqs,
            num_speculative_tokens=0,
        )
        self.node = make_worker(self.config)
        self.runner, self.passes = _runner(num_seqs, num_blocks, longest)

    def start(self, num_seqs: int, context: int) -> Step:
        """All decode; returns the first step in which they do."""
        random_ = random.Random(1)
        effects = self.node.start(0.0)
        for number in range(num_seqs):
            length = context + random_.randrange(BLOCK_SIZE)
            tokens = tuple(random_.randrange(1, VOCAB) for _ in range(length))
            sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop_token_ids=(2,))
            asked = Decode(f"r-{number}", 1, ROUTER, None, tokens, length, sampling, 1e6)
            effects += self.node.receive(0.0, asked)
        step = _step_of(effects)
        while step is None or len(step.seqs) < num_seqs or step.num_tokens > num_seqs:
            assert step is not None, "nothing to do"
            sampled = [Sampled(5) if seq.sample else None for seq in step.seqs]
            done = StepDone(step.step_id, sampled, [0] * len(step.checksum_blocks), 0.01)
            step = _step_of(self.node.receive(0.0, done))
        return step


def _runner(num_seqs: int, num_blocks: int, longest: int) -> tuple[ModelRunner, InstantPasses]:
    """Of a model that is never run."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=longest,
    )
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        runner = ModelRunner(
            Path(folder), dtype="float32", device="cpu", num_blocks=num_blocks, num_threads=1
        )
    decoder, limits, device = runner._decoder, runner._limits, runner.device
    steps = GpuSteps(
        decoder, limits, device, max_num_seqs=num_seqs, graphs=False, progress=lambda _: None
    )
    passes = InstantPasses(decoder, limits, device, num_seqs)
    steps._passes, runner._steps = passes, steps
    return runner, passes


def _step_of(effects: list[Effect]) -> Step | None:
    return next((effect.step for effect in effects if isinstance(effect, Execute)), None)


def measure(num_seqs: int, context: int, profile: bool) -> dict[str, Any]:
    host = Host(num_seqs, context)
    step = host.start(num_seqs, context)
    node_s, prepare_s, after_s, passes, frames = [], [], [], [], 0
    profiler = cProfile.Profile()
    for number in range(WARM + STEPS):
        if number == WARM and profile:
            profiler.enable()
        began = perf_counter()
        done = host.runner.execute(step)
        ended = perf_counter()
        done = replace(done, checksums=[0] * len(step.checksum_blocks), elapsed_s=0.02)
        received = perf_counter()
        effects = host.node.receive(0.02 * number, done)
        node_s.append(perf_counter() - received)
        prepare_s.append(host.passes.launched_at - began)
        after_s.append(ended - host.passes.launched_at)
        first = done.sampled[0]
        assert first is not None
        passes.append(1 + len(first.more))
        frames += sum(isinstance(e, Send) and isinstance(e.message, TokenDeltas) for e in effects)
        found = _step_of(effects)
        assert found is not None
        step = found
    profiler.disable()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    assert frames == WARM + STEPS
    each = [(n + p + a) * 1e3 for n, p, a in zip(node_s, prepare_s, after_s, strict=True)][WARM:]
    return {
        "sequences": num_seqs,
        "node ms": median(node_s[WARM:]) * 1e3,
        "prepare ms": median(prepare_s[WARM:]) * 1e3,
        "after ms": median(after_s[WARM:]) * 1e3,
        "a step ms": median(each),
        "p90 ms": sorted(each)[int(0.9 * len(each))],
        "passes a step": sum(passes[WARM:]) / STEPS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="for example benchmarks/results/host_step.json")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args()
    rows = [measure(count, args.context, args.profile) for count in args.sequences]
    print_table(rows)
    write_json(args.out, {"context": args.context, "rows": rows})


if __name__ == "__main__":
    main()
