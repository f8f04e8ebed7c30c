"""Which running requests move to other workers, and when.

Life of a migration: a second attempt begins beside the first, at a worker that has room; it fetches
or computes the KV while the first one still generates -> with its first token it takes over, and
the first is given up. The tokens are the same, because sampling depends on (seed, position), so
either may fail on the way: the other goes on.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from kvrelay.engine.backoff import Backoff
from kvrelay.engine.messages import Preempted
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.router.messages import DrainReport, RoleChanged, WorkerDraining
from kvrelay.router.placement.endpoint import Endpoint
from kvrelay.router.record import Attempt, Cause, RequestRecord

if TYPE_CHECKING:
    from kvrelay.router.requests import Requests

PAUSE = Backoff(0.2, 51.2)  # between two migrations of a request


class Migrations:
    """Owned by the router."""

    def __init__(self, requests: Requests, controller: NodeId) -> None:
        """`controller`: to be told how much still needs a worker that drains; "": no node."""
        self._requests = requests
        self._dispatcher = requests.dispatcher
        self._live = requests.live
        self._controller = controller

    def on_role_changed(self, now: float, change: RoleChanged) -> None:
        """What decodes on a worker that is to compute prompts moves; what finds no room stays."""
        worker = self._dispatcher.on_role(now, change.worker, change.epoch, change.role)
        if worker is not None and change.role is Role.PREFILL:
            self._clear(now, worker)

    def on_draining(self, now: float, draining: WorkerDraining) -> None:
        """Nothing new goes there, and what decodes there moves."""
        name, epoch, num_left = draining.worker, draining.epoch, 0
        worker = self._dispatcher.endpoint(name, epoch)
        if worker is not None:
            worker.excluded_until = inf
            self._clear(now, worker)
            num_left = sum(_needs(record, worker) for record in self._live.values())
        if self._controller:
            report = DrainReport(self._requests.node_id, name, epoch, num_left)
            self._requests.send(self._controller, report)

    def on_preempted(self, now: float, preempted: Preempted) -> None:
        record = self._live.get(preempted.request_id)
        attempt = None if record is None else record.attempt(preempted.attempt)
        if record is None or attempt is None or attempt.decode.worker != preempted.worker:
            return
        attempt.preempted = attempt.decode.info.epoch == preempted.epoch
        if not preempted.awaits_prefill:
            self._dispatcher.on_prefill_over(now, attempt, record.request_id)
        self._rescue(now, record)

    def tick(self, now: float) -> None:
        """Those that wait for memory move as soon as another worker has some."""
        for record in list(self._live.values()):
            self._rescue(now, record)

    def _move(self, now: float, record: RequestRecord) -> None:
        """To another worker, if one has room."""
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
            self._requests.totals.migrations += 1
            record.num_moves += 1
            record.next_move_at = now + PAUSE.pause_s(record.num_moves)
            self._requests.send_attempt(now, record, attempt)
        else:
            record.stay()

    def _rescue(self, now: float, record: RequestRecord) -> None:
        if record.current is not None and record.current.preempted:
            self._move(now, record)

    def _clear(self, now: float, endpoint: Endpoint) -> None:
        for record in list(self._live.values()):
            attempt = record.current
            if attempt is not None and attempt.decode is endpoint:
                self._move(now, record)


def _needs(record: RequestRecord, endpoint: Endpoint) -> bool:
    """Whether an attempt of it decodes there, or its prompt is computed there."""
    return any(
        attempt.decode is endpoint or (attempt.prefill is endpoint and attempt.awaits_prefill)
        for attempt in record.under_way
    )
