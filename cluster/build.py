"""The composition root: from configuration to a worker that runs.

`prepare_model` finds the checkpoint and plans its KV cache, without torch, wherever the cluster is
started; `build_worker` loads the model, registers the KV pool and the host arena with the transfer
agent, opens the disk store and makes the node, in the process that becomes the worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from cluster.config import Config, EngineSection
from cluster.disk_tier import NoHostMemory, open_disk_tier
from cluster.runtime.host import Deliver, Executor
from cluster.runtime.process import BuiltWorker
from cluster.runtime.threads import WorkerThreads
from decode_worker.worker import DecodeWorker
from engine.config import KVSpec, WorkerConfig
from engine.model.config import ModelConfig, weights_bytes
from engine.model.errors import ModelError
from engine.model.resolve import resolve_model
from engine.node import NodeId
from engine.stats import Role, WorkerInfo
from engine.tier import DEFAULT_RETENTION, Retention, Tier
from kvtransfer.store.folder import slot_bytes
from prefill_worker.worker import PrefillWorker

log = logging.getLogger("kvrelay.build")

GIB = float(1 << 30)
SPARE_BYTES = 500 << 20  # of a worker beside weights and KV: libraries, activations

Progress = Callable[[str], None]


class BuildError(Exception):
    """A worker of this configuration cannot run here; one line for the user."""


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
    disk_bytes: int = 0
    disk_path: str = ""  # "": in the user's cache
    retention_s: float = DEFAULT_RETENTION.keep_s
    disk_after_s: float = 2.0

    @property
    def node(self) -> NodeId:
        return self.worker


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """For tests and measurements: what to build a worker from, where it is not the usual."""

    make_agent: Callable[[NodeId, Any, Any], Any] | None = None  # (name, pool, host); None: NIXL
    corrupt: Callable[..., None] | None = None  # given to the TransferExecutors


@dataclass(frozen=True, slots=True)
class KVPlan:
    """How many blocks a worker gets, and what they cost."""

    spec: KVSpec
    num_blocks: int
    weights_bytes: int
    num_host_blocks: int = 0
    num_disk_blocks: int = 0

    @property
    def host_bytes(self) -> int:
        return self.num_host_blocks * self.spec.bytes_per_block

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.spec.bytes_per_block

    @property
    def needed_bytes(self) -> int:
        return self.kv_bytes + self.weights_bytes + SPARE_BYTES


@dataclass(frozen=True, slots=True)
class PreparedModel:
    path: Path
    config: ModelConfig
    served_name: str
    max_model_len: int
    plan: KVPlan


def prepare_model(config: Config, num_workers_here: int, progress: Progress) -> PreparedModel:
    """The model on disk, and the plan of its KV cache. Checks that `num_workers_here` fit into the
    memory of this machine; 0 if they run elsewhere. May take minutes. Raises BuildError."""
    section = config.model
    try:
        cache_dir = Path(section.cache_dir) if section.cache_dir else None
        path = resolve_model(section.name, cache_dir=cache_dir, progress=progress)
        model = ModelConfig.from_dir(path)
    except ModelError as error:
        raise BuildError(str(error)) from error
    # The workers choose what "auto" is; float32 is the most that it can cost.
    plan = plan_kv(model, config.engine, "float32" if section.dtype == "auto" else section.dtype)
    host_bytes = int(config.tiers.host_gib * GIB) if num_workers_here else 0
    check_memory(plan, num_workers_here, psutil.virtual_memory().available, host_bytes)
    return PreparedModel(
        path=path,
        config=model,
        served_name=section.served_name or Path(section.name).name.removesuffix(".gguf"),
        max_model_len=resolve_max_model_len(model, config.engine, plan),
        plan=plan,
    )


def plan_kv(model: ModelConfig, engine: EngineSection, dtype: str) -> KVPlan:
    """Raises BuildError if the memory for KV does not hold a block."""
    spec = model.kv_spec(engine.block_size, dtype)
    num_blocks = engine.num_blocks or int(engine.kv_cache_gib * GIB) // spec.bytes_per_block
    if num_blocks < 1:
        raise BuildError(
            f"engine.kv_cache_gib = {engine.kv_cache_gib:g}: too little for one KV block"
            f" of {spec.bytes_per_block / GIB:.3f} GiB"
        )
    return KVPlan(spec, num_blocks, weights_bytes(model, dtype))


def plan_tiers(plan: KVPlan, spec: WorkerSpec) -> KVPlan:
    """`plan` with the tiers of `spec`. Raises BuildError where one would not hold a block."""
    per_block = plan.spec.bytes_per_block
    counts = {}
    for name, size, slot in (
        ("host", spec.host_bytes, per_block),
        ("disk", spec.disk_bytes, slot_bytes(per_block)),
    ):
        counts[name] = size // slot
        if size and not counts[name]:
            raise BuildError(
                f"tiers.{name}_gib: this worker's share of {size / GIB:g} GiB is too little for one"
                f" KV block of {plan.spec.bytes_per_block / GIB:.3f} GiB; raise it, or set it to 0"
            )
    return replace(plan, num_host_blocks=counts["host"], num_disk_blocks=counts["disk"])


def check_memory(plan: KVPlan, num_workers: int, available_bytes: int, host_bytes: int = 0) -> None:
    """Raises BuildError if `num_workers`, and `host_bytes` of KV below them, need more than is
    available."""
    needed = num_workers * plan.needed_bytes + host_bytes
    if needed <= available_bytes:
        return
    who = f"{num_workers} worker(s) need" if num_workers else "the host tier needs"
    parts = (
        f"each {plan.weights_bytes / GIB:.2f} weights + {plan.kv_bytes / GIB:.2f} KV"
        f" + {SPARE_BYTES / GIB:.2f} spare"
    )
    host = f" + {host_bytes / GIB:.2f} for the host tier" if host_bytes else ""
    detail = f" ({parts}{host})" if num_workers else ""
    lower = ", tiers.host_gib" if host_bytes else ""
    raise BuildError(
        f"too little memory: {who} {needed / GIB:.1f} GiB{detail}, {available_bytes / GIB:.1f} GiB"
        f" are available; lower engine.kv_cache_gib{lower} or the number of workers"
    )


def kv_lines(model: ModelConfig, infos: Sequence[WorkerInfo]) -> list[str]:
    """For people: what a token of KV costs and how many tokens fit into a worker and its tiers."""
    info = infos[0]
    per_token = info.bytes_per_block // info.block_size
    value_bytes = per_token // (2 * model.num_layers * model.num_kv_heads * model.head_dim)
    lines = [
        f"KV cache: {per_token:,} bytes a token = 2 (K, V) x {model.num_layers} layers"
        f" x {model.num_kv_heads} KV heads x {model.head_dim} head_dim x {value_bytes} bytes",
        f"          {_blocks_text(info, info.num_blocks)} in each worker",
    ]
    hosts = [info.num_host_blocks for info in infos if info.num_host_blocks]
    disks = [info.num_disk_blocks for info in infos if info.num_disk_blocks]
    for name, counts in (("host", hosts), ("disk", disks)):
        if counts:
            share = f"in {len(counts)} worker(s)"
            lines.append(f"{name + ':':10}{_blocks_text(info, sum(counts))} {share}")
    return lines


def _blocks_text(info: WorkerInfo, num_blocks: int) -> str:
    return (
        f"{num_blocks:,} blocks of {info.block_size} tokens"
        f" = {num_blocks * info.block_size:,} tokens"
        f" = {num_blocks * info.bytes_per_block / GIB:.2f} GiB"
    )


def resolve_max_model_len(model: ModelConfig, engine: EngineSection, plan: KVPlan) -> int:
    """What is set, else the model's context as far as the KV blocks of a worker hold it: a request
    that does not say how much it wants must not ask for more than there is. Raises BuildError."""
    longest = model.max_position_embeddings
    if engine.max_model_len > longest:
        raise BuildError(
            f"engine.max_model_len = {engine.max_model_len}: the model has {longest} positions"
        )
    return engine.max_model_len or min(longest, plan.num_blocks * plan.spec.block_size)


def build_worker(spec: WorkerSpec, options: BuildOptions | None = None) -> BuiltWorker:
    """Load the model and make the worker; takes seconds. Raises BuildError."""
    from engine.model.runner import ModelRunner
    from kvtransfer.agent import AgentError
    from kvtransfer.agents.pool import block_bytes
    from kvtransfer.executor import StepExecutor, TransferExecutor

    options = options or BuildOptions()
    try:
        path = _model_dir(spec)
        model = ModelConfig.from_dir(path)
        dtype = spec.dtype
        if dtype == "auto":
            dtype = ModelRunner.default_dtype("cuda" if spec.on_gpu else "cpu")
        plan = plan_tiers(plan_kv(model, spec.engine, dtype), spec)
        available_bytes = psutil.virtual_memory().available
        check_memory(plan, 0 if spec.on_gpu else 1, available_bytes, plan.host_bytes)
        max_model_len = resolve_max_model_len(model, spec.engine, plan)
        runner = ModelRunner(
            path,
            dtype=dtype,
            device=spec.device,
            num_blocks=plan.num_blocks,
            block_size=spec.engine.block_size,
            num_threads=spec.threads or None,
            max_model_len=max_model_len,
        )
        memory: dict[Tier, Any] = {Tier.DEVICE: runner.kv_pool}
        if plan.num_host_blocks:
            memory[Tier.HOST] = make_arena(plan, on_gpu=spec.on_gpu)
        make_agent = options.make_agent or _nixl_agent
        agent = make_agent(spec.worker, runner.kv_pool, memory.get(Tier.HOST))
        digest = model.digest(path)
    except (ModelError, AgentError) as error:
        raise BuildError(str(error)) from error
    config = worker_config(spec, plan, max_model_len, digest, agent.metadata())
    pools = {tier: block_bytes(pool) for tier, pool in memory.items()}
    try:
        disk, notices = open_disk_tier(config, spec.disk_path, memory, pools, options.corrupt)
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
    records = disk.records if disk is not None else ()
    worker: type[PrefillWorker | DecodeWorker] = DecodeWorker
    if spec.role is Role.PREFILL:
        worker = PrefillWorker
    steps = StepExecutor(runner.execute, pools[Tier.DEVICE])
    moves = TransferExecutor(spec.worker, spec.epoch, agent, pools, corrupt=options.corrupt)

    def make_executor(deliver: Deliver) -> Executor:
        return WorkerThreads(steps, moves, disk, deliver, spec.worker)

    return BuiltWorker(worker(config, records), config.info(), make_executor, tuple(notices))


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
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        itl_target_s=engine.itl_target_ms / 1e3 if spec.role is Role.DECODE else 0.0,
        max_waiting=engine.max_waiting,
        lease_s=engine.lease_s,
        handoff_timeout_s=engine.handoff_timeout_s,
        read_timeout_s=engine.read_timeout_s,
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
