"""Prometheus metrics of one API process.

What the API itself sees is counted here; `cluster_metrics` has the cluster's status. Three sets of
names are shown: `kvrelay_`; `vllm:`, for what was written for vLLM (autoscalers, dashboards, the
endpoint picker of the Gateway API inference extension); and `gen_ai_`, the names, buckets and
attributes of OpenTelemetry's convention for model servers, in the form that Prometheus knows them
in. `vllm:` names hold no counts of their own. There, a server is one router with all
workers of a model behind it, so each value is that of all of these together.

https://github.com/kubernetes-sigs/gateway-api-inference-extension (docs/proposals/003)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from kvrelay.cluster.api.errors import WATCHED

_LATENCY_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(90.0, 120.0, 180.0, 300.0, 600.0, 1200.0),  # a start from no worker, a long queue
)
_PHASE_S = (0.0001, 0.0005, 0.001, 0.0025, *_LATENCY_S)
_RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0, 10.0)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)

PROVIDER = "kvrelay"
_SUCCESS = ("stop", "length")
CANCELLED = "cancelled"  # by the client: not an error of the server
INTERNAL_ERROR = "internal_error"  # a bug of the server
CLIENT_GONE = 499  # as a status, nginx's, of who was answered nothing
ENDPOINTS = (
    *("chat", "completions", "responses", "messages"),
    *("embeddings", "score", "rerank"),
)  # that generate
BATCH = "batch"  # the endpoint of rows of batches, which nobody waits for
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "WEBSOCKET")
_GEN_AI_DURATION_S = tuple(0.01 * 2**n for n in range(14))
_GEN_AI_FIRST_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0),
)
_GEN_AI_NEXT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_GEN_AI_LABELS = ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"]
_OPERATIONS = {
    "completions": "text_completion",
    **dict.fromkeys(("embeddings", "score", "rerank"), "embeddings"),
}

# Attributes of `ApiMetrics` that each model has
OWN = (
    *("requests", "live_requests", "prompt_tokens", "cached_tokens", "output_tokens"),
    *("tenant_tokens", "ttft_s", "itl_s", "e2e_s", "queue_s", "phase_s"),
    "prediction_ratio",
)
OF_ALL = ("requests", "e2e_s")  # calls whose model is not known have these
# Foreign name -> our metric, one of these
FOREIGN = {
    "vllm:time_to_first_token_seconds": "ttft_s",
    "vllm:inter_token_latency_seconds": "itl_s",
    "vllm:e2e_request_latency_seconds": "e2e_s",
    "vllm:request_queue_time_seconds": "queue_s",
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:generation_tokens": "output_tokens",
    "vllm:prefix_cache_queries": "prompt_tokens",
    "vllm:prefix_cache_hits": "cached_tokens",
    "vllm:request_success": "requests",
}
SPAN_OUTCOMES = ("sent", "failed", "dropped")


def operation_of(endpoint: str) -> str:
    """Returns the convention's name; every other endpoint that generates is a chat within."""
    return _OPERATIONS.get(endpoint, "chat")


class ApiMetrics:
    """What the API counts about the requests of one model. Owned by the API of one process, which
    has one for each model, and one named "" for calls that were over before their model was known.

    Invariant: `all` is one for all of them, by model."""

    def __init__(self, registry: CollectorRegistry, model: str = "") -> None:
        """`model`: as clients call it."""
        self.registry = registry
        self.all: dict[str, ApiMetrics] = {}
        self.spans = Counter(
            "kvrelay_spans",
            "Spans by what became of them: sent to the collector, failed, or dropped before.",
            ["outcome"],
            registry=registry,
        )
        self._gen_ai_duration_s = self._gen_ai(
            "request_duration_seconds",
            "From the arrival of a request to its last byte; error_type is empty without an error.",
            _GEN_AI_DURATION_S,
            ["error_type"],
        )
        self._gen_ai_first_s = self._gen_ai(
            "time_to_first_token_seconds",
            "From the arrival of a request that succeeded to its first token.",
            _GEN_AI_FIRST_S,
        )
        self._gen_ai_next_s = self._gen_ai(
            "time_per_output_token_seconds",
            "Time per output token after the first, mean of a request that succeeded.",
            _GEN_AI_NEXT_S,
        )
        self._http_requests = Counter(
            "kvrelay_http_requests",
            "HTTP requests that were answered, by route, method and status; a stream that failed "
            "has the status of its error, a WebSocket 101.",
            ["route", "method", "status"],
            registry=registry,
        )
        for outcome in SPAN_OUTCOMES:
            self.spans.labels(outcome)
        self._begin(model)
        self.of("")
        registry.register(ByModel(self.all))
        ProcessCollector(registry=registry)

    def of(self, model: str) -> ApiMetrics:
        """Those of another model, or of this one."""
        if model not in self.all:
            copy(self)._begin(model)
        return self.all[model]

    def _begin(self, model: str) -> None:
        """Count what `ByModel` shows, from 0."""
        self._model = model
        self.all[model] = self
        self.requests = Counter(
            "kvrelay_requests",
            "Requests that ended, by outcome: stop, length, cancelled or an error code; and by the "
            "status that says so.",
            ["endpoint", "outcome", "status"],
            registry=None,
        )
        for endpoint in ENDPOINTS:  # `increase()` needs a value before the first failure
            for outcome, status in {INTERNAL_ERROR: 500, **WATCHED}.items():
                self.requests.labels(endpoint, outcome, str(status))
        self.live_requests = Gauge(
            "kvrelay_live_requests", "HTTP requests being served.", registry=None
        )
        self.prompt_tokens = _counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = _counter(
            "cached_prompt_tokens", "Tokens of prompts whose KV was cached."
        )
        self.output_tokens = _counter("output_tokens", "Tokens generated.")
        self.tenant_tokens = Counter(
            "kvrelay_tenant_tokens",
            "Tokens by tenant and kind: of prompts, those of them that were cached, generated.",
            ["tenant", "kind"],
            registry=None,
        )
        self.ttft_s = _histogram(
            "ttft_seconds", "From the end of the request's body to its first token.", _LATENCY_S
        )
        self.itl_s = _histogram(
            "itl_seconds", "Time between tokens of one choice, after the first.", _ITL_S
        )
        self.e2e_s = _histogram(
            "e2e_seconds", "From the arrival of a request to its last byte.", _LATENCY_S
        )
        self.queue_s = _histogram(
            "queue_seconds", "Waiting for room, at the router and at workers.", _PHASE_S
        )
        self.phase_s = Histogram(
            "kvrelay_phase_seconds",
            "Where a request's time went, from its arrival to its last byte, by phase.",
            ["phase"],
            buckets=_PHASE_S,
            registry=None,
        )
        self.prediction_ratio = _histogram(
            "router_ttft_prediction_ratio",
            "Predicted time from the router's decision to the first token, over the real one.",
            _RATIOS,
        )

    def answered(self, route: str, method: str, status: int) -> None:
        """A request has its answer. `route`: the template of its path; "" is none of ours."""
        known = method if method in _METHODS else "other"
        self._http_requests.labels(route, known, str(status)).inc()

    def count(self, endpoint: str, outcome: str, status: int) -> None:
        """A call is over that did not get so far as to be served, or that generates nothing."""
        self.requests.labels(endpoint, outcome, str(status)).inc()

    def used(self, tenant: str, usage: Mapping[str, Any]) -> None:
        """A call has used so many tokens, by OpenAI's names."""
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        used = usage["prompt_tokens"], cached, usage["completion_tokens"]
        totals = self.prompt_tokens, self.cached_tokens, self.output_tokens
        for total, kind, tokens in zip(totals, ("prompt", "cached", "output"), used, strict=True):
            total.inc(tokens)
            self.tenant_tokens.labels(tenant, kind).inc(tokens)

    def ended(
        self, endpoint: str, outcome: str, status: int, elapsed_s: float, is_row: bool = False
    ) -> None:
        """A call is over, whether it was served or not. `outcome`: as in `kvrelay_requests`. A row
        of a batch is counted, and no latency that somebody has seen."""
        self.count(BATCH if is_row else endpoint, outcome, status)
        if is_row:
            return
        self.e2e_s.observe(elapsed_s)
        error = "" if outcome in (*_SUCCESS, CANCELLED) else outcome
        labels = operation_of(endpoint), PROVIDER, self._model, error
        self._gen_ai_duration_s.labels(*labels).observe(elapsed_s)

    def served(
        self, endpoint: str, outcome: str, ttft_s: float, rest_s: float, num_tokens: int
    ) -> None:
        """One choice of a call is over. `rest_s`: from its first token to its last; `num_tokens`:
        of its output. Times to and between tokens are those of requests that succeeded."""
        if outcome not in _SUCCESS:
            return
        labels = operation_of(endpoint), PROVIDER, self._model
        self._gen_ai_first_s.labels(*labels).observe(ttft_s)
        if num_tokens > 1:
            self._gen_ai_next_s.labels(*labels).observe(rest_s / (num_tokens - 1))

    def _gen_ai(
        self, name: str, text: str, buckets: tuple[float, ...], more: Iterable[str] = ()
    ) -> Histogram:
        name, labels = f"gen_ai_server_{name}", [*_GEN_AI_LABELS, *more]
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)


def _counter(name: str, text: str) -> Counter:
    return Counter(f"kvrelay_{name}", text, registry=None)


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(f"kvrelay_{name}", text, buckets=buckets, registry=None)


class OfCluster(Collector):
    """What is registered, with the cluster's name as a label: one Prometheus may have several."""

    def __init__(self, registry: CollectorRegistry, cluster: str) -> None:
        self._registry, self._label = registry, {"cluster": cluster}

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            samples = metric.samples
            metric.samples = [s._replace(labels={**self._label, **s.labels}) for s in samples]
            yield metric


class ByModel(Collector):
    """What the API counts, with the model as a label, by our names and by those that others read.
    Made when it is scraped."""

    def __init__(self, all_of: Mapping[str, ApiMetrics]) -> None:
        self._all = all_of

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        served = {model: each for model, each in self._all.items() if model} or self._all
        for name in OWN:
            all_of = self._all if name in OF_ALL else served
            yield self._merged(name, "", "model", lambda metric: metric.samples, all_of)
        for foreign, name in FOREIGN.items():
            yield self._merged(name, foreign, "model_name", _foreign, served)

    def _merged(
        self,
        name: str,
        foreign: str,
        label: str,
        samples: Callable[[Metric], Iterable[Sample]],
        all_of: Mapping[str, ApiMetrics],
    ) -> Metric:
        """The metric `name` of all models, called `foreign` if that is given."""
        made: Metric | None = None
        for model, each in all_of.items():
            (metric,) = getattr(each, name).collect()
            made = made or Metric(foreign or metric.name, metric.documentation, metric.type)
            for sample in samples(metric):
                suffix = sample.name.removeprefix(metric.name)
                labels = {label: model, **sample.labels}
                made.samples.append(Sample(f"{made.name}{suffix}", labels, sample.value))
        assert made is not None
        return made


def _foreign(metric: Metric) -> Iterable[Sample]:
    """Returns samples as they are, but requests that were served by how."""
    if metric.name != "kvrelay_requests":
        return metric.samples
    sums = dict.fromkeys(_SUCCESS, 0.0)
    for sample in metric.samples:
        outcome = sample.labels["outcome"]
        if outcome in sums and sample.name.endswith("_total"):
            sums[outcome] += sample.value
    return [
        Sample(f"{metric.name}_total", {"finished_reason": outcome}, count)
        for outcome, count in sums.items()
    ]
