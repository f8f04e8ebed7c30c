"""The live requests of a router: how one comes in, moves, and ends exactly once.

Life: `submit` queues it, `dispatch` sends an attempt out, `advance` streams what comes back,
`retry` queues it again, and one of finish, `fail` and `cancel` ends it. The router takes what has
to be sent at the end of each message."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.engine.node import Effect, NodeId, Note, Send
from kvrelay.engine.request import FinishReason, Refusal, TokenDelta, TokenLogprobs
from kvrelay.router.admission.admission import (
    OUTPUT_UNITS,
    Admission,
    IncomingCall,
    computed_tokens,
    units_done,
)
from kvrelay.router.admission.blocked import Blocked
from kvrelay.router.admission.fair_queue import FairQueue
from kvrelay.router.admission.flow import QueueEntry
from kvrelay.router.config import RouterConfig
from kvrelay.router.dispatch import Accepts, Dispatcher
from kvrelay.router.explain import Explanations
from kvrelay.router.index.watcher import CacheWatcher
from kvrelay.router.messages import Failed, Output, Submit
from kvrelay.router.placement.endpoint import Endpoint
from kvrelay.router.record import (
    CLEARED_TOKENS,
    Attempt,
    Cause,
    Rejection,
    RequestRecord,
    WaitsFor,
    abort_messages,
    dispatch_messages,
)
from kvrelay.router.state import ReplicaSync
from kvrelay.router.status import Totals

MAX_LATE = 2  # attempts that were late count as one: a machine may be slow, or it hangs each time
MAX_OWN_FAILURES = 2  # a request may have, on as many workers; then it is refused
MAX_LOST_APART = 2  # workers that ended while no other suspect was there
MAX_TRIED_AT_ONCE = 8  # requests that find no worker, in one message: each costs a choice


class Requests:
    """Owned by the router. Invariant: a live request is either in the queue or has a current
    attempt; one that ended is in neither, and has no booking anywhere."""

    def __init__(self, router: NodeId, config: RouterConfig, clock: Callable[[], float]) -> None:
        """`clock`: for how long decisions take, and for nothing else."""
        self.node_id = router
        self._config = config
        self._clock = clock
        self._effects: list[Effect] = []
        self._ended: dict[str, NodeId] = {}  # id -> client; oldest first
        self.dispatcher = Dispatcher(config, router)
        self.watcher: CacheWatcher | None = None
        self.replica_sync = ReplicaSync(self.dispatcher.index)
        self.totals = Totals()
        self.explanations = Explanations(config.max_decisions)
        self.now = 0.0  # when the message came that is being handled
        self.live: dict[str, RequestRecord] = {}
        self.queue = FairQueue(config.low_priority_share)
        self.admission = Admission(config, self.queue, self.dispatcher.output_tokens)
        self.ended_turns: list[tuple[RequestRecord, Attempt | None]] = []  # for `Sessions`
        self._is_held_back = False  # a request would wait too long at the workers
        self.room_changed = False  # True: a worker may have room for a queued request
        self._blocked = Blocked()  # that could not be sent, while others are tried

    def send(self, to: NodeId, message: object) -> None:
        self._effects.append(Send(to, message))

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def submit(self, now: float, submit: Submit) -> None:
        """Admit a request, or refuse it. An exact repeat is ignored."""
        twin = self.live.get(submit.request_id)
        if twin is not None:
            if submit != twin.submit:
                detail = f"request id {submit.request_id!r} is in use"
                self._refuse(submit, Rejection(Refusal.DUPLICATE, detail))
            return
        if self._ended.get(submit.request_id) == submit.reply_to:
            return
        self.totals.submitted += 1
        record = RequestRecord(
            submit=submit,
            sampling=submit.sampling,
            arrival=self.totals.submitted,
            submitted_at=now,
            deadline=now + min(submit.timeout_s, self._config.max_timeout_s),
            queued_at=now,
        )
        self.live[record.request_id] = record
        rejection = self.dispatcher.check(record)
        if rejection is None and not submit.timeout_s > 0:
            detail = f"a timeout of {submit.timeout_s} s leaves no time"
            rejection = Rejection(Refusal.DEADLINE, detail)
        if rejection is not None:
            self.fail(record, rejection)
        elif (reason := record.complete()) is not None:
            self._finish(now, record, reason)
        else:
            self._admit(now, record)

    def refuse(self, now: float, call: IncomingCall) -> Failed | None:
        """Why `call` would be refused, by a cheap check; it counts as if it was submitted."""
        rejection = self.admission.quick_refusal(now, call)
        if rejection is None:
            return None
        self.totals.submitted += 1
        self.totals.refused(call.tenant, rejection.reason)
        return Failed("", rejection.reason, rejection.detail, rejection.retry_after_s)

    def _admit(self, now: float, record: RequestRecord) -> None:
        """Dispatch or queue it; if the queue is full, one request is refused."""
        has_reservation = self.admission.redeem(now, record)
        num_held = self.dispatcher.held(now, record)
        self.queue.push(record, self.admission.units(record, num_held), num_held or 0)
        self.admission.on_queued(now, record, self.dispatcher.prompt_rates)
        record.enqueue(now)
        self.room_changed = True
        self.dispatch(now)
        if record not in self.queue:
            self.admission.on_admitted(record)
            return
        turned_away = self.admission.turn_away(now, record, has_reservation=has_reservation)
        if turned_away is not None:
            self.fail(*turned_away)

    def dispatch(self, now: float) -> None:
        """Send out, in order, queued requests that a worker has room for. The others wait, and may
        be passed a number of times; then memory is held for one of them at a worker. Where many
        have to be tried, the next message goes on with those that were not."""
        self.admission.on_queue_changed(now, has_workers=self.dispatcher.has_workers)
        if not self.room_changed:
            return
        self.room_changed = self._is_held_back = False
        blocked, num_tried = self._blocked, 0
        due: list[QueueEntry] = []  # they are tried again before one more passes them
        while self.dispatcher.has_room(now):
            entry = self.queue.next(blocked)
            if entry is None:
                break
            if due:
                for passed in due:
                    blocked.try_again(passed)
                due.clear()
                continue
            began = self._clock()
            attempt = self._try(now, entry)
            if isinstance(attempt, Rejection):
                self.fail(entry.record, attempt)
            elif attempt is not None:
                attempt.route_s = self._clock() - began
                self._dispatch_now(now, entry.record, attempt)
                due = blocked.are_passed(now, entry)
            else:
                num_tried += 1
                if num_tried == MAX_TRIED_AT_ONCE:
                    self.room_changed = True
                    return
        if blocked.entries:
            self._blocked = Blocked()

    def _try(self, now: float, entry: QueueEntry) -> Attempt | Rejection | None:
        """The next attempt of a queued request; None: it waits, and is `_blocked`."""
        record, blocked, dispatcher = entry.record, self._blocked, self.dispatcher
        blocked.count_passes(entry)
        is_due = entry.passes.are_over(now, record.deadline - record.submitted_at)
        if record.waits_for is WaitsFor.AGENT and self.admission.has_prompt_at_workers(entry):
            is_due = False  # nobody passes an agent that is being served
        if not is_due and blocked.lacks_memory(entry):
            record.wait(now, WaitsFor.MEMORY)
            blocked.add(entry)
            return None
        if not is_due and not self.admission.may_send(record):
            self._is_held_back = True
            record.wait(now, WaitsFor.DEADLINE)
            blocked.add(entry, is_held_back=True)
            return None
        attempt = self._place(now, record, self.admission.accepts, patient=is_due)
        if attempt is None:
            found = dispatcher.found_room
            record.wait(now, self.admission.waits_for if found else WaitsFor.MEMORY)
            if (least := dispatcher.no_room_for(record)) is not None:
                blocked.no_memory_for(least, is_low=entry.is_low)
            blocked.add(entry, is_held_back=found)
        return attempt

    def _place(
        self, now: float, record: RequestRecord, accepts: Accepts, *, patient: bool
    ) -> Attempt | Rejection | None:
        """As `Dispatcher.place`; a suspect goes only where no other one is."""
        place = self.dispatcher.place
        if not record.is_suspect:
            attempt = place(now, record, (), accepts)
            return place(now, record, patient=True) if attempt is None and patient else attempt
        others = [
            worker
            for other in self.live.values()
            if other.is_suspect and other is not record
            for attempt in other.under_way
            for worker in attempt.workers
        ]
        attempt = place(now, record, (), accepts, apart_from=others)
        if isinstance(attempt, Attempt):
            attempt.is_apart = True
        return attempt

    def advance(
        self,
        now: float,
        record: RequestRecord,
        attempt: Attempt,
        endpoint: Endpoint,
        delta: TokenDelta,
        num_before: int,
    ) -> None:
        """Stream what `delta` of `endpoint` has added to the record, after `num_before` tokens."""
        if delta.num_cached_tokens is not None and record.num_cached_tokens is None:
            record.note_cached(delta.num_cached_tokens, delta.cached_by_source)
            record.recomputed, record.images = delta.recomputed, delta.images
            self._count_cached(record, endpoint)
        new = tuple(record.tokens[num_before:])
        attempt.weights = delta.weights or attempt.weights
        record.note_weights(attempt.weights, num_before)
        attempt.on_delta(now, endpoint.worker, delta, bool(new))
        for ends, is_new in self.dispatcher.on_phases(now, attempt, endpoint, delta):
            self.totals.kv_lost["fetch" if ends.fetches else "handoff"] += 1
            if is_new:
                text = f"KV of {ends.source.worker} often does not come to {endpoint.worker}"
                self._effects.append(Note("warning", "kv_link_bad", text))
        logprobs = delta.logprobs[-len(new) :] if new else ()
        if new:
            accepted, rejected = record.drafts
            record.drafts = accepted + delta.drafts[0], rejected + delta.drafts[1]
            record.take_outputs(delta.prompt)
            endpoint.succeed()
            self.admission.on_work(record, OUTPUT_UNITS * len(new))
            self.room_changed |= self._is_held_back
            if record.first_token_at is None:
                record.first_token_at = now
                self.queue.on_first_token(record)
                self.admission.on_work(record, computed_tokens(record))
            self.start(now, record, attempt)
            if record.is_suspect and len(record.tokens) - attempt.num_tokens >= CLEARED_TOKENS:
                record.clear()
                self.room_changed = True
        reason = delta.finish or record.complete()
        if reason is not None:
            if attempt is record.leaving:
                record.current, record.leaving = attempt, record.current
            has_ended = endpoint if delta.finish else None
            self._stop(record, has_ended)
            self._finish(now, record, reason, new, logprobs)
        elif new:
            self._output(record, new, logprobs)

    def retry(
        self,
        now: float,
        record: RequestRecord,
        cause: Cause,
        detail: str,
        gone: Endpoint | None = None,
        blamed: Endpoint | None = None,
    ) -> None:
        """Give the current attempt up and queue the request for the next one; or, if it was about
        to move, let it stay where it is.

        `gone` has forgotten the attempt already; `blamed` gets no requests for a while, and this
        request never again. A refusal for a full queue does not count as a failure.
        """
        attempt = record.current
        assert attempt is not None, f"{record.request_id} has no attempt to give up"
        assert record.complete() is None, f"{record.request_id} is complete: nothing to retry"
        attempt.end(now, cause)
        self._drop(record, attempt, gone)
        self.totals.retries[cause] += 1
        if cause in (Cause.WORKER_DOWN, Cause.EXECUTION):
            record.on_lost_worker(attempt)
        if blamed is not None:
            self.dispatcher.on_failure(now, blamed, attempt.sent_at)
            if cause is not Cause.QUEUE_FULL:
                record.avoid.append(blamed)
        text = f"{record.request_id}: attempt {attempt.number} is lost ({cause}): {detail}"
        self._effects.append(Note("warning", f"attempt_{cause}", text))
        if record.leaving is not None:
            record.stay()
            return
        record.current = None
        record.num_late += cause is Cause.LATE
        if cause not in (Cause.QUEUE_FULL, Cause.WEIGHTS, Cause.LATE):
            # One that goes on from attempt to attempt is not what workers fail at.
            record.failures = 1 if attempt.first_at is not None else record.failures + 1
        if (
            record.lost_apart >= MAX_LOST_APART
            or record.lost_workers >= self._config.max_lost_workers
        ):
            why = (
                f"{record.lost_workers} workers ended while they served it; the last one: {detail}"
            )
            self.fail(record, Rejection(Refusal.ATTEMPTS, why))
        elif max(record.failures, record.num_late // MAX_LATE) >= self._config.max_attempts:
            num_failed = max(record.failures, record.num_late)
            why = f"{num_failed} attempts failed; the last one ({cause}): {detail}"
            self.fail(record, Rejection(Refusal.ATTEMPTS, why))
        else:
            self.queue.restore(record)
            record.enqueue(now)

    def on_own_failure(
        self, now: float, record: RequestRecord, endpoint: Endpoint, rejection: Rejection
    ) -> None:
        """A step that ran for `record` alone has failed, on a worker that is well. It is tried once
        more, on another one if there is one."""
        record.own_failures += 1
        if record.own_failures >= MAX_OWN_FAILURES:
            where = f"it failed by itself {record.own_failures} times; at last on"
            self.fail(record, Rejection(rejection.reason, f"{where} {rejection.detail}"))
            return
        record.avoid.append(endpoint)
        self.retry(now, record, Cause.OWN_FAILURE, rejection.detail, gone=endpoint)

    def leave(self, now: float, record: RequestRecord, cause: Cause) -> None:
        """The attempt that it was about to leave, if there is one, is over."""
        if record.leaving is not None:
            record.leaving.end(now, cause)
            self._drop(record, record.leaving)
            record.leaving = None

    def start(self, now: float, record: RequestRecord, attempt: Attempt) -> None:
        """The prompt of `attempt` is computed: it has sent tokens, be they known already."""
        if not attempt.started:
            attempt.started = True
            self.dispatcher.on_first_token(now, attempt, record.request_id)
            self.room_changed = True

    def cancel(self, record: RequestRecord) -> None:
        """End it, and send nothing to the client."""
        self._stop(record)
        self._forget(record, Refusal.CANCELLED)

    def fail(self, record: RequestRecord, rejection: Rejection) -> None:
        """End it, and send the client `Failed`."""
        self._stop(record)
        self._refuse(record.submit, rejection)
        self._forget(record, rejection.reason)

    def expire(self, now: float) -> None:
        """End requests that are past their deadline, or have waited too long for a first worker."""
        self.admission.on_workers(self.dispatcher.prompt_tokens_per_s)
        has_workers = self.dispatcher.has_workers
        for record in list(self.live.values()):
            rejection = self.admission.overdue(now, record, has_workers=has_workers)
            if rejection is not None:
                self.fail(record, rejection)
        while turned_away := self.admission.shed(now):
            self.fail(*turned_away)

    def _dispatch_now(self, now: float, record: RequestRecord, attempt: Attempt) -> None:
        self.queue.charge(now, record)
        submit = record.submit
        self.totals.sent(submit.tenant, submit.service_class.tier, now - record.queued_at)
        self.send_attempt(now, record, attempt)

    def send_attempt(self, now: float, record: RequestRecord, attempt: Attempt) -> None:
        """Send an attempt to its workers."""
        self.totals.attempts += 1
        self.totals.handoffs += attempt.prefill is not None
        self.totals.fetches += attempt.fetch_from is not None
        self.dispatcher.on_sent(now, attempt)
        left_s = record.deadline - now
        self._effects += dispatch_messages(self.node_id, record, attempt, left_s)
        for endpoint in attempt.workers:
            block_hashes = record.packed_hashes(endpoint.info)
            self._effects += self.replica_sync.announce(now, endpoint.info, block_hashes)
        self._name(record, attempt)

    def _name(self, record: RequestRecord, attempt: Attempt) -> None:
        """Says what the tokens of blocks are, those of the output too, to who wants to know."""
        if self.watcher is not None:
            for info in {each.info.fingerprint: each.info for each in attempt.workers}.values():
                named = bytes(record.packed_hashes(info))
                self.watcher.named(record.submit, record.tokens, named, info.block_size)

    def _count_cached(self, record: RequestRecord, endpoint: Endpoint) -> None:
        assert record.num_cached_tokens is not None
        for count in (endpoint, self.totals):
            count.prompt_tokens += record.num_prompt_tokens
            count.cached_tokens += record.num_cached_tokens
            count.cached_tokens_by_source.update(record.cached_by_source)

    def _output(
        self,
        record: RequestRecord,
        new: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        finish: FinishReason | None = None,
    ) -> None:
        self.totals.output_tokens += len(new)
        output = Output(
            request_id=record.request_id,
            index=record.num_output_tokens - len(new),
            tokens=new,
            logprobs=logprobs,
            finish=finish,
            num_cached_tokens=record.num_cached_tokens or 0,
            cached_by_source=record.cached_by_source,
            prompt=record.give_outputs(),
            weights=tuple(record.weights) if finish or len(record.weights) > 1 else (),
            drafts=record.drafts,
        )
        self.send(record.submit.reply_to, output)

    def _finish(
        self,
        now: float,
        record: RequestRecord,
        reason: FinishReason,
        new: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        self._output(record, new, logprobs, reason)
        self.dispatcher.output_tokens.add(record.num_output_tokens)
        self.admission.on_finished(now, record)
        self._forget(record, reason)

    def _stop(self, record: RequestRecord, has_ended: Endpoint | None = None) -> None:
        for attempt in record.under_way:
            self._effects += abort_messages(record, attempt, keep=has_ended)

    def _drop(self, record: RequestRecord, attempt: Attempt, gone: Endpoint | None = None) -> None:
        """`attempt` is over. `gone` has forgotten it already."""
        self._effects += abort_messages(record, attempt, keep=gone)
        self.dispatcher.release(attempt, record.request_id)
        self.room_changed = True

    def _refuse(self, submit: Submit, rejection: Rejection) -> None:
        failed = Failed(
            submit.request_id, rejection.reason, rejection.detail, rejection.retry_after_s
        )
        self.send(submit.reply_to, failed)

    def _forget(self, record: RequestRecord, outcome: FinishReason | Refusal) -> None:
        record.wait(self.now, "")
        self.explanations.add(self.now, record, outcome)
        if record.submit.session is not None:
            self.ended_turns.append((record, record.current))
        for attempt in record.under_way:
            self.dispatcher.release(attempt, record.request_id)
            self._name(record, attempt)
        record.current = record.leaving = None
        units = units_done(record)
        self.queue.settle(record, units)
        self.totals.worked(record.submit.tenant, units)
        if record.first_token_at is not None:
            ttft_s = record.first_token_at - record.submitted_at
            self.totals.ended(record.submit.service_class.tier, ttft_s)
        self.room_changed = True
        if outcome in (Refusal.QUEUE_FULL, Refusal.OVERLOADED):
            self.totals.refused(record.submit.tenant, outcome)
        else:
            self.totals.requests[outcome] += 1
        del self.live[record.request_id]
        self._ended[record.request_id] = record.submit.reply_to
        while len(self._ended) > self._config.max_ended:
            del self._ended[next(iter(self._ended))]
