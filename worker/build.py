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
from msgspec import structs

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.host import Deliver, Executor
from kvrelay.engine.model.config import check_unchanged, files_of, versions_of
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.parallel.shard import Shard
from kvrelay.engine.node import Node
from kvrelay.kvtransfer.tiers.blocks import StoreRecords
from kvrelay.worker.kv_plan import (
    BuildError,
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
from kvrelay.worker.threads import WorkerThreads, giving_way
from kvrelay.worker.transfers import MakeRankTransfers, open_transfers

log = logging.getLogger("kvrelay.build")

MakeWorker = Callable[[WorkerConfig, StoreRecords], Node]


def build(spec: WorkerSpec, make_worker: MakeWorker, options: BuildOptions) -> BuiltWorker:
    """Load the model and make the worker; takes seconds. Raises BuildError."""
    # It takes a core for seconds, which the worker that has taken over the streams needs.
    giving_way(lambda: import_module("kvrelay.engine.model.runner"))
    from kvrelay.engine.model.device import gpu_bytes
    from kvrelay.engine.model.runner import ModelRunner
    from kvrelay.engine.model.step_executor import StepExecutor
    from kvrelay.kvtransfer.agent import AgentError

    model, engine, on_gpu = spec.model, spec.engine.sized(gpu=spec.on_gpu), spec.on_gpu
    try:
        path = spec.find_model()
        before = versions_of(files_of(path))
        shape = model_config(path, engine)
        if model.dtype == "auto":
            dtype = ModelRunner.default_dtype("cuda" if on_gpu else "cpu")
            model = structs.replace(model, dtype=dtype)
        plan = plan_kv(shape, engine, model.dtype, model.quantization)
        available_bytes = psutil.virtual_memory().available
        num_machines = spec.num_machines
        needed_bytes = 0 if on_gpu else plan.needed_bytes // num_machines
        host_bytes = spec.share_of(spec.tiers.set_host_gib)
        if spec.tiers.host_gib == "auto":  # of each of its machines as much as of this one
            gpus = spec.num_ranks_here * gpu_bytes() if on_gpu else 0
            free_bytes = available_bytes - needed_bytes
            here = auto_host_bytes(plan, spec.num_sharing, free_bytes, gpus)
            host_bytes = here * num_machines
        plan = plan_tiers(plan, host_bytes, spec.share_of(spec.tiers.disk_gib))
        if num_machines == 1:  # else this one has a part
            check_memory([] if on_gpu else [plan], available_bytes, plan.host_bytes)
        longest = resolve_max_model_len(shape, engine, plan)
        engine = structs.replace(engine, num_blocks=plan.num_blocks, max_model_len=longest)
        spec = replace(spec, model=model, engine=engine)
        runner, parallel = open_runner(spec, path, MakeRankTransfers(spec, plan))
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
            shares_cores=spec.num_peers > 0 and not on_gpu,
        )

    lost, worker = parallel.when_lost if parallel else None, make_worker(config, records)
    return BuiltWorker(worker, config.info(), make_executor, tuple(notices), lost)


def open_runner(
    spec: WorkerSpec, path: Path, companion: MakeRankTransfers | None = None
) -> tuple[Any, Any]:
    """(what runs steps, the same if it has processes of its own that may be lost, else None). Both
    have the interface of ModelRunner. `companion`: of each rank but 0. Raises ModelError."""
    if spec.engine.tensor_parallel_size == 1:
        from kvrelay.engine.model.runner import ModelRunner

        # Others of the machine may be serving; one that takes the streams over goes first.
        return giving_way(lambda: ModelRunner(path, spec.model, spec.engine)), None
    from kvrelay.engine.model.parallel.runner import ParallelRunner

    runner = ParallelRunner(
        path,
        spec.model,
        spec.engine,
        companion=companion,
        host=spec.host,
        further=spec.rank_hosts,
        find_model=spec.find_model,
    )
    return runner, runner
