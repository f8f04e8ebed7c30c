"""What the host takes for a decode step, and how long a device waits for it.

    python -m benchmarks.host_step [--sequences 16 64 256] [--context 1024] [--profile]

A worker's own node, threads and runner; a device whose passes take a given time and compute
nothing, with its memory on the host. Once with each step handed out when the last has ended, and
once with a step ahead, which is the default on a GPU. Sequences are at random places in their
blocks, as in service. Host time is what the node, the launching and the waiting thread take for a
step; the device waits for as much of it as is not done while it computes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter, sleep, thread_time
from typing import Any

import transformers

from benchmarks.gpu.measure import print_table
from benchmarks.report import write_json
from kvrelay.cluster.roles import make_worker
from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.config import EngineSection, ModelSection, WorkerConfig
from kvrelay.engine.messages import TokenDeltas
from kvrelay.engine.model.gpu.decode import SLOTS, DecodePasses
from kvrelay.engine.model.gpu.steps import GpuSteps, Launches
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.model.step_executor import StepExecutor
from kvrelay.engine.node import Effect, Send
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.stats import Role
from kvrelay.engine.step import Execute, Sampled, Step, StepDone
from kvrelay.worker.threads import LaunchThreads

BLOCK_SIZE, VOCAB = 16, 32_000
MAX_TOKENS, ROUTER = 4096, "router-0"
STEPS, WARM = 150, 20


class TimedPasses(DecodePasses):
    """Passes that take `pass_s` on a device that runs one after the other."""

    pass_s = 0.0
    busy_until = 0.0
    ends: list[float]
    idle_s = 0.0  # between passes, since the first

    def launch(self, size: int, slot: int) -> None:
        now = perf_counter()
        if self.busy_until:
            self.idle_s += max(0.0, now - self.busy_until)
        self.busy_until = max(now, self.busy_until) + self.pass_s
        self.ends[slot] = self.busy_until

    def result(self, slot: int, num_rows: int) -> list[int]:
        sleep(max(0.0, self.ends[slot] - perf_counter()))
        return [3 + (row + slot) % 7 for row in range(num_rows)]


class Host:
    """Drives a worker's node and runner from one thread."""

    def __init__(self, num_seqs: int, context: int, ahead: int) -> None:
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
            steps_ahead=ahead,
        )
        self.node = make_worker(self.config)
        self.runner, self.passes = _runner(num_seqs, num_blocks, longest)

    def steps(self, busy: Counter[str]) -> StepExecutor:
        """`busy`: seconds of each thread are added there."""

        def launch(step: Step) -> Callable[[], StepDone]:
            began = thread_time()
            wait = launched(step)
            busy["launch"] += thread_time() - began

            def timed() -> StepDone:
                began = thread_time()
                done = wait()
                busy["wait"] += thread_time() - began
                return done

            return timed

        def execute(step: Step) -> StepDone:
            began = thread_time()
            done = self.runner.execute(step)
            busy["launch"] += thread_time() - began
            return done

        launched = Launches(self.runner._steps, self.runner._guard).launch
        return StepExecutor(
            execute,
            lambda ids: [0] * len(ids),
            launch_step=launch,
            begin_checksums=lambda ids: lambda: [0] * len(ids),
        )

    def start(self, num_seqs: int, context: int) -> list[Step]:
        """All decode; returns the first step in which they do, and what is behind it."""
        random_ = random.Random(1)
        effects = self.node.start(0.0)
        for number in range(num_seqs):
            length = context + random_.randrange(BLOCK_SIZE)
            tokens = tuple(random_.randrange(1, VOCAB) for _ in range(length))
            sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop_token_ids=(2,))
            asked = Decode(f"r-{number}", sampling, 1, ROUTER, tokens, length, 1e6)
            effects += self.node.receive(0.0, asked)
        steps = _steps_of(effects)
        while len(steps[0].seqs) < num_seqs or steps[0].num_tokens > num_seqs:
            step, *steps = steps
            sampled = [Sampled(5) if seq.sample else None for seq in step.seqs]
            done = StepDone(step.step_id, sampled, [0] * len(step.checksum_blocks), 0.01)
            steps += _steps_of(self.node.receive(0.0, done))
        return steps


def _runner(num_seqs: int, num_blocks: int, longest: int) -> tuple[ModelRunner, TimedPasses]:
    """Makes one whose model is never run."""
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
        engine = EngineSection(num_blocks=num_blocks, threads=1).sized(gpu=False)
        model = ModelSection(dtype="float32", device="cpu")
        runner = ModelRunner(Path(folder), model, engine)
    decoder, limits, device = runner._decoder, runner._limits, runner.device
    steps = GpuSteps(
        decoder, limits, device, max_num_seqs=num_seqs, graphs=False, progress=lambda _: None
    )
    passes = TimedPasses(decoder, limits, device, num_seqs)
    passes.ends = [0.0] * SLOTS
    steps._passes, runner._steps = passes, steps
    return runner, passes


def _steps_of(effects: list[Effect]) -> list[Step]:
    return [effect.step for effect in effects if isinstance(effect, Execute)]


def measure(
    num_seqs: int, context: int, pass_s: float, ahead: int, profile: bool
) -> dict[str, Any]:
    host = Host(num_seqs, context, ahead)
    done_steps: SimpleQueue[StepDone] = SimpleQueue()
    busy = Counter[str]()
    steps, passes = host.steps(busy), host.passes
    passes.pass_s = pass_s
    threads = LaunchThreads(steps.launch, done_steps.put, "step")
    for step in host.start(num_seqs, context):
        threads.submit(step)
    profiler, frames, began, idle_s = cProfile.Profile(), 0, 0.0, 0.0
    for number in range(WARM + STEPS):
        if number == WARM:
            began, idle_s = perf_counter(), passes.idle_s
            busy.clear()
            if profile:
                profiler.enable()
        done = done_steps.get()
        received = thread_time()
        effects = host.node.receive(0.02 * number, done)
        busy["node"] += thread_time() - received
        frames += sum(isinstance(e, Send) and isinstance(e.message, TokenDeltas) for e in effects)
        for step in _steps_of(effects):
            threads.submit(step)
    taken_s = perf_counter() - began
    profiler.disable()
    threads.stop()
    threads.join()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    assert frames == WARM + STEPS
    return {
        "sequences": num_seqs,
        "pass ms": pass_s * 1e3,
        "steps ahead": ahead,
        "node ms": busy["node"] / STEPS * 1e3,
        "launch ms": busy["launch"] / STEPS * 1e3,
        "wait ms": busy["wait"] / STEPS * 1e3,
        "host ms": busy.total() / STEPS * 1e3,
        "a step ms": taken_s / STEPS * 1e3,
        "device waits ms": (passes.idle_s - idle_s) / STEPS * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--pass-ms",
        type=float,
        nargs="+",
        default=[6.0, 8.0, 14.0],
        help="of each number of sequences; an 8B model takes about as long",
    )
    parser.add_argument("--out", type=Path, help="for example benchmarks/results/host_step.json")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args()
    rows = [
        measure(count, args.context, ms / 1e3, ahead, args.profile)
        for count, ms in zip(args.sequences, args.pass_ms, strict=False)
        for ahead in (0, 1)
    ]
    print_table(rows)
    write_json(args.out, {"context": args.context, "rows": rows})


if __name__ == "__main__":
    main()
