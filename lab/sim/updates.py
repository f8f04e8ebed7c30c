"""Weights that change among traffic and faults.

What one version computes is marked in each slot, and comes out of the pool without the mark; the
tokens are those of one model. So a block that another version has computed has wrong content, and
is seen where it is used. `keep`, which lets a sequence go on with such blocks, is left out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrelay.cluster.control.weights import Rollout
from kvrelay.cluster.orders import UpdateModel
from kvrelay.engine.node import Effect, NodeId
from kvrelay.engine.sequence import Sequence as Seq
from kvrelay.engine.weights import (
    LoadWeights,
    UpdateMode,
    UseWeights,
    WeightsLoaded,
    WeightsUsed,
    WeightVersion,
)
from kvrelay.lab.sim.runtime import SimNode, SimRuntime
from kvrelay.router.router import Router
from kvrelay.worker.node import Worker
from kvrelay.worker.weights import weight_updates

UPDATED = 0.3
"""How many of the runs have updates."""
FAILS = 0.1  # so many loads, and as many probes, while there are faults
VERSIONS = tuple(WeightVersion(name, name.encode(), f"/{name}") for name in ("own", "one", "two"))
BASE = VERSIONS[0]


@dataclass(frozen=True, slots=True)
class Update:
    at_s: float
    order: UpdateModel


def draw_updates(rng: random.Random, until_s: float) -> tuple[Update, ...]:
    """In no order: what comes while another one is rolled out is refused."""
    if rng.random() >= UPDATED:
        return ()
    modes = (UpdateMode.DRAIN, UpdateMode.RECOMPUTE)
    return tuple(
        Update(
            rng.uniform(0.0, until_s + 1.0),
            UpdateModel("", BASE, rng.choice(VERSIONS), rng.choice(modes), back=rng.random() < 0.2),
        )
        for _ in range(rng.choice((1, 3, 8)))
    )


def mark_of(version: WeightVersion) -> int:
    return 0 if version.digest in (b"", BASE.digest) else hash_of(version.digest)


def hash_of(digest: bytes) -> int:
    return int.from_bytes(digest.ljust(8, b"."), "big") << 8


class SimWeights:
    """Performs what workers ask for about weights. Owned by a run."""

    def __init__(self, runtime: SimRuntime, seed: int) -> None:
        self._runtime = runtime
        self._rng = random.Random(f"{seed}: loads")  # events of runs without updates stay

    def perform(self, life: SimNode, effect: Effect) -> bool:
        """Whether it was one of these."""
        rng, runtime = self._rng, self._runtime
        why = "fault" if runtime.faults.active and rng.random() < FAILS else ""
        match effect:
            case LoadWeights(version):
                after_s, done = rng.uniform(0.01, 1.0), WeightsLoaded(version.digest, why)
                life.executor.loaded = version
                runtime.to_self(life, after_s, done)
            case UseWeights(digest):
                if not why:
                    version = life.executor.loaded
                    assert version.digest == digest
                    assert not life.executor.is_busy, "weights change while a step runs"
                    life.executor.pool.mark = mark_of(version)
                runtime.to_self(life, rng.uniform(0.001, 0.05), WeightsUsed(digest, why))
            case _:
                return False
        runtime.faults.injected["weights not changed" if why else "weights changed"] += 1
        return True


def check_pairs(runtime: SimRuntime, workers: Sequence[NodeId]) -> None:
    """An attempt is computed and decoded by one version."""
    lives = [life.node for worker in workers if (life := runtime.life(worker)) is not None]
    nodes = [node for node in lives if isinstance(node, Worker)]
    computed: Mapping[tuple[str, int], Seq] = {
        seq.key: seq for node in nodes for seq in node.core.seqs.values() if not seq.reserve_growth
    }
    for node in nodes:
        for key, arrival in node.exchange.connector.arrivals.items():
            other = computed.get(key)
            if other is None or not arrival.seq.is_remote or arrival.seq.key not in node.core.seqs:
                continue
            mine, its = arrival.seq.chain.fingerprint, other.chain.fingerprint
            if mine != its:
                runtime.violate("versions differ", f"{key}: {mine.hex()} reads KV of {its.hex()}")


def check_versions(
    runtime: SimRuntime, rollout: Rollout, routers: Sequence[NodeId], workers: Sequence[NodeId]
) -> None:
    """At the end all workers have the version that is current, and routers know it."""
    if not rollout.kept.number:
        return
    if rollout.kept.target is not None:
        runtime.violate("update", f"{rollout.kept.target.name} is rolled out for ever")
    wanted = rollout.kept.current
    for worker in workers:
        life = runtime.life(worker)
        assert life is not None
        assert isinstance(life.node, Worker)
        has = weight_updates(life.node.plugs).version
        if wanted.digest and has.digest != wanted.digest:
            runtime.violate("update", f"{worker} has {has.name}, and {wanted.name} is current")
        for router in routers:
            its = runtime.life(router)
            assert its is not None
            assert isinstance(its.node, Router)
            info = its.node._dispatcher.workers()[worker]
            if info.fingerprint != life.node.core.fingerprint:
                text = f"{router} takes {worker} for one with {info.weights}, it has {has.name}"
                runtime.violate("update", text)
