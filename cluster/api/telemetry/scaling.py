"""What the autoscaler wants and has done, as metrics; nothing where none runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_GAUGES = {
    "wanted": ("wanted_workers", "Workers that the autoscaler wants."),
    "wanted_decode": ("wanted_decode_workers", "Of those, the ones to decode."),
    "least": ("min_workers", "Fewest workers that may be now."),
    "most": ("max_workers", "Most workers that may be now."),
    "coming": ("coming_workers", "Workers that are ordered and not up yet."),
    "draining": ("draining_workers", "Workers that are to go when nothing needs them."),
}
ACTIONS = ("start", "drain", "flip")


def scaling_metrics(state: dict[str, Any] | None) -> Iterator[Metric]:
    """`state`: of `/status`."""
    if not state:
        return
    for key, (name, text) in _GAUGES.items():
        if state[key] is not None:
            yield GaugeMetricFamily(f"kvrelay_scaling_{name}", text, value=float(state[key]))
    ticks = CounterMetricFamily(
        "kvrelay_scaling_ticks", "Decisions by reason, also those not to act.", labels=["reason"]
    )
    for reason, count in state["ticks"].items():
        ticks.add_metric([reason], count)
    yield ticks
    actions = CounterMetricFamily(
        "kvrelay_scaling_actions", "What the autoscaler has done to workers.", labels=["action"]
    )
    for action in ACTIONS:
        actions.add_metric([action], state["actions"].get(action, 0))
    yield actions
