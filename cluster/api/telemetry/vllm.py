"""Metrics by vLLM's names, for what was written for vLLM: autoscalers, dashboards, and the
endpoint picker of the Gateway API inference extension.

The picker's protocol asks a model server for the number of requests that wait and that run, the
use of its KV cache, and, if it can tell, the size and number of its KV blocks. Here a server is one
router with all workers behind it, so each value is of all of them together.

https://github.com/kubernetes-sigs/gateway-api-inference-extension (docs/proposals/003)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_LABEL = "model_name"
_SUCCESS = ("stop", "length")


def status_gauges(status: Mapping[str, Any]) -> Iterator[Metric]:
    """`status`: as of `cluster.api.metrics.status_dict`."""
    model = str(status.get("model", ""))
    workers = [each for each in status.get("workers", []) if each.get("num_blocks")]
    waiting = status.get("num_queued", 0) + _sum(workers, "num_waiting")
    yield _gauge(
        "num_requests_waiting", "Requests that wait, at a router or worker.", model, waiting
    )
    running = _sum(workers, "num_running")
    yield _gauge("num_requests_running", "Requests in running batches.", model, running)
    # Outputs need KV to the end: where they are generated, memory decides.
    of_outputs = [each for each in workers if each.get("role") != "prefill"] or workers
    used = _sum(of_outputs, "num_used_blocks") / max(1, _sum(of_outputs, "num_blocks"))
    text = "KV blocks held by requests, as a part of all where outputs are generated; 1 is full."
    for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):  # the second is the older name
        yield _gauge(name, text, model, used)
    info = GaugeMetricFamily(
        "vllm:cache_config_info",
        "Tokens of a KV block, and KV blocks of all workers.",
        labels=[_LABEL, "block_size", "num_gpu_blocks"],
    )
    sizes = {each.get("block_size", 0) for each in workers} - {0}
    if len(sizes) == 1:
        info.add_metric([model, str(sizes.pop()), str(int(_sum(workers, "num_blocks")))], 1.0)
    yield info


class VllmAliases(Collector):
    """What the API counts, by vLLM's names. Holds no counts of its own."""

    def __init__(
        self, registry: CollectorRegistry, model: str, renamed: Mapping[str, Collector]
    ) -> None:
        """`renamed`: vLLM's names, without `vllm:`, of metrics without labels; and
        `request_success`, of a counter with a label `outcome`."""
        self._model = model
        self._renamed = dict(renamed)
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for name, source in self._renamed.items():
            for metric in source.collect():
                if name == "request_success":
                    yield self._successes(metric)
                else:
                    yield self._named(name, metric)

    def _named(self, name: str, metric: Metric) -> Metric:
        made = Metric(f"vllm:{name}", metric.documentation, metric.type)
        for sample in metric.samples:
            suffix = sample.name.removeprefix(metric.name)
            labels = {_LABEL: self._model, **sample.labels}
            made.samples.append(Sample(f"vllm:{name}{suffix}", labels, sample.value))
        return made

    def _successes(self, metric: Metric) -> Metric:
        sums = dict.fromkeys(_SUCCESS, 0.0)
        for sample in metric.samples:
            outcome = sample.labels.get("outcome", "")
            if outcome in sums and sample.name.endswith("_total"):
                sums[outcome] += sample.value
        family = CounterMetricFamily(
            "vllm:request_success",
            "Requests that were served, by why they ended.",
            labels=[_LABEL, "finished_reason"],
        )
        for outcome, count in sums.items():
            family.add_metric([self._model, outcome], count)
        return family


def _sum(workers: Iterable[Mapping[str, Any]], key: str) -> float:
    return float(sum(each.get(key, 0) for each in workers))


def _gauge(name: str, text: str, model: str, value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"vllm:{name}", text, labels=[_LABEL])
    family.add_metric([model], value)
    return family
