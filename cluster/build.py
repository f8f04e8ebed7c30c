"""The composition root: from configuration to a worker that runs.

`prepare_model` finds the checkpoint and plans its KV cache, without torch, wherever the cluster is
started; `build_worker` loads the model, registers the KV pool with the transfer agent and makes
the node, in the process that becomes the worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster.config import Config, EngineSection
from cluster.runtime.host import Deliver, Executor
from cluster.runtime.process import BuiltWorker
from cluster.runtime.threads import WorkerThreads
from decode_worker.worker import DecodeWorker
from engine.config import KVSpec, WorkerConfig
from engine.model.config import ModelConfig, weights_bytes
from engine.model.errors import ModelError
from engine.model.resolve import resolve_model
from engine.node import Node, NodeId
from engine.stats import Role, WorkerInfo
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


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """For tests and measurements: what to build a worker from, where it is not the usual."""

    make_agent: Callable[[NodeId, Any], Any] | None = None  # (name, pool) -> Agent; None: NIXL
    corrupt: Callable[..., None] | None = None  # given to the WorkerExecutor


@dataclass(frozen=True, slots=True)
class KVPlan:
    """How many blocks a worker gets, and what they cost."""

    spec: KVSpec
    num_blocks: int
    weights_bytes: int

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
    check_memory(plan, num_workers_here, psutil.virtual_memory().available)
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


def check_memory(plan: KVPlan, num_workers: int, available_bytes: int) -> None:
    """Raises BuildError if `num_workers` need more than is available."""
    needed = num_workers * plan.needed_bytes
    if needed > available_bytes:
        raise BuildError(
            f"too little memory: {num_workers} worker(s) need {needed / GIB:.1f} GiB"
            f" (each {plan.weights_bytes / GIB:.2f} weights + {plan.kv_bytes / GIB:.2f} KV"
            f" + {SPARE_BYTES / GIB:.2f} spare), {available_bytes / GIB:.1f} GiB are available;"
            " lower engine.kv_cache_gib or the number of workers"
        )


def kv_lines(model: ModelConfig, info: WorkerInfo) -> list[str]:
    """For people: what a token of KV costs and how many tokens fit into a worker."""
    per_token = info.bytes_per_block // info.block_size
    value_bytes = per_token // (2 * model.num_layers * model.num_kv_heads * model.head_dim)
    kv_gib = info.num_blocks * info.bytes_per_block / GIB
    return [
        f"KV cache: {per_token:,} bytes a token = 2 (K, V) x {model.num_layers} layers"
        f" x {model.num_kv_heads} KV heads x {model.head_dim} head_dim x {value_bytes} bytes",
        f"          {info.num_blocks:,} blocks of {info.block_size} tokens"
        f" = {info.num_blocks * info.block_size:,} tokens = {kv_gib:.2f} GiB in each worker",
    ]


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
    from kvtransfer.executor import WorkerExecutor

    options = options or BuildOptions()
    try:
        path = _model_dir(spec)
        model = ModelConfig.from_dir(path)
        dtype = spec.dtype
        if dtype == "auto":
            dtype = ModelRunner.default_dtype("cuda" if spec.on_gpu else "cpu")
        plan = plan_kv(model, spec.engine, dtype)
        if not spec.on_gpu:
            check_memory(plan, 1, psutil.virtual_memory().available)
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
        agent = (options.make_agent or _nixl_agent)(spec.worker, runner.kv_pool)
        fingerprint = model.fingerprint(path, dtype, spec.engine.block_size)
    except (ModelError, AgentError) as error:
        raise BuildError(str(error)) from error
    for notice in runner.notices:
        log.warning("%s: %s", spec.worker, notice)
    config = worker_config(spec, plan, max_model_len, fingerprint, agent.metadata())
    node: Node = PrefillWorker(config) if spec.role is Role.PREFILL else DecodeWorker(config)
    executor = WorkerExecutor(
        runner.execute, agent, block_bytes(runner.kv_pool), corrupt=options.corrupt
    )

    def make_executor(deliver: Deliver) -> Executor:
        return WorkerThreads(executor, deliver, spec.worker)

    return BuiltWorker(node, config.info(), make_executor)


def worker_config(
    spec: WorkerSpec, plan: KVPlan, max_model_len: int, fingerprint: bytes, metadata: bytes
) -> WorkerConfig:
    engine = spec.engine
    return WorkerConfig(
        node_id=spec.worker,
        role=spec.role,
        epoch=spec.epoch,
        num_blocks=plan.num_blocks,
        block_size=engine.block_size,
        bytes_per_block=plan.spec.bytes_per_block,
        max_model_len=max_model_len,
        fingerprint=fingerprint,
        agent_metadata=metadata,
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


def _nixl_agent(name: NodeId, pool: Any) -> Any:
    from kvtransfer.agents.nixl import NixlAgent

    return NixlAgent(name, pool)
