"""From a `WorkerSpec` to a worker that computes with vLLM, in the process that becomes it.

The process runs in the environment of `engine.python`, which has vLLM and its torch; of ours it
needs the source alone. What it needs beside that is in every environment that has vLLM.
"""

from __future__ import annotations

import os
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from msgspec import structs

from kvrelay.decode_worker.vllm.engine import VllmEngine
from kvrelay.decode_worker.vllm.node import FIXED_WEIGHTS, VllmWorker
from kvrelay.engine.config import EngineSection, WorkerConfig
from kvrelay.engine.host import Deliver, Executor, first_line
from kvrelay.engine.kv.tier import Retention
from kvrelay.worker.kv_plan import BuildError, model_config, plan_kv, resolve_max_model_len
from kvrelay.worker.process import BuiltWorker
from kvrelay.worker.spec import WorkerSpec

CPU_BLOCK = 32  # vLLM's attention on CPUs takes multiples of it


def build(spec: WorkerSpec) -> BuiltWorker:
    """Load the model; takes a minute, most of it vLLM's own imports. Raises BuildError."""
    if spec.weights is not None:
        raise BuildError(f"{spec.weights.name}: {FIXED_WEIGHTS}")
    engine = spec.engine.sized(gpu=spec.on_gpu)
    path = spec.find_model()
    shape = model_config(path, engine)
    dtype = spec.model.dtype
    plan = plan_kv(shape, engine, "float32" if dtype == "auto" else dtype, on_gpu=spec.on_gpu)
    longest = resolve_max_model_len(shape, engine, plan)
    engine = structs.replace(engine, num_blocks=plan.num_blocks, max_model_len=longest)
    check_blocks(engine, on_gpu=spec.on_gpu)
    os.environ.update(environment(engine, on_gpu=spec.on_gpu))
    try:
        vllm = VllmEngine(arguments(spec, engine, path))
    except ImportError as error:
        raise BuildError(f"engine.python = '{engine.python}' has no vLLM: {error}") from error
    except (TypeError, ValueError) as error:
        raise BuildError(f"vLLM refuses its settings: {first_line(error)}") from error
    cache, model = vllm.config.cache_config, vllm.config.model_config
    num_blocks = (cache.num_gpu_blocks or 1) - 1  # one of them is its null block
    config = WorkerConfig(
        **{
            **structs.asdict(engine),
            "num_blocks": num_blocks,
            "block_size": cache.block_size,
            "max_model_len": min(model.max_model_len, num_blocks * cache.block_size),
        },
        node_id=spec.worker,
        role=spec.role,
        epoch=spec.epoch,
        bytes_per_block=plan.spec.bytes_per_block,
        fingerprint=fingerprint(path, str(model.dtype), cache.block_size),
        retention=Retention(spec.tiers.retention_s),
        cores="" if spec.on_gpu else spec.machine,
    )

    def make_executor(deliver: Deliver) -> Executor:
        return vllm.start(deliver)

    info = replace(config.info(), hands_over=False)
    return BuiltWorker(VllmWorker(config), info, make_executor)


def check_blocks(engine: EngineSection, *, on_gpu: bool) -> None:
    """Raises BuildError where vLLM has no attention for blocks of this size."""
    if not on_gpu and engine.block_size % CPU_BLOCK:
        raise BuildError(
            f"engine.block_size = {engine.block_size}: vLLM's attention on CPUs takes multiples of"
            f" {CPU_BLOCK}; set it to {CPU_BLOCK}"
        )


def environment(engine: EngineSection, *, on_gpu: bool) -> dict[str, str]:
    """Settings of vLLM that are variables of its process."""
    found = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if on_gpu:
        return found
    # Bound to as many cores as it has threads, it would be to those of the other workers as well.
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    return {**found, **bind, "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}


def arguments(spec: WorkerSpec, engine: EngineSection, path: Path) -> dict[str, Any]:
    """What vLLM's EngineArgs get; those of engine.arguments go before all others."""
    found: dict[str, Any] = {
        "model": str(path),
        "dtype": spec.model.dtype,
        "max_model_len": engine.max_model_len,
        "block_size": engine.block_size,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": max(engine.max_num_batched_tokens, engine.max_num_seqs),
        "tensor_parallel_size": engine.tensor_parallel_size,
        "enable_prefix_caching": True,
        "structured_outputs_config": {"backend": "guidance"},
    }
    if engine.num_blocks:
        found["num_gpu_blocks_override"] = engine.num_blocks + 1  # on CPUs as well
    if spec.on_gpu:
        found["gpu_memory_utilization"] = engine.gpu_memory_utilization
    return found | engine.arguments


def fingerprint(path: Path, dtype: str, block_size: int) -> bytes:
    """Names what its blocks hold, for the hashes that routers know them by. No other worker's are
    like them, whatever its model: none of ours reads vLLM's blocks."""
    digest = blake2b(f"{dtype} {block_size}\n".encode(), digest_size=16, person=b"kvrelay-vllm")
    digest.update((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as opened:  # the names and places of its tensors
            digest.update(opened.read(int.from_bytes(opened.read(8), "little")))
    return digest.digest()
