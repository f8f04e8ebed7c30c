"""The composition root: from configuration to a worker that runs.

`prepare_model` finds the checkpoint and plans its KV cache, without torch, wherever the cluster is
started; `build_worker` loads the model, registers the KV pool and the host arena with the transfer
agent, opens the disk store and makes the node, in the process that becomes the worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from cluster.config import Config, EngineSection
from cluster.runtime.host import Deliver, Executor
from cluster.worker.devices import sized
from cluster.worker.disk_tier import NoHostMemory, open_disk_tier
from cluster.worker.kv_plan import (
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
from cluster.worker.node import make_worker
from cluster.worker.process import BuiltWorker
from cluster.worker.threads import WorkerThreads, giving_way
from engine.config import WorkerConfig
from engine.kv.tier import DEFAULT_RETENTION, Retention, Tier
from engine.model.checkpoint.resolve import resolve_model
from engine.model.config import ModelConfig
from engine.model.errors import ModelError
from engine.model.parallel.shard import check_divides
from engine.node import NodeId
from engine.stats import Role

if TYPE_CHECKING:
    from engine.model.step_executor import StepExecutor

log = logging.getLogger("kvrelay.build")

Progress = Callable[[str], None]

LOAD_BYTES_PER_S = 1e8  # of weights, from the slowest disk that is worth waiting for


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything that a process needs to become a worker."""

    cluster: str  # name of the cluster, for operators
    worker: NodeId
    role: Role
    epoch: int
    model_dir: str  # where the launcher found the model; other machines may have to find it
    model_name: str
    cache_dir: str
    dtype: str
    device: str
    on_gpu: bool
    threads: int  # 0: as the runner chooses
    engine: EngineSection
    host_bytes: int = 0  # of this worker's tiers; 0: no such tier
    num_sharing_host: int = 0  # workers of its machine among which a host tier of auto is divided
    disk_bytes: int = 0
    disk_path: str = ""  # "": in the user's cache
    retention_s: float = DEFAULT_RETENTION.keep_s
    disk_after_s: float = 2.0
    num_peers: int = 0  # other workers of the cluster
    quantization: str = "none"
    num_gpus: int = 0  # that it is given
    machine: str = ""  # its id

    @property
    def node(self) -> NodeId:
        return self.worker


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """For tests and measurements: what to build a worker from, where it is not the usual."""

    make_agent: Callable[[NodeId, Any, Any], Any] | None = None  # (name, pool, host); None: NIXL
    corrupt: Callable[..., None] | None = None  # given to the TransferExecutors


@dataclass(frozen=True, slots=True)
class PreparedModel:
    path: Path
    config: ModelConfig
    served_name: str
    max_model_len: int
    plan: KVPlan

    @property
    def load_s(self) -> float:
        """How long its weights may take to be read."""
        return self.plan.weights_bytes / LOAD_BYTES_PER_S


def prepare_model(
    config: Config, num_workers_here: int, progress: Progress, *, on_gpu: bool = False
) -> PreparedModel:
    """The model on disk, and the plan of its KV cache. Checks that `num_workers_here` fit into the
    memory of this machine; 0 if they run elsewhere. On GPUs only the host tier has to. May take
    minutes. Raises BuildError."""
    section, engine = config.model, sized(config.engine, gpu=on_gpu)
    try:
        cache_dir = Path(section.cache_dir) if section.cache_dir else None
        path = resolve_model(section.name, cache_dir=cache_dir, progress=progress)
        model = model_config(path, engine)
        check_divides(model, engine.tensor_parallel_size)
    except ModelError as error:
        raise BuildError(str(error)) from error
    # The workers choose what "auto" is; float32 is the most that it can cost.
    dtype = "float32" if section.dtype == "auto" else section.dtype
    plan = plan_kv(model, engine, dtype, section.quantization)
    host_bytes = int(config.tiers.set_host_gib * GIB) if num_workers_here else 0
    num_in_host = 0 if on_gpu else num_workers_here
    check_memory(plan, num_in_host, psutil.virtual_memory().available, host_bytes)
    return PreparedModel(
        path=path,
        config=model,
        served_name=section.served_name or Path(section.name).name.removesuffix(".gguf"),
        max_model_len=resolve_max_model_len(model, engine, plan),
        plan=plan,
    )


def build_worker(spec: WorkerSpec, options: BuildOptions | None = None) -> BuiltWorker:
    """Load the model and make the worker; takes seconds. Raises BuildError."""
    # It takes a core for seconds, which the worker that has taken over the streams needs.
    giving_way(lambda: import_module("engine.model.runner"))
    from engine.model.quantize import scheme
    from engine.model.runner import ModelRunner
    from kvtransfer.agent import AgentError
    from kvtransfer.agents.pool import block_bytes
    from kvtransfer.executor import TransferExecutor
    from kvtransfer.layout import BlockLayout

    options = options or BuildOptions()
    spec = replace(spec, engine=sized(spec.engine, gpu=spec.on_gpu))
    try:
        path = _model_dir(spec)
        model = model_config(path, spec.engine)
        dtype, device_type = spec.dtype, "cuda" if spec.on_gpu else "cpu"
        if dtype == "auto":
            dtype = ModelRunner.default_dtype(device_type)
        plan = plan_kv(model, spec.engine, dtype, spec.quantization)
        available_bytes = psutil.virtual_memory().available
        free_bytes = available_bytes - (0 if spec.on_gpu else plan.needed_bytes)
        host_bytes = spec.host_bytes or auto_host_bytes(plan, spec.num_sharing_host, free_bytes)
        plan = plan_tiers(plan, host_bytes, spec.disk_bytes)
        check_memory(plan, 0 if spec.on_gpu else 1, available_bytes, plan.host_bytes)
        max_model_len = resolve_max_model_len(model, spec.engine, plan)
        runner, ranks = open_runner(spec, path, plan, dtype, max_model_len)
        # On a GPU both may follow from the memory that is left.
        plan, max_model_len = replace(plan, num_blocks=len(runner.kv_pool)), runner.max_model_len
        memory: dict[Tier, Any] = {Tier.DEVICE: runner.kv_pool}
        if plan.num_host_blocks:
            memory[Tier.HOST] = make_arena(plan, on_gpu=spec.on_gpu)
        make_agent = options.make_agent or _nixl_agent
        agent = make_agent(spec.worker, runner.kv_pool, memory.get(Tier.HOST))
        quantization = scheme(spec.quantization, device_type)
        digest = model.digest(path, max_model_len, quantization)
    except (ModelError, AgentError) as error:
        raise BuildError(str(error)) from error
    config = worker_config(spec, plan, max_model_len, digest, agent.metadata())
    share = BlockLayout(plan.spec).share(0, 1)
    pools = {tier: block_bytes(pool, share) for tier, pool in memory.items()}
    try:
        disk, notices = open_disk_tier(
            config, spec.disk_path, memory, pools, share, options.corrupt
        )
    except NoHostMemory as error:
        raise BuildError(
            f"tiers.disk_gib without tiers.host_gib: {spec.worker} has a GPU without GPUDirect"
            " Storage, whose KV reaches the disk by host memory; set tiers.host_gib as well"
        ) from error
    notices = [*runner.notices, *notices]
    for notice in notices:
        log.warning("%s: %s", spec.worker, notice)
    if disk is None:
        config = replace(config, num_disk_blocks=0)
    storage = {} if disk is None else {Tier.DISK: disk}
    records = {tier: each.records for tier, each in storage.items()}
    steps = _step_executor(runner, ranks, pools[Tier.DEVICE], share)
    moves = TransferExecutor(
        spec.worker, spec.epoch, agent, pools, share=share, corrupt=options.corrupt
    )

    def make_executor(deliver: Deliver) -> Executor:
        shares = spec.num_peers > 0 and not spec.on_gpu
        return WorkerThreads(steps, moves, storage, deliver, spec.worker, shares_cores=shares)

    when_lost = ranks.when_lost if ranks else None
    return BuiltWorker(
        make_worker(config, records), config.info(), make_executor, tuple(notices), when_lost
    )


def _step_executor(runner: Any, ranks: Any, pool: Any, share: Any) -> StepExecutor:
    """`pool`: the device's, as bytes."""
    from engine.model.step_executor import StepExecutor
    from kvtransfer.checksum import checksum_blocks

    return StepExecutor(
        runner.execute,
        partial(checksum_blocks, pool, share=share),
        close=ranks.close if ranks else None,
        prepare_grammar=runner.grammars.prepare,
        is_device_lost=runner.is_device_lost,
    )


def make_arena(plan: KVPlan, *, on_gpu: bool) -> Any:
    """Memory of the host tier, and behind it what the disk of a GPU needs. Raises AgentError."""
    from kvtransfer.agents.pool import make_host_arena
    from kvtransfer.agents.staged import STAGING_BLOCKS

    spare = STAGING_BLOCKS if on_gpu and plan.num_disk_blocks else 0
    num_blocks = plan.num_host_blocks + spare
    return make_host_arena(num_blocks, plan.spec.bytes_per_block, pinned=on_gpu)


def worker_config(
    spec: WorkerSpec, plan: KVPlan, max_model_len: int, model_digest: bytes, metadata: bytes
) -> WorkerConfig:
    from kvtransfer.layout import compatibility, fingerprint

    engine = spec.engine
    return WorkerConfig(
        node_id=spec.worker,
        role=spec.role,
        epoch=spec.epoch,
        num_blocks=plan.num_blocks,
        block_size=engine.block_size,
        bytes_per_block=plan.spec.bytes_per_block,
        max_model_len=max_model_len,
        fingerprint=fingerprint(model_digest, plan.spec),
        agent_metadata=metadata,
        compatibility=compatibility(model_digest, plan.spec),
        num_host_blocks=plan.num_host_blocks,
        num_disk_blocks=plan.num_disk_blocks,
        retention=Retention(spec.retention_s),
        disk_after_s=spec.disk_after_s,
        window=plan.window.size,
        num_sinks=plan.window.num_sinks,
        cores="" if spec.on_gpu else spec.machine,
        guard=engine.guard,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        num_speculative_tokens=engine.num_speculative_tokens,
        itl_target_s=engine.itl_target_ms / 1e3,
        max_waiting=engine.max_waiting,
        step_timeout_s=engine.step_timeout_s,
        max_failed_steps=engine.max_failed_steps,
        lease_s=engine.lease_s,
        handoff_timeout_s=engine.handoff_timeout_s,
        read_timeout_s=engine.read_timeout_s,
        read_floor_s=engine.read_floor_s,
    )


def _model_dir(spec: WorkerSpec) -> Path:
    path = Path(spec.model_dir)
    if path.is_dir():
        return path
    cache_dir = Path(spec.cache_dir) if spec.cache_dir else None
    return resolve_model(spec.model_name, cache_dir=cache_dir, progress=log.info)


def _nixl_agent(name: NodeId, pool: Any, host: Any) -> Any:
    from kvtransfer.agents.nixl import NixlAgent

    return NixlAgent(name, pool, host=host)


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
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "memory_share": engine.gpu_memory_utilization,
        "cuda_graphs": engine.cuda_graphs,
    }
    if size == 1:
        from engine.model.runner import ModelRunner

        # Others of the machine may be serving; one that takes the streams over goes first.
        return giving_way(lambda: ModelRunner(path, **options)), None
    if spec.on_gpu and (spec.num_peers or spec.host_bytes or spec.disk_bytes):
        raise ModelError(
            f"engine.tensor_parallel_size = {size} on GPUs serves without KV transfer: it needs"
            " cluster.prefill = 0, cluster.decode = 1, tiers.host_gib = 0 and tiers.disk_gib = 0"
        )
    from engine.model.parallel.runner import ParallelRunner

    runner = ParallelRunner(path, size, **options)
    return runner, runner
