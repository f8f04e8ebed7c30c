"""What routers know, as the autoscaler wants it."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.cluster.scaling.connector import ManagedWorker
from kvrelay.cluster.scaling.observations import Snapshot
from kvrelay.engine.stats import WorkerInfo, WorkerStats
from kvrelay.router.traffic import RouterSeen, Traffic, WorkerSeen


def router_seen(at_s: float, router: str, traffic: Traffic, num_live: int) -> RouterSeen:
    return RouterSeen(
        router=router,
        at_s=at_s,
        prompts=dict(traffic.prompts),
        outputs=dict(traffic.outputs),
        prompt_tokens=traffic.prompt_tokens,
        cached_tokens=traffic.cached_tokens,
        num_late=traffic.num_late,
        num_live=num_live,
    )


def worker_seen(at_s: float, info: WorkerInfo, stats: WorkerStats) -> WorkerSeen:
    """`at_s`: when the statistics came."""
    return WorkerSeen(
        worker=info.worker,
        at_s=at_s,
        prompt_weights=stats.prompt_weights,
        decode_weights=stats.decode_weights,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        decode_step_s=stats.decode_step_s,
        pool_tokens=info.num_blocks * info.block_size,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        num_decoding=stats.num_decoding,
        pending_prefill_tokens=stats.pending_prefill_tokens,
    )


def snapshot_of(
    at_s: float,
    wall_s: float,
    routers: Iterable[RouterSeen],
    stats: Iterable[tuple[WorkerInfo, float, WorkerStats]],
    workers: Iterable[ManagedWorker],
) -> Snapshot:
    """`stats`: the last of each worker, and when they came."""
    seen = tuple(worker_seen(came_at, info, each) for info, came_at, each in stats)
    return Snapshot(at_s, wall_s, tuple(routers), seen, tuple(workers))
