"""The composition root: from configuration to a worker that runs.

`prepare_model` finds the checkpoint and plans its KV cache, without torch, wherever the cluster is
started; `build_worker` loads the model, opens what moves its KV and makes the node, in the process
that becomes the worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
from msgspec import structs

from kvrelay.cluster.config import Config, EngineSection
from kvrelay.cluster.processes.worker_parts import make_worker
from kvrelay.engine.host import Deliver, Executor
from kvrelay.engine.model.backends import Backends
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.engine.model.config import ModelConfig, check_unchanged, files_of, versions_of
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.parallel.shard import Shard, check_divides
from kvrelay.engine.stats import Role
from kvrelay.worker.devices import size_setting, sized
from kvrelay.worker.kv_plan import (
    GIB,
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
from kvrelay.worker.threads import WorkerThreads, giving_way
from kvrelay.worker.transfers import MakeRankTransfers, open_transfers

log = logging.getLogger("kvrelay.build")

Progress = Callable[[str], None]

LOAD_BYTES_PER_S = 1e8  # of weights, from the slowest disk that is worth waiting for


@dataclass(frozen=True, slots=True)
class PreparedModel:
    path: Path
    config: ModelConfig
    served_name: str
    max_model_len: int
    plan: KVPlan  # of the workers with the most ranks

    @property
    def load_s(self) -> float:
        """How long its weights may take to be read."""
        return self.plan.weights_bytes / LOAD_BYTES_PER_S


def prepare_model(
    config: Config,
    num_workers_here: int,
    progress: Progress,
    *,
    num_prefill_here: int = 0,
    on_gpu: bool = False,
) -> PreparedModel:
    """The model on disk, and the plan of its KV cache. Checks that `num_workers_here`, of which
    `num_prefill_here` are started for prefill, fit into the memory of this machine; 0 if they run
    elsewhere. On GPUs only the host tier has to. May take minutes. Raises BuildError."""
    section = config.model
    try:
        cache_dir = Path(section.cache_dir) if section.cache_dir else None
        path = resolve_model(section.name, cache_dir=cache_dir, progress=progress)
        model = model_config(path, config.engine)
        engines = _engines(config, model, on_gpu)
    except ModelError as error:
        raise BuildError(str(error)) from error
    # The workers choose what "auto" is; float32 is the most that it can cost.
    dtype = "float32" if section.dtype == "auto" else section.dtype
    plans = {r: plan_kv(model, each, dtype, section.quantization) for r, each in engines.items()}
    host_bytes = int(config.tiers.set_host_gib * GIB) if num_workers_here else 0
    here = [plans[Role.DECODE]] * (num_workers_here - num_prefill_here)
    here += [plans[Role.PREFILL]] * num_prefill_here if num_prefill_here else []
    check_memory([] if on_gpu else here, psutil.virtual_memory().available, host_bytes)
    return PreparedModel(
        path=path,
        config=model,
        served_name=section.served_name or Path(section.name).name.removesuffix(".gguf"),
        max_model_len=min(resolve_max_model_len(model, engines[r], plans[r]) for r in engines),
        plan=max(plans.values(), key=lambda plan: plan.num_ranks),
    )


def _engines(config: Config, model: ModelConfig, on_gpu: bool) -> dict[Role, EngineSection]:
    """Settings of workers that are started for each role; of prefill workers only where there are
    some. Raises ModelError if their ranks do not divide the model."""
    roles = [Role.PREFILL, Role.DECODE] if config.cluster.prefill else [Role.DECODE]
    engine = sized(config.engine, gpu=on_gpu)
    found = {}
    for role in roles:
        num_ranks = config.ranks_of(role)
        check_divides(model, num_ranks, size_setting(config, role))
        found[role] = structs.replace(engine, tensor_parallel_size=num_ranks)
    return found


def build_worker(spec: WorkerSpec, options: BuildOptions | None = None) -> BuiltWorker:
    """Load the model and make the worker; takes seconds. Raises BuildError."""
    # It takes a core for seconds, which the worker that has taken over the streams needs.
    giving_way(lambda: import_module("kvrelay.engine.model.runner"))
    from kvrelay.engine.model.device import gpu_bytes
    from kvrelay.engine.model.runner import ModelRunner
    from kvrelay.engine.model.step_executor import StepExecutor
    from kvrelay.kvtransfer.agent import AgentError

    options = options or BuildOptions()
    spec = replace(spec, engine=sized(spec.engine, gpu=spec.on_gpu))
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
        if not host_bytes:  # of each of its machines as much as of this one
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
        return giving_way(lambda: ModelRunner(path, **options)), None
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
