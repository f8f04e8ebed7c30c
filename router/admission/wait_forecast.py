"""How long somebody who comes now would wait for a worker: the work ahead of it in the order of
service, at the rate at which the queue drains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from router.admission.estimates import Drain
from router.admission.fair_queue import FairQueue, Flow, Level
from router.admission.reservations import ClientKey, FlowKey, Reservations

NOTHING: Mapping[FlowKey, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Somebody who may have to wait: behind all of its tenant's requests that do."""

    client: ClientKey
    level: Level
    flow: Flow
    units: float  # that it takes
    own_units: float  # of its tenant's that wait before it
    num_own: int
    service_s: float
    timeout_s: float
    left_s: float  # of its timeout

    @property
    def key(self) -> FlowKey:
        return self.client[:2]


class WaitForecast:
    """Owned by the router's admission, whose parts it reads."""

    def __init__(
        self, queue: FairQueue, drain: Drain, promises: Reservations, low_share: float
    ) -> None:
        self._queue = queue
        self._drain = drain
        self._reservations = promises
        self._low_share = low_share

    def wait_s(self, who: Newcomer, promised: Mapping[FlowKey, float] = NOTHING) -> float | None:
        """Until it would be sent to a worker, if those who hold a promise came before it; None:
        nobody knows."""
        rate = self._drain.units_per_s
        if rate is None:
            return None
        levels, (priority, tenant) = self._queue.levels, who.key
        above = sum(level.units for level in levels if level.priority < priority)
        above += sum(units for (number, _), units in promised.items() if number < priority)
        beside = _ahead(who, promised, self._reservations.num_by_flow)
        # What those above leave once their queue is empty, or at least the guaranteed share.
        least = self._low_share * rate / max(1, len(levels) - 1)
        left = max(rate - self._drain.joining_above(priority), least)
        wait_s = (above + beside) / left if left else inf
        if above and least:
            wait_s = min(wait_s, beside / least)
        if self._queue.is_limited(who.flow):
            running = max(1, self._queue.num_running[tenant])
            wait_s = max(wait_s, (who.num_own + 1) / running * who.service_s)
        return wait_s


def _ahead(
    who: Newcomer, promised: Mapping[FlowKey, float], num_reserved: Mapping[FlowKey, int]
) -> float:
    """Work of its priority that is served before it: all of its tenant's, and of others what they
    start earlier in virtual time. A tenant to whom places were promised will not run out of work:
    whatever becomes free is filled."""
    level, flow = who.level, who.flow
    own = who.own_units + promised.get(who.key, 0.0)
    start = flow.start + own / flow.share.weight
    others = {tenant: each.units for tenant, each in level.flows.items() if each.waiting}
    for (priority, tenant), units in promised.items():
        if priority == level.priority:
            others[tenant] = others.get(tenant, 0.0) + units
    for tenant in level.flows:
        if num_reserved.get((level.priority, tenant)):
            others[tenant] = inf
    others.pop(flow.tenant, None)
    ahead = own + sum(each.units for _, each in level.returned)
    for tenant, units in others.items():
        other = level.flows.get(tenant)
        weight = 1.0 if other is None else other.share.weight
        begins = level.virtual if other is None else max(other.start, level.virtual)
        ahead += min(units, max(0.0, start - begins) * weight)
    return ahead
