"""Which adapters are in use, by vLLM's name, for pickers that send their requests to one server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.cluster.api.adapters import Registered
from kvrelay.engine.adapters import WEIGHTS_NAME
from kvrelay.router.router import Router

LABELS = ("model_name", "max_lora", "waiting_lora_adapters", "running_lora_adapters")
TEXT = "Adapters that are loaded or computed with, and others that requests wait for."


class AdapterUse(NamedTuple):
    """Of one model: how many adapters a worker has room for, and names."""

    model: str
    max_loaded: int
    waiting: tuple[str, ...]
    running: tuple[str, ...]


def adapter_use(
    model: str, registered: Mapping[str, Registered], router: Router, room_bytes: int
) -> AdapterUse:
    """`registered`: those of the model, by name; at least one. `room_bytes`: that a worker has for
    adapters."""
    names = {each.digest: name for name, each in registered.items()}
    running = {digest for _, _, stats in router.worker_stats for digest in stats.loaded}
    waiting = set[bytes]()
    for record in router.live.values():
        if record.submit.need is not None:
            (waiting if record.current is None else running).add(record.submit.need.digest)
    sizes = [_size(each) for each in registered.values()]
    return AdapterUse(
        model,
        max(1, room_bytes * len(sizes) // max(1, sum(sizes))),
        tuple(sorted(names[each] for each in waiting - running if each in names)),
        tuple(sorted(names[each] for each in running if each in names)),
    )


def _size(entry: Registered) -> int:
    try:
        return (Path(entry.source) / WEIGHTS_NAME).stat().st_size
    except OSError:
        return 0


class AdapterCollector(Collector):
    """Asks at each scrape. Its value is the time, so that of several the last one counts."""

    def __init__(
        self, registry: CollectorRegistry, uses: Callable[[], Iterable[AdapterUse]]
    ) -> None:
        self._uses = uses
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return []  # nobody is asked before the first scrape

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("vllm:lora_requests_info", TEXT, labels=LABELS)
        for model, max_loaded, waiting, running in self._uses():
            values = model, str(max_loaded), ",".join(waiting), ",".join(running)
            family.add_metric(values, time.time())
        if family.samples:
            yield family
