"""The router: a client's request in, its tokens out, also when workers fail on the way.

Life of a request: Submit -> queued -> dispatched (Decode to one worker, and perhaps Prefill to
another) -> Outputs as tokens come -> the last Output, or Failed. An attempt that is lost, silent,
refused or contradicts itself is aborted, and the next one continues from the record, so the
client's stream has neither gap nor repeat.

A worker sends its statistics several times a second, with work or without. One that falls silent,
and one that says that its step is late, gets no requests, and those that it has go on elsewhere if
another worker is well. A worker that is silent is reported to the controller, again and again. That
asks the worker itself, and ends it if there is no answer. A silent attempt is probed.

Life of a migration: a second attempt begins beside the first, at a worker that has room; it fetches
or computes the KV while the first one still generates -> with its first token it takes over, and
the first is given up. The tokens are the same, because sampling depends on (seed, position), so
either may fail on the way: the other goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import astuple
from math import inf
from typing import Any

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.backoff import Backoff
from kvrelay.engine.kv.events import KVEvents, KVSnapshot, KVSnapshotRequest
from kvrelay.engine.messages import Abort, Preempted, Probe, Refused, TokenDeltas
from kvrelay.engine.node import Effect, NodeId, Note, Unsendable, Wake, Woken
from kvrelay.engine.request import Refusal, TokenDelta
from kvrelay.engine.stats import Progress, Role, RouterDown, RouterUp, WorkerInfo, WorkerStats
from kvrelay.engine.weights import WeightsChanged
from kvrelay.kvtransfer.messages import CacheOrderDone
from kvrelay.prefill_worker.messages import Prefill
from kvrelay.router.admission.admission import IncomingCall
from kvrelay.router.config import RouterConfig
from kvrelay.router.explain import Explanations
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.index.watcher import CacheWatcher
from kvrelay.router.messages import (
    Cancel,
    DrainReport,
    Failed,
    PromptRouted,
    RoleChanged,
    SessionCommand,
    Submit,
    WorkerDown,
    WorkerDraining,
    WorkerSuspected,
    WorkerUp,
)
from kvrelay.router.placement.endpoint import Endpoint
from kvrelay.router.placement.policy import RoutingDecision
from kvrelay.router.record import Attempt, Cause, DeltaFit, Rejection, RequestRecord
from kvrelay.router.requests import Requests
from kvrelay.router.sessions.session import SessionConfig, SessionRecord, SessionsUpdated
from kvrelay.router.sessions.sessions import TICK as SESSIONS_TICK
from kvrelay.router.sessions.sessions import Sessions
from kvrelay.router.state import TICK as STATE_TICK
from kvrelay.router.state import (
    IndexLoaded,
    IndexWriter,
    OthersLoads,
    SharedState,
    StateConfig,
    StateUp,
    TenantLoad,
)
from kvrelay.router.status import RouterStatus, worker_status
from kvrelay.router.traffic import Traffic

TICK = "tick"
COMPLAINT_S = 1.0  # between two complaints about one worker
PAUSE = Backoff(0.2, 51.2)  # between two migrations of a request


class Router:
    """A Node. It owns the records of requests (in `Requests`) and what is known of workers (in its
    `Dispatcher`). Invariant: while a worker is up, a request is live or a view of the index has a
    gap, exactly one tick is under way. Silence counts as the router's own time passes, tick by
    tick: that of a process that was stopped itself does not."""

    def __init__(
        self,
        node_id: NodeId,
        config: RouterConfig | None = None,
        session_config: SessionConfig | None = None,
        sessions: Iterable[SessionRecord] = (),
        state: StateConfig | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        controller: NodeId = "",
        watcher: CacheWatcher | None = None,
    ) -> None:
        """`sessions`: those of an earlier router, from a store. `clock`: wall time, to measure how
        long decisions take; nothing is decided by it. `controller`: gets reports of workers that
        are silent or drain; "": no node. `watcher`: learns what workers hold."""
        self.node_id = node_id
        self._config = config or RouterConfig()
        self._requests = Requests(node_id, self._config, clock)
        self._dispatcher = self._requests.dispatcher
        self._requests.watcher = self._dispatcher.index.watcher = watcher
        self._totals = self._requests.totals
        self._controller = controller
        self._ticked_at: float | None = None
        self.sessions = Sessions(
            node_id,
            session_config or SessionConfig(),
            self._dispatcher.index,
            self._dispatcher.workers,
            sessions,
        )
        self.shared = SharedState(node_id, state or StateConfig(), self._dispatcher.index)
        self._ticking = False
        self._handlers: dict[type, Callable[[float, Any], None]] = {
            Submit: self._on_submit,
            Cancel: self._on_cancel,
            WorkerUp: self._on_worker_up,
            WorkerDown: self._on_worker_down,
            TokenDeltas: self._on_deltas,
            Refused: self._on_refused,
            Preempted: self._on_preempted,
            RoleChanged: self._on_role_changed,
            WeightsChanged: lambda now, changed: self._on_weights(now, *astuple(changed)),
            WorkerDraining: self._on_draining,
            KVEvents: self._on_kv_events,
            KVSnapshot: self._on_kv_events,
            WorkerStats: self._on_stats,
            SessionCommand: self.sessions.on_command,
            CacheOrderDone: self.sessions.on_order_done,
            StateUp: self.sessions.on_state_up,
            SessionsUpdated: self.sessions.on_sessions_updated,
            IndexLoaded: self.shared.on_index_loaded,
            IndexWriter: self.shared.on_index_writer,
            OthersLoads: self._on_others_loads,
            RouterUp: self._requests.replica_sync.on_router_up,
            RouterDown: self._requests.replica_sync.on_router_down,
            PromptRouted: self._requests.replica_sync.on_prompt_routed,
            Unsendable: self._on_unsendable,
            Woken: self._on_woken,
        }

    def start(self, now: float) -> list[Effect]:
        self.sessions.start(now)
        return self.sessions.take_effects(now) + self.shared.start()

    def receive(self, now: float, message: Any) -> list[Effect]:
        handler = self._handlers.get(type(message))
        if handler is None:
            return [Note("warning", "unexpected_message", type(message).__name__)]
        self._requests.now = now
        handler(now, message)
        self._requests.dispatch(now)
        while self._requests.ended_turns:
            self.sessions.on_turn_ended(now, *self._requests.ended_turns.pop(0))
        effects = self._requests.take_effects() + self.sessions.take_effects(now)
        effects += self.shared.take_effects()
        dispatcher = self._dispatcher
        has_work = self._requests.live or not dispatcher.index.in_step or dispatcher.has_workers
        if not self._ticking and has_work:
            self._ticking = True
            effects.append(Wake(self._config.tick_s, TICK))
        return effects

    @property
    def index(self) -> PrefixIndex:
        """What is known of the workers' caches; not to be changed."""
        return self._dispatcher.index

    @property
    def live(self) -> Mapping[str, RequestRecord]:
        """The requests that it serves, by id; not to be changed."""
        return self._requests.live

    @property
    def explanations(self) -> Explanations:
        """Why requests that ended last went where they went; not to be changed."""
        return self._requests.explanations

    @property
    def traffic(self) -> Traffic:
        """What has come since its start; not to be changed."""
        return self._requests.admission.traffic

    @property
    def worker_stats(self) -> list[tuple[WorkerInfo, float, WorkerStats]]:
        """The last statistics of each worker that is up and has sent any, and when they came."""
        known = ((e, e.stats) for e in self._dispatcher.endpoints if e.alive)
        return [(e.info, e.struct.last_seen_at, stats) for e, stats in known if stats is not None]

    def refuse(self, now: float, call: IncomingCall) -> Failed | None:
        """Why `call` would be refused, by a cheap check, under overload; None: submit it."""
        return self._requests.refuse(now, call)

    @property
    def loads(self) -> bool:
        """Whether the workers that are up load what requests need."""
        return self._dispatcher.loads

    def explain(self, request_id: str) -> tuple[RoutingDecision, ...]:
        """The decisions about `request_id` that are still kept, oldest first."""
        record, ended = self._requests.live.get(request_id), self.explanations.get(request_id)
        attempts = record.attempts if record else ended.attempts if ended else []
        return tuple(a.decision for a in attempts if a.decision is not None)

    def status(self, now: float) -> RouterStatus:
        totals = deepcopy(self._totals)
        return RouterStatus(
            router=self.node_id,
            policy=self._config.policy,
            num_live=len(self._requests.live),
            num_queued=len(self._requests.queue),
            cache_hit_rate=totals.cached_tokens / max(1, totals.prompt_tokens),
            totals=totals,
            bad_links=self._dispatcher.links.losses(now),
            prediction_error=self.explanations.prediction_error,
            workers=[worker_status(now, each) for each in self._dispatcher.endpoints],
        )

    def check_idle(self) -> list[str]:
        """A line for each thing that should not be there when no request is."""
        left = [f"request {request_id} is live" for request_id in self._requests.live]
        left += [f"request {r.request_id} is queued" for r in self._requests.queue.in_order()]
        return left + self._dispatcher.check_idle() + self.sessions.check_idle()

    def _on_submit(self, now: float, submit: Submit) -> None:
        self._requests.submit(now, self.sessions.named(submit))
        record = self._requests.live.get(submit.request_id)
        if record is not None and record.submit.session is not None:
            self.sessions.on_turn(now, record.submit)

    def _on_cancel(self, now: float, cancel: Cancel) -> None:
        record = self._requests.live.get(cancel.request_id)
        if record is not None:
            self._requests.cancel(record)

    def _on_worker_up(self, now: float, up: WorkerUp) -> None:
        replaced, is_new = self._dispatcher.on_worker_up(now, up.info)
        if not is_new:  # a controller says so again; its role may have changed meanwhile
            again = RoleChanged(up.info.worker, up.info.epoch, up.info.role)
            self._on_role_changed(now, again)
        if replaced is not None:
            self._on_lost(now, replaced, f"{up.info.worker} has started again")
        if is_new:
            self._requests.room_changed = True
            self.sessions.on_worker_up(now)
            self.shared.on_worker_up(now, up.info.worker, up.info.epoch)
            self._ask_for_snapshots(now)

    def _on_worker_down(self, now: float, down: WorkerDown) -> None:
        lost = self._dispatcher.on_worker_down(down.worker, down.epoch)
        if lost is not None:
            self.shared.on_worker_down(down.worker)
            self._on_lost(now, lost, f"{down.worker} is down: {down.reason}")

    def _on_lost(self, now: float, lost: Endpoint, detail: str) -> None:
        """Retry the requests that still need `lost`."""
        self.sessions.on_worker_down(now, lost.worker)
        self._take_over(now, lost, Cause.WORKER_DOWN, detail)

    def _on_kv_events(self, now: float, events: KVEvents | KVSnapshot) -> None:
        if self._dispatcher.on_kv_events(now, events):
            self._requests.send(events.worker, KVSnapshotRequest(self.node_id))
        self.shared.on_kv_events(events)

    def _on_stats(self, now: float, stats: WorkerStats) -> None:
        if stats.num_weight_changes:
            about = stats.worker, stats.epoch, stats.fingerprint, stats.weights
            self._on_weights(now, *about, stats.num_weight_changes)
        if self._dispatcher.on_stats(now, stats):
            self._requests.send(stats.worker, KVSnapshotRequest(self.node_id))

    def _on_deltas(self, now: float, deltas: TokenDeltas) -> None:
        endpoint = self._dispatcher.endpoint(deltas.worker, deltas.epoch)
        if endpoint is not None:
            for delta in deltas.deltas:
                self._on_delta(now, endpoint, delta)

    def _on_delta(self, now: float, endpoint: Endpoint, delta: TokenDelta) -> None:
        record = self._requests.live.get(delta.request_id)
        attempt = None if record is None else record.attempt(delta.attempt)
        if record is None or attempt is None or not attempt.involves(endpoint):
            self._totals.stale += 1
            if delta.finish is None:  # the worker still generates for an attempt that is over
                self._requests.send(endpoint.worker, Abort(delta.request_id, delta.attempt))
            return
        attempt.last_delta_at = now
        from_decode, has_left = endpoint is attempt.decode, attempt is record.leaving
        if from_decode:
            attempt.handed_over |= bool(delta.tokens)
            attempt.preempted &= not delta.tokens
        else:
            attempt.prefill_reported |= bool(delta.tokens)
        num_before = len(record.tokens)
        verdict = record.accept(delta)
        if verdict is DeltaFit.NEXT:
            if from_decode:
                attempt.probed_at, attempt.silent_probes = None, 0
            if record.leaving is not None and not has_left and attempt.handed_over:
                self._requests.start(now, record, attempt)
                self._requests.leave(now, record, Cause.MIGRATED)
            self._requests.advance(now, record, attempt, endpoint, delta, num_before)
        elif verdict is DeltaFit.GAP:
            self._totals.gaps += 1
            self._probe(now, record, attempt)
        elif has_left:
            self._requests.leave(now, record, Cause.DIVERGED)
        elif from_decode:
            # The decode worker continues from other tokens than the client has seen. A prefill
            # worker's token is ignored instead: it comes too late to count.
            self._requests.retry(now, record, Cause.DIVERGED, f"at position {delta.position}")

    def _on_refused(self, now: float, refused: Refused) -> None:
        endpoint = self._dispatcher.endpoint(refused.worker, refused.epoch)
        record = self._requests.live.get(refused.request_id)
        attempt = None if record is None else record.attempt(refused.attempt)
        if endpoint is None or record is None or attempt is None or not attempt.involves(endpoint):
            return
        from_decode = endpoint is attempt.decode
        if not from_decode and attempt.handed_over:
            return  # the decode worker has all that it needs
        detail = f"{refused.worker}: {refused.detail}"
        requests = self._requests
        if attempt is record.leaving:
            requests.leave(now, record, Cause.REFUSED)
            return
        if record.leaving is not None:  # whatever the new worker says, the old one goes on
            requests.retry(now, record, Cause.REFUSED, detail, gone=endpoint)
            return
        match refused.reason:
            case Refusal.UNKNOWN:
                has_changed = attempt.fingerprint != endpoint.info.fingerprint
                cause = Cause.WEIGHTS if has_changed else Cause.UNKNOWN
                requests.retry(now, record, cause, detail, gone=endpoint)
            case Refusal.QUEUE_FULL:
                cause = Cause.QUEUE_FULL
                requests.retry(now, record, cause, detail, gone=endpoint, blamed=endpoint)
            case Refusal.DUPLICATE:  # a repeated message: it has this attempt already, or a later
                self._probe(now, record, attempt)
            case (
                Refusal.DEADLINE
                | Refusal.GRAMMAR
                | Refusal.NEED
                | Refusal.INVALID_TOKENS
                | Refusal.UNSUPPORTED
                | Refusal.UNENCODABLE
            ):  # clients read why: which worker it was is nothing to them
                requests.fail(record, Rejection(refused.reason, refused.detail))
            case Refusal.NEVER_FITS | Refusal.CONTEXT_LENGTH if from_decode:
                requests.fail(record, Rejection(refused.reason, refused.detail))
            case Refusal.EXECUTION | Refusal.SAMPLING:
                requests.on_own_failure(now, record, endpoint, Rejection(refused.reason, detail))
            case Refusal.WORKER_FAILED | Refusal.BLOCK_TABLE:
                requests.retry(now, record, Cause.EXECUTION, detail, gone=endpoint, blamed=endpoint)
            case _:
                record.avoid.append(endpoint)
                requests.retry(now, record, Cause.REFUSED, detail, gone=endpoint)

    def _on_unsendable(self, now: float, lost: Unsendable) -> None:
        """A request that fits into no message to a worker is refused at once."""
        if isinstance(lost.message, Decode | Prefill):
            record = self._requests.live.get(lost.message.request_id)
            if record is not None:
                self._requests.fail(record, Rejection(Refusal.UNENCODABLE, lost.why))

    def _on_woken(self, now: float, woken: Woken) -> None:
        if woken.tag == SESSIONS_TICK:
            self.sessions.tick(now)
            return
        if woken.tag == STATE_TICK:
            self.shared.tick(now, self._loads())
            return
        assert woken.tag == TICK, f"woken for {woken.tag!r}, which was never asked for"
        self._ticking = False
        self._requests.expire(now)
        self._watch_workers(now)
        for record in list(self._requests.live.values()):
            if record.current is not None:
                self._watch_attempt(now, record, record.current)
        for record in list(self._requests.live.values()):
            self._rescue(now, record)  # another worker may have memory by now
        self._ask_for_snapshots(now)
        self._requests.room_changed = True  # a back-off may be over

    def _watch_workers(self, now: float) -> None:
        """Take requests away from the workers that make no progress, and report them."""
        tick_s, last = self._config.tick_s, self._ticked_at
        self._ticked_at = now
        passed_s = 0.0 if last is None else min(now - last, 2 * tick_s)
        alive = [each for each in self._dispatcher.endpoints if each.alive]
        for endpoint in alive:
            endpoint.silent_s += passed_s
        unwell = [each for each in alive if self._why_unwell(each)]
        for endpoint in unwell:
            self._on_unwell(now, endpoint, has_others=len(unwell) < len(alive))

    def _why_unwell(self, endpoint: Endpoint) -> str:
        """Why the worker makes no progress; "": it makes some."""
        if endpoint.silent_s >= self._config.silent_after_s:
            return f"{endpoint.worker} has said nothing for {endpoint.silent_s:.1f} s"
        if endpoint.progress is not Progress.MADE:
            return f"the step of {endpoint.worker} does not end"
        return ""

    def _on_unwell(self, now: float, endpoint: Endpoint, *, has_others: bool) -> None:
        why = self._why_unwell(endpoint)
        is_silent = endpoint.silent_s >= self._config.silent_after_s
        is_ending = is_silent or endpoint.progress is Progress.NONE
        if self._controller and is_ending and now - endpoint.complained_at >= COMPLAINT_S:
            endpoint.complained_at = now
            suspected = WorkerSuspected(self.node_id, endpoint.worker, endpoint.info.epoch, why)
            self._requests.send(self._controller, suspected)
        if endpoint.stats is None:
            return  # it may live, and not know this router yet
        endpoint.excluded_until = max(endpoint.excluded_until, now + 2 * self._config.tick_s)
        if has_others:
            self._take_over(now, endpoint, Cause.SILENT if is_silent else Cause.LATE, why)

    def _take_over(self, now: float, lost: Endpoint, cause: Cause, detail: str) -> None:
        """Retry the requests that still need `lost`."""
        for record in list(self._requests.live.values()):
            if record.leaving is not None and record.leaving.needs(lost):
                self._requests.leave(now, record, cause)
            if record.current is not None and record.current.needs(lost):
                self._requests.retry(now, record, cause, detail)

    def _watch_attempt(self, now: float, record: RequestRecord, attempt: Attempt) -> None:
        """Probe a silent decode worker; give it up when it answers none of several probes."""
        after_s = self._config.probe_after_s
        if attempt.probed_at is None:
            if now - attempt.last_delta_at >= after_s:
                self._probe(now, record, attempt)
        elif now - attempt.probed_at >= after_s:
            if attempt.silent_probes < self._config.max_silent_probes:
                self._probe(now, record, attempt)
            else:
                silent = attempt.decode
                detail = f"{silent.worker} left {attempt.silent_probes} probes unanswered"
                self._requests.retry(now, record, Cause.SILENT, detail, blamed=silent)

    def _probe(self, now: float, record: RequestRecord, attempt: Attempt) -> None:
        """Ask the decode worker for what is missing, at most once in a while."""
        if attempt.probed_at is None or now - attempt.probed_at >= self._config.probe_after_s:
            attempt.probed_at = now
            attempt.silent_probes += 1
            self._totals.probes += 1
            probe = Probe(record.request_id, attempt.number, self.node_id, len(record.tokens))
            self._requests.send(attempt.decode.worker, probe)

    def _on_role_changed(self, now: float, change: RoleChanged) -> None:
        """What decodes on a worker that is to compute prompts moves; what finds no room stays."""
        worker = self._dispatcher.on_role(now, change.worker, change.epoch, change.role)
        if worker is not None and change.role is Role.PREFILL:
            self._clear(now, worker)

    def _on_weights(self, now: float, *changed: Any) -> None:
        """What it has goes on, or is given back; what comes is sent for the new ones. changed: as
        of `Dispatcher.on_weights`."""
        if self._dispatcher.on_weights(now, *changed) is not None:
            self._requests.room_changed = True
            self.sessions.on_worker_up(now)

    def _on_draining(self, now: float, draining: WorkerDraining) -> None:
        """Nothing new goes there, and what decodes there moves."""
        name, epoch, num_left = draining.worker, draining.epoch, 0
        worker = self._dispatcher.endpoint(name, epoch)
        if worker is not None:
            worker.excluded_until = inf
            self._clear(now, worker)
            num_left = sum(_is_used(record, worker) for record in self._requests.live.values())
        if self._controller:
            self._requests.send(self._controller, DrainReport(self.node_id, name, epoch, num_left))

    def _on_preempted(self, now: float, preempted: Preempted) -> None:
        record = self._requests.live.get(preempted.request_id)
        attempt = None if record is None else record.attempt(preempted.attempt)
        if record is None or attempt is None or attempt.decode.worker != preempted.worker:
            return
        attempt.preempted = attempt.decode.info.epoch == preempted.epoch
        if not preempted.awaits_prefill:
            self._dispatcher.on_prefill_over(now, attempt, record.request_id)
        self._rescue(now, record)

    def _rescue(self, now: float, record: RequestRecord) -> None:
        """Move a request that waits for memory to where there is some."""
        if record.current is not None and record.current.preempted:
            self._move(now, record)

    def _clear(self, now: float, endpoint: Endpoint) -> None:
        for record in list(self._requests.live.values()):
            attempt = record.current
            if attempt is not None and attempt.decode is endpoint:
                self._move(now, record)

    def _move(self, now: float, record: RequestRecord) -> None:
        """Begin an attempt at another worker beside the current one, if one has room."""
        old = record.current
        if old is None or now < record.next_move_at:
            return
        leaves: tuple[Endpoint, ...] = (old.decode,)
        if record.leaving is not None:
            if not (old.preempted and record.leaving.preempted):
                return  # one of the two goes on
            leaves = (old.decode, record.leaving.decode)  # a third worker may have room
            self._requests.leave(now, record, Cause.MIGRATED)
        if not old.started and (old.awaits_prefill or not old.preempted):
            return  # its prompt is being computed
        record.leave()
        attempt = self._dispatcher.place(now, record, leaves=leaves)
        if isinstance(attempt, Attempt):
            self._totals.migrations += 1
            record.num_moves += 1
            record.next_move_at = now + PAUSE.pause_s(record.num_moves)
            self._requests.send_attempt(now, record, attempt)
        else:
            record.stay()

    def _loads(self) -> dict[str, TenantLoad]:
        queue = self._requests.queue
        tenants = {*queue.num_running, *queue.num_queued}
        return {tenant: queue.load(tenant) for tenant in tenants}

    def _on_others_loads(self, now: float, others: OthersLoads) -> None:
        self._requests.queue.elsewhere = others.tenants
        self._requests.room_changed = True  # a tenant may have its share back

    def _ask_for_snapshots(self, now: float) -> None:
        for worker in self._dispatcher.index.due(now):
            self._requests.send(worker, KVSnapshotRequest(self.node_id))


def _is_used(record: RequestRecord, endpoint: Endpoint) -> bool:
    """Whether an attempt of it decodes there, or its prompt is computed there."""
    return any(
        attempt.decode is endpoint or (attempt.prefill is endpoint and attempt.awaits_prefill)
        for attempt in record.under_way
    )
