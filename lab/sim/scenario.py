"""A run: the cluster, the workload and the faults that belong to a seed, and what to expect.

Everything here is drawn from the seed before the first event. Timeouts are drawn without regard to
each other, so that leases run out during reads and reads outlive their handoff.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.tier import LOWER_TIERS, Retention
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.lab.sim.faults import (
    BrokenLink,
    Crash,
    FaultPlan,
    Handover,
    Partition,
    Pause,
    Rot,
    Sickness,
    SicknessKind,
)
from kvrelay.lab.sim.model import Attention
from kvrelay.lab.sim.operator import PlannedOrder, draw_orders
from kvrelay.lab.sim.workload import (
    Job,
    JobLimits,
    Poison,
    draw_chat,
    draw_crowd,
    draw_jobs,
)
from kvrelay.router.config import POLICIES, RouterConfig

ROUTERS: tuple[NodeId, ...] = ("router-0", "router-1")
BLOCK_SIZE = 4
FINGERPRINT = b"simulated model, one layout"
OTHER_FINGERPRINT = b"simulated model, another layout"
WITH_DRAFTER = b"simulated model, and a drafter"
POISON_STEPS = 0.3
"""How many of the runs have requests that fail all of a step."""
GROUPED = 0.25
CROWDED = (False, False, True)
"""Whether a run ends with tenants that keep the memory of all workers in use for long."""


@dataclass(frozen=True, slots=True)
class RoleChange:
    """The controller is told to prefer a worker for another role."""

    worker: NodeId
    at_s: float
    role: Role


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the seed chose. `workers` have epoch 0: each life of a worker gets its own."""

    workers: tuple[WorkerConfig, ...]
    router: RouterConfig
    checksums: bool
    jobs: tuple[Job, ...]
    faults: FaultPlan
    orders: tuple[PlannedOrder, ...]
    role_changes: tuple[RoleChange, ...]
    silent_grace_s: float  # the controller's
    routers: tuple[NodeId, ...]
    attention: Attention

    def router_of(self, request_id: str) -> NodeId:
        """Routers get requests in turn."""
        return self.routers[int(request_id[1:]) % len(self.routers)]

    @property
    def quiet_s(self) -> float:
        """After the last answer: long enough for every lease, handoff and read to time out."""
        worst_s = max(w.lease_s + w.handoff_timeout_s + 3 * w.read_timeout_s for w in self.workers)
        behind_s = 40.0 if any(o.after_faults for o in self.orders) else 5.0  # orders, and the disk
        hanging_s = self.faults.hang_s if self.faults.read_hang else 0.0
        return behind_s + worst_s + hanging_s


def draw_scenario(
    rng: random.Random,
    more: random.Random,
    last: random.Random | None = None,
    grouped: float = GROUPED,
) -> Scenario:
    """`more`, and after it `last`: draw what older seeds did not have, so that these keep the
    rest. `grouped`: how many of the runs have layers in groups."""
    workers = _draw_workers(rng)
    attention = _draw_attention(more)
    if last is not None:
        attention = _draw_groups(last, attention, grouped)
    workers = _make_unlike(more, workers, attention)
    routers = ROUTERS[: more.choice((1, 1, 2))]
    checksums = rng.random() < 0.5
    until_s = rng.uniform(1.0, 6.0)
    names: list[NodeId] = [w.node_id for w in workers]
    faults = draw_faults(rng, ROUTERS[0], names, until_s, checksums=checksums)
    faults = replace(faults, row_error=more.uniform(0.002, 0.02) if more.random() < 0.3 else 0.0)
    limits = JobLimits(
        max_model_len=min(w.max_model_len for w in workers),
        longest_model_len=max(w.max_model_len for w in workers),
        pool_tokens=min(_pool_tokens(w) for w in workers if w.role is Role.DECODE),
        attention=attention,
        poison=(
            (Poison.ROW, more.uniform(0.02, 0.2) if more.random() < 0.3 else 0.0),
            (Poison.STEP, 0.05 if more.random() < POISON_STEPS else 0.0),
        ),
    )
    jobs = draw_jobs(rng, more, limits, until_s)
    ttft_s = more.choice((0.0, 0.0, more.uniform(0.02, 1.0)))
    faults = replace(faults, broken_links=_draw_broken_links(more, names, until_s))
    router = structs.replace(_draw_router(rng), ttft_target_s=ttft_s)
    orders = draw_orders(rng, names, jobs, until_s, FINGERPRINT, BLOCK_SIZE)
    changes = _draw_role_changes(rng, names, until_s)
    if more.choice(CROWDED):
        router, workers = _make_room_for_crowd(more, router, workers)
        least = min(map(_pool_tokens, workers))
        jobs += draw_crowd(more, replace(limits, pool_tokens=least))
    return Scenario(
        tuple(workers),
        router,
        checksums,
        tuple(jobs),
        faults,
        tuple(orders),
        changes,
        silent_grace_s=rng.choice((1.0, 2.0)),
        routers=routers,
        attention=attention,
    )


def with_one_tenant(scenario: Scenario, rng: random.Random) -> Scenario:
    """`scenario` with all requests of one tenant, and a crowd in which some need most of a pool:
    one caller's, beside whom another one asks for little."""
    router, workers = _make_room_for_crowd(rng, scenario.router, list(scenario.workers))
    limits = JobLimits(
        max_model_len=min(w.max_model_len for w in workers),
        longest_model_len=max(w.max_model_len for w in workers),
        pool_tokens=min(map(_pool_tokens, workers)),
        attention=scenario.attention,
    )
    alone = [replace(job, is_alone=True) for job in scenario.jobs if job.tenant is None]
    flood = [replace(job, caller="flood") for job in draw_crowd(rng, limits, num_tenants=1)]
    alone += [*flood, *draw_chat(rng, limits, flood)]
    return replace(scenario, router=router, workers=tuple(workers), jobs=tuple(alone))


def _draw_attention(more: random.Random) -> Attention:
    if more.random() < 0.65:
        return Attention()
    return Attention(more.randint(6, 33), more.choice((0, 0, more.randint(1, 5))))


def _draw_groups(last: random.Random, attention: Attention, grouped: float) -> Attention:
    """In so many of the runs layers attend to different windows, mostly some to everything, or are
    recurrent, or both."""
    if last.random() < 1 - grouped:
        return attention
    more = tuple(last.randint(5, 33) for _ in range(last.choice((1, 1, 2))))
    window = attention.window if last.random() < 0.3 else 0
    sinks = attention.num_sinks or last.choice((0, 0, last.randint(1, 5)))
    num_states = last.choice((0, 1, 2))
    if num_states and last.random() < 0.5:
        more = ()
    return Attention(window, sinks, more, num_states)


def _pool_tokens(config: WorkerConfig) -> int:
    return BLOCK_SIZE * (config.num_blocks // config.kv_windows.count)


def _make_room_for_crowd(
    more: random.Random, router: RouterConfig, workers: list[WorkerConfig]
) -> tuple[RouterConfig, list[WorkerConfig]]:
    """A queue for all of it, and workers that lack memory before they lack slots."""
    router = structs.replace(
        router, max_queue=1024, ttft_target_s=0.0, max_memory_wait_s=more.choice((0.0, 3.0))
    )
    return router, [
        structs.replace(
            each,
            num_blocks=min(28 * each.kv_windows.count, each.num_blocks),
            max_num_seqs=16,
        )
        for each in workers
    ]


def _make_unlike(
    more: random.Random, workers: list[WorkerConfig], attention: Attention
) -> list[WorkerConfig]:
    """Workers of one model on unequal machines: some on a host that others share, some with more
    memory, a longer context, or another layout."""
    chances = [0.3 if more.random() < 0.4 else 0.0 for _ in range(4)]

    def unlike(config: WorkerConfig) -> WorkerConfig:
        larger, longer, other, shared = (more.random() < chance for chance in chances)
        return structs.replace(
            config,
            window=attention.window,
            sinks=attention.num_sinks,
            group_windows=attention.windows if len(attention.windows) > 1 else (),
            has_states=attention.num_states > 0,
            num_blocks=config.num_blocks * (3 if larger else 1) * len(attention.windows),
            max_model_len=config.max_model_len + (56 if longer else 0),
            fingerprint=OTHER_FINGERPRINT if other else config.fingerprint,
            cores="0-3" if shared else "",
        )

    return [unlike(config) for config in workers]


def _draw_workers(rng: random.Random) -> list[WorkerConfig]:
    num_prefill, num_decode = rng.choice((0, 1, 1, 2, 3)), rng.randint(1, 3)
    max_model_len = rng.choice((104, 128, 160))
    lease_s = rng.choice((rng.uniform(0.03, 0.3), rng.uniform(0.3, 3.0)))
    handoff_s, read_s = rng.uniform(0.3, 3.0), rng.uniform(0.2, 4.0)
    host, disk = rng.choice((0, 8, 16, 60)), rng.choice((0, 10, 30, 100))
    retention = Retention(rng.choice((3600.0, rng.uniform(0.5, 5.0))), rng.random() < 0.8)
    disk_after_s = rng.choice((0.05, rng.uniform(0.1, 2.0)))
    budget, seqs = rng.choice((8, 16, 32, 64)), rng.choice((2, 4, 8, 16))
    waiting = rng.choice((4, 16, 64))
    num_drafts = rng.choice((0, 2, 7))
    read_floor_s, step_timeout_s = rng.uniform(0.05, 1.0), rng.uniform(0.3, 1.5)
    itl_ms = 10.0 if read_floor_s > 0.5 else 0.0  # half of all; nothing is drawn for it
    max_failed_steps, max_snapshot = rng.randint(2, 4), rng.choice((4, 16, 1 << 15))

    def config(role: Role, number: int) -> WorkerConfig:
        # Drafters differ by worker, and with them what KV means; nothing is drawn for it.
        has_drafter = num_drafts > 0 and itl_ms > 0 and number % 2 == 1
        return WorkerConfig(
            node_id=f"{role}-{number}",
            role=role,
            epoch=0,
            num_blocks=rng.choice((rng.randint(24, 36), rng.randint(24, 80))),
            block_size=BLOCK_SIZE,
            bytes_per_block=BLOCK_SIZE * 8,
            max_model_len=max_model_len,
            fingerprint=WITH_DRAFTER if has_drafter else FINGERPRINT,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            num_speculative_tokens=num_drafts,
            drafter="drafter" if has_drafter else "",
            itl_target_ms=itl_ms,
            itl_most_ms=10 * itl_ms,
            max_waiting=waiting,
            lease_s=lease_s,
            handoff_timeout_s=handoff_s,
            read_timeout_s=read_s,
            read_floor_s=read_floor_s,
            left_reads_s=5.0,  # more than the controller takes to end the peer
            step_timeout_s=step_timeout_s,
            max_failed_steps=max_failed_steps,
            max_snapshot_blocks=max_snapshot,
            stats_interval_s=0.25,
            num_host_blocks=host,
            num_disk_blocks=disk,
            retention=retention,
            disk_after_s=disk_after_s,
        )

    return [config(Role.PREFILL, n) for n in range(num_prefill)] + [
        config(Role.DECODE, n) for n in range(num_decode)
    ]


def _draw_role_changes(
    rng: random.Random, workers: list[NodeId], until_s: float
) -> tuple[RoleChange, ...]:
    """In order of time; some while nothing else goes wrong any more."""
    times = sorted(rng.uniform(0.0, until_s + 2.0) for _ in range(rng.choice((0, 0, 2, 6, 20))))
    return tuple(RoleChange(rng.choice(workers), at_s, rng.choice(list(Role))) for at_s in times)


def _draw_router(rng: random.Random) -> RouterConfig:
    """Short waits, and limits that a burst reaches."""
    return RouterConfig(
        policy=rng.choice(("prefix", "prefix", *POLICIES)),
        max_queue=rng.choice((8, 32, 128)),
        max_inflight_per_worker=rng.choice((2, 8, 32)),
        max_attempts=rng.randint(4, 8),
        no_workers_wait_s=rng.uniform(0.5, 10.0),
        probe_after_s=rng.uniform(0.3, 2.0),
        max_silent_probes=rng.randint(2, 3),
        silent_after_s=rng.uniform(0.8, 2.5),
        tick_s=rng.uniform(0.1, 0.3),
        snapshot_retry_s=rng.uniform(0.2, 1.0),
        speculative_s=rng.uniform(0.5, 5.0),
        backoff_s=rng.uniform(0.02, 0.3),
        max_backoff_s=rng.uniform(0.5, 3.0),
    )


def draw_faults(
    rng: random.Random,
    router: NodeId,
    workers: list[NodeId],
    until_s: float,
    *,
    checksums: bool,
) -> FaultPlan:
    """Damaged blocks need checksums to be noticed, so without them none are drawn."""

    def maybe(low: float, high: float, chance: float = 0.5) -> float:
        return rng.uniform(low, high) if rng.random() < chance else 0.0

    return FaultPlan(
        until_s=until_s,
        lose=maybe(0.005, 0.08),
        duplicate=maybe(0.005, 0.1),
        delay=maybe(0.01, 0.15),
        delay_s=rng.uniform(0.01, 1.5),
        read_error=maybe(0.02, 0.3),
        read_stall=maybe(0.02, 0.3),
        read_slow=maybe(0.05, 0.5),
        read_slow_s=rng.uniform(0.1, 3.0),
        flip=maybe(0.02, 0.3) if checksums else 0.0,
        connect_error=maybe(0.05, 0.4, chance=0.3),
        step_error=maybe(0.002, 0.02, chance=0.3),
        step_slow=maybe(0.01, 0.05, chance=0.3),
        crashes=_draw_crashes(rng, workers, until_s),
        partitions=_draw_partitions(rng, [router, *workers], until_s),
        pauses=_draw_pauses(rng, workers, until_s),
        disk_error=maybe(0.02, 0.3),
        disk_slow=maybe(0.02, 0.3),
        disk_slow_s=rng.uniform(0.1, 3.0),
        # An index that could not be changed may name what was overwritten.
        store_error=maybe(0.05, 0.4) if checksums else 0.0,
        rots=_draw_rots(rng, workers, until_s) if checksums else (),
        read_hang=maybe(0.05, 0.3),
        hang_s=rng.uniform(1.0, 25.0),
        sicknesses=_draw_sicknesses(rng, workers, until_s),
        handovers=_draw_handovers(rng, until_s),
        **_draw_clocks(workers, until_s),
    )


def _draw_clocks(workers: list[NodeId], until_s: float) -> dict[str, Any]:
    """In one run of three workers measure their steps wrong, by up to 100 times. Nothing is drawn
    from the run's own source: all else is as in a run without."""
    rng = random.Random(f"clocks {until_s}")
    if rng.random() < 2 / 3:
        return {}
    factors = [rng.choice((0.01, 1.0, 100.0)) for _ in workers]
    return {"clocks": tuple(zip(workers, factors, strict=True)), "clock_noise": rng.choice((1, 3))}


def _draw_crashes(rng: random.Random, workers: list[NodeId], until_s: float) -> tuple[Crash, ...]:
    """Up to four, in order of time; no worker dies again before it is back."""
    crashes: list[Crash] = []
    free_at = dict.fromkeys(workers, 0.1)
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        worker = rng.choice(workers)
        at = free_at[worker] + rng.uniform(0.0, until_s * 0.6)
        down, notice = rng.uniform(0.02, 2.0), rng.uniform(0.01, 1.0)
        if at + max(down, notice) < until_s:
            crashes.append(Crash(worker, at, down, notice))
            free_at[worker] = at + max(down, notice)
    return tuple(sorted(crashes, key=lambda c: c.at_s))


def _draw_partitions(
    rng: random.Random, nodes: list[NodeId], until_s: float
) -> tuple[Partition, ...]:
    partitions = []
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        from_s = rng.uniform(0.0, until_s * 0.8)
        until = min(until_s, from_s + rng.uniform(0.05, 2.0))
        partitions.append(Partition(frozenset(rng.sample(nodes, 2)), from_s, until))
    return tuple(partitions)


def _draw_broken_links(
    more: random.Random, workers: list[NodeId], until_s: float
) -> tuple[BrokenLink, ...]:
    links = []
    for _ in range(more.choice((0, 0, 0, 1, 3)) if len(workers) > 1 else 0):
        source, reader = more.sample(workers, 2)
        links.append(BrokenLink(source, reader, more.uniform(0.0, until_s / 2), until_s))
    return tuple(links)


def _draw_pauses(rng: random.Random, workers: list[NodeId], until_s: float) -> tuple[Pause, ...]:
    pauses = []
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        from_s = rng.uniform(0.0, until_s * 0.8)
        until = min(until_s, from_s + rng.uniform(0.05, 2.0))
        pauses.append(Pause(rng.choice(workers), from_s, until))
    return tuple(pauses)


def _draw_sicknesses(
    rng: random.Random, workers: list[NodeId], until_s: float
) -> tuple[Sickness, ...]:
    return tuple(
        Sickness(
            rng.choice(workers),
            rng.uniform(0.0, until_s),
            rng.choice(list(SicknessKind)),
            rng.choice((rng.uniform(0.5, 8.0), rng.uniform(8.0, 30.0))),
        )
        for _ in range(rng.choice((0, 0, 0, 1, 2)))
    )


def _draw_handovers(rng: random.Random, until_s: float) -> tuple[Handover, ...]:
    """In order of time; the next controller is there before it dies as well."""
    handovers: list[Handover] = []
    at_s = 0.0
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        at_s += rng.uniform(0.0, until_s / 3)
        handovers.append(Handover(at_s, rng.uniform(0.01, 2.0)))
        at_s += handovers[-1].away_s + 0.01
    return tuple(handovers)


def _draw_rots(rng: random.Random, workers: list[NodeId], until_s: float) -> tuple[Rot, ...]:
    return tuple(
        Rot(
            rng.choice(workers),
            rng.choice(LOWER_TIERS),
            rng.uniform(0.0, until_s),
            rng.randrange(1000),
            rng.randrange(1000),
        )
        for _ in range(rng.choice((0, 0, 4, 40)))
    )
