"""What moves the KV of one rank of a worker: its agent, and the executors of its tiers.

A worker's rank 0 has them in the worker's process. Those of the others are in the followers'
processes, with `RankTransfers` as the companion: it does there what rank 0 is asked to do, with its
own heads of the same blocks, and says when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.tier import DiskRecord, Retention, Tier
from kvrelay.engine.model.parallel.shard import Shard
from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.agent import StoreIndex
from kvrelay.kvtransfer.agents.ranks import RanksAgent
from kvrelay.kvtransfer.checksum import BlockBytes, begin_checksums, checksum_blocks
from kvrelay.kvtransfer.executor import TransferExecutor
from kvrelay.kvtransfer.layout import BlockLayout, HeadShare, compatibility, fingerprint
from kvrelay.kvtransfer.probes import Probes
from kvrelay.kvtransfer.store.arena import HostArena
from kvrelay.kvtransfer.transfer_loop import Request
from kvrelay.worker.disk_tier import NoHostMemory, Storage, open_disk_tier
from kvrelay.worker.host_tier import (
    HostMemory,
    free_other_forms,
    open_host_memory,
    open_orphaned,
    open_packed,
    open_quantizer,
)
from kvrelay.worker.kv_plan import BuildError, KVPlan, model_config
from kvrelay.worker.object_tier import open_object_tier
from kvrelay.worker.spec import BuildOptions, WorkerSpec
from kvrelay.worker.threads import TransferLoops

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
    memory: TransferExecutor
    arena: HostArena | None  # of its host memory, where that outlives the worker
    packed: HostArena | None  # of that in four bits
    storage: Mapping[Tier, Storage]
    notices: tuple[str, ...]

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        return checksum_blocks(self.pool, block_ids, self.share)

    def begin_checksums(self, block_ids: Sequence[int]) -> Callable[[], list[int]]:
        return begin_checksums(self.pool, block_ids, self.share)

    def update(self, change: StoreIndex) -> None:
        """Change the index of a tier, before its thread runs."""
        if change.tier in self.storage:
            self.storage[change.tier].store.update(change)
        elif self.arena is not None:
            self.arena.update(change)

    def leave_kv(self) -> None:
        """What is in host memory is for another worker, when this one has ended."""
        self.keep_kv(True)

    def keep_kv(self, has_heir: bool) -> None:
        for arena in (self.arena, self.packed):
            if arena is not None:
                arena.has_heir = has_heir

    @property
    def leaves_kv(self) -> bool:
        return any(arena is not None and arena.has_heir for arena in (self.arena, self.packed))

    @property
    def facts(self) -> RankFacts:
        records = {tier: each.records for tier, each in self.storage.items()}
        if self.arena is not None:
            records[Tier.HOST] = tuple(self.arena.records)
        return RankFacts(self.share, self.config.agent_metadata, records, self.notices)


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
    from kvrelay.kvtransfer.agents.pool import block_bytes

    share = BlockLayout(plan.spec).share(shard.rank, shard.size)
    of_rank = _share_of(config, share, shard)
    part = f"rank-{shard.rank}-of-{shard.size}" if shard.size > 1 else ""
    memory: dict[Tier, Any] = {Tier.DEVICE: pool}
    of_cluster = f"{spec.cluster}/{part}"
    free_other_forms(spec.cluster, config, shard.size)
    host = open_host_tier(of_rank, spec, plan, of_cluster) if plan.num_host_blocks else None
    arena = None if host is None else host.arena
    if host is not None:
        memory[Tier.HOST] = host.blocks
    make_agent = options.make_agent or _nixl_agent
    inner = make_agent(spec.worker, pool, memory.get(Tier.HOST), share)
    agent = RanksAgent(spec.worker, inner, share, shard.rank)
    pools = {tier: block_bytes(each, share) for tier, each in memory.items()}
    make_copies = partial(
        TransferExecutor,
        *(spec.worker, spec.epoch),
        pools=pools,
        share=share,
        reserve=None if arena is None else arena.reserve,
        corrupt=options.corrupt,
    )
    quantizer = open_quantizer(plan.spec, share)
    with _host_memory_for_the_disk(spec):
        disk, notices = open_disk_tier(
            *(of_rank, spec.tiers.disk_path, memory, make_copies, share, quantizer),
            part=part,
        )
    stored, more = open_object_tier(
        of_rank, spec.tiers, memory, make_copies, share, num_ranks=shard.size
    )
    packed, why_not = open_packed(of_rank, of_cluster, quantizer, memory, make_copies, share)
    orphaned = open_orphaned(
        of_rank, of_cluster, arena, memory, make_copies, follows=shard.rank > 0
    )
    config = structs.replace(
        config,
        agent_metadata=agent.metadata(),
        host_outlives=arena is not None,
        num_disk_blocks=0 if disk is None else config.num_disk_blocks,
        num_object_blocks=0 if stored is None else config.num_object_blocks,
        num_packed_blocks=0 if packed is None else config.num_packed_blocks,
        quantizes=quantizer is not None,
    )
    tiers = {
        Tier.DISK: disk,
        Tier.OBJECT: stored,
        Tier.PACKED: None if packed is None else packed.storage,
        Tier.ORPHANED: orphaned,
    }
    return Transfers(
        *(config, share, pools[Tier.DEVICE], make_copies(agent, probes=Probes(agent)), arena),
        None if packed is None else packed.arena,
        {tier: each for tier, each in tiers.items() if each is not None},
        (*notices, *more, *why_not, *(() if host is None else host.notices)),
    )


def _share_of(config: WorkerConfig, share: HeadShare, shard: Shard) -> WorkerConfig:
    """A rank's part of what the worker has."""
    return structs.replace(
        config,
        bytes_per_block=share.bytes_per_block,
        disk_slot_bytes=config.disk_slot_bytes // shard.size,
        disk_bytes=config.disk_bytes // shard.size,
    )


@contextmanager
def _host_memory_for_the_disk(spec: WorkerSpec) -> Iterator[None]:
    try:
        yield
    except NoHostMemory as error:
        raise BuildError(
            f"tiers.disk_gib without tiers.host_gib: {spec.worker} has a GPU, whose KV reaches the"
            " disk by host memory (no GPUDirect Storage, or a codec); set tiers.host_gib as well"
        ) from error


def _config_of(spec: WorkerSpec, path: Path, plan: KVPlan, runner: Any) -> WorkerConfig:
    from kvrelay.engine.model.checkpoint.version import read_version
    from kvrelay.engine.model.quantize import scheme

    model = model_config(path, spec.engine)
    # On a GPU both may follow from the memory that was left.
    plan, max_model_len = replace(plan, num_blocks=len(runner.kv_pool)), runner.max_model_len
    quantization = scheme(spec.model.quantization, "cuda" if spec.on_gpu else "cpu")
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
        self._loops = TransferLoops(opened.memory, opened.storage, tell, name, opened.arena)

    def receive(self, message: Request | RemoveKV) -> None:
        if isinstance(message, RemoveKV):
            self._opened.keep_kv(False)
        else:
            self._loops.submit(message)

    def close(self) -> None:
        self._loops.close(CLOSE_S)


def open_host_tier(config: WorkerConfig, spec: WorkerSpec, plan: KVPlan, part: str) -> HostMemory:
    """Memory of the host tier, and behind it what the disk of a GPU needs. Raises AgentError."""
    from kvrelay.kvtransfer.agents.staged import STAGING_BLOCKS

    spare = STAGING_BLOCKS if spec.on_gpu and plan.num_disk_blocks else 0
    num_slots = plan.num_host_blocks + spare
    return open_host_memory(config, part, num_slots, pinned=spec.on_gpu)


def _nixl_agent(name: NodeId, pool: Any, host: Any, share: HeadShare) -> Any:
    from kvrelay.kvtransfer.agents.nixl import NixlAgent

    return NixlAgent(name, pool, host=host, share=share)


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
        cores="" if spec.on_gpu else spec.machine,
        loads=not spec.on_gpu,
        left_reads_s=spec.left_reads_s,
        reads_left_kv=spec.num_peers > 0 and bool(spec.tiers.host_gib),
    )
