"""Requests served by the engine and by transformers' continuous batching: the same random 8B model,
the same prompts, in the same run.

    python -m benchmarks.gpu.throughput [--requests N] [--prompt-len N] [--output-len N]

The engine is its scheduler, block pool and runner without network and API; the aim is 3 times the
tokens per second. Writes benchmarks/results/gpu_throughput.json.
"""

from __future__ import annotations

import argparse
import gc
from time import perf_counter
from typing import Any

import torch
import transformers

from benchmarks.gpu.llama import BLOCK_SIZE, make_model, make_runner
from benchmarks.gpu.measure import print_table, write_json
from kvrelay.engine.config import EngineSection, WorkerConfig
from kvrelay.engine.core import EngineCore
from kvrelay.engine.kv.block_hash import BlockChain
from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.model.runner import ModelRunner
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.stats import Role

AIM = 3.0
MAX_NUM_SEQS, MAX_BATCHED = 64, 2048


def prompts_of(count: int, length: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(10, vocab_size, (count, length), generator=generator).tolist()


def serve(runner: ModelRunner, prompts: list[list[int]], output_len: int) -> float:
    """Seconds till every prompt has its tokens."""
    spec = runner.kv_spec
    config = WorkerConfig(
        node_id="bench", role=Role.DECODE, epoch=1, num_blocks=len(runner.kv_pool),
        block_size=BLOCK_SIZE, bytes_per_block=spec.bytes_per_block,
        max_model_len=runner.max_model_len, fingerprint=bytes(16), max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_BATCHED, max_waiting=len(prompts),
        num_speculative_tokens=0,
    )  # fmt: skip
    core = EngineCore(config)
    sampling = SamplingParams(max_tokens=output_len, temperature=0.0)
    began = perf_counter()
    for number, prompt in enumerate(prompts):
        seq = Sequence(
            request_id=str(number), attempt=0, router="bench", tokens=list(prompt),
            num_prompt_tokens=len(prompt), sampling=sampling, deadline=1e9, arrived_at=0.0,
            phase_since=0.0, chain=BlockChain(config.fingerprint, CacheScope(), BLOCK_SIZE),
            retention=config.retention, reserve_growth=True, num_reported=len(prompt),
        )  # fmt: skip
        core.seqs[seq.key] = seq
        core.scheduler.add(seq)
    while core.seqs:
        core.now = perf_counter() - began
        core.scheduler.admit_waiting(core.now, lambda _: False, core.timing.token_s)
        step = core.next_step()
        assert step is not None
        step.checksum_blocks.clear()  # nothing leaves this worker
        for seq, _ in core.finish_step(runner.execute(step)):
            if seq.num_output_tokens >= output_len:
                core.remove(seq)
    return perf_counter() - began


def serve_by_transformers(
    model: transformers.LlamaForCausalLM, prompts: list[list[int]], output_len: int
) -> float:
    generation = transformers.GenerationConfig(
        max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    model.generate_batch(prompts[:4], generation_config=generation)  # warms up
    torch.cuda.synchronize()
    began = perf_counter()
    outputs = model.generate_batch(prompts, generation_config=generation)
    elapsed = perf_counter() - began
    lengths = {len(output.generated_tokens) for output in outputs.values()}
    assert len(outputs) == len(prompts), f"{len(outputs)} of {len(prompts)} requests were answered"
    assert lengths == {output_len}, f"answers of {lengths} tokens"
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    chosen, _ = parser.parse_known_args()
    model = make_model()
    prompts = prompts_of(chosen.requests, chosen.prompt_len, model.config.vocab_size)
    length = chosen.prompt_len + chosen.output_len + BLOCK_SIZE
    num_blocks = (MAX_NUM_SEQS + 1) * -(-length // BLOCK_SIZE) + 64
    engine = EngineSection(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=length,
        max_num_seqs=MAX_NUM_SEQS,
    )
    runner = make_runner(model, engine)
    serve(runner, prompts[:4], 8)
    timed = {"kvrelay": serve(runner, prompts, chosen.output_len)}
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    name = f"transformers {transformers.__version__}"
    timed[name] = serve_by_transformers(model, prompts, chosen.output_len)
    made = chosen.requests * chosen.output_len
    measured: list[dict[str, Any]] = [
        {"engine": engine, "s": taken, "output tokens/s": made / taken}
        for engine, taken in timed.items()
    ]
    print_table(measured)
    ratio = timed[name] / timed["kvrelay"]
    print(f"{ratio:.2f} times the tokens per second (aim: {AIM})")
    write_json("gpu_throughput.json", {**vars(chosen), "rows": measured, "ratio": ratio})


if __name__ == "__main__":
    main()
