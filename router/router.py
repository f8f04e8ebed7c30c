"""The router: a client's request in, its tokens out, also when workers fail on the way.

Life of a request: Submit -> queued -> dispatched (Decode to one worker, and perhaps Prefill to
another) -> Outputs as tokens come -> the last Output, or Failed. An attempt that is lost, silent,
refused or contradicts itself is aborted, and the next one continues from the record, so the
client's stream has neither gap nor repeat. A tick watches deadlines and silences (`router.health`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.events import KVEvents, KVSnapshot, KVSnapshotRequest
from kvrelay.engine.messages import Abort, Preempted, Refused, TokenDeltas
from kvrelay.engine.node import Effect, NodeId, Note, Unsendable, Wake, Woken
from kvrelay.engine.request import Refusal, TokenDelta
from kvrelay.engine.stats import RouterDown, RouterUp, WorkerInfo, WorkerStats
from kvrelay.kvtransfer.messages import CacheOrderDone
from kvrelay.prefill_worker.messages import Prefill
from kvrelay.router.admission.admission import Call
from kvrelay.router.config import RouterConfig
from kvrelay.router.explain import Explanations
from kvrelay.router.health import Health
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.messages import (
    Cancel,
    Failed,
    PromptRouted,
    RoleChanged,
    SessionCommand,
    Submit,
    WorkerDown,
    WorkerDraining,
    WorkerUp,
)
from kvrelay.router.migration import Migrations
from kvrelay.router.placement.endpoint import Endpoint
from kvrelay.router.placement.work import Decision
from kvrelay.router.record import Cause, Rejection, RequestRecord, Verdict
from kvrelay.router.requests import Requests
from kvrelay.router.sessions.session import SessionConfig, SessionRecord
from kvrelay.router.sessions.sessions import TICK as SESSIONS_TICK
from kvrelay.router.sessions.sessions import Sessions
from kvrelay.router.sessions.sharing import SessionsUpdated
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


class Router:
    """A Node. It owns the records of requests (in `Requests`) and what is known of workers (in its
    `Dispatcher`). Invariant: while a worker is up, a request is live or a view of the index has a
    gap, exactly one tick is under way."""

    def __init__(
        self,
        node_id: NodeId,
        config: RouterConfig | None = None,
        session_config: SessionConfig | None = None,
        sessions: Iterable[SessionRecord] = (),
        state: StateConfig | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        controller: NodeId = "",
    ) -> None:
        """`sessions`: those of an earlier router, from a store. `clock`: wall time, to measure how
        long decisions take; nothing is decided by it. `controller`: to be told of workers that are
        silent; "": no node."""
        self.node_id = node_id
        self._config = config or RouterConfig()
        self._requests = Requests(node_id, self._config, clock)
        self._dispatcher = self._requests.dispatcher
        self._totals = self._requests.totals
        self._migrations = Migrations(self._requests, controller)
        self._health = Health(
            node_id,
            self._config,
            self._requests,
            lambda: self._dispatcher.endpoints,
            self._totals,
            controller,
        )
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
            Preempted: self._migrations.on_preempted,
            RoleChanged: self._migrations.on_role_changed,
            WorkerDraining: self._migrations.on_draining,
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
        """Of the requests that ended last; not to be changed."""
        return self._requests.explanations

    @property
    def traffic(self) -> Traffic:
        """What has come since its start; not to be changed."""
        return self._requests.admission.traffic

    @property
    def worker_stats(self) -> list[tuple[WorkerInfo, float, WorkerStats]]:
        """Of each worker that is up and has told any, by name: the last, and when it came."""
        known = ((e, e.stats) for e in self._dispatcher.endpoints if e.alive)
        return [(e.info, e.struct.last_seen_at, stats) for e, stats in known if stats is not None]

    def refuse(self, now: float, call: Call) -> Failed | None:
        """Why `call` would be refused, by a cheap check, under overload; None: submit it."""
        return self._requests.refuse(now, call)

    def explain(self, request_id: str) -> tuple[Decision, ...]:
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
        self._requests.submit(now, submit)
        if submit.session is not None and submit.request_id in self._requests.live:
            self.sessions.on_turn(now, self._requests.live[submit.request_id].submit)

    def _on_cancel(self, now: float, cancel: Cancel) -> None:
        record = self._requests.live.get(cancel.request_id)
        if record is not None:
            self._requests.cancel(record)

    def _on_worker_up(self, now: float, up: WorkerUp) -> None:
        replaced, is_new = self._dispatcher.on_worker_up(now, up.info)
        if not is_new:  # a controller says so again; its role may have changed meanwhile
            again = RoleChanged(up.info.worker, up.info.epoch, up.info.role)
            self._migrations.on_role_changed(now, again)
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
        self._health.take_over(now, lost, Cause.WORKER_DOWN, detail)

    def _on_kv_events(self, now: float, events: KVEvents | KVSnapshot) -> None:
        if self._dispatcher.on_kv_events(now, events):
            self._requests.send(events.worker, KVSnapshotRequest(self.node_id))
        self.shared.on_kv_events(events)

    def _on_stats(self, now: float, stats: WorkerStats) -> None:
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
        if verdict is Verdict.NEXT:
            if from_decode:
                attempt.probed_at, attempt.silent_probes = None, 0
            if record.leaving is not None and not has_left and attempt.handed_over:
                self._requests.start(now, record, attempt)
                self._requests.leave(now, record, Cause.MIGRATED)
            self._requests.advance(now, record, attempt, endpoint, delta, num_before)
        elif verdict is Verdict.GAP:
            self._totals.gaps += 1
            self._health.probe(now, record, attempt)
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
                requests.retry(now, record, Cause.UNKNOWN, detail, gone=endpoint)
            case Refusal.QUEUE_FULL:
                cause = Cause.QUEUE_FULL
                requests.retry(now, record, cause, detail, gone=endpoint, blamed=endpoint)
            case Refusal.DUPLICATE:  # a repeated message: it has this attempt already, or a later
                self._health.probe(now, record, attempt)
            case Refusal.DEADLINE | Refusal.GRAMMAR | Refusal.INVALID_TOKENS | Refusal.UNENCODABLE:
                requests.fail(record, Rejection(refused.reason, detail))
            case Refusal.NEVER_FITS | Refusal.CONTEXT_LENGTH if from_decode:
                requests.fail(record, Rejection(refused.reason, detail))
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
        self._health.tick(now)
        self._migrations.tick(now)
        self._ask_for_snapshots(now)
        self._requests.room_changed = True  # a back-off may be over

    def _loads(self) -> dict[str, TenantLoad]:
        queue = self._requests.queue
        tenants = {*queue.num_running, *queue.num_queued}
        return {t: TenantLoad(queue.num_running[t], queue.num_queued[t]) for t in tenants}

    def _on_others_loads(self, now: float, others: OthersLoads) -> None:
        self._requests.queue.elsewhere = others.tenants
        self._requests.room_changed = True  # a tenant may have its share back

    def _ask_for_snapshots(self, now: float) -> None:
        for worker in self._dispatcher.index.due(now):
            self._requests.send(worker, KVSnapshotRequest(self.node_id))
