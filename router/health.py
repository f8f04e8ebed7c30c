"""Which workers and attempts make progress, as a router sees it, and what becomes of the others.

A worker tells its statistics several times a second, with work or without. One that falls silent,
and one that says that its step is late, gets no requests, and those that it has go on elsewhere if
another worker is well. Of one that is silent the controller is told, again and again; it asks the
worker itself, and ends it if there is no answer. A single attempt that is silent is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from kvrelay.engine.messages import Probe
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Progress
from kvrelay.router.config import RouterConfig
from kvrelay.router.messages import WorkerSuspected
from kvrelay.router.placement.endpoint import Endpoint
from kvrelay.router.record import Attempt, Cause, RequestRecord
from kvrelay.router.status import Totals

TELL_S = 1.0  # between two complaints of one worker


class Attempts(Protocol):
    """The live requests of a router, as far as their attempts are given up."""

    @property
    def live(self) -> Mapping[str, RequestRecord]: ...

    def send(self, to: NodeId, message: object) -> None: ...
    def leave(self, now: float, record: RequestRecord, cause: Cause) -> None: ...
    def retry(
        self,
        now: float,
        record: RequestRecord,
        cause: Cause,
        detail: str,
        *,
        blamed: Endpoint | None = None,
    ) -> None: ...


class Health:
    """Owned by a router. Silence counts as the router's own time passes, tick by tick: that of a
    process that was stopped itself does not."""

    def __init__(
        self,
        router: NodeId,
        config: RouterConfig,
        requests: Attempts,
        endpoints: Callable[[], Iterable[Endpoint]],
        totals: Totals,
        controller: NodeId,
    ) -> None:
        """`endpoints`: all that are known. `controller`: whom to tell; "": no node."""
        self._router = router
        self._config = config
        self._requests = requests
        self._endpoints = endpoints
        self._totals = totals
        self._controller = controller
        self._ticked_at: float | None = None

    def tick(self, now: float) -> None:
        """About every `tick_s`."""
        tick_s, last = self._config.tick_s, self._ticked_at
        self._ticked_at = now
        passed_s = 0.0 if last is None else min(now - last, 2 * tick_s)
        alive = [each for each in self._endpoints() if each.alive]
        for endpoint in alive:
            endpoint.silent_s += passed_s
        unwell = [each for each in alive if self._why(each)]
        for endpoint in unwell:
            self._on_unwell(now, endpoint, has_others=len(unwell) < len(alive))
        for record in list(self._requests.live.values()):
            if record.current is not None:
                self._watch(now, record, record.current)

    def take_over(self, now: float, lost: Endpoint, cause: Cause, detail: str) -> None:
        """Retry the requests that still need `lost`."""
        for record in list(self._requests.live.values()):
            if record.leaving is not None and record.leaving.needs(lost):
                self._requests.leave(now, record, cause)
            if record.current is not None and record.current.needs(lost):
                self._requests.retry(now, record, cause, detail)

    def probe(self, now: float, record: RequestRecord, attempt: Attempt) -> None:
        """Ask the decode worker for what is missing, at most once in a while."""
        if attempt.probed_at is None or now - attempt.probed_at >= self._config.probe_after_s:
            attempt.probed_at = now
            attempt.silent_probes += 1
            self._totals.probes += 1
            probe = Probe(record.request_id, attempt.number, self._router, len(record.tokens))
            self._requests.send(attempt.decode.worker, probe)

    def _why(self, endpoint: Endpoint) -> str:
        """Why it is not well; "": it is."""
        if endpoint.silent_s >= self._config.silent_after_s:
            return f"{endpoint.worker} has said nothing for {endpoint.silent_s:.1f} s"
        if endpoint.progress is not Progress.MADE:
            return f"the step of {endpoint.worker} does not end"
        return ""

    def _on_unwell(self, now: float, endpoint: Endpoint, *, has_others: bool) -> None:
        why = self._why(endpoint)
        is_silent = endpoint.silent_s >= self._config.silent_after_s
        is_ending = is_silent or endpoint.progress is Progress.NONE
        if self._controller and is_ending and now - endpoint.complained_at >= TELL_S:
            endpoint.complained_at = now
            life = (endpoint.worker, endpoint.info.epoch)
            self._requests.send(self._controller, WorkerSuspected(self._router, *life, why))
        if endpoint.stats is None:
            return  # it may live, and not know this router yet
        endpoint.excluded_until = max(endpoint.excluded_until, now + 2 * self._config.tick_s)
        if has_others:
            self.take_over(now, endpoint, Cause.SILENT if is_silent else Cause.LATE, why)

    def _watch(self, now: float, record: RequestRecord, attempt: Attempt) -> None:
        """Ask a silent decode worker; give it up when it answers none of several probes."""
        after_s = self._config.probe_after_s
        if attempt.probed_at is None:
            if now - attempt.last_delta_at >= after_s:
                self.probe(now, record, attempt)
        elif now - attempt.probed_at >= after_s:
            if attempt.silent_probes < self._config.max_silent_probes:
                self.probe(now, record, attempt)
            else:
                silent = attempt.decode
                detail = f"{silent.worker} left {attempt.silent_probes} probes unanswered"
                self._requests.retry(now, record, Cause.SILENT, detail, blamed=silent)
