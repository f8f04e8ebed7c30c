"""From a fleet to another one, by what costs least: cancel, then flip, then drain, then start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.cluster.scaling.connector import ManagedWorker, State
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role

ORDER = {State.PENDING: 0, State.STARTING: 1, State.UP: 2}


@dataclass(frozen=True, slots=True)
class Moves:
    starts: tuple[Role, ...] = ()
    drains: tuple[NodeId, ...] = ()
    flips: tuple[tuple[NodeId, Role], ...] = ()


def moves_to(workers: Iterable[ManagedWorker], prefill: int, decode: int) -> Moves:
    """`workers`: those that serve or will, of any role (`both` counts as decode). The first to go
    are those that have come least far, then those that came last: they hold the least KV."""
    ranked = sorted(workers, key=lambda w: (ORDER[w.state], -w.ordered_at, w.worker))
    prefills = [w.worker for w in ranked if w.role is Role.PREFILL]
    decodes = [w.worker for w in ranked if w.role is not Role.PREFILL]
    surplus = max(0, len(ranked) - prefill - decode)
    # Of the pool that has most above what it should have.
    drains: list[NodeId] = []
    for _ in range(surplus):
        above = len(prefills) - prefill, len(decodes) - decode
        pool = prefills if above[0] >= above[1] else decodes
        drains.append(pool.pop(0))
    flips: list[tuple[NodeId, Role]] = []
    while len(prefills) > prefill and len(decodes) < decode:
        flips.append((prefills[0], Role.DECODE))
        decodes.append(prefills.pop(0))
    while len(decodes) > decode and len(prefills) < prefill:
        flips.append((decodes[0], Role.PREFILL))
        prefills.append(decodes.pop(0))
    starts = [Role.DECODE] * max(0, decode - len(decodes))
    starts += [Role.PREFILL] * max(0, prefill - len(prefills))
    return Moves(tuple(starts), tuple(drains), tuple(flips))
