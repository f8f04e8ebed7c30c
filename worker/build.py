"""From a `WorkerSpec` to a worker that could run, in the process that becomes it.

The model is loaded, what moves its KV is opened, and the node is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.host import Deliver, Executor
from kvrelay.engine.model.backends import Backends
from kvrelay.engine.model.config import check_unchanged, files_of, versions_of
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.parallel.shard import Shard
from kvrelay.engine.node import Node
from kvrelay.kvtransfer.tiers.blocks import StoreRecords
from kvrelay.worker.kv_plan import (
    BuildError,
    KVPlan,
    auto_host_bytes,
    check_memory,
    model_config,
    plan_kv,
    plan_tiers,
    resolve_max_model_len,
)
from kvrelay.worker.process import BuiltWorker
from kvrelay.worker.ranks import Ranks
from kvrelay.worker.spec import BuildOptions, WorkerSpec
from kvrelay.worker.threads import WorkerThreads, at_low_priority
from kvrelay.worker.transfers import MakeRankTransfers, open_transfers

log = logging.getLogger("kvrelay.build")

MakeWorker = Callable[[WorkerConfig, StoreRecords], Node]


def build(spec: WorkerSpec, make_worker: MakeWorker, options: BuildOptions) -> BuiltWorker:
    """Load the model and make the worker; takes seconds. Raises BuildError."""
    # It takes a core for seconds, which the worker that has taken over the streams needs.
    at_low_priority(lambda: import_module("kvrelay.engine.model.runner"))
    from kvrelay.engine.model.device import gpu_bytes
    from kvrelay.engine.model.runner import ModelRunner
    from kvrelay.engine.model.step_executor import StepExecutor
    from kvrelay.kvtransfer.agent import AgentError

    spec = replace(spec, engine=spec.engine.sized(gpu=spec.on_gpu))
    try:
        path = spec.find_model()
        before = versions_of(files_of(path))
        model = model_config(path, spec.engine)
        dtype = spec.dtype
        if dtype == "auto":
            dtype = ModelRunner.default_dtype("cuda" if spec.on_gpu else "cpu")
        plan = plan_kv(model, spec.engine, dtype, spec.quantization)
        available_bytes = psutil.virtual_memory().available
        num_machines = 1 + len(spec.further)
        needed_bytes = 0 if spec.on_gpu else plan.needed_bytes // num_machines
        free_bytes = available_bytes - needed_bytes
        host_bytes = spec.host_bytes
        if not host_bytes:  # each of its machines gives as much as this one
            gpus = spec.num_ranks_here * gpu_bytes() if spec.on_gpu else 0
            here = auto_host_bytes(plan, spec.num_sharing_host, free_bytes, gpus)
            host_bytes = here * num_machines
        plan = plan_tiers(plan, host_bytes, spec.disk_bytes)
        if num_machines == 1:  # else this one has a part
            check_memory([] if spec.on_gpu else [plan], available_bytes, plan.host_bytes)
        max_model_len = resolve_max_model_len(model, spec.engine, plan)
        companion = MakeRankTransfers(spec, plan)
        runner, parallel = open_runner(spec, path, plan, dtype, max_model_len, companion)
        first = Shard(0, spec.engine.tensor_parallel_size)
        own = open_transfers(spec, path, plan, runner, first, options)
        check_unchanged(before, files_of(path))
    except (ModelError, AgentError) as error:
        raise BuildError(str(error)) from error
    ranks = None if parallel is None else Ranks(own, parallel)
    config = own.config if ranks is None else ranks.config()
    records = own.facts.records if ranks is None else ranks.records
    notices = [*runner.notices, *(own.notices if ranks is None else ranks.notices())]
    for notice in notices:
        log.warning("%s: %s", spec.worker, notice)
    steps = StepExecutor(
        runner.execute,
        own.checksums,
        launch_step=runner.launch,
        begin_checksums=own.begin_checksums,
        add_ranks=ranks.add_checksums if ranks else None,
        close=parallel.close if parallel else None,
        prepare_grammar=runner.grammars.prepare,
        is_device_lost=runner.is_device_lost,
    )

    def make_executor(deliver: Deliver) -> Executor:
        return WorkerThreads(
            steps,
            own.memory,
            {tier: own.storage[tier] for tier in records},
            deliver,
            spec.worker,
            join_ranks=ranks.join if ranks else None,
            shares_cores=spec.num_peers > 0 and not spec.on_gpu,
        )

    lost, worker = parallel.when_lost if parallel else None, make_worker(config, records)
    return BuiltWorker(worker, config.info(), make_executor, tuple(notices), lost)


def open_runner(
    spec: WorkerSpec,
    path: Path,
    plan: KVPlan,
    dtype: str,
    max_model_len: int,
    companion: MakeRankTransfers | None = None,
) -> tuple[Any, Any]:
    """(what runs steps, the same if it has processes of its own that may be lost, else None). Both
    have the interface of ModelRunner. `companion`: of each rank but 0. Raises ModelError."""
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
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "memory_share": engine.gpu_memory_utilization,
        "cuda_graphs": engine.cuda_graphs,
        "backends": Backends(engine.attention_backend, engine.moe_backend),
    }
    if size == 1:
        from kvrelay.engine.model.runner import ModelRunner

        # Others of the machine may be serving; one that takes the streams over goes first.
        return at_low_priority(lambda: ModelRunner(path, **options)), None
    from kvrelay.engine.model.parallel.runner import ParallelRunner

    runner = ParallelRunner(
        path,
        size,
        companion=companion,
        host=spec.host,
        further=spec.rank_hosts,
        find_model=spec.find_model,
        **options,
    )
    return runner, runner
