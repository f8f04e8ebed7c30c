"""The live requests of a router: how one comes in, moves, and ends exactly once.

Life: `submit` queues it, `dispatch` sends an attempt out, `advance` streams what comes back,
`retry` queues it again, and one of finish, `fail` and `cancel` ends it. What has to be sent is
collected and taken by the router at the end of each message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum

from engine.node import Effect, NodeId, Note, Send
from engine.request import FinishReason, Refusal, TokenDelta, TokenLogprobs
from router.admission.admission import Admission, Call, Rejection
from router.admission.estimates import OUTPUT_UNITS, computed_tokens, units_done
from router.admission.fair_queue import MAX_PASSED, Entry, FairQueue
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.explain import Explanations
from router.index.replica_sync import ReplicaSync
from router.messages import Failed, Output, Submit
from router.orders import aborts, orders
from router.placement.endpoint import Endpoint
from router.record import Attempt, RequestRecord
from router.status import Totals

MAX_TRIED = 4  # requests that find no place, in one message: each costs a look at the workers
NO_WORKERS_RETRY_AFTER_S = 5.0


class Cause(StrEnum):
    """Why an attempt was given up: also the metric label."""

    WORKER_DOWN = "worker_down"
    UNKNOWN = "unknown"
    SILENT = "silent"
    DIVERGED = "diverged"
    QUEUE_FULL = "queue_full"
    EXECUTION = "execution"
    REFUSED = "refused"


class Requests:
    """Owned by the router. Invariant: a live request is in the queue or has a current attempt,
    never both; one that ended is in neither, and has no booking anywhere."""

    def __init__(self, router: NodeId, config: RouterConfig, clock: Callable[[], float]) -> None:
        """`clock`: for how long decisions take, and for nothing else."""
        self._router = router
        self._config = config
        self._clock = clock
        self._effects: list[Effect] = []
        self._ended: dict[str, NodeId] = {}  # id -> client; oldest first
        self._no_decode_since: float | None = None
        self.dispatcher = Dispatcher(config, router)
        self.placements = ReplicaSync(self.dispatcher.index)
        self.totals = Totals()
        self.explanations = Explanations(config.max_decisions)
        self.now = 0.0  # of the message that is being handled
        self.live: dict[str, RequestRecord] = {}
        self.queue = FairQueue(config.low_priority_share)
        self.admission = Admission(config, self.queue)
        self.ended_turns: list[tuple[RequestRecord, Attempt | None]] = []  # for `Sessions`
        self._is_held_back = False  # somebody would wait too long at the workers
        self.room_changed = False  # True: somebody in the queue may find a place now

    def send(self, to: NodeId, message: object) -> None:
        self._effects.append(Send(to, message))

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def submit(self, now: float, submit: Submit) -> None:
        """Take a request in, or refuse it. One that is repeated word for word is ignored: its
        first copy is, or was, answered."""
        twin = self.live.get(submit.request_id)
        if twin is not None:
            if submit != twin.submit:
                detail = f"request id {submit.request_id!r} is in use"
                self._refuse(submit, Rejection(Refusal.DUPLICATE, detail))
            return
        if self._ended.get(submit.request_id) == submit.reply_to:
            return
        self.totals.submitted += 1
        log = RequestRecord(
            submit=submit,
            sampling=submit.sampling,
            arrival=self.totals.submitted,
            submitted_at=now,
            deadline=now + min(submit.timeout_s, self._config.max_timeout_s),
            queued_at=now,
        )
        self.live[log.request_id] = log
        rejection = self.dispatcher.check(log)
        if rejection is None and not submit.timeout_s > 0:
            detail = f"a timeout of {submit.timeout_s} s leaves no time"
            rejection = Rejection(Refusal.DEADLINE, detail)
        if rejection is not None:
            self.fail(log, rejection)
        elif (reason := log.complete()) is not None:
            self._finish(now, log, reason)
        else:
            self._admit(now, log)

    def refuse(self, now: float, call: Call) -> Failed | None:
        """Why `call` would plainly be refused, if it were submitted; it counts as if it was."""
        rejection = self.admission.plainly_refused(now, call)
        if rejection is None:
            return None
        self.totals.submitted += 1
        self.totals.refused(call.tenant, rejection.reason)
        return Failed("", rejection.reason, rejection.detail, rejection.retry_after_s)

    def _admit(self, now: float, log: RequestRecord) -> None:
        """A place, or one in the queue; or somebody is turned away."""
        is_expected = self.admission.expects(now, log)
        self.queue.push(log, self.admission.units(log))
        log.enqueue(now)
        self.room_changed = True
        self.dispatch(now)
        if log not in self.queue:
            self.admission.joined(log)
            return
        turned_away = self.admission.turn_away(now, log, is_expected=is_expected)
        if turned_away is not None:
            self.fail(*turned_away)

    def dispatch(self, now: float) -> None:
        """Send out, in order, whatever of the queue finds a place. A few may be passed by others
        that are easier to place, but none for ever."""
        self.admission.watch(now, has_decode=self.dispatcher.has_decode)
        if not self.room_changed:
            return
        self.room_changed = self._is_held_back = False
        tried: dict[str, Entry] = {}
        while len(tried) < MAX_TRIED and self.dispatcher.has_room(now):
            entry = self.queue.next(tried)
            if entry is None:
                return
            log, began = entry.log, self._clock()
            may_send = self.admission.may_send(log)
            self._is_held_back |= not may_send
            placed = self.dispatcher.place(now, log) if may_send else None
            if isinstance(placed, Rejection):
                self.fail(log, placed)
            elif placed is not None:
                placed.route_s = self._clock() - began
                self._send_attempt(now, log, placed)
                for passed in tried.values():
                    passed.num_passed += 1
            elif entry.num_passed >= MAX_PASSED:
                return
            else:
                tried[log.request_id] = entry

    def advance(
        self,
        now: float,
        log: RequestRecord,
        attempt: Attempt,
        endpoint: Endpoint,
        delta: TokenDelta,
        num_before: int,
    ) -> None:
        """Stream what `delta` of `endpoint` has added to the log beyond `num_before` tokens."""
        if delta.num_cached_tokens is not None and log.num_cached_tokens is None:
            self._count_prefix_hit(log, endpoint, delta.num_cached_tokens, delta.cached_by_source)
        new = tuple(log.tokens[num_before:])
        attempt.hear(now, endpoint.worker, delta, bool(new))
        logprobs = delta.logprobs[-len(new) :] if new else ()
        if new:
            endpoint.succeed()
            self.admission.done(log, OUTPUT_UNITS * len(new))
            self.room_changed |= self._is_held_back
            if log.first_token_at is None:
                log.first_token_at = now
                self.admission.done(log, computed_tokens(log))
            if not attempt.started:
                attempt.started = True
                self.dispatcher.started(now, attempt, log.request_id)
                self.room_changed = True
        reason = delta.finish or log.complete()
        if reason is not None:
            self._effects += aborts(log, attempt, keep=endpoint if delta.finish else None)
            self._finish(now, log, reason, new, logprobs)
        elif new:
            self._output(log, new, logprobs)

    def retry(
        self,
        now: float,
        log: RequestRecord,
        cause: Cause,
        detail: str,
        gone: Endpoint | None = None,
        blamed: Endpoint | None = None,
    ) -> None:
        """Give the current attempt up and queue the request for the next one.

        `gone` has forgotten the attempt already; `blamed` is left alone for a while, by this
        request for good. Being turned away from a full queue does not count as a failure.
        """
        attempt = log.current
        assert attempt is not None, f"{log.request_id} has no attempt to give up"
        assert log.complete() is None, f"{log.request_id} should have ended with its last token"
        self._effects += aborts(log, attempt, keep=gone)
        self.dispatcher.release(attempt, log.request_id)
        attempt.end(now, cause)
        log.current = None
        self.room_changed = True
        self.totals.retries[cause] += 1
        if blamed is not None:
            self.dispatcher.fail(now, blamed)
            if cause is not Cause.QUEUE_FULL:
                log.avoid.append(blamed)
        text = f"{log.request_id}: attempt {attempt.number} is lost ({cause}): {detail}"
        self._effects.append(Note("warning", f"attempt_{cause}", text))
        if cause is not Cause.QUEUE_FULL:
            log.failures += 1
        if log.failures >= self._config.max_attempts:
            why = f"{log.failures} attempts failed; the last one ({cause}): {detail}"
            self.fail(log, Rejection(Refusal.ATTEMPTS, why))
        else:
            self.queue.restore(log)
            log.enqueue(now)

    def cancel(self, log: RequestRecord) -> None:
        """End it without a word to the client."""
        self._stop(log)
        self._forget(log, Refusal.CANCELLED)

    def fail(self, log: RequestRecord, rejection: Rejection) -> None:
        """End it with `Failed`."""
        self._stop(log)
        self._refuse(log.submit, rejection)
        self._forget(log, rejection.reason)

    def expire(self, now: float) -> None:
        """End whatever is past its deadline, or has waited too long for a first worker."""
        if self.dispatcher.has_decode:
            self._no_decode_since = None
        elif self._no_decode_since is None:
            self._no_decode_since = now
        for log in list(self.live.values()):
            rejection = self._overdue(now, log)
            if rejection is not None:
                self.fail(log, rejection)
        while turned_away := self.admission.shed(now):
            self.fail(*turned_away)

    def _overdue(self, now: float, log: RequestRecord) -> Rejection | None:
        waited_s = now - log.queued_at
        if log.current is None and self._no_decode_since is not None:
            alone_s = now - max(log.queued_at, self._no_decode_since)
            if now >= log.deadline or alone_s >= self._config.no_workers_wait_s:
                detail = f"no decode worker is up; waited {waited_s:.1f} s for one"
                return Rejection(Refusal.NO_WORKERS, detail, NO_WORKERS_RETRY_AFTER_S)
        if now < log.deadline:
            return self.admission.hopeless(now, log)
        allowed_s = log.deadline - log.submitted_at
        self.admission.late(now, log)
        where = f"queued for {waited_s:.1f} s" if log.current is None else "being served"
        done = f"{log.num_output_tokens} of at most {log.sampling.max_tokens} tokens were done"
        return Rejection(
            Refusal.DEADLINE, f"its {allowed_s:g} s are over; it was {where}, and {done}"
        )

    def _send_attempt(self, now: float, log: RequestRecord, attempt: Attempt) -> None:
        self.queue.charge(now, log)
        self.totals.sent(log.submit.tenant, now - log.queued_at)
        self.totals.attempts += 1
        self.totals.handoffs += attempt.prefill is not None
        self.totals.fetches += attempt.fetch_from is not None
        self._effects += orders(self._router, log, attempt, timeout_s=log.deadline - now)
        self._effects += self.placements.tell(now, log, attempt)

    def _count_prefix_hit(
        self, log: RequestRecord, endpoint: Endpoint, num_cached: int, by_source: Mapping[str, int]
    ) -> None:
        log.note_cached(num_cached, by_source)
        assert log.num_cached_tokens is not None
        for count in (endpoint, self.totals):
            count.prompt_tokens += log.num_prompt_tokens
            count.cached_tokens += log.num_cached_tokens
            count.cached_tokens_by_source.update(log.cached_by_source)

    def _output(
        self,
        log: RequestRecord,
        new: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        finish: FinishReason | None = None,
    ) -> None:
        self.totals.output_tokens += len(new)
        output = Output(
            request_id=log.request_id,
            index=log.num_output_tokens - len(new),
            tokens=new,
            logprobs=logprobs,
            finish=finish,
            num_cached_tokens=log.num_cached_tokens or 0,
            cached_by_source=log.cached_by_source,
        )
        self.send(log.submit.reply_to, output)

    def _finish(
        self,
        now: float,
        log: RequestRecord,
        reason: FinishReason,
        new: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        self._output(log, new, logprobs, reason)
        self.dispatcher.observe_output(log.num_output_tokens)
        self.admission.ended(now, log)
        self._forget(log, reason)

    def _stop(self, log: RequestRecord) -> None:
        if log.current is not None:
            self._effects += aborts(log, log.current, keep=None)

    def _refuse(self, submit: Submit, rejection: Rejection) -> None:
        failed = Failed(
            submit.request_id, rejection.reason, rejection.detail, rejection.retry_after_s
        )
        self.send(submit.reply_to, failed)

    def _forget(self, log: RequestRecord, outcome: FinishReason | Refusal) -> None:
        self.explanations.add(self.now, log, outcome)
        if log.submit.session is not None:
            self.ended_turns.append((log, log.current))
        if log.current is not None:
            self.dispatcher.release(log.current, log.request_id)
            log.current = None
        units = units_done(log)
        self.queue.settle(log, units)
        self.totals.worked(log.submit.tenant, units)
        self.room_changed = True
        if outcome in (Refusal.QUEUE_FULL, Refusal.OVERLOADED):
            self.totals.refused(log.submit.tenant, outcome)
        else:
            self.totals.requests[outcome] += 1
        del self.live[log.request_id]
        self._ended[log.request_id] = log.submit.reply_to
        while len(self._ended) > self._config.max_ended:
            del self._ended[next(iter(self._ended))]
