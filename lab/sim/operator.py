"""An operator who gives orders about idle KV: park, resume, pin, unpin, drop.

Orders are drawn with the scenario. Those given while there are faults may be lost, and so may their
answers; those given after must each be answered once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.engine.kv.block_hash import hash_blocks
from kvrelay.engine.kv.scope import UNSALTED
from kvrelay.engine.node import Effect, NodeId, Send
from kvrelay.kvtransfer.messages import CacheAction, CacheOrder, CacheOrderDone
from kvrelay.lab.sim.workload import Job

OPERATOR: NodeId = "operator"


@dataclass(frozen=True, slots=True)
class PlannedOrder:
    at_s: float  # after the start of the run, or of the time after the faults
    worker: NodeId
    order: CacheOrder
    after_faults: bool


@dataclass(frozen=True, slots=True)
class GiveOrder:
    """To the operator, from the run."""

    planned: PlannedOrder


def draw_orders(
    rng: random.Random,
    workers: list[NodeId],
    jobs: list[Job],
    until_s: float,
    fingerprint: bytes,
    block_size: int,
) -> list[PlannedOrder]:
    """About prefixes of the jobs' prompts and answers."""
    orders = []
    for number in range(rng.choice((0, 0, 6, 30))):
        job = rng.choice(jobs)
        tokens = (*job.prompt, *job.expected)
        block_hashes = hash_blocks(fingerprint, UNSALTED, tokens, block_size)
        after = rng.random() < 0.3
        order = CacheOrder(
            f"o{number}",
            OPERATOR,
            rng.choice(list(CacheAction)),
            tuple(block_hashes[: rng.randint(1, 30)]),
        )
        at_s = rng.uniform(0.0, 1.0 if after else until_s)
        orders.append(PlannedOrder(at_s, rng.choice(workers), order, after))
    return orders


class Operator:
    """A node. `answers` counts those to each order."""

    def __init__(self, violated: Callable[[str, str], None]) -> None:
        self.node_id = OPERATOR
        self.answers: Counter[str] = Counter()
        self._given: dict[str, tuple[PlannedOrder, float]] = {}  # and when
        self._violated = violated

    def start(self, now: float) -> list[Effect]:
        return []

    def receive(self, now: float, message: Any) -> list[Effect]:
        match message:
            case GiveOrder(planned):
                self._given[planned.order.order_id] = (planned, now)
                return [Send(planned.worker, planned.order)]
            case CacheOrderDone(worker, order_id, num_blocks):
                planned, _ = self._given[order_id]
                self.answers[order_id] += 1
                most = len(planned.order.block_hashes)
                if worker != planned.worker or not 0 <= num_blocks <= most:
                    self._violated("order", f"{order_id}: {message}")
            case _:
                self._violated("order", f"the operator was told {message}")
        return []

    def check(self, up_since: Mapping[NodeId, float]) -> None:
        """At the end: every order that could not be lost was answered, once. `up_since`: when each
        worker came up for the last time."""
        for order_id, (planned, given_at) in self._given.items():
            could_be_lost = not planned.after_faults or given_at < up_since[planned.worker]
            if not could_be_lost and self.answers[order_id] != 1:
                times = self.answers[order_id]
                self._violated("order", f"{order_id} was answered {times} times")
