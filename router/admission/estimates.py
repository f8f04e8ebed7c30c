"""What a request takes, from those that were served, and how long it will wait.

Work is counted in units: one for a prompt token that is computed, `OUTPUT_UNITS` for a token of
output. The queue drains as fast as the workers do work while requests wait: that is measured token
by token, so that it is known long before the first of many requests ends. The wait of a request is
the work ahead of it in the order of service, at that rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from kvrelay.router.admission.fair_queue import FairQueue
from kvrelay.router.admission.flows import Flow, Level
from kvrelay.router.admission.reservations import ClientKey, FlowKey, Reservations
from kvrelay.router.averages import Average, DrainRate, Ratio
from kvrelay.router.record import RequestRecord

OUTPUT_UNITS = 2.0  # an output token against one of a prompt, as in VTC (Sheng et al. 2024)
NO_UNITS: Mapping[FlowKey, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A request that may have to wait: behind all waiting requests of its tenant."""

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


class Estimates:
    """Owned by the router's admission, whose queue and reservations it reads."""

    def __init__(
        self,
        queue: FairQueue,
        reservations: Reservations,
        low_share: float,
        output_tokens: Average,
    ) -> None:
        """`output_tokens`: of a request; its owner keeps it up to date."""
        self._queue = queue
        self._reservations = reservations
        self._low_share = low_share
        self._output_tokens = output_tokens
        self.drain = DrainRate()
        self._computed_share = Average(1.0)  # of prompt tokens; the rest was cached
        self._prompt_s = Ratio()  # per prompt token, from dispatch to the first token of output
        self._output_s = Ratio()  # per token of output after the first

    def units(self, num_prompt: int, max_tokens: int, num_held: int | None = None) -> float:
        """What a request will take. `num_held`: prompt tokens whose KV is held somewhere; None: it
        is not known which prompt it is, and as much was cached as for others."""
        share = self._computed_share.value
        computed = max(1.0, num_prompt * share if num_held is None else num_prompt - num_held)
        return computed + OUTPUT_UNITS * min(max_tokens, self._output_tokens.value)

    def service_s(self, num_prompt: int, max_tokens: int) -> float:
        """From its dispatch to its end: as for earlier requests, or by the load now (Little's
        law); 0 as long as nothing is known."""
        output_s = min(max_tokens, self._output_tokens.value) * self._output_s.value
        rate = self.drain.can_serve_per_s
        stay_s = self._queue.units_running / rate if rate else 0.0
        return max(num_prompt * self._prompt_s.value + output_s, stay_s)

    def on_finished(self, now: float, record: RequestRecord) -> None:
        """A request was served to its end."""
        if record.num_cached_tokens is not None:
            self._computed_share.add(computed_tokens(record) / record.num_prompt_tokens)
        self.on_ended(now, record)

    def on_ended(self, now: float, record: RequestRecord) -> None:
        """Count how long it took, as far as it came."""
        sent_at = self._queue.sent_at(record)
        # One that was sent more than once, or lived through an outage, tells nothing.
        if sent_at is None or self.drain.was_out(since=sent_at):
            return
        first_at = now if record.first_token_at is None else record.first_token_at
        self._prompt_s.add(first_at - sent_at, record.num_prompt_tokens)
        if record.num_output_tokens > 1:
            self._output_s.add(now - first_at, record.num_output_tokens - 1)

    def wait_s(self, who: Newcomer, reserved: Mapping[FlowKey, float] = NO_UNITS) -> float | None:
        """Until it would be sent to a worker, if the `reserved` work came before it; None: not
        known yet."""
        rate = self.drain.units_per_s
        if rate is None:
            return None
        levels, (priority, tenant) = self._queue.levels, who.key
        above = sum(level.units for level in levels if level.priority < priority)
        above += sum(units for (number, _), units in reserved.items() if number < priority)
        beside = _ahead(who, reserved, self._reservations.num_by_flow)
        # What those above leave once their queue is empty, or at least the guaranteed share.
        least = self._low_share * rate / max(1, len(levels) - 1)
        left = max(rate - self.drain.joining_above(priority), least)
        wait_s = (above + beside) / left if left else inf
        if above and least:
            wait_s = min(wait_s, beside / least)
        if self._queue.is_limited(who.flow):
            running = max(1, self._queue.num_running[tenant])
            wait_s = max(wait_s, (who.num_own + 1) / running * who.service_s)
        return wait_s


def units_done(record: RequestRecord) -> float:
    """What `record` has taken up to now."""
    if record.first_token_at is None:
        return 0.0
    return computed_tokens(record) + OUTPUT_UNITS * record.num_output_tokens


def computed_tokens(record: RequestRecord) -> int:
    return record.num_prompt_tokens - (record.num_cached_tokens or 0)


def _ahead(
    who: Newcomer, reserved: Mapping[FlowKey, float], num_reserved: Mapping[FlowKey, int]
) -> float:
    """Work of its priority that is served before it: all of its tenant's, and of others what they
    start earlier in virtual time. A tenant with reservations will not run out of work:
    it uses all capacity that becomes free."""
    level, flow = who.level, who.flow
    own = who.own_units + reserved.get(who.key, 0.0)
    start = flow.start + own / flow.share.weight
    others = {tenant: each.units for tenant, each in level.flows.items() if each}
    for (priority, tenant), units in reserved.items():
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
