"""Grafana's dashboards in deploy/grafana, made from the panels that are listed here.

`python -m tests.operations.dashboards` writes them. A panel is a title, a unit of Grafana's, and
queries by their legends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.structure import ROOT

FOLDER = ROOT / "deploy/grafana"
Panel = tuple[str, str, Mapping[str, str]]


def _rate(counter: str, by: str = "", where: str = "") -> str:
    grouped = f" by ({by}) " if by else ""
    return f"sum{grouped}(rate({counter}{{{where}}}[$__rate_interval]))".replace("{}", "")


def _quantiles(histogram: str, where: str = "") -> dict[str, str]:
    rates = _rate(f"{histogram}_bucket", "le", where)
    return {f"p{round(q * 100)}": f"histogram_quantile({q}, {rates})" for q in (0.5, 0.9, 0.99)}


def _of_workers(metric: str) -> dict[str, str]:
    return {"{{worker}}": f"max by (worker) (kvrelay_worker_{metric})"}


def _events(event: str, by: str = "worker") -> str:
    return _rate("kvrelay_worker_events_total", by, f'event="{event}"')


ENDPOINT: list[Panel] = [
    ("Requests by outcome", "reqps", {"{{outcome}}": _rate("kvrelay_requests_total", "outcome")}),
    ("Live requests", "short", {"{{instance}}": "kvrelay_live_requests"}),
    ("Time to first token", "s", _quantiles("kvrelay_ttft_seconds")),
    ("Time between tokens", "s", _quantiles("kvrelay_itl_seconds")),
    ("End to end", "s", _quantiles("kvrelay_e2e_seconds")),
    (
        "Tokens",
        "short",
        {
            "prompt": _rate("kvrelay_prompt_tokens_total"),
            "of those cached": _rate("kvrelay_cached_prompt_tokens_total"),
            "output": _rate("kvrelay_output_tokens_total"),
        },
    ),
    ("Where time goes", "s", {"{{phase}}": _rate("kvrelay_phase_seconds_sum", "phase")}),
    ("Wait in the queue", "s", _quantiles("kvrelay_phase_seconds", 'phase="queue"')),
    (
        "Attempts given up",
        "short",
        {"{{reason}}": _rate("kvrelay_router_retries_total", "reason")},
    ),
    (
        "OpenTelemetry: request duration, p90",
        "s",
        {
            "{{gen_ai_operation_name}}": "histogram_quantile(0.9, "
            + _rate("gen_ai_server_request_duration_seconds_bucket", "gen_ai_operation_name, le")
            + ")"
        },
    ),
]
POOLS: list[Panel] = [
    (
        "Workers up",
        "short",
        {"{{role}}": "sum by (role) (max by (worker, role) (kvrelay_worker_up))"},
    ),
    ("Queue of the routers", "short", {"{{instance}}": "kvrelay_router_queued"}),
    ("Running", "short", _of_workers("running")),
    ("Waiting at workers", "short", _of_workers("waiting")),
    ("Prompt tokens to compute", "short", _of_workers("pending_prefill_tokens")),
    ("Rate of prefill", "short", _of_workers("prefill_tokens_per_second")),
    ("Decode step", "s", _of_workers("decode_step_seconds")),
    (
        "Prompts: handed over or not",
        "short",
        {
            "attempts": _rate("kvrelay_router_attempts_total"),
            "handed over": _rate("kvrelay_router_handoffs_total"),
            "migrations": _rate("kvrelay.router.routers_total"),
        },
    ),
    ("Restarts", "short", {"{{worker}}": "max by (worker) (kvrelay_worker_restarts_total)"}),
    ("Predicted over real TTFT", "short", _quantiles("kvrelay_router_ttft_prediction_ratio")),
]
KV: list[Panel] = [
    (
        "KV blocks held by requests",
        "percentunit",
        {"{{worker}}": "max by (worker) (kvrelay_worker_used_blocks / kvrelay_worker_blocks)"},
    ),
    ("Cached blocks on the device", "short", _of_workers("cached_blocks")),
    ("Blocks in host memory", "short", _of_workers("host_blocks")),
    ("Blocks on disk", "short", _of_workers("disk_blocks")),
    (
        "Cache hit rate",
        "percentunit",
        {
            "of prompt tokens": _rate("kvrelay_cached_prompt_tokens_total")
            + " / "
            + _rate("kvrelay_prompt_tokens_total")
        },
    ),
    (
        "Cached tokens by source",
        "short",
        {"{{source}}": _rate("kvrelay_router_cached_tokens_by_source_total", "source")},
    ),
    (
        "Copied down",
        "Bps",
        {
            "to host, {{worker}}": _events("moved_bytes_device_host"),
            "to disk, {{worker}}": _events("moved_bytes_host_disk"),
        },
    ),
    (
        "Evictions and preemptions",
        "short",
        {"evictions": _events("evictions", ""), "preemptions": _events("preemptions", "")},
    ),
    ("Stores that fail", "short", {"{{worker}}": _events("disk_store_failed")}),
    ("Sessions", "short", {"{{state}}": "sum by (state) (kvrelay_sessions)"}),
]
_BYTES, _SECONDS = "kvrelay_worker_kv_read_bytes_total", "kvrelay_worker_kv_read_seconds_total"
_PAIR, _FROM_PEERS = "peer, worker", 'source="peer"'
TRANSFERS: list[Panel] = [
    ("KV read, by source", "Bps", {"{{source}}": _rate(_BYTES, "source")}),
    (
        "KV read, by pair",
        "Bps",
        {"{{peer}} to {{worker}}": _rate(_BYTES, _PAIR, _FROM_PEERS)},
    ),
    (
        "Speed of a pair while it reads",
        "Bps",
        {
            "{{peer}} to {{worker}}": _rate(_BYTES, _PAIR, _FROM_PEERS)
            + " / "
            + _rate(_SECONDS, _PAIR, _FROM_PEERS)
        },
    ),
    ("Transfers that are not settled", "short", _of_workers("handoffs")),
    (
        "Handoffs",
        "short",
        {"done": _events("handoffs_done", ""), "failed": _events("handoffs_failed", "")},
    ),
    (
        "Why reads failed",
        "short",
        {"{{event}}": _rate("kvrelay_worker_events_total", "event", 'event=~"handoff_failed_.*"')},
    ),
    ("Leases that ran out", "short", {"{{worker}}": _events("leases_expired")}),
    (
        "Frames between processes",
        "short",
        {"{{event}}": _rate("kvrelay_wire_events_total", "event")},
    ),
]
TENANTS: list[Panel] = [
    (
        "Attempts sent",
        "reqps",
        {"{{tenant}}": _rate("kvrelay_router_sent_by_tenant_total", "tenant")},
    ),
    (
        "Refused",
        "reqps",
        {"{{tenant}}": _rate("kvrelay_router_refused_by_tenant_total", "tenant")},
    ),
    (
        "Mean wait in the queue",
        "s",
        {
            "{{tenant}}": _rate("kvrelay_router_queue_seconds_by_tenant_total", "tenant")
            + " / "
            + _rate("kvrelay_router_sent_by_tenant_total", "tenant")
        },
    ),
    (
        "Part of the service",
        "percentunit",
        {
            "{{tenant}}": _rate("kvrelay_router_work_by_tenant_total", "tenant")
            + " / ignoring (tenant) group_left "
            + _rate("kvrelay_router_work_by_tenant_total")
        },
    ),
    (
        "Requests by how they ended",
        "reqps",
        {"{{reason}}": _rate("kvrelay_router_requests_total", "reason")},
    ),
]
SCALING: list[Panel] = [
    (
        "Workers",
        "short",
        {
            "up": "sum (max by (worker) (kvrelay_worker_up))",
            "wanted": "max (kvrelay_scaling_wanted_workers)",
            "of those to decode": "max (kvrelay_scaling_wanted_decode_workers)",
            "at least": "max (kvrelay_scaling_min_workers)",
            "at most": "max (kvrelay_scaling_max_workers)",
        },
    ),
    (
        "On their way",
        "short",
        {
            "coming": "max (kvrelay_scaling_coming_workers)",
            "draining": "max (kvrelay_scaling_draining_workers)",
        },
    ),
    (
        "What was done, a minute",
        "short",
        {"{{action}}": "max by (action) (increase(kvrelay_scaling_actions_total[1m]))"},
    ),
    (
        "Why, in ticks a minute",
        "short",
        {"{{reason}}": "max by (reason) (increase(kvrelay_scaling_ticks_total[1m]))"},
    ),
    ("Time to first token", "s", _quantiles("kvrelay_ttft_seconds")),
    ("Requests", "reqps", {"{{outcome}}": _rate("kvrelay_requests_total", "outcome")}),
]

DASHBOARDS = {
    "endpoint": ("KVRelay: endpoint", ENDPOINT),
    "pools": ("KVRelay: pools", POOLS),
    "kv": ("KVRelay: KV and tiers", KV),
    "transfers": ("KVRelay: KV transfers", TRANSFERS),
    "tenants": ("KVRelay: tenants", TENANTS),
    "scaling": ("KVRelay: scaling", SCALING),
}
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 12, 8


def panel(index: int, title: str, unit: str, queries: Mapping[str, str]) -> dict[str, Any]:
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": index % 2 * WIDTH, "y": index // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": expr, "legendFormat": legend}
            for number, (legend, expr) in enumerate(queries.items())
        ],
    }


def dashboard(name: str) -> dict[str, Any]:
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"kvrelay-{name}",
        "title": title,
        "tags": ["kvrelay"],
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {"type": "dashboards", "title": "KVRelay", "tags": ["kvrelay"], "asDropdown": True}
        ],
        "templating": {
            "list": [{"name": "source", "type": "datasource", "query": "prometheus"}],
        },
        "panels": [panel(index, *each) for index, each in enumerate(panels)],
    }


def text_of(name: str) -> str:
    return json.dumps(dashboard(name), indent=2) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in DASHBOARDS:
        (FOLDER / f"{each}.json").write_text(text_of(each), encoding="utf-8")
