"""A worker's model, loaded: in the worker's own process, or divided among several."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.model.errors import ModelError

if TYPE_CHECKING:
    from cluster.worker.build import WorkerSpec
    from cluster.worker.kv_plan import KVPlan


def open_runner(
    spec: WorkerSpec, path: Path, plan: KVPlan, dtype: str, max_model_len: int
) -> tuple[Any, Any]:
    """(what runs steps, the same if it has processes of its own that may be lost, else None). Both
    have the interface of ModelRunner. Raises ModelError."""
    engine, size = spec.engine, spec.engine.tensor_parallel_size
    options: dict[str, Any] = {
        "dtype": dtype,
        "kv_dtype": engine.kv_dtype,
        "quantization": spec.quantization,
        "window": engine.window,
        "num_sinks": engine.sinks,
        "guard": engine.guard,
        "device": spec.device,
        "num_blocks": plan.num_blocks,
        "block_size": engine.block_size,
        "num_threads": spec.threads or None,
        "max_model_len": max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "cuda_graphs": engine.cuda_graphs,
    }
    if size == 1:
        from engine.model.runner import ModelRunner

        return ModelRunner(path, **options), None
    if spec.on_gpu and (spec.num_peers or spec.host_bytes or spec.disk_bytes):
        raise ModelError(
            f"engine.tensor_parallel_size = {size} on GPUs serves without KV transfer: it needs"
            " cluster.prefill = 0, cluster.decode = 1, tiers.host_gib = 0 and tiers.disk_gib = 0"
        )
    from engine.model.parallel.runner import ParallelRunner

    runner = ParallelRunner(path, size, **options)
    return runner, runner
