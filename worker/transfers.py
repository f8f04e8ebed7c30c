"""What moves the KV of one rank of a worker: its agent, and the movers of its tiers.

A worker's rank 0 has them in the worker's process. Those of the others are in the followers'
processes, with `RankTransfers` as the companion: it does there what rank 0 is asked to do, with its
own heads of the same blocks, and says when it is done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.tier import DiskRecord, Retention, Tier
from kvrelay.engine.model.parallel.shard import Shard
from kvrelay.engine.node import NodeId
from kvrelay.engine.support import Capability, engine_traits, refusal_of
from kvrelay.kvtransfer.agent import StoreIndex
from kvrelay.kvtransfer.checksum import BlockBytes, begin_checksums, checksum_blocks
from kvrelay.kvtransfer.executor import ArenaExecutor, TransferExecutor
from kvrelay.kvtransfer.layout import BlockLayout, HeadShare, compatibility, fingerprint
from kvrelay.kvtransfer.movers.opening import NoHostMemory, TierSettings, open_storage
from kvrelay.kvtransfer.movers.ranks import RanksAgent
from kvrelay.kvtransfer.probes import Probes
from kvrelay.kvtransfer.store.arena import HostArena
from kvrelay.kvtransfer.tiers.registry import without_missing
from kvrelay.kvtransfer.transfer_loop import Request
from kvrelay.worker.host_tier import (
    HostMemory,
    free_other_forms,
    open_host_memory,
    open_quantizer,
)
from kvrelay.worker.kv_plan import BuildError, KVPlan, model_config
from kvrelay.worker.spec import BuildOptions, WorkerSpec
from kvrelay.worker.threads import Copies, TransferLoops, loop_of

if TYPE_CHECKING:
    from kvrelay.engine.model.parallel.link import Tell

CLOSE_S = 1.0  # for what a follower copies when its worker ends


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a worker has to know of one of its ranks."""

    share: HeadShare
    metadata: bytes
    records: Mapping[Tier, tuple[DiskRecord, ...]]  # what its stores hold
    notices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Transfers:
    config: WorkerConfig  # the worker's, with the metadata of this rank
    share: HeadShare
    pool: BlockBytes  # the device's
    copies: Copies
    records: Mapping[Tier, tuple[DiskRecord, ...]]  # what its stores held when they were opened
    arenas: tuple[HostArena, ...]  # memory that outlives the worker
    notices: tuple[str, ...]

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        return checksum_blocks(self.pool, block_ids, self.share)

    def begin_checksums(self, block_ids: Sequence[int]) -> Callable[[], list[int]]:
        return begin_checksums(self.pool, block_ids, self.share)

    def update(self, change: StoreIndex) -> None:
        """Change the index of a tier, before its thread runs."""
        _, store = self.copies[loop_of(change)]
        if store is not None:
            store.update(change)

    def leave_kv(self) -> None:
        """What is in host memory is for another worker, when this one has ended."""
        self.keep_kv(True)

    def keep_kv(self, has_heir: bool) -> None:
        for arena in self.arenas:
            arena.has_heir = has_heir

    @property
    def leaves_kv(self) -> bool:
        return any(arena.has_heir for arena in self.arenas)

    @property
    def facts(self) -> RankFacts:
        return RankFacts(self.share, self.config.agent_metadata, self.records, self.notices)


def open_transfers(
    spec: WorkerSpec,
    path: Path,
    plan: KVPlan,
    runner: Any,
    shard: Shard,
    options: BuildOptions,
) -> Transfers:
    """`path`: of the checkpoint; `runner`: the rank's ModelRunner. Raises BuildError, ModelError,
    AgentError."""
    config = _config_of(spec, path, plan, runner)
    config = structs.replace(config, steps_ahead=0 if runner.launch is None else 1)
    return transfers_of(spec, config, plan, runner.kv_pool, shard, options)


def transfers_of(
    spec: WorkerSpec,
    config: WorkerConfig,
    plan: KVPlan,
    pool: Any,
    shard: Shard,
    options: BuildOptions,
) -> Transfers:
    """Those over `pool`, the rank's device memory for KV. Raises BuildError, AgentError."""
    from kvrelay.kvtransfer.movers.pool import block_bytes

    share = BlockLayout(plan.spec).share(shard.rank, shard.size)
    of_rank = _share_of(config, share, shard)
    memory: dict[Tier, Any] = {Tier.DEVICE: pool}
    quantizer = open_quantizer(plan.spec, share)
    settings = TierSettings(
        *(of_rank, memory, share, quantizer, spec.tiers, spec.cluster, shard.rank, shard.size)
    )
    free_other_forms(spec.cluster, config, shard.size)
    arena, records, notices = None, dict[Tier, tuple[DiskRecord, ...]](), tuple[str, ...]()
    if plan.num_host_blocks:
        host = open_host_tier(of_rank, spec, plan, f"{spec.cluster}/{settings.part}")
        memory[Tier.HOST], arena, notices = host.blocks, host.arena, host.notices
    if arena is not None:
        records[Tier.HOST] = tuple(arena.records)
    make_agent = options.make_agent or _nixl_agent
    inner = make_agent(spec.worker, pool, memory.get(Tier.HOST), share)
    agent = RanksAgent(spec.worker, inner, share, shard.rank)
    pools = {tier: block_bytes(each, share) for tier, each in memory.items()}
    make_executor = partial(
        TransferExecutor,
        *(spec.worker, spec.epoch),
        pools=pools,
        share=share,
        reserve=None if arena is None else arena.reserve,
        corrupt=options.corrupt,
    )
    try:
        storage, more = open_storage(replace(settings, arena=arena))
    except NoHostMemory as error:
        raise BuildError(str(error)) from error
    index = None if arena is None else ArenaExecutor(arena)
    copies: Copies = {
        Tier.DEVICE: (make_executor(agent, probes=Probes(agent)), index),
        **{tier: (make_executor(each.mover), each.store) for tier, each in storage.items()},
    }
    records |= {tier: each.records for tier, each in storage.items()}
    config = structs.replace(
        without_missing(config, storage),
        agent_metadata=agent.metadata(),
        host_outlives=arena is not None,
        quantizes=quantizer is not None,
    )
    arenas = [arena, *(each.arena for each in storage.values())]
    return Transfers(
        *(config, share, pools[Tier.DEVICE], copies, records),
        tuple(each for each in arenas if each is not None),
        (*more, *notices),
    )


def _share_of(config: WorkerConfig, share: HeadShare, shard: Shard) -> WorkerConfig:
    """A rank's part of what the worker has."""
    return structs.replace(
        config,
        bytes_per_block=share.bytes_per_block,
        disk_slot_bytes=config.disk_slot_bytes // shard.size,
        disk_bytes=config.disk_bytes // shard.size,
    )


def _config_of(spec: WorkerSpec, path: Path, plan: KVPlan, runner: Any) -> WorkerConfig:
    from kvrelay.engine.model.checkpoint.version import read_version
    from kvrelay.engine.model.quantize import scheme

    model = model_config(path, spec.engine)
    # On a GPU both may follow from the memory that was left.
    plan, max_model_len = replace(plan, num_blocks=len(runner.kv_pool)), runner.max_model_len
    device, num_ranks = "cuda" if spec.on_gpu else "cpu", spec.engine.tensor_parallel_size
    quantization = scheme(spec.model.quantization, device, num_ranks)
    dtype = "" if spec.engine.kv_dtype == "auto" else spec.model.dtype
    digest = model.digest(path, max_model_len, quantization, dtype=dtype)
    config = worker_config(spec, plan, max_model_len, digest)
    base = read_version(path)
    return structs.replace(config, weights=spec.weights or base, base_weights=base.digest)


@dataclass(frozen=True, slots=True)
class RemoveKV:
    """To the ranks above 0: what is in host memory is for nobody. Without it they leave it, as they
    end when rank 0 is killed, too."""


@dataclass(frozen=True, slots=True)
class MakeRankTransfers:
    """Makes the companion of a follower: what moves its KV. It can be pickled."""

    spec: WorkerSpec
    plan: KVPlan

    def __call__(self, runner: Any, shard: Shard, tell: Tell) -> RankTransfers:
        path = self.spec.find_model()  # on this machine
        opened = open_transfers(self.spec, path, self.plan, runner, shard, BuildOptions())
        return RankTransfers(opened, f"{self.spec.worker}-{shard.rank}", tell)


class RankTransfers:
    """Companion. Owns the transfers of a follower, and their threads."""

    def __init__(self, opened: Transfers, name: NodeId, tell: Tell) -> None:
        self.facts = opened.facts
        self._opened = opened
        opened.keep_kv(True)
        self.checksums = opened.checksums
        self.begin_checksums = opened.begin_checksums
        self._loops = TransferLoops(opened.copies, tell, name)

    def receive(self, message: Request | RemoveKV) -> None:
        if isinstance(message, RemoveKV):
            self._opened.keep_kv(False)
        else:
            self._loops.submit(message)

    def close(self) -> None:
        self._loops.close(CLOSE_S)


def open_host_tier(config: WorkerConfig, spec: WorkerSpec, plan: KVPlan, part: str) -> HostMemory:
    """Memory of the host tier, and behind it what the disk of a GPU needs. Raises AgentError."""
    from kvrelay.kvtransfer.movers.staged import STAGING_BLOCKS

    spare = STAGING_BLOCKS if spec.on_gpu and plan.num_disk_blocks else 0
    num_slots = plan.num_host_blocks + spare
    return open_host_memory(config, part, num_slots, pinned=spec.on_gpu)


def _nixl_agent(name: NodeId, pool: Any, host: Any, share: HeadShare) -> Any:
    from kvrelay.kvtransfer.movers.nixl import NixlAgent

    return NixlAgent(name, pool, host=host, share=share)


def has_own_cores(spec: WorkerSpec) -> bool:
    """Whether its steps take nothing from other workers of its machine, and those nothing from it:
    on a GPU, or where there is a core for each thread of as many workers with as many ranks."""
    threads = spec.engine.threads * spec.num_ranks_here * (spec.num_peers + 1)
    return spec.on_gpu or 0 < threads <= len(os.sched_getaffinity(0))


def worker_config(
    spec: WorkerSpec, plan: KVPlan, max_model_len: int, model_digest: bytes
) -> WorkerConfig:
    decided = {
        "num_blocks": plan.num_blocks,
        "block_size": plan.spec.block_size,
        "max_model_len": max_model_len,
        "window": plan.windows.groups[0].size,
        "sinks": max(window.num_sinks for window in plan.windows.groups),
    }
    return WorkerConfig(
        **structs.asdict(spec.engine) | decided,
        node_id=spec.worker,
        role=spec.role,
        epoch=spec.epoch,
        bytes_per_block=plan.spec.bytes_per_block,
        group_windows=plan.spec.windows if plan.spec.num_groups > 1 else (),
        has_states=plan.spec.num_state_groups > 0,
        fingerprint=fingerprint(model_digest, plan.spec),
        compatibility=compatibility(model_digest, plan.spec),
        num_host_blocks=plan.num_host_blocks,
        num_packed_blocks=plan.num_packed_blocks,
        num_disk_blocks=plan.num_disk_blocks,
        disk_codec=plan.disk_codec,
        disk_slot_bytes=plan.disk_slot_bytes,
        disk_bytes=plan.disk_bytes,
        retention=Retention(spec.tiers.retention_s),
        disk_after_s=spec.tiers.disk_after_s,
        num_object_blocks=spec.tiers.object_blocks if spec.tiers.object_bucket else 0,
        object_after_s=spec.tiers.object_after_s,
        cores="" if has_own_cores(spec) else spec.machine,
        loads=not refusal_of(Capability.ADAPTERS, engine_traits(spec.engine, on_gpu=spec.on_gpu)),
        left_reads_s=spec.left_reads_s,
        reads_left_kv=spec.num_peers > 0 and bool(spec.tiers.host_gib),
    )
