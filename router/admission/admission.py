"""Whether a request may come in: does it fit at all, is there room, and will it be served in time.

A request that no decode worker could ever hold is refused with the sizes; one that could, but not
now, waits. Whether it may is decided in the message that brings it:

* the queue is bounded, for all and for each tenant that has a bound. Where it is full, the tenant
  that holds most for its weight gives up its newest place, whoever that is;
* its wait is predicted: the work ahead of it, at the rate at which the queue drains. It is refused
  where that is more than `max_queue_wait_s`, or leaves too little of its timeout to be served in.
  While the rate is not known, everything up to the bound is admitted.

Who is refused is told when a place will be free, and has it then
(`router.admission.reservations`). Requests that come back after a failed attempt are never
refused for lack of room: there are at most as many of them as were dispatched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from engine.request import Refusal
from engine.stats import WorkerInfo
from router.admission.estimates import Drain, Estimates
from router.admission.fair_queue import FairQueue
from router.admission.reservations import MAX_AHEAD_S, ClientKey, Reservations
from router.admission.wait_forecast import Newcomer, WaitForecast
from router.config import RouterConfig
from router.messages import Submit
from router.record import RequestRecord

MIN_RETRY_AFTER_S = 0.1
UNKNOWN_RETRY_AFTER_S = 1.0  # while nobody knows how fast the queue drains
MAX_STAY = 0.35  # of a timeout, for all that is at the workers; more is kept in the queue
FEW = 4  # requests may always be at the workers
MARGIN = 0.1  # of a timeout, since predictions are not exact
PROMISED_WAIT = 1.25  # times max_queue_wait_s: for those that were told when to come
NEW_WAIT = 0.5  # of what may be waited, while others hold promises: rates change until they come


@dataclass(frozen=True, slots=True)
class Rejection:
    reason: Refusal
    detail: str
    retry_after_s: float | None = None


def blocks_needed(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def fits(info: WorkerInfo, num_tokens: int) -> bool:
    """Could an empty worker hold a sequence that ends at `num_tokens` tokens?"""
    needed = blocks_needed(num_tokens, info.block_size)
    needed = min(needed, info.max_seq_blocks or needed)
    return num_tokens <= info.max_model_len and needed <= info.num_blocks


def clamp_max_tokens(
    num_prompt: int, max_tokens: int, decodes: Sequence[WorkerInfo]
) -> int | Rejection:
    """`max_tokens`, cut to the longest context among `decodes` (at least one); or why the request
    can be served by none of them."""
    limit = max([info.max_model_len for info in decodes])
    if num_prompt == 0:
        return Rejection(Refusal.CONTEXT_LENGTH, "the prompt has 0 tokens; it needs at least 1")
    if num_prompt + 1 > limit:
        return Rejection(
            Refusal.CONTEXT_LENGTH,
            f"the prompt has {num_prompt} tokens; with at least 1 token of output, "
            f"{limit - 1} fit into the context of {limit}",
        )
    max_tokens = min(max_tokens, limit - num_prompt)
    for info in decodes:
        if fits(info, num_prompt + max_tokens):
            return max_tokens
    largest = max(decodes, key=lambda info: info.num_blocks * info.block_size)
    needed = blocks_needed(num_prompt + max_tokens, largest.block_size)
    return Rejection(
        Refusal.NEVER_FITS,
        f"{num_prompt} prompt + {max_tokens} output tokens need {needed} KV blocks of "
        f"{largest.block_size} tokens; the largest decode worker has {largest.num_blocks}",
    )


@dataclass(frozen=True, slots=True)
class Call:
    """What is known of a client's call before its prompt is tokenised."""

    name: bytes  # as `Submit.call`
    tenant: str
    priority: int
    num_prompt_tokens: int  # about
    max_tokens: int
    timeout_s: float


class Admission:
    """Owned by the router. It decides who may wait; the queue says in which order."""

    def __init__(self, config: RouterConfig, queue: FairQueue) -> None:
        self._config = config
        self._queue = queue
        self._drain = Drain()
        self._reservations = Reservations()
        self._estimates = Estimates()
        share = config.low_priority_share
        self._forecast = WaitForecast(queue, self._drain, self._reservations, share)

    def watch(self, now: float, *, has_decode: bool) -> None:
        """To be told whenever the queue has changed."""
        waits, serves = len(self._queue) > 0, len(self._queue.num_running) > 0
        self._drain.watch(now, waits=waits and has_decode, serves=serves)

    def done(self, log: RequestRecord, units: float) -> None:
        """Workers have done so much work for `log`."""
        self._drain.done(units)
        self._queue.work_on(log, units)

    def units(self, log: RequestRecord) -> float:
        """Work that `log` will take."""
        return self._estimates.units(log.num_prompt_tokens, log.sampling.max_tokens)

    def joined(self, log: RequestRecord) -> None:
        """`log` is admitted."""
        self._drain.joined(log.submit.priority, self._queue.entry(log).units)

    def ended(self, now: float, log: RequestRecord) -> None:
        """`log` was served to its end."""
        self._estimates.observe(now, log, self._queue.sent_at(log))

    def late(self, now: float, log: RequestRecord) -> None:
        """`log` is past its deadline."""
        self._estimates.time(now, log, self._queue.sent_at(log))

    def may_send(self, log: RequestRecord) -> bool:
        """Whether `log` can be expected to end in time beside all that is at the workers.

        Of each request, in the mean, half is left. Reckoned from what is left, room comes with
        every token, and not when requests end: those that began together would end together, and
        so would those that follow them.
        """
        rate = self._drain.can_serve_per_s
        if rate is None or self._queue.num_running.total() < FEW:
            return True
        stay_s = (2 * self._queue.units_left + self._queue.entry(log).units) / rate
        return stay_s <= (log.deadline - log.submitted_at) * MAX_STAY

    def _service_s(self, num_prompt: int, max_tokens: int) -> float:
        """From dispatch to end: as it was for others, or by what is there now (Little's law)."""
        rate = self._drain.can_serve_per_s
        stay_s = self._queue.units_running / rate if rate else 0.0
        return max(self._estimates.service_s(num_prompt, max_tokens), stay_s)

    def expects(self, now: float, log: RequestRecord) -> bool:
        """Whether `log`, which has just come, is somebody who was told to come back now."""
        return len(self._reservations) > 0 and self._reservations.redeem(now, _client(log.submit))

    def plainly_refused(self, now: float, call: Call) -> Rejection | None:
        """Why `call`, which is not yet submitted, would be refused if it was: as far as that is
        plain, and at next to no cost."""
        level, flow = self._queue.find(call.priority, call.tenant)
        if level is None or flow is None or not flow.waiting:
            return None
        newcomer = Newcomer(
            client=(call.priority, call.tenant, call.name),
            level=level,
            flow=flow,
            units=self._estimates.units(call.num_prompt_tokens, call.max_tokens),
            own_units=flow.units,
            num_own=len(flow.waiting),
            service_s=self._service_s(call.num_prompt_tokens, call.max_tokens),
            timeout_s=call.timeout_s,
            left_s=call.timeout_s,
        )
        is_expected = self._reservations.is_due(now, newcomer.client)
        return self._too_many(now, newcomer) or self._too_late(now, newcomer, is_expected)

    def turn_away(
        self, now: float, log: RequestRecord, *, is_expected: bool
    ) -> tuple[RequestRecord, Rejection] | None:
        """`log` has come and has to wait: who is not admitted because of that, and why."""
        self._reservations.pass_time(now)
        newcomer = self._newcomer(now, log)
        rejection = self._too_many(now, newcomer) or self._too_late(now, newcomer, is_expected)
        if rejection is not None:
            return log, rejection
        self.joined(log)
        # ConcurrencyLimiter are kept, too, for those who were told to come now.
        kept = 0 if is_expected else min(self._reservations.num_ripe, self._config.max_queue // 2)
        loser = self._queue.surplus(self._config.max_queue - kept)
        if loser is None:
            return None
        detail = f"{self._config.max_queue} requests are waiting, which is the limit"
        newcomer = self._newcomer(now, loser)
        place_s = newcomer.units / (self._drain.units_per_s or inf)
        return loser, self._refusal(now, newcomer, Refusal.QUEUE_FULL, detail, place_s)

    def shed(self, now: float) -> tuple[RequestRecord, Rejection] | None:
        """Who waits and has to go, since the queue drains more slowly than was thought when it
        came: the newest of a tenant first. None: nobody (any more)."""
        for level in self._queue.levels:
            for flow in level.flows.values():
                if not flow.waiting:
                    continue
                who = self._newcomer(now, flow.newest)
                wait_s = self._forecast.wait_s(who)
                if wait_s is None or wait_s <= self._allowed_s(who, PROMISED_WAIT, margin=0.0):
                    continue
                waited_s = now - flow.newest.queued_at
                detail = f"queued for {waited_s:.1f} s, and it would wait for {wait_s:.1f} s more"
                return flow.newest, self._refusal(now, who, Refusal.OVERLOADED, detail)
        return None

    def hopeless(self, now: float, log: RequestRecord) -> Rejection | None:
        """Why it would be in vain to serve `log`, if it waits and was never sent to a worker."""
        if log not in self._queue or self._queue.entry(log).is_charged:
            return None
        service_s = self._service_s(log.num_prompt_tokens, log.sampling.max_tokens)
        if now + service_s <= log.deadline:
            return None
        detail = (
            f"queued for {now - log.queued_at:.1f} s, {max(0.0, log.deadline - now):.1f} s of its "
            f"timeout are left, and serving it takes about {service_s:.1f} s"
        )
        return self._refusal(now, self._newcomer(now, log), Refusal.OVERLOADED, detail)

    def _newcomer(self, now: float, log: RequestRecord) -> Newcomer:
        """`log` waits already: it is judged as if it came now."""
        entry = self._queue.entry(log)
        return Newcomer(
            client=_client(log.submit),
            level=entry.level,
            flow=entry.flow,
            units=entry.units,
            own_units=max(0.0, entry.flow.units - entry.units),
            num_own=len(entry.flow.waiting) - 1,
            service_s=self._service_s(log.num_prompt_tokens, log.sampling.max_tokens),
            timeout_s=log.deadline - log.submitted_at,
            left_s=log.deadline - now,
        )

    def _too_many(self, now: float, who: Newcomer) -> Rejection | None:
        limit, tenant = who.flow.share.max_queued, who.flow.tenant
        itself = len(who.flow.waiting) - who.num_own  # 0 if it is not submitted yet
        others = self._queue.elsewhere.get(tenant)
        num_queued = self._queue.num_queued[tenant] + (others.num_queued if others else 0)
        if not limit or num_queued - itself < limit:
            return None
        detail = f"{limit} requests of {tenant!r} are waiting, which is its limit"
        place_s = (self._forecast.wait_s(who) or 0.0) / limit
        return self._refusal(now, who, Refusal.QUEUE_FULL, detail, place_s)

    def _too_late(self, now: float, who: Newcomer, is_expected: bool) -> Rejection | None:
        wait_s = self._forecast.wait_s(who)
        if wait_s is None:
            return None
        is_new = not is_expected and len(self._reservations) > 0
        if is_new:
            allowed_s = self._allowed_new_s(who)
        else:
            allowed_s = self._allowed_s(who, PROMISED_WAIT if is_expected else 1.0)
        if is_new and allowed_s / 2 < wait_s <= allowed_s:
            # There is room, but part of it is for those who were told to come now.
            wait_s = self._forecast.wait_s(who, self._reservations.ripe_units()) or 0.0
        if wait_s <= allowed_s:
            return None
        detail = f"it would wait for about {wait_s:.1f} s, and "
        if self._allowed_s(who) < self._config.max_queue_wait_s:
            detail += f"of its timeout of {who.timeout_s:g} s serving takes {who.service_s:.1f} s"
        elif is_new:
            detail += f"{allowed_s:g} s is the limit while others are expected back"
        else:
            detail += f"{self._config.max_queue_wait_s:g} s is the limit"
        return self._refusal(now, who, Refusal.OVERLOADED, detail)

    def _allowed_s(self, who: Newcomer, patience: float = 1.0, margin: float = MARGIN) -> float:
        in_time_s = who.left_s * (1.0 - margin) - who.service_s
        return min(self._config.max_queue_wait_s * patience, in_time_s)

    def _allowed_new_s(self, who: Newcomer) -> float:
        """While others were told to come back."""
        return NEW_WAIT * max(0.0, self._allowed_s(who))

    def _refusal(
        self, now: float, who: Newcomer, reason: Refusal, detail: str, place_s: float = 0.0
    ) -> Rejection:
        """`place_s`: until a place is free at the earliest, where places are what is short."""
        wait_s = self._forecast.wait_s(who)
        if wait_s is None:
            after_s, units_per_s = UNKNOWN_RETRY_AFTER_S, who.units / UNKNOWN_RETRY_AFTER_S
        else:
            after_s = max(MIN_RETRY_AFTER_S, wait_s - self._allowed_new_s(who), place_s)
            units_per_s = self._drain.units_per_s or 1.0
            if who.own_units > 0 and wait_s > 0:  # as fast as its line moves
                units_per_s = who.own_units / wait_s
        due = self._reservations.make(who.client, now + after_s, who.units, units_per_s)
        return Rejection(reason, detail, MAX_AHEAD_S if due is None else due - now)


def _client(submit: Submit) -> ClientKey:
    asked = submit.call or hash(submit.tokens).to_bytes(8, "little", signed=True)
    return submit.priority, submit.tenant, asked
