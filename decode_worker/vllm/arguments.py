"""What vLLM gets of our settings: its EngineArgs, and variables of its process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvrelay.engine.config import EngineSection, ModelSection

VLLM_KV_DTYPES = {"float8_e4m3": "fp8_e4m3"}
# How many processes of vLLM share a model, and by what: none of it changes what is computed.
SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
    "enable_expert_parallel",
    "distributed_executor_backend",
)
OF_SERVING = ("max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override")


def environment(*, on_gpu: bool) -> dict[str, str]:
    """Settings of vLLM that are variables of its process."""
    found = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if on_gpu:
        return found
    # Bound to as many cores as it has threads, it would be to those of the other workers as well.
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    return {**found, **bind, "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}


def arguments(
    model: ModelSection, engine: EngineSection, path: Path, *, on_gpu: bool
) -> dict[str, Any]:
    """What vLLM's EngineArgs get; those of engine.arguments go before all others."""
    found: dict[str, Any] = {
        "model": str(path),
        "dtype": model.dtype,
        "block_size": engine.block_size,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": max(engine.max_num_batched_tokens, engine.max_num_seqs),
        "tensor_parallel_size": engine.tensor_parallel_size,
        "enable_prefix_caching": True,
        "structured_outputs_config": {"backend": "guidance"},
    }
    if engine.pools:  # a prompt is computed whole, and nothing of it is found again
        found["enable_prefix_caching"] = False
        del found["max_num_batched_tokens"]
    if engine.max_model_len:
        found["max_model_len"] = engine.max_model_len
    if engine.num_blocks:
        found["num_gpu_blocks_override"] = engine.num_blocks + 1  # on CPUs as well
    elif engine.kv_cache_gib:
        num_bytes = int(engine.kv_cache_gib * (1 << 30))
        found["kv_cache_memory_bytes"] = num_bytes // num_processes(engine)  # each rank's
    if model.quantization != "none":
        found["quantization"] = model.quantization
    if engine.kv_dtype != "auto":
        found["kv_cache_dtype"] = VLLM_KV_DTYPES[engine.kv_dtype]
    # On CPUs what 0.32 compiles in bfloat16 computes other numbers: tokens are not the model's.
    found["enforce_eager"] = not (on_gpu and engine.cuda_graphs)
    if on_gpu:
        found["gpu_memory_utilization"] = engine.gpu_memory_utilization
    return found | engine.arguments


def asked_arguments(
    model: ModelSection, engine: EngineSection, path: Path, *, on_gpu: bool
) -> dict[str, Any]:
    """Those on which the form of KV depends, of one process that would have all of the model."""
    without = {*SIZES, *OF_SERVING, "max_model_len", "kv_cache_memory_bytes"}
    found = arguments(model, engine, path, on_gpu=on_gpu)
    return {name: value for name, value in found.items() if name not in without}


def num_processes(engine: EngineSection) -> int:
    """That one worker has of vLLM, each with a GPU where they are used."""
    return engine.tensor_parallel_size * engine.num_stages
