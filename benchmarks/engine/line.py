"""One engine behind its standard input and output, for `benchmarks.engine.cpu`.

`python -m benchmarks.engine.line kvrelay|vllm SPEC`: each line in asks for tokens after some
prompts, `{"prompts": [[ids]], "output": n}`; each line out says how long it took. The process ends
with its input. With vLLM it runs in an interpreter that has that package, and uses nothing else of
KVRelay.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]


def kvrelay(spec: dict[str, Any]) -> Generate:
    from kvrelay.cluster.prepare import prepare_model
    from kvrelay.lab.bench.engine import EngineSpec, LoneWorker, greedy

    asked = EngineSpec(
        model=spec["model_dir"],
        batches=tuple(spec["batches"]),
        input_len=spec["input_len"],
        output_len=spec["output_len"],
        prefills=tuple(spec["prefills"]),
        dtype=spec["dtype"],
        quantization=spec["quantization"],
        device="cpu",
        threads=spec["threads"],
        max_num_batched_tokens=spec["max_num_batched_tokens"],
    )
    config = asked.config()
    model = prepare_model(config, 1, lambda _: None)
    worker = LoneWorker(config, model)

    def generate(prompts: Prompts, output_len: int) -> list[list[int]]:
        return [answer.tokens for answer in worker.generate(prompts, greedy(output_len))]

    return generate


def vllm(spec: dict[str, Any]) -> Generate:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=spec["model_dir"],
        dtype=spec["dtype"],
        max_model_len=spec["max_model_len"],
        max_num_batched_tokens=spec["max_num_batched_tokens"],
        block_size=spec["block_size"],
        num_gpu_blocks_override=spec["num_blocks"],
        enable_prefix_caching=False,
        enforce_eager=spec["eager"],
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )

    def generate(prompts: Prompts, output_len: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = engine.generate(asked, params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return generate


def main(name: str, text: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints does not get between the answers
    generate = {"kvrelay": kvrelay, "vllm": vllm}[name](json.loads(text))
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        tokens = generate(asked["prompts"], asked["output"])
        elapsed_s = time.perf_counter() - began
        assert [len(each) for each in tokens] == [asked["output"]] * len(tokens)
        out.write(json.dumps({"seconds": elapsed_s, "tokens": tokens}) + "\n")
        out.flush()
    out.close()
    os._exit(0)  # not by way of other libraries' threads


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
