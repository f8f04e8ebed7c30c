"""Spans: each call that generates, as a trace of its phases, sent to an OpenTelemetry collector.

Life of a call's spans: made all at once when the call has ended, from the durations of its phases;
queued; sent by a thread of the SDK. Serving waits for none of it. Where the collector is slow or
gone, the queue fills up, whole calls are dropped, and a counter says how many spans were lost.

The names are those of OpenTelemetry's conventions for generative AI, where there is one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvrelay.cluster.api.metrics import operation_of
from kvrelay.engine.logs import masked

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from kvrelay.cluster.api.calls import ServedCall, ServedChoice

log = logging.getLogger("kvrelay.tracing")

MAX_BATCH = 512  # spans sent together
EXPORT_TIMEOUT_S = 10.0  # of one batch, with all its retries
CLOSE_S = 3.0  # what is left at the end has this long

_NO_ERRORS = ("stop", "length", "cancelled")
_NS = 1_000_000_000

Count = Callable[[str, int], None]  # outcome ("sent", "failed", "dropped"), spans


class Tracing:
    """Owned by the process that serves. Invariant: at most `max_pending` spans wait to be sent or
    are being sent; those of a call are sent all or not at all. `record` never blocks."""

    def __init__(
        self,
        endpoint: str,
        sample: float,
        count: Count,
        max_pending: int = 4096,
        export_every_s: float = 1.0,
        about: Mapping[str, str] | None = None,
    ) -> None:
        """`endpoint`: URL of a collector that speaks OTLP over HTTP. `sample`: the fraction of
        calls that are traced; a caller's `traceparent` decides for its own. `about`: attributes of
        this process, by OpenTelemetry's names. Takes a while."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # `_Counted` says it, once
        url = traces_url(endpoint)
        self._count = count
        self._max_pending = max_pending
        self._num_recorded = 0
        exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)
        self._exporter = _counted(exporter, url, count)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample)),
            resource=Resource.create({"service.name": "kvrelay", **(about or {})}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=max_pending,
                schedule_delay_millis=export_every_s * 1e3,
                max_export_batch_size=min(MAX_BATCH, max_pending),
            )
        )
        self._tracer = self._provider.get_tracer("kvrelay")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, call: ServedCall, headers: Mapping[str, str], ended_ns: int) -> None:
        """`headers`: the call's, among them perhaps a W3C `traceparent`. `ended_ns`: since 1970."""
        from opentelemetry import trace

        started_ns = ended_ns - int(call.e2e_s * _NS)
        root = self._tracer.start_span(
            f"{operation_of(call.endpoint)} {call.model}",
            context=self._propagator.extract(headers),
            kind=trace.SpanKind.SERVER,
            start_time=started_ns,
        )
        if not root.is_recording():
            return
        phases = [(index, p) for index, c in enumerate(call.choices) for p in c.phases]
        num_pending = self._num_recorded - self._exporter.num_settled
        if num_pending + 1 + len(phases) > self._max_pending:
            self._count("dropped", 1 + len(phases))
            return  # a span that is not ended is not sent
        self._num_recorded += 1 + len(phases)
        root.set_attributes(_attributes(call))
        if call.outcome not in _NO_ERRORS:
            root.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(root)
        at_ns, of = started_ns, 0
        for index, phase in phases:
            if index != of:
                at_ns, of = started_ns, index
            attributes: dict[str, Any] = {"kvrelay.choice": index}
            if phase.attempt:
                attributes["kvrelay.attempt"] = phase.attempt
            if phase.worker:
                attributes["kvrelay.worker"] = phase.worker
            span = self._tracer.start_span(
                phase.name, context=inside, attributes=attributes, start_time=at_ns
            )
            at_ns += int(phase.seconds * _NS)
            span.end(end_time=at_ns)
        root.end(end_time=ended_ns)

    def close(self) -> None:
        """Send what is left; blocks for a bounded time, whatever the collector does."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def traces_url(endpoint: str) -> str:
    """Where traces go: a collector without a path is asked at OTLP's own."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def _counted(exporter: SpanExporter, url: str, count: Count) -> Any:
    """`exporter`, which then counts what becomes of spans."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Counted(SpanExporter):
        """Called by the SDK's thread alone, which is the only one to write `num_settled`."""

        num_settled = 0
        _is_failing = False

        def export(self, spans: Any) -> SpanExportResult:
            result = SpanExportResult.FAILURE
            try:
                result = exporter.export(spans)
            finally:
                failed = result is not SpanExportResult.SUCCESS
                count("failed" if failed else "sent", len(spans))
                self.num_settled += len(spans)
                if failed and not self._is_failing:
                    log.warning("%s does not take spans; they are lost until it does", masked(url))
                self._is_failing = failed
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return Counted()


def _attributes(call: ServedCall) -> dict[str, Any]:
    usage = call.usage
    details = usage["prompt_tokens_details"]
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation_of(call.endpoint),
        "gen_ai.provider.name": "kvrelay",
        "gen_ai.request.model": call.model,
        "gen_ai.response.model": call.model,
        "gen_ai.response.id": call.answer_id,
        "gen_ai.request.choice.count": len(call.choices),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": details["cached_tokens"],
        "kvrelay.request_id": call.request_id,
    }
    found |= {f"gen_ai.request.{name}": value for name, value in call.sampling.items()}
    for source, tokens in details["cached_tokens_by_source"].items():
        found[f"kvrelay.cached_tokens.{source}"] = tokens
    if call.client_id:
        found["kvrelay.client_request_id"] = call.client_id
    if call.tenant:
        found["kvrelay.tenant"] = call.tenant
    if call.outcome in ("stop", "length"):
        found["gen_ai.response.finish_reasons"] = [call.outcome]
    else:
        found["error.type"] = call.outcome
    if call.choices:
        found |= _of_first(call.choices[0])
    return found


def _of_first(choice: ServedChoice) -> dict[str, Any]:
    """What a call's first choice tells of the whole."""
    found: dict[str, Any] = {}
    if choice.ttft_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = choice.ttft_s
    explanation = choice.explanation
    if explanation is None:
        return found
    if explanation.session is not None:
        found["gen_ai.conversation.id"] = explanation.session
    if explanation.prediction is not None:
        found["kvrelay.decision_to_first_token.predicted_s"] = explanation.prediction.predicted_s
        found["kvrelay.decision_to_first_token.real_s"] = explanation.prediction.real_s
    found["kvrelay.attempts"] = len(explanation.attempts)
    for attempt in explanation.attempts[-1:]:
        found["kvrelay.worker.decode"] = attempt.decode.worker
        if attempt.prefill is not None:
            found["kvrelay.worker.prefill"] = attempt.prefill.worker
        if attempt.fetch_from is not None:
            found["kvrelay.worker.fetch_from"] = attempt.fetch_from
    return found
