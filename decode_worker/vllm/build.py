"""From a `WorkerSpec` to a worker that computes with vLLM, in the process that becomes it.

The process runs in the environment of `engine.python`, which has vLLM and its torch; of ours it
needs the source alone, and xxhash and NIXL, by which KV is checked and moved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from msgspec import structs

from kvrelay.decode_worker.vllm.engine import VllmEngine
from kvrelay.decode_worker.vllm.node import FIXED_WEIGHTS, VllmWorker
from kvrelay.engine.config import EngineSection
from kvrelay.engine.host import Deliver, Executor, first_line
from kvrelay.engine.identity import VLLM, files_of, telling_arguments
from kvrelay.engine.kv.window import Windows
from kvrelay.engine.model.config import ModelConfig, check_unchanged, versions_of
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.parallel.shard import Shard
from kvrelay.engine.support import drafts_of, notices_of, tiers_of
from kvrelay.kvtransfer.agent import AgentError
from kvrelay.worker.kv_plan import (
    BuildError,
    KVPlan,
    check_memory,
    fit_gpu,
    model_config,
    most_dtype,
    plan_kv,
    plan_traits,
    resolve_max_model_len,
)
from kvrelay.worker.node import RoleHandler
from kvrelay.worker.process import BuiltWorker
from kvrelay.worker.spec import BuildOptions, MakeAgent, WorkerSpec

Roles = Sequence[type[RoleHandler]]
NEEDED = {
    "xxhash": ("xxhash",),
    "nixl": ("nixl_cu13", "nixl_cu12"),
}  # by modules, any of which will do
VLLM_KV_DTYPES = {"float8_e4m3": "fp8_e4m3"}
CPU_BLOCK = 32  # vLLM's attention on CPUs takes multiples of it


def build(spec: WorkerSpec, roles: Roles, make_agent: MakeAgent | None = None) -> BuiltWorker:
    """Load the model; takes a minute, most of it vLLM's own imports. `roles`: what it does with a
    request; `make_agent`: as in BuildOptions. Raises BuildError."""
    if spec.weights is not None:
        raise BuildError(f"{spec.weights.name}: {FIXED_WEIGHTS}")
    _check_environment(spec.engine.python)
    engine = spec.engine.sized(gpu=spec.on_gpu)
    try:
        path = spec.find_model()
        before = versions_of(files_of(path, VLLM))
        shape = model_config(path, engine)
    except ModelError as error:
        raise BuildError(str(error)) from error
    dtype = most_dtype(spec.model.dtype, engine)
    plan = plan_kv(shape, engine, dtype, spec.model.quantization, on_gpu=spec.on_gpu)
    if spec.on_gpu and plan.is_copied:
        from kvrelay.engine.model.device import gpu_bytes  # not where clusters are planned

        _check_copy(fit_gpu(plan, shape, engine, dtype, gpu_bytes()))
    longest = resolve_max_model_len(shape, engine, plan)
    engine = structs.replace(engine, num_blocks=plan.num_blocks, max_model_len=longest)
    check_blocks(engine, on_gpu=spec.on_gpu)
    os.environ.update(environment(engine, on_gpu=spec.on_gpu))
    try:
        vllm = VllmEngine(spec.worker, arguments(spec, engine, path), copies=plan.is_copied)
    except ImportError as error:
        raise BuildError(f"engine.python = '{engine.python}' has no vLLM: {error}") from error
    except (TypeError, ValueError) as error:
        raise BuildError(f"vLLM refuses its settings: {first_line(error)}") from error
    built = _built(replace(spec, engine=engine), path, shape, plan, vllm, roles, make_agent)
    try:
        check_unchanged(before, files_of(path, VLLM))
    except ModelError as error:
        raise BuildError(str(error)) from error
    return built


def _check_copy(plan: KVPlan) -> None:
    """Whether the machine has memory for the copy of KV that a GPU will hold, before the model is
    loaded. Raises BuildError."""
    check_memory([], psutil.virtual_memory().available, plan.copied_bytes)


def _built(
    spec: WorkerSpec,
    path: Path,
    shape: ModelConfig,
    plan: KVPlan,
    vllm: VllmEngine,
    roles: Roles,
    make_agent: MakeAgent | None,
) -> BuiltWorker:
    from kvrelay.kvtransfer.movers.pool import make_host_arena
    from kvrelay.worker.build import with_tiers
    from kvrelay.worker.threads import TransferLoops
    from kvrelay.worker.transfers import transfers_of, worker_config

    cache, model = vllm.config.cache_config, vllm.config.model_config
    num_blocks = (cache.num_gpu_blocks or 1) - 1  # one of them is its null block
    num_heads = model.get_num_kv_heads(vllm.config.parallel_config)
    copied = vllm.copies.spec(cache.block_size, num_heads)
    whole, traits = Windows.of(cache.block_size).groups[0], plan_traits(spec.engine, plan.spec)
    spec = replace(spec, engine=structs.replace(spec.engine, block_size=cache.block_size))
    plan = replace(
        plan, spec=copied or plan.spec, num_blocks=num_blocks, window=whole, group_windows=()
    )
    facts = engine_facts(spec.engine.arguments, vllm, on_gpu=spec.on_gpu)
    digest = shape.digest(path, model.max_model_len, runs=VLLM, engine=facts)
    if copied is not None:  # its weights are there; memory for its KV comes into use as it fills
        plan = with_tiers(replace(plan, weights_bytes=0), spec)
    longest = min(model.max_model_len, num_blocks * cache.block_size)
    config = worker_config(spec, plan, longest, digest)
    config = structs.replace(config, num_packed_blocks=0)
    asked = [*drafts_of(spec.engine), *tiers_of(spec.tiers)]
    notices = tuple(notices_of(asked, traits))
    if copied is None:
        node = VllmWorker(config, roles, copies=False, edits=vllm.edits)
        info = replace(config.info(), hands_over=False)
        return BuiltWorker(node, info, vllm.start, notices)
    pool = make_host_arena(num_blocks, config.bytes_per_block, spec.on_gpu)
    try:
        options = BuildOptions(make_agent)
        own = transfers_of(spec, config, plan, pool, Shard(0, 1), options)
    except AgentError as error:
        raise BuildError(str(error)) from error
    vllm.copies.use(pool, own.share)

    def make_executor(deliver: Deliver) -> Executor:
        return vllm.start(deliver, TransferLoops(own.copies, deliver, spec.worker))

    # Its blocks are in the order of vLLM, which is not that of four bits.
    config = structs.replace(own.config, quantizes=False)
    node = VllmWorker(config, roles, own.facts.records, edits=vllm.edits)
    return BuiltWorker(
        node, config.info(), make_executor, (*notices, *own.notices), leave_kv=own.leave_kv
    )


def _check_environment(python: str) -> None:
    """Raises BuildError where a package is missing that moves KV."""
    missing = [name for name in NEEDED if not any(map(find_spec, NEEDED[name]))]
    if missing:
        raise BuildError(
            f"engine.python = '{python}' lacks {' and '.join(missing)}, which check and move KV:"
            f" {python} -m pip install {' '.join(missing)}"
        )


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
    if spec.model.quantization != "none":
        found["quantization"] = spec.model.quantization
    if engine.kv_dtype != "auto":
        found["kv_cache_dtype"] = VLLM_KV_DTYPES[engine.kv_dtype]
    if spec.on_gpu:
        found["gpu_memory_utilization"] = engine.gpu_memory_utilization
        found["enforce_eager"] = not engine.cuda_graphs
    return found | engine.arguments


def engine_facts(arguments: Mapping[str, Any], vllm: VllmEngine, *, on_gpu: bool) -> dict[str, Any]:
    """All that decides what its blocks hold, beside the model: who reads them has the same."""
    from kvrelay.engine.model.device import cpu_tiles

    return {
        "version": vllm.version,
        "dtype": str(vllm.config.model_config.dtype),
        "arguments": telling_arguments(arguments),
        "attention": vllm.attention_backends,
        "layers": vllm.copies.form(),
        # vLLM's attention on CPUs keeps keys in the order of the instructions that read them.
        "device": "cuda" if on_gpu else cpu_tiles(),
    }
