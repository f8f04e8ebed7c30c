"""Metrics of what was used by which key. Made when they are scraped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.cluster.api.keys.keys import Keys

_LABELS = ["tenant", "key", "model"]


class KeyCollector(Collector):
    """Labels are bounded: `Keys.totals` is."""

    def __init__(self, registry: CollectorRegistry, keys: Keys) -> None:
        self._keys = keys
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return []  # nobody is asked before the first scrape

    def collect(self) -> Iterator[Metric]:
        text = "by tenant, key (empty: of the settings) and model, since this process began."
        requests = CounterMetricFamily("kvrelay_key_requests", f"Requests {text}", labels=_LABELS)
        tokens = CounterMetricFamily(
            "kvrelay_key_tokens", f"Tokens {text}", labels=[*_LABELS, "kind"]
        )
        for by, had in sorted(self._keys.totals.items()):
            requests.add_metric(by, had.requests)
            for kind, number in (
                ("prompt", had.input),
                ("cached", had.cached),
                ("output", had.output),
            ):
                tokens.add_metric([*by, kind], number)
        yield from (requests, tokens)
