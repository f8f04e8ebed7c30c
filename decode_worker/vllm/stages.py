"""Stages of a pipeline on CPUs, in each process that computes a model.

vLLM 0.32 makes the memory that a later stage receives into as it runs the model without a request.
On CPUs it does that only to compile, so with `enforce_eager` the first step of such a stage raises.
"""

from __future__ import annotations

from typing import Any


def receive_stages(worker: Any) -> bool:
    """Makes that memory in the `worker` of a rank, as vLLM would. Returns False where its vLLM
    receives in another way."""
    if worker.vllm_config.parallel_config.pipeline_parallel_size == 1:
        return True
    runner = worker.model_runner
    if not hasattr(runner, "intermediate_tensors"):
        return False
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens,
            dtype=runner.model_config.dtype,
            device=runner.device,
        )
    return True
