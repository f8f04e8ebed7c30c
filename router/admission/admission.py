"""Whether a request may come in: is there room for it, and will it be served in time.

A request that does not fit on any decode worker was refused before (`router.dispatch`); one that
fits, but not now, waits. Whether it may is decided in the message that brings it:

* the queue is bounded, for all and for each tenant that has a bound. Where it is full, the tenant
  that has queued most for its weight gives up the newest one of its caller with most;
* its wait is predicted: the work ahead of it, at the rate at which the queue drains. It is refused
  where that leaves too little of its timeout to be served in, or, if `max_queue_wait_s` is set, is
  more than that.
  While the rate is not sure, everything up to the bound is admitted, and so it is where nothing
  is served: an estimate refuses nothing that an idle cluster would serve.

A refused client is told when there will be capacity, which is reserved for it then
(`router.admission.reservations`). Requests that are queued again after a failed attempt are never
refused for lack of room: there are at most as many of them as were dispatched.

What a request takes is estimated from those that were served. Work is counted in units: one for a
prompt token that is computed, `OUTPUT_UNITS` for a token of output. The queue drains as fast as the
workers do work while requests wait: that is measured token by token, so that it is known long
before the first of many requests ends. The wait of a request is the work ahead of it in the order
of service, at that rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from kvrelay.engine.cost import TOKENS_UNIT, FittedCost
from kvrelay.engine.request import Refusal
from kvrelay.engine.service_class import ServiceClass
from kvrelay.engine.shares import may_take, reserve_of
from kvrelay.router.admission.fair_queue import FairQueue, seen_by
from kvrelay.router.admission.flow import Flow, Level, QueueEntry
from kvrelay.router.admission.reservations import (
    MAX_RETRY_AFTER_S,
    ClientKey,
    FlowKey,
    Reservations,
)
from kvrelay.router.averages import Average, DrainRate
from kvrelay.router.config import RouterConfig
from kvrelay.router.messages import Submit
from kvrelay.router.record import Rejection, RequestRecord, WaitsFor
from kvrelay.router.traffic import Traffic

FIRST_TOKEN_SHAPE = (0.05, 1.0)  # a first token takes as long as 200 of the prompt's, and those
SURE = 0.25  # standard error of what is sure, as a part of it
OUTPUT_UNITS = 2.0  # an output token against one of a prompt, as in VTC (Sheng et al. 2024)
NO_UNITS: Mapping[FlowKey, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A request that may have to wait: behind all waiting requests of its caller, and those of its
    tenant's other callers whose turn comes before."""

    client: ClientKey
    level: Level
    flow: Flow
    caller: str
    is_queued: bool  # False: it may never be submitted
    units: float  # that it takes
    own_units: float  # units of its tenant's requests that wait before it, about
    num_own: int
    service_s: float
    timeout_s: float
    left_s: float  # until its timeout is over

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
        self._computed_share = Average(1.0)  # the part of prompt tokens that was not cached
        self._prompt_s = FittedCost(FIRST_TOKEN_SHAPE)  # from dispatch to the first token of output
        self._output_s = FittedCost((1.0,))  # tokens of output after the first

    def units(self, num_prompt: int, max_tokens: int, num_held: int | None = None) -> float:
        """What a request will take. `num_held`: prompt tokens whose KV is held somewhere; None: it
        is not known which prompt it is, and as much was cached as for others."""
        share = self._computed_share.value
        computed = max(1.0, num_prompt * share if num_held is None else num_prompt - num_held)
        return computed + OUTPUT_UNITS * min(max_tokens, self._output_tokens.value)

    def service_s(self, num_prompt: int, max_tokens: int, *, is_low: bool) -> float:
        """From its dispatch to its end, at least: as for earlier requests, or by the load now
        (Little's law); 0 as long as nothing is sure. `is_low`: it is of a low class of service."""
        num_output = min(max_tokens, self._output_tokens.value)
        own_s = _sure_s(self._prompt_s, _prompt(num_prompt))
        own_s += _sure_s(self._output_s, (num_output / TOKENS_UNIT,))
        rate = self.drain.can_serve_per_s if self.is_sure(0.0) else None
        stay_s = seen_by(is_low, self._queue.units_running) / rate if rate else 0.0
        return max(own_s, stay_s)

    def is_sure(self, units: float) -> bool:
        """Whether rates say something of a request of so many units beside those that are served:
        as much as one of either takes was done more than once."""
        num_running = max(1, self._queue.num_running.total())
        return self.drain.is_sure(max(units, sum(self._queue.units_running) / num_running))

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
        self._prompt_s.add(_prompt(record.num_prompt_tokens), first_at - sent_at)
        if record.num_output_tokens > 1:
            num_more = record.num_output_tokens - 1
            self._output_s.add((num_more / TOKENS_UNIT,), now - first_at)

    def wait_s(self, who: Newcomer, reserved: Mapping[FlowKey, float] = NO_UNITS) -> float | None:
        """Until it would be sent to a worker, if the `reserved` work came before it; None: not
        sure yet."""
        rate = self.drain.units_per_s
        if rate is None or not self.is_sure(who.units):
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


def _prompt(num_tokens: int) -> tuple[float, float]:
    return (1.0, num_tokens / TOKENS_UNIT)


def _sure_s(cost: FittedCost, features: tuple[float, ...]) -> float:
    """What `cost` says where it is sure; 0 where little like it was measured."""
    return cost.seconds(features) if cost.spread(features) <= SURE else 0.0


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
    """Work of its priority that is served before it: its tenant's, and of others what they
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


MIN_RETRY_AFTER_S = 0.1
NO_WORKERS_RETRY_AFTER_S = 5.0
UNKNOWN_RETRY_AFTER_S = 1.0  # while it is not known how fast the queue drains
MAX_STAY = 0.35  # share of a timeout, for all work that is at the workers; the rest stays queued
MIN_RUNNING = 4  # so many requests may always be at the workers
MARGIN = 0.1  # share of a timeout, since predictions are not exact
ON_TIME = 0.95  # share of router.ttft_target_s, for predictions that are a little off
MAX_AGENT_QUEUE_S = 0.5  # in prompts at a worker, for an agent that has prompts at workers
MAX_QUEUE = 0.25  # share of it, in prompts at a worker; the rest waits in the router
LEAST_FREE = 0.3  # share of a worker's KV memory, for those that are on time
RESERVED_WAIT = 1.25  # times max_queue_wait_s: for clients with a reservation
NEW_WAIT = 0.5  # share of the allowed wait, for new clients while others have reservations


@dataclass(frozen=True, slots=True)
class IncomingCall:
    """What is known of a client's call before its prompt is tokenised."""

    name: bytes  # as `Submit.call`
    tenant: str
    priority: int
    num_prompt_tokens: int  # about
    max_tokens: int
    timeout_s: float
    caller: str = ""  # as `Submit.caller`
    root: str = ""  # as `Submit.root`


class Admission:
    """Owned by the router. It decides who may wait; the queue says in which order."""

    def __init__(self, config: RouterConfig, queue: FairQueue, output_tokens: Average) -> None:
        """`output_tokens`: of a request; its owner keeps it up to date."""
        self._config = config
        self._max_wait_s = config.max_queue_wait_s or inf
        self.traffic = Traffic()
        self._queue = queue
        self._reservations = Reservations()
        self._estimates = Estimates(
            queue, self._reservations, config.low_priority_share, output_tokens
        )
        self._drain = self._estimates.drain
        self._no_worker_since: float | None = None
        self.waits_for = WaitsFor.TARGET  # why the last one was not accepted

    def on_queue_changed(self, now: float, *, has_workers: bool) -> None:
        """Whether requests wait, or are served, may have changed."""
        waits, serves = len(self._queue) > 0, len(self._queue.num_running) > 0
        self._drain.update(now, waits=waits and has_workers, serves=serves)

    def on_workers(self, prompt_tokens_per_s: float) -> None:
        """What they say that they compute together; 0: not known yet."""
        self._drain.workers_per_s = prompt_tokens_per_s

    def on_work(self, record: RequestRecord, units: float) -> None:
        """Workers have done so much work for `record`."""
        self._drain.on_work(units)
        self._queue.work_on(record, units)

    def units(self, record: RequestRecord, num_held: int | None = None) -> float:
        """Work that `record` will take. `num_held`: of its prompt's tokens, as of
        `Dispatcher.held`."""
        num_prompt, max_tokens = record.num_prompt_tokens, record.sampling.max_tokens
        return self._estimates.units(num_prompt, max_tokens, num_held)

    def on_admitted(self, record: RequestRecord) -> None:
        self._drain.on_queued(record.submit.priority, self._queue.entry(record).units)

    def on_finished(self, now: float, record: RequestRecord) -> None:
        """`record` was served to its end."""
        self._estimates.on_finished(now, record)
        num_cached, num_output = record.num_cached_tokens, record.num_output_tokens
        first_at, target_s = record.first_token_at, self._config.ttft_target_s or inf
        is_late = first_at is not None and first_at - record.submitted_at > target_s
        if record.submit.service_class is not ServiceClass.BATCH:
            self.traffic.on_finished(
                record.num_prompt_tokens, num_cached, num_output, is_late=is_late
            )

    def may_send(self, record: RequestRecord) -> bool:
        """Whether `record` can be expected to end in time beside all that is at the workers.

        On average half of each request is left. Counted by the work that is left, room comes with
        every token, and not when requests end: requests that began together would end together,
        and so would those that follow them.
        """
        rate = self._drain.can_serve_per_s
        if record.num_output_tokens:  # its client waits for the next one
            return True
        entry = self._queue.entry(record)
        if rate is None or self._queue.num_running.total() < MIN_RUNNING:
            return True
        if not self._estimates.is_sure(entry.units):
            return True
        stay_s = (2 * seen_by(entry.is_low, self._queue.units_left) + entry.units) / rate
        return stay_s <= (record.deadline - record.submitted_at) * MAX_STAY

    def on_queued(self, now: float, record: RequestRecord, rates: Sequence[float]) -> None:
        """`record` is new, and waits. Where it cannot be on time behind the others of its tenant,
        the longest of the caller with most work is late until it can: of one caller as many as
        possible are on time then (Moore and Hodgson 1968). `rates`: prompt tokens per second of
        each worker that they are meant for."""
        self._on_arrival(record.submit.priority, record.num_prompt_tokens)
        target_s, flow = self._config.ttft_target_s, self._queue.entry(record).flow
        if not target_s or not rates:
            return
        total = sum(rates)
        busy = [each for level in self._queue.levels for each in level.flows.values() if each]
        share = flow.share.weight / sum(each.share.weight for each in busy)
        left_s = target_s * ON_TIME - (now - record.submitted_at)
        while entry := flow.longest:
            own_s = self._queue.entry(record).units / max(rates)
            if flow.on_time_units / (total * share) + own_s <= left_s:
                return
            flow.put_late(entry)
            if entry.record is record:
                return

    def accepts(
        self, now: float, record: RequestRecord, ttft_s: float, queue_s: float, free: float
    ) -> bool:
        """Whether `record` goes where its first token would take `ttft_s` and wait for `queue_s` of
        other prompts, and this share of the KV memory is free. Queues at workers stay short, so
        that the order is decided here. One whose first token cannot be on time any more lets
        others go first, and leaves them memory. An agent that has prompts at workers sends no more
        where they would queue: they would be in the way of another agent's next turn there, however
        the queue here is ordered."""
        target_s, entry = self._config.ttft_target_s, self._queue.entry(record)
        if entry.is_charged:
            return True
        self.waits_for = WaitsFor.AGENT
        if queue_s > MAX_AGENT_QUEUE_S and self.has_prompt_at_workers(entry):
            return False
        self.waits_for = WaitsFor.TARGET
        if not target_s:
            return True
        if queue_s > target_s * MAX_QUEUE:
            return False
        if entry.is_late:
            is_due = entry.flow.num_before_late * self._config.low_priority_share >= 1
            return is_due or free >= LEAST_FREE
        if now - record.submitted_at + ttft_s <= target_s * ON_TIME:
            return True
        self._queue.put_late(record)
        return len(self._queue) == 1 and free >= LEAST_FREE

    def has_prompt_at_workers(self, entry: QueueEntry) -> bool:
        """Whether one of its agent's is there and has no first token. What belongs to no session is
        no agent's."""
        return bool(entry.agent.name and self._queue.num_prefilling[entry.agent.key])

    def redeem(self, now: float, record: RequestRecord) -> bool:
        """Whether `record`, which has just come, was told to come back now (Retry-After)."""
        reservations = self._reservations
        return len(reservations) > 0 and reservations.redeem(now, _client(record.submit))

    def quick_refusal(self, now: float, call: IncomingCall) -> Rejection | None:
        """Why `call`, which is not yet submitted, would be refused if it was. A cheap check, that
        does not find every reason."""
        level, flow = self._queue.find(call.priority, call.tenant)
        if level is None or not flow:
            return None
        own_units, num_own = flow.before(call.caller, call.root)
        newcomer = Newcomer(
            client=(call.priority, call.tenant, call.name),
            level=level,
            flow=flow,
            caller=call.caller,
            is_queued=False,
            units=self._estimates.units(call.num_prompt_tokens, call.max_tokens),
            own_units=own_units,
            num_own=num_own,
            service_s=self._estimates.service_s(
                call.num_prompt_tokens,
                call.max_tokens,
                is_low=ServiceClass.of(call.priority).is_low,
            ),
            timeout_s=call.timeout_s,
            left_s=call.timeout_s,
        )
        has_reservation = self._reservations.is_due(now, newcomer.client)
        refusal = self._too_many(now, newcomer) or self._too_late(now, newcomer, has_reservation)
        if refusal is not None:  # it will not be submitted
            self._on_arrival(call.priority, call.num_prompt_tokens)
        return refusal

    def _on_arrival(self, priority: int, num_prompt_tokens: int) -> None:
        if ServiceClass.of(priority) is not ServiceClass.BATCH:
            self.traffic.on_arrival(num_prompt_tokens)

    def turn_away(
        self, now: float, record: RequestRecord, *, has_reservation: bool
    ) -> tuple[RequestRecord, Rejection] | None:
        """`record` has come and has to wait: the request that is refused because of that."""
        self._reservations.expire(now)
        newcomer = self._newcomer(now, record)
        rejection = self._too_many(now, newcomer) or self._too_late(now, newcomer, has_reservation)
        if rejection is not None:
            return record, rejection
        self.on_admitted(record)
        # Places in the queue are kept as well, for clients that are due back now.
        limit = self._config.max_queue
        kept = 0 if has_reservation else min(self._reservations.num_active, limit // 2)
        surplus = self._queue.surplus(limit - kept)
        if surplus is None:
            return None
        detail = f"{limit} requests are waiting, which is the limit"
        newcomer = self._newcomer(now, surplus)
        place_s = newcomer.units / (self._drain.units_per_s or inf)
        return surplus, self._refusal(now, newcomer, Refusal.QUEUE_FULL, detail, place_s)

    def shed(self, now: float) -> tuple[RequestRecord, Rejection] | None:
        """A waiting request that is refused after all, since the queue drains more slowly than was
        estimated when it came: the newest of a tenant's caller with most. None: there is none."""
        for level in () if self._is_idle else self._queue.levels:
            for flow in level.flows.values():
                if not flow:
                    continue
                newest = flow.newest.record
                who = self._newcomer(now, newest)
                wait_s = self._estimates.wait_s(who)
                if wait_s is None or wait_s <= self._allowed_s(who, RESERVED_WAIT, margin=0.0):
                    continue
                waited_s = now - newest.queued_at
                detail = f"queued for {waited_s:.1f} s, and it would wait for {wait_s:.1f} s more"
                return newest, self._refusal(now, who, Refusal.OVERLOADED, detail)
        return None

    def overdue(self, now: float, record: RequestRecord, *, has_workers: bool) -> Rejection | None:
        """Why `record` ends now: its deadline is over, or no worker came up. None: it goes on."""
        if has_workers:
            self._no_worker_since = None
        elif self._no_worker_since is None:
            self._no_worker_since = now
        waited_s = now - record.queued_at
        if record.current is None and self._no_worker_since is not None:
            alone_s = now - max(record.queued_at, self._no_worker_since)
            if now >= record.deadline or alone_s >= self._config.no_workers_wait_s:
                detail = f"no worker is up; waited {waited_s:.1f} s for one"
                return Rejection(Refusal.NO_WORKERS, detail, NO_WORKERS_RETRY_AFTER_S)
        if now < record.deadline:
            return self._hopeless(now, record)
        self._estimates.on_ended(now, record)
        where = f"queued for {waited_s:.1f} s" if record.current is None else "being served"
        allowed_s = record.deadline - record.submitted_at
        max_tokens = record.sampling.max_tokens
        done = f"{record.num_output_tokens} of at most {max_tokens} tokens were done"
        return Rejection(
            Refusal.DEADLINE, f"its {allowed_s:g} s are over; it was {where}, and {done}"
        )

    def _hopeless(self, now: float, record: RequestRecord) -> Rejection | None:
        """Why `record` can no longer be served in time, if it waits and was never dispatched."""
        if record not in self._queue or self._queue.entry(record).is_charged or self._is_idle:
            return None
        service_s = self._service_s(record)
        if now + service_s <= record.deadline:
            return None
        left_s = max(0.0, record.deadline - now)
        detail = (
            f"queued for {now - record.queued_at:.1f} s, {left_s:.1f} s of its timeout are left, "
            f"and serving it takes at least {service_s:.1f} s"
        )
        return self._refusal(now, self._newcomer(now, record), Refusal.OVERLOADED, detail)

    @property
    def _is_idle(self) -> bool:
        """Nothing is at the workers: whoever comes begins at once, and is never refused by what it
        is expected to take."""
        return self._queue.num_running.total() == 0

    def _service_s(self, record: RequestRecord) -> float:
        sizes = record.num_prompt_tokens, record.sampling.max_tokens
        return self._estimates.service_s(*sizes, is_low=record.submit.is_low)

    def _newcomer(self, now: float, record: RequestRecord) -> Newcomer:
        """`record` waits already: it is judged as if it came now."""
        entry = self._queue.entry(record)
        flow, caller = entry.flow, entry.caller
        own_units, num_own = flow.before(caller.name, entry.agent.name, entry)
        return Newcomer(
            client=_client(record.submit),
            level=entry.level,
            flow=flow,
            caller=caller.name,
            is_queued=True,
            units=entry.units,
            own_units=own_units,
            num_own=num_own,
            service_s=self._service_s(record),
            timeout_s=record.deadline - record.submitted_at,
            left_s=record.deadline - now,
        )

    def _too_many(self, now: float, who: Newcomer) -> Rejection | None:
        limit, tenant = who.flow.share.max_queued, who.flow.tenant
        if not limit:
            return None
        free = limit - (self._queue.num_before(who.flow) - who.is_queued)
        own = self._queue.num_before(who.flow, who.caller) - who.is_queued
        # However few places there are, no caller has all.
        reserve = reserve_of(limit)
        if free < 1:
            detail = f"{limit} requests of {tenant!r} are waiting, which is its limit"
        elif not may_take(own, free, reserve):
            detail = (
                f"{own} requests of this caller are waiting, its share of the {limit} that"
                f" {tenant!r} may have"
            )
        else:
            return None
        place_s = (self._estimates.wait_s(who) or 0.0) / limit
        return self._refusal(now, who, Refusal.QUEUE_FULL, detail, place_s)

    def _too_late(self, now: float, who: Newcomer, has_reservation: bool) -> Rejection | None:
        wait_s = self._estimates.wait_s(who)
        if wait_s is None or self._is_idle:
            return None
        is_new = not has_reservation and len(self._reservations) > 0
        if is_new:
            allowed_s = self._allowed_new_s(who)
        else:
            allowed_s = self._allowed_s(who, RESERVED_WAIT if has_reservation else 1.0)
        if is_new and allowed_s / 2 < wait_s <= allowed_s:
            # There is room, but part of it is reserved for clients that are due back now.
            wait_s = self._estimates.wait_s(who, self._reservations.active_units()) or 0.0
        if wait_s <= allowed_s:
            return None
        detail = f"it would wait for about {wait_s:.1f} s, and "
        if is_new and wait_s <= self._allowed_s(who):
            detail += f"{allowed_s:.3g} s is the limit while others are expected back"
        elif self._allowed_s(who) < self._max_wait_s:
            detail += f"of its timeout of {who.timeout_s:g} s serving takes at least "
            detail += f"{who.service_s:.1f} s"
        else:
            detail += f"{self._max_wait_s:g} s is the limit"
        return self._refusal(now, who, Refusal.OVERLOADED, detail)

    def _allowed_s(self, who: Newcomer, patience: float = 1.0, margin: float = MARGIN) -> float:
        in_time_s = who.left_s * (1.0 - margin) - who.service_s
        return min(self._max_wait_s * patience, in_time_s)

    def _allowed_new_s(self, who: Newcomer) -> float:
        """What new clients may wait while others have reservations."""
        return NEW_WAIT * max(0.0, self._allowed_s(who))

    def _refusal(
        self, now: float, who: Newcomer, reason: Refusal, detail: str, place_s: float = 0.0
    ) -> Rejection:
        """`place_s`: until there is a place in the queue at the earliest, where it is full."""
        self.traffic.num_late += ServiceClass.of(who.client[0]) is not ServiceClass.BATCH
        wait_s = self._estimates.wait_s(who)
        if wait_s is None:
            after_s, units_per_s = UNKNOWN_RETRY_AFTER_S, who.units / UNKNOWN_RETRY_AFTER_S
        else:
            after_s = max(MIN_RETRY_AFTER_S, wait_s - self._allowed_new_s(who), place_s)
            units_per_s = self._drain.units_per_s or 1.0
            if who.own_units > 0 and wait_s > 0:  # as fast as the tenant's queue moves
                units_per_s = who.own_units / wait_s
        due = self._reservations.make(who.client, now + after_s, who.units, units_per_s)
        return Rejection(reason, detail, MAX_RETRY_AFTER_S if due is None else due - now)


def _client(submit: Submit) -> ClientKey:
    asked = submit.call or hash(submit.tokens).to_bytes(8, "little", signed=True)
    return submit.priority, submit.tenant, asked
