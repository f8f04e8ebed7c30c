"""Prometheus metrics of one API process.

`ApiMetrics` counts what the API itself sees. `ClusterCollector` asks for the router's status at
each scrape and turns it into gauges and counters. The status is a plain dictionary, so that it can
be JSON too: `status_dict` makes it from `router.status.RouterStatus` and adds the model's name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.cluster.api.telemetry import known, vllm
from kvrelay.cluster.api.telemetry.gen_ai import GenAiMetrics
from kvrelay.cluster.api.telemetry.scaling import scaling_metrics
from kvrelay.cluster.api.utility.version import VERSION
from kvrelay.router.status import RouterStatus

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PHASE_S = (0.0001, 0.0005, 0.001, 0.0025, *_LATENCY_S)
_RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0, 10.0)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)

# Key of a worker's status -> (metric, help)
_WORKER_GAUGES = {
    "num_blocks": ("blocks", "KV blocks in the worker's pool."),
    "num_used_blocks": ("used_blocks", "KV blocks held by requests."),
    "num_cached_blocks": ("cached_blocks", "KV blocks that are sealed: found by prefix."),
    "num_running": ("running", "Requests in the running batch."),
    "num_waiting": ("waiting", "Requests that wait to run."),
    "num_handoffs": ("handoffs", "KV transfers not settled, and KV held for a consumer."),
    "pending_prefill_tokens": ("pending_prefill_tokens", "Tokens known and not computed."),
    "prefill_tokens_per_s": ("prefill_tokens_per_second", "Rate of prefill, recent."),
    "decode_step_s": ("decode_step_seconds", "Time of a decode step, recent."),
    "read_bytes_per_s": ("read_bytes_per_second", "Rate of KV transfers, recent."),
    "num_host_blocks": ("host_blocks", "Blocks of the worker's host memory that hold KV."),
    "num_disk_blocks": ("disk_blocks", "Blocks of the worker's disk that hold KV."),
    "host_read_bytes_per_s": ("host_read_bytes_per_second", "Rate of loads from host memory."),
    "disk_read_bytes_per_s": ("disk_read_bytes_per_second", "Rate of loads from disk."),
}
_ROUTER_GAUGES = {
    "num_live": ("live", "Requests that the router serves."),
    "num_queued": ("queued", "Requests that wait for a worker."),
    "prediction_error": (
        "ttft_prediction_error",
        "Relative error of the predicted time to the first token: median of the last requests.",
    ),
}
# Of totals that are not by reason.
_STATE_GAUGES = {
    "up": "1 if the store of shared state can be reached; without it routers go on from memory.",
    "writes_index": "1 if this router keeps the prefix index in the store.",
    "unwritten": "Changes that wait to be written to the store.",
}
_STATE_COUNTERS = {
    "outages": "How often the store was lost.",
    "dropped": "Changes for the store that found no room; told again when it is back.",
    "unreadable": "What was in the store and could not be read.",
}
_TOTAL_LABELS = {
    "cached_tokens_by_source": "source",
    "kv_lost": "kind",
    "refused_by_tenant": "tenant",
    "sent_by_tenant": "tenant",
    "queue_seconds_by_tenant": "tenant",
    "work_by_tenant": "tenant",
}


def status_dict(status: RouterStatus, model: str) -> dict[str, Any]:
    """The status as JSON's types: what `/status` answers and `ClusterCollector` reads."""
    plain: dict[str, Any] = msgspec.to_builtins(status, str_keys=True)
    plain["workers"] = list(plain["workers"])
    return {"model": model, "cache_hit_rate": status.cache_hit_rate, **plain}


class ApiMetrics:
    """What the API counts about the requests it serves. Owned by the API of one process."""

    def __init__(self, registry: CollectorRegistry, model: str = "") -> None:
        """`model`: as clients call it."""
        self.registry = registry
        self.requests = Counter(
            "kvrelay_requests",
            "HTTP requests that ended, by outcome: stop, length, cancelled or an error code.",
            ["endpoint", "outcome"],
            registry=registry,
        )
        self.live_requests = Gauge(
            "kvrelay_live_requests", "HTTP requests being served.", registry=registry
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = self._counter(
            "cached_prompt_tokens", "Tokens of prompts whose KV was cached."
        )
        self.output_tokens = self._counter("output_tokens", "Tokens generated.")
        self.ttft_s = self._histogram(
            "ttft_seconds", "From the end of the request's body to its first token.", _LATENCY_S
        )
        self.itl_s = self._histogram(
            "itl_seconds", "Time between tokens of one choice, after the first.", _ITL_S
        )
        self.e2e_s = self._histogram(
            "e2e_seconds", "From the arrival of a request to its last byte.", _LATENCY_S
        )
        self.phase_s = Histogram(
            "kvrelay_phase_seconds",
            "Where a request's time went, from its arrival to its last byte, by phase.",
            ["phase"],
            buckets=_PHASE_S,
            registry=registry,
        )
        self.spans = Counter(
            "kvrelay_spans",
            "Spans by what became of them: sent to the collector, failed, or dropped before.",
            ["outcome"],
            registry=registry,
        )
        self.prediction_ratio = Histogram(
            "kvrelay_router_ttft_prediction_ratio",
            "Predicted time from the router's decision to the first token, over the real one.",
            buckets=_RATIOS,
            registry=registry,
        )

        for outcome in known.SPAN_OUTCOMES:
            self.spans.labels(outcome)
        self.gen_ai = GenAiMetrics(registry)
        renamed = {
            "time_to_first_token_seconds": self.ttft_s,
            "inter_token_latency_seconds": self.itl_s,
            "e2e_request_latency_seconds": self.e2e_s,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.output_tokens,
            "prefix_cache_queries": self.prompt_tokens,
            "prefix_cache_hits": self.cached_tokens,
            "request_success": self.requests,
        }
        vllm.VllmAliases(registry, model, renamed)
        ProcessCollector(registry=registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"kvrelay_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kvrelay_{name}", text, buckets=buckets, registry=self.registry)


class ClusterCollector(Collector):
    """Turns `status()` into metrics at each scrape. Holds no state."""

    def __init__(self, registry: CollectorRegistry, status: Callable[[], dict[str, Any]]) -> None:
        """`status` as `status_dict` makes it; what is missing there is missing in the metrics."""
        self._status = status
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return []  # the status is not asked for before the first scrape

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        workers = status.get("workers", [])
        yield from self._process(status)
        yield from vllm.status_gauges(status)
        yield from self._worker_gauges(workers)
        yield from self._worker_counters(workers)
        for key, (name, text) in _ROUTER_GAUGES.items():
            if status.get(key) is not None:
                yield GaugeMetricFamily(f"kvrelay_router_{name}", text, value=status[key])
        yield _lost_shares(status.get("bad_links", ()))
        yield from scaling_metrics(status.get("scaling"))
        yield from self._state(status.get("state", {}))
        yield from self._totals(status.get("totals", {}))

    def _process(self, status: dict[str, Any]) -> Iterator[Metric]:
        """Of the process that is asked, and what it knows of the others."""
        build = GaugeMetricFamily(
            "kvrelay_build_info", "1; the version, and what is served.", labels=["version", "model"]
        )
        build.add_metric([VERSION, str(status.get("model", ""))], 1.0)
        yield build
        text = "This machine's clock: to be compared with that of whoever asks."
        yield GaugeMetricFamily("kvrelay_clock_seconds", text, value=time.time())
        routers = GaugeMetricFamily(
            "kvrelay_routers_up", "1 if the router process serves.", labels=["router", "state"]
        )
        for router in status.get("routers", []):
            state = str(router["state"])
            routers.add_metric([router["router"], state], float(state == "up"))
        yield routers
        wire = known.from_zero(known.WIRE_EVENTS, status.get("wire", {}))
        yield _by_label(CounterMetricFamily, "wire_events", "event", wire, "Frames by their fate.")
        tasks = status.get("restarted_tasks", {})
        text = "Background tasks that had failed."
        yield _by_label(CounterMetricFamily, "restarted_tasks", "task", tasks, text)
        sessions = known.from_zero(known.SESSION_STATES, status.get("sessions", {}))
        yield _by_label(GaugeMetricFamily, "sessions", "state", sessions, "Sessions by state.")

    def _state(self, state: dict[str, Any]) -> Iterator[Metric]:
        """Nothing where no store is configured."""
        if state:
            for key, text in _STATE_GAUGES.items():
                yield GaugeMetricFamily(f"kvrelay_state_{key}", text, value=float(state[key]))
            for key, text in _STATE_COUNTERS.items():
                yield CounterMetricFamily(f"kvrelay_state_{key}", text, value=state[key])

    def _worker_gauges(self, workers: list[dict[str, Any]]) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "kvrelay_worker_up",
            "1 if requests can be given to the worker.",
            labels=["worker", "role", "state"],
        )
        for worker in workers:
            state = str(worker["state"])
            up.add_metric([*_labels(worker), state], float(state == "up"))
        yield up
        for key, (name, text) in _WORKER_GAUGES.items():
            gauge = GaugeMetricFamily(f"kvrelay_worker_{name}", text, labels=["worker", "role"])
            for worker in workers:
                if key in worker:
                    gauge.add_metric(_labels(worker), float(worker[key]))
            yield gauge
        links = GaugeMetricFamily(
            "kvrelay_worker_kv_link_bytes_per_second",
            "Rate of a small read from the peer, timed when the worker connected to it.",
            labels=["worker", "role", "peer"],
        )
        for worker in workers:
            for link in worker.get("links", ()):
                if link["bytes_per_s"]:
                    links.add_metric([*_labels(worker), link["peer"]], link["bytes_per_s"])
        yield links

    def _worker_counters(self, workers: list[dict[str, Any]]) -> Iterator[Metric]:
        events = CounterMetricFamily(
            "kvrelay_worker_events",
            "What the worker has counted since it started.",
            labels=["worker", "role", "event"],
        )
        reads = {
            what: CounterMetricFamily(
                f"kvrelay_worker_{what}",
                f"{text} that requests have read KV instead of computing it. source: a tier or a"
                " peer.",
                labels=["worker", "role", "source", "peer"],
            )
            for what, text in (("kv_read_bytes", "Bytes"), ("kv_read_seconds", "Seconds"))
        }
        restarts = CounterMetricFamily(
            "kvrelay_worker_restarts",
            "How often the worker was started again.",
            labels=["worker", "role"],
        )
        hangs = CounterMetricFamily(
            "kvrelay_worker_hangs",
            "How often the worker was ended because it did not answer.",
            labels=["worker", "role"],
        )
        for worker in workers:
            if "restarts" in worker:
                restarts.add_metric(_labels(worker), worker["restarts"])
                hangs.add_metric(_labels(worker), worker.get("hangs", 0))
            counters = worker.get("counters")
            if not counters:  # it is not up: zeros would look like a fall of its counters
                continue
            for event, count in sorted(known.from_zero(known.WORKER_EVENTS, counters).items()):
                what, _, place = event.partition(":")
                if what in reads:
                    reads[what].add_metric([*_labels(worker), *place.split(":", 1)], float(count))
                else:
                    events.add_metric([*_labels(worker), event], float(count))
        yield from (restarts, hangs, events, *reads.values())

    def _totals(self, totals: dict[str, Any]) -> Iterator[Metric]:
        """A total is a number, or numbers by a label."""
        tenants = tuple(totals.get("sent_by_tenant", ()))
        for key, value in sorted(totals.items()):
            name = f"kvrelay_router_{key}"
            text = f"Total of '{key}' since the router started."
            if isinstance(value, dict):
                label = _TOTAL_LABELS.get(key, "reason")
                known_values = tenants if label == "tenant" else known.TOTALS.get(key, ())
                counts = known.from_zero(known_values, value)
                yield _by_label(CounterMetricFamily, f"router_{key}", label, counts, text)
            else:
                yield CounterMetricFamily(name, text, value=value)


def _lost_shares(links: Iterable[dict[str, Any]]) -> Metric:
    shares = GaugeMetricFamily(
        "kvrelay_router_kv_lost_share",
        "Share of KV that did not come by a link that is avoided. source: who has it; reader: who"
        " reads it; kind: what was handed over, or fetched.",
        labels=["source", "reader", "kind"],
    )
    for link in links:
        kind = "fetch" if link["fetches"] else "handoff"
        shares.add_metric([link["source"], link["reader"], kind], link["lost_share"])
    return shares


def _labels(worker: dict[str, Any]) -> list[str]:
    return [worker["worker"], worker["role"]]


def _by_label(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    label: str,
    counts: dict[str, float],
    text: str,
) -> Metric:
    family = kind(f"kvrelay_{name}", text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family
