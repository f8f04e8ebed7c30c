"""Metrics by the names of vLLM and OpenTelemetry, and counters that begin at 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from kvrelay.cluster.api.cluster_metrics import ClusterCollector
from kvrelay.kvtransfer.peer.rates import MAX_COUNTED_PEERS, OTHER_PEERS, ReadRates
from kvrelay.router.status import LinkLoss
from tests.cluster.api.conftest import MODEL, Served, cluster_status
from tests.cluster.api.operations.test_operations import ASK, samples

WORKER = {"worker": "w", "role": "decode", "state": "up", "num_blocks": 100, "block_size": 16}
Scrape = Callable[..., float | None]


def scrape_of(status: dict[str, Any]) -> Scrape:
    registry = CollectorRegistry()
    ClusterCollector(registry, lambda: cluster_status(status))
    return lambda name, **labels: registry.get_sample_value(name, labels)


def test_what_the_endpoint_picker_asks_for_is_of_router_and_workers() -> None:
    decode = WORKER | {"num_used_blocks": 40, "num_waiting": 2, "num_running": 3}
    prefill = WORKER | {"worker": "p", "role": "prefill", "num_used_blocks": 100, "num_running": 1}
    value = scrape_of({"model": MODEL, "num_queued": 5, "workers": [decode, prefill]})
    assert value("vllm:num_requests_waiting", model_name=MODEL) == 7
    assert value("vllm:num_requests_running", model_name=MODEL) == 4
    for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
        assert value(f"vllm:{name}", model_name=MODEL) == 0.4
    shape = {"block_size": "16", "num_gpu_blocks": "200"}
    assert value("vllm:cache_config_info", model_name=MODEL, **shape) == 1


def test_without_workers_no_kv_is_used() -> None:
    value = scrape_of({"model": MODEL, "num_queued": 1, "workers": []})
    assert value("vllm:num_requests_waiting", model_name=MODEL) == 1
    assert value("vllm:kv_cache_usage_perc", model_name=MODEL) == 0


def test_what_an_operator_has_to_know_of_the_controller_is_there() -> None:
    told = {"known": True, "epoch": 4, "has_ray": False, "age_s": 2.5, "failed_writes": 3}
    told |= {"unwritten_s": 7.5, "open_files": 80, "max_files": 100, "lines_dropped": 9}
    router = {"router": "router-1", "epoch": 3, "state": "up", "http_port": 1, "url": "u"}
    router |= {"num_live": 0, "num_queued": 0, "store_up": None, "restarts": 2}
    status = {"controller": told, "routers": [router], "workers": [WORKER | {"restarts": 1}]}
    status |= {"state_folder": {"free_bytes": 5, "free_files": 6}, "lines_dropped": 8}
    value = scrape_of(status)
    found = {
        name: value(f"kvrelay_controller_{name}")
        for name in ("age_seconds", "has_ray", "open_files", "max_files")
    }
    assert found == {"age_seconds": 2.5, "has_ray": 0, "open_files": 80, "max_files": 100}
    restarts = "kvrelay_process_restarts_total"
    assert value(restarts, kind="controller", process="controller") == 3
    assert value(restarts, kind="router", process="router-1") == 2
    assert value(restarts, kind="worker", process="w") == 1
    assert value("kvrelay_state_folder_free_bytes") == 5
    assert value("kvrelay_state_folder_free_files") == 6
    assert value("kvrelay_state_folder_unwritten_seconds") == 7.5
    assert value("kvrelay_state_folder_failed_writes_total") == 3
    assert value("kvrelay_log_lines_dropped_total", process="controller") == 9
    assert value("kvrelay_log_lines_dropped_total", process="router") == 8


def test_a_controller_that_has_said_nothing_has_an_age_and_no_more() -> None:
    value = scrape_of({"controller": {"known": False, "age_s": 40.0}, "workers": []})
    assert value("kvrelay_controller_age_seconds") == 40
    assert value("kvrelay_controller_has_ray") is None
    assert value("kvrelay_state_folder_free_bytes") is None, "a disk that hangs answers nothing"


def test_an_answer_is_counted_by_every_name(served: Served) -> None:
    before = samples(served)
    tokens = served.post({"model": MODEL, "messages": ASK}).json()["usage"]["completion_tokens"]
    served.post({"model": "unknown", "messages": ASK})
    served.post({"model": MODEL, "prompt": "Hi", "max_tokens": 1}, "/v1/completions")
    served.wait_idle()
    after = samples(served)

    def grown(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0)

    def gen_ai(name: str, operation: str, model: str = MODEL, **more: str) -> float:
        labels = {"gen_ai_operation_name": operation, "gen_ai_request_model": model}
        return grown(f"gen_ai_server_{name}", gen_ai_provider_name="kvrelay", **labels, **more)

    model = {"model_name": MODEL}
    assert grown("vllm:request_success_total", finished_reason="stop", **model) == 1
    assert grown("vllm:request_success_total", finished_reason="length", **model) == 1
    assert grown("vllm:generation_tokens_total", **model) == tokens + 1
    assert grown("vllm:time_to_first_token_seconds_count", **model) == 2
    assert grown("vllm:e2e_request_latency_seconds_count", **model) == 2
    assert grown("vllm:e2e_request_latency_seconds_bucket", le="+Inf", **model) == 2
    assert gen_ai("time_to_first_token_seconds_count", "chat") == 1
    assert gen_ai("time_per_output_token_seconds_count", "chat") == 1
    assert gen_ai("time_to_first_token_seconds_count", "text_completion") == 1
    duration = "request_duration_seconds_count"
    assert gen_ai(duration, "chat", error_type="") == 1
    assert gen_ai(duration, "chat", "", error_type="model_not_found") == 1


def test_counters_of_what_goes_wrong_begin_at_zero_where_a_worker_counts() -> None:
    up = WORKER | {"counters": {"steps": 4, "leases_expired": 2}}
    down = WORKER | {"worker": "gone", "counters": {}, "restarts": 3, "hangs": 2}
    status = {"workers": [up, down], "totals": {"retries": {"silent": 1}, "requests": {}}}
    status["totals"] |= {"sent_by_tenant": {"red": 2}, "refused_by_tenant": {}}
    value = scrape_of(status)
    of = {"worker": "w", "role": "decode"}
    events = "kvrelay_worker_events_total"
    assert value(events, event="leases_expired", **of) == 2
    assert value(events, event="disk_store_failed", **of) == 0
    assert value(events, event="disk_store_failed", worker="gone", role="decode") is None
    assert value("kvrelay_worker_restarts_total", worker="gone", role="decode") == 3
    assert value("kvrelay_worker_hangs_total", worker="gone", role="decode") == 2
    assert value("kvrelay_router_retries_total", reason="silent") == 1
    assert value("kvrelay_router_retries_total", reason="late") == 0
    assert value("kvrelay_router_requests_total", reason="queue_full") == 0
    assert value("kvrelay_router_refused_by_tenant_total", tenant="red") == 0
    assert value("kvrelay_wire_events_total", event="lost") == 0


def test_kv_events_are_counted_where_they_are_published() -> None:
    value = scrape_of({"kv_events": {"batches": 3, "dropped": 0}})
    assert value("kvrelay_kv_events_total", event="batches") == 3
    assert value("kvrelay_kv_events_total", event="dropped") == 0
    assert scrape_of({})("kvrelay_kv_events_total", event="batches") is None


def test_reads_are_by_source_and_peer() -> None:
    rates = ReadRates(None, None)  # type: ignore[arg-type]
    rates.add(None, 100, 0.5, "prefill-0")
    value = scrape_of({"workers": [WORKER | {"counters": rates.counters}]})
    labels = {"worker": "w", "role": "decode", "source": "peer", "peer": "prefill-0"}
    assert value("kvrelay_worker_kv_read_bytes_total", **labels) == 100
    assert value("kvrelay_worker_kv_read_seconds_total", **labels) == 0.5


def test_what_a_link_showed_when_it_was_made_is_by_peer() -> None:
    timed = {"peer": "prefill-0", "bytes_per_s": 9e9}
    links = [timed, {"peer": "prefill-1", "bytes_per_s": 0.0}]
    value = scrape_of({"workers": [WORKER | {"links": links}]})
    name, of = "kvrelay_worker_kv_link_bytes_per_second", {"worker": "w", "role": "decode"}
    assert value(name, peer="prefill-0", **of) == 9e9
    assert value(name, peer="prefill-1", **of) is None, "not known is not 0"


def test_peers_beyond_the_limit_are_counted_together() -> None:
    rates = ReadRates(None, None)  # type: ignore[arg-type]
    for number in range(MAX_COUNTED_PEERS + 5):
        rates.add(None, 10, 0.1, f"prefill-{number}")
    peers = {key.split(":")[2] for key in rates.counters if key.startswith("kv_read_bytes:")}
    assert rates.counters[f"kv_read_bytes:peer:{OTHER_PEERS}"] == 50
    assert len(peers) == MAX_COUNTED_PEERS + 1


def test_links_that_are_avoided_are_shown_with_what_they_lost() -> None:
    """They used to be lists in the status, and no scrape was answered while there was one."""
    link = LinkLoss("prefill-0", "decode-0", fetches=False, lost_share=0.5, wait_s=1.0)
    status = cluster_status({"workers": [WORKER]})
    status.bad_links = (link,)
    registry = CollectorRegistry()
    ClusterCollector(registry, lambda: status)
    labels = {"source": "prefill-0", "reader": "decode-0", "kind": "handoff"}
    assert registry.get_sample_value("kvrelay_router_kv_lost_share", labels) == 0.5


def test_groups_of_layers_have_a_label_and_models_with_one_have_no_such_metrics() -> None:
    counts = {"num_groups": 1, "num_used": 5, "num_cached": 7, "num_evicted": 9}
    groups = [{"kind": kind} | counts for kind in ("full", "window", "state")]
    counters = {"evictions": 27.0, "prefix_tokens_recomputed:state": 48.0}
    worker = WORKER | {"groups": groups, "counters": counters}
    labels = {"worker": "w", "role": "decode"}
    value = scrape_of({"workers": [worker]})
    assert value("kvrelay_worker_group_used_blocks", group="full", **labels) == 5
    assert value("kvrelay_worker_group_cached_blocks", group="window", **labels) == 7
    assert value("kvrelay_worker_group_evictions_total", group="state", **labels) == 9
    name = "kvrelay_prefix_tokens_recomputed_total"
    assert value(name, cause="state", **labels) == 48
    assert value(name, cause="window", **labels) == 0
    assert value(name, cause="full", **labels) is None
    event = "prefix_tokens_recomputed:state"
    assert value("kvrelay_worker_events_total", event=event, **labels) is None
    value = scrape_of({"workers": [WORKER | {"counters": {"evictions": 27.0}}]})
    assert value("kvrelay_worker_group_used_blocks", group="full", **labels) is None
    assert value(name, cause="state", **labels) is None
