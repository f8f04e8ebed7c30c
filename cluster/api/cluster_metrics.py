"""The cluster's status as Prometheus metrics, by one table: `FAMILIES`.

At each scrape the router's process is asked for a `ClusterStatus`, and each row of the table makes
one family of it, by our names and by vLLM's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.cluster.api.utility.version import VERSION
from kvrelay.cluster.status import ClusterStatus, scaling_by_model
from kvrelay.engine.request import FinishReason, Refusal
from kvrelay.engine.stats import RECOMPUTED
from kvrelay.router.messages import SessionState
from kvrelay.router.record import Cause
from kvrelay.router.status import WORKER_FACTS, Totals, WorkerStatus

# Label values that are known before anything was counted. A counter that appears with its first
# event hides that event: `increase()` needs a value before it. So what alerts look at begins at 0.
_KNOWN_TOTALS: dict[str, tuple[str, ...]] = {
    "requests": (*FinishReason, *Refusal),
    "retries": tuple(Cause),
    "kv_lost": ("handoff", "fetch"),
    "cached_tokens_by_source": ("device", "host", "disk", "object", "peer"),
}
WORKER_EVENTS = (
    "preemptions",
    "evictions",
    "handoffs_done",
    "handoffs_failed",
    "handoff_failed_checksum_mismatch",
    "handoff_failed_read_failed",
    "handoff_failed_read_overdue",
    "handoff_failed_refused",
    "leases_expired",
    "sequences_left_out",
    "tier_lost",
    "disk_store_failed",
    "host_store_failed",
    "object_store_failed",
    "handoff_failed_store_unavailable",
    "handoff_failed_object_missing",
    "kv_reads_left_behind",
)
WIRE_EVENTS = (
    "sent",
    "received",
    "connected",
    "reconnected",
    "broken",
    "lost",
    "resent",
    "connect_failed",
    "queue_full",
    "undeliverable",
    "unencodable",
)
SCALING_ACTIONS = ("start", "drain", "flip", "remove")
_TOTAL_LABELS = {
    "cached_tokens_by_source": "source",
    "kv_lost": "kind",
    "refused_by_tenant": "tenant",
    "sent_by_tenant": "tenant",
    "sent_by_class": "service_tier",
    "queue_seconds_by_class": "service_tier",
    "ended_by_class": "service_tier",
    "ttft_seconds_by_class": "service_tier",
    "queue_seconds_by_tenant": "tenant",
    "work_by_tenant": "tenant",
}


def from_zero(labels: Iterable[str], counts: Mapping[str, float]) -> dict[str, float]:
    """`counts`, and 0 for each of `labels` that has none."""
    return dict.fromkeys(map(str, labels), 0.0) | dict(counts)


Samples = Iterable[tuple[tuple[str, ...], float]]  # label values, and the value


class Family(NamedTuple):
    """A row of `FAMILIES`. What is not known has no samples; without labels it is not shown."""

    name: str
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    text: str
    labels: tuple[str, ...]
    samples: Callable[[ClusterStatus], Samples]


def _one(get: Callable[[ClusterStatus], float | None]) -> Callable[[ClusterStatus], Samples]:
    """One value without labels; None: not known."""

    def samples(status: ClusterStatus) -> Samples:
        value = get(status)
        return [] if value is None else [((), float(value))]

    return samples


def _by_key(
    get: Callable[[ClusterStatus], Mapping[str, float]],
) -> Callable[[ClusterStatus], Samples]:
    """Values by the one label that their keys are."""
    return lambda status: [((key,), count) for key, count in sorted(get(status).items())]


def _each_worker(name: str) -> Callable[[ClusterStatus], Samples]:
    """A field of each worker that has it."""

    def samples(status: ClusterStatus) -> Samples:
        for worker in status.workers:
            value = worker.fact(name)
            if value is not None:
                yield (worker.worker, worker.role), float(value)

    return samples


def _links(status: ClusterStatus) -> Samples:
    for worker in status.workers:
        for link in worker.fact("links") or ():
            if link.bytes_per_s:  # not timed is not 0
                yield (worker.worker, worker.role, link.peer), link.bytes_per_s


def _events(status: ClusterStatus) -> Samples:
    for worker in status.workers:
        counters = worker.fact("counters")
        if not counters:  # it is not up: zeros would look like a fall of its counters
            continue
        for event, count in sorted(from_zero(WORKER_EVENTS, counters).items()):
            if ":" not in event:  # others have families of their own
                yield (worker.worker, worker.role, event), float(count)


def _reads(prefix: str) -> Callable[[ClusterStatus], Samples]:
    """Counters that are called `prefix`, the source, and the peer, with colons between."""

    def samples(status: ClusterStatus) -> Samples:
        for worker in status.workers:
            for event, count in sorted((worker.fact("counters") or {}).items()):
                if event.startswith(prefix):
                    source, peer = event.removeprefix(prefix).split(":", 1)
                    yield (worker.worker, worker.role, source, peer), float(count)

    return samples


def _recomputed(status: ClusterStatus) -> Samples:
    """From 0 where there are groups that may lack it."""
    for worker in status.workers:
        for group in worker.fact("groups") or ():
            if group.kind != "full":
                count = (worker.fact("counters") or {}).get(f"{RECOMPUTED}{group.kind}", 0.0)
                yield (worker.worker, worker.role, group.kind), count


def _groups(name: str) -> Callable[[ClusterStatus], Samples]:
    """A field of what each kind of groups has, where a worker has several groups."""

    def samples(status: ClusterStatus) -> Samples:
        for worker in status.workers:
            for group in worker.fact("groups") or ():
                yield (worker.worker, worker.role, group.kind), float(getattr(group, name))

    return samples


def _lost_shares(status: ClusterStatus) -> Samples:
    for link in status.bad_links:
        yield (link.source, link.reader, "fetch" if link.fetches else "handoff"), link.lost_share


def _restarts(status: ClusterStatus) -> Samples:
    """By process, so that one that goes for good takes nothing from a sum."""
    if status.controller.epoch is not None:
        yield ("controller", "controller"), float(status.controller.epoch - 1)
    for router in status.routers:
        if router.restarts is not None:
            yield ("router", router.router), float(router.restarts)
    for worker in status.workers:
        if worker.restarts is not None:
            yield ("worker", worker.worker), float(worker.restarts)


def _lines_dropped(status: ClusterStatus) -> Samples:
    yield ("router",), float(status.lines_dropped)
    if status.controller.lines_dropped is not None:
        yield ("controller",), float(status.controller.lines_dropped)


def _total(name: str) -> Family:
    """A total is a number, or numbers by a label."""
    text = f"Total of '{name}' since the router started."
    name_of_metric = f"kvrelay_router_{name}"
    if not isinstance(getattr(Totals(), name), dict):
        samples = _one(lambda status: getattr(status.totals, name))
        return Family(name_of_metric, CounterMetricFamily, text, (), samples)
    label = _TOTAL_LABELS.get(name, "reason")

    def counts(status: ClusterStatus) -> Mapping[str, float]:
        tenants = status.totals.sent_by_tenant
        known = tenants if label == "tenant" else _KNOWN_TOTALS.get(name, ())
        return from_zero(known, getattr(status.totals, name))

    return Family(name_of_metric, CounterMetricFamily, text, (label,), _by_key(counts))


def _models(status: ClusterStatus) -> list[ClusterStatus]:
    """That of each model: its workers, and its requests."""
    return [
        replace(
            status,
            model=each.model,
            num_queued=each.num_queued,
            workers=[worker for worker in status.workers if worker.model == each.model],
        )
        for each in status.models
    ] or [status]


def _of_models(name: str) -> Callable[[ClusterStatus], Samples]:
    return lambda status: [((m.model,), float(getattr(m, name))) for m in status.models]


def _vllm(name: str, text: str, get: Callable[[ClusterStatus], float]) -> Family:
    """A value for all workers of a model and the router together."""

    def samples(status: ClusterStatus) -> Samples:
        return [((each.model,), get(each)) for each in _models(status)]

    return Family(f"vllm:{name}", GaugeMetricFamily, text, ("model_name",), samples)


def _known(status: ClusterStatus) -> list[WorkerStatus]:
    return [worker for worker in status.workers if worker.num_blocks]


def _kv_usage(status: ClusterStatus) -> float:
    """Outputs need KV to the end: where they are generated, memory decides."""
    workers = _known(status)
    workers = [worker for worker in workers if worker.role != "prefill"] or workers
    num_blocks = sum(worker.num_blocks or 0 for worker in workers)
    return sum(worker.num_used_blocks or 0 for worker in workers) / max(1, num_blocks)


def _cache_config(status: ClusterStatus) -> Samples:
    for each in _models(status):
        workers = _known(each)
        sizes = {worker.block_size for worker in workers if worker.block_size}
        if len(sizes) == 1:
            num_blocks = sum(worker.num_blocks or 0 for worker in workers)
            yield (each.model, str(sizes.pop()), str(num_blocks)), 1.0


_WORKER = ("worker", "role")
_ROUTER_GAUGES = {
    "num_live": ("live", "Requests that the router serves."),
    "num_queued": ("queued", "Requests that wait for a worker."),
    "prediction_error": (
        "ttft_prediction_error",
        "Relative error of the predicted time to the first token: median of the last requests.",
    ),
}
_SCALING_GAUGES = {
    "wanted": ("wanted_workers", "Workers that the autoscaler wants."),
    "wanted_decode": ("wanted_decode_workers", "Of those, the ones to decode."),
    "least": ("min_workers", "Fewest workers that may be now."),
    "most": ("max_workers", "Most workers that may be now."),
    "coming": ("coming_workers", "Workers that are ordered and not up yet."),
    "draining": ("draining_workers", "Workers that are to go when nothing needs them."),
}
_CONTROLLER_GAUGES = {
    "age_s": (
        "age_seconds",
        "Time since the controller has said something to this router, or this one waits for it.",
    ),
    "has_ray": ("has_ray", "1 if Ray answers the controller: without, no worker is started."),
    "open_files": ("open_files", "Files that the controller's process has open."),
    "max_files": ("max_files", "Files that it may have open."),
}
_FOLDER_GAUGES = {
    "state_folder.free_bytes": ("free_bytes", "Room on the disk of sessions.state_dir."),
    "state_folder.free_files": ("free_files", "Files that can still be made there."),
    "controller.unwritten_s": (
        "unwritten_seconds",
        "Time for which what the next controller has to know could not be written there.",
    ),
}
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


def _of_scaling(name: str) -> Callable[[ClusterStatus], Samples]:
    return lambda status: [
        ((model,), float(getattr(each, name)))
        for model, each in scaling_by_model(status).items()
        if getattr(each, name) is not None
    ]


def _counts_of_scaling(name: str, known: Iterable[str] = ()) -> Callable[[ClusterStatus], Samples]:
    def samples(status: ClusterStatus) -> Samples:
        for model, each in scaling_by_model(status).items():
            for key, count in sorted(from_zero(known, getattr(each, name)).items()):
                yield (model, key), count

    return samples


GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily
_MODEL_FAMILIES = {
    "num_up": ("workers_up", "Workers that the router may use, by the model they serve."),
    "num_queued": ("queued_requests", "Requests that wait for a worker, by model."),
}
_GROUP_FAMILIES = {
    "num_used": ("group_used_blocks", GAUGE, "KV blocks held by requests, by kind of group."),
    "num_cached": ("group_cached_blocks", GAUGE, "KV blocks that are sealed, by kind of group."),
    "num_evicted": ("group_evictions", COUNTER, "KV blocks that were evicted, by kind of group."),
}
FAMILIES = (
    Family(
        "kvrelay_build_info",
        GAUGE,
        "1; the version, and what is served.",
        ("version", "model"),
        lambda status: [((VERSION, status.model), 1.0)],
    ),
    *(
        Family(f"kvrelay_model_{name}", GAUGE, text, ("model",), _of_models(key))
        for key, (name, text) in _MODEL_FAMILIES.items()
    ),
    Family(
        "kvrelay_clock_seconds",
        GAUGE,
        "This machine's clock: to be compared with that of whoever asks.",
        (),
        _one(lambda _: time.time()),
    ),
    Family(
        "kvrelay_certificate_expiry_timestamp_seconds",
        GAUGE,
        "When the certificate that is in use ends, and its CA: seconds since 1970.",
        ("certificate",),
        _by_key(lambda status: status.certificates),
    ),
    Family(
        "kvrelay_routers_up",
        GAUGE,
        "1 if the router process serves.",
        ("router", "state"),
        lambda status: [((r.router, r.state), float(r.state == "up")) for r in status.routers],
    ),
    *(
        Family(f"kvrelay_controller_{name}", GAUGE, text, (), _one(attrgetter(f"controller.{key}")))
        for key, (name, text) in _CONTROLLER_GAUGES.items()
    ),
    Family(
        "kvrelay_process_restarts",
        COUNTER,
        "How often a process was started again. kind: controller, router or worker.",
        ("kind", "process"),
        _restarts,
    ),
    *(
        Family(f"kvrelay_state_folder_{name}", GAUGE, text, (), _one(attrgetter(key)))
        for key, (name, text) in _FOLDER_GAUGES.items()
    ),
    Family(
        "kvrelay_state_folder_failed_writes",
        COUNTER,
        "Failed attempts to write what the next controller has to know.",
        (),
        _one(attrgetter("controller.failed_writes")),
    ),
    Family(
        "kvrelay_log_lines_dropped",
        COUNTER,
        "Lines of a log that found no room: a full disk, or a pipe that is not read.",
        ("process",),
        _lines_dropped,
    ),
    Family(
        "kvrelay_wire_events",
        COUNTER,
        "Frames by their fate.",
        ("event",),
        _by_key(lambda status: from_zero(WIRE_EVENTS, status.wire)),
    ),
    Family(
        "kvrelay_kv_events",
        COUNTER,
        "KV events for other routers. event: batches, replays, states, or dropped.",
        ("event",),
        _by_key(lambda status: status.kv_events),
    ),
    Family(
        "kvrelay_restarted_tasks",
        COUNTER,
        "Background tasks that had failed.",
        ("task",),
        _by_key(lambda status: status.restarted_tasks),
    ),
    Family(
        "kvrelay_sessions",
        GAUGE,
        "Sessions by state.",
        ("state",),
        _by_key(lambda status: from_zero(SessionState, status.sessions)),
    ),
    Family(
        "kvrelay_worker_up",
        GAUGE,
        "1 if requests can be given to the worker.",
        (*_WORKER, "model", "state"),
        lambda s: [
            ((w.worker, w.role, w.model or s.model, w.state), float(w.state == "up"))
            for w in s.workers
        ],
    ),
    *(
        Family(f"kvrelay_worker_{fact.metric}", GAUGE, fact.sentence, _WORKER, _each_worker(name))
        for name, fact in WORKER_FACTS.items()
        if fact.metric
    ),
    Family(
        "kvrelay_worker_kv_link_bytes_per_second",
        GAUGE,
        "Rate of a small read from the peer, timed when the worker connected to it.",
        (*_WORKER, "peer"),
        _links,
    ),
    Family(
        "kvrelay_worker_restarts",
        COUNTER,
        "How often the worker was started again.",
        _WORKER,
        _each_worker("restarts"),
    ),
    Family(
        "kvrelay_worker_hangs",
        COUNTER,
        "How often the worker was ended because it did not answer.",
        _WORKER,
        _each_worker("hangs"),
    ),
    Family(
        "kvrelay_worker_weights",
        GAUGE,
        "1: the version of the weights that the worker computes with, by its name.",
        (*_WORKER, "version"),
        lambda s: [((w.worker, w.role, w.weights), 1.0) for w in s.workers if w.weights],
    ),
    Family(
        "kvrelay_worker_events",
        COUNTER,
        "What the worker has counted since it started.",
        (*_WORKER, "event"),
        _events,
    ),
    *(
        Family(
            f"kvrelay_worker_{what}",
            COUNTER,
            f"{text} that requests have read KV instead of computing it. source: a tier or a peer.",
            (*_WORKER, "source", "peer"),
            _reads(f"{what}:"),
        )
        for what, text in (("kv_read_bytes", "Bytes"), ("kv_read_seconds", "Seconds"))
    ),
    *(
        Family(f"kvrelay_worker_{name}", kind, text, (*_WORKER, "group"), _groups(key))
        for key, (name, kind, text) in _GROUP_FAMILIES.items()
    ),
    Family(
        "kvrelay_prefix_tokens_recomputed",
        COUNTER,
        "Prompt tokens computed though attention KV of them was cached. cause: what was not.",
        (*_WORKER, "cause"),
        _recomputed,
    ),
    *(
        Family(f"kvrelay_router_{name}", GAUGE, text, (), _one(attrgetter(key)))
        for key, (name, text) in _ROUTER_GAUGES.items()
    ),
    Family(
        "kvrelay_router_kv_lost_share",
        GAUGE,
        "Share of KV that did not come by a link that is avoided. source: who has it; reader: who"
        " reads it; kind: what was handed over, or fetched.",
        ("source", "reader", "kind"),
        _lost_shares,
    ),
    *map(_total, sorted(Totals.__struct_fields__)),
    *(
        Family(f"kvrelay_scaling_{name}", GAUGE, text, ("model",), _of_scaling(key))
        for key, (name, text) in _SCALING_GAUGES.items()
    ),
    Family(
        "kvrelay_scaling_ticks",
        COUNTER,
        "Decisions by reason, also those not to act.",
        ("model", "reason"),
        _counts_of_scaling("ticks"),
    ),
    Family(
        "kvrelay_scaling_actions",
        COUNTER,
        "What the autoscaler has done to workers.",
        ("model", "action"),
        _counts_of_scaling("actions", SCALING_ACTIONS),
    ),
    *(
        Family(f"kvrelay_state_{key}", GAUGE, text, (), _one(attrgetter(f"state.{key}")))
        for key, text in _STATE_GAUGES.items()
    ),
    *(
        Family(f"kvrelay_state_{key}", COUNTER, text, (), _one(attrgetter(f"state.{key}")))
        for key, text in _STATE_COUNTERS.items()
    ),
    _vllm(
        "num_requests_waiting",
        "Requests that wait, at a router or worker.",
        lambda s: float(s.num_queued + sum(w.fact("num_waiting") or 0 for w in _known(s))),
    ),
    _vllm(
        "num_requests_running",
        "Requests in running batches.",
        lambda s: float(sum(w.fact("num_running") or 0 for w in _known(s))),
    ),
    *(
        _vllm(
            name,
            "KV blocks held by requests, as a part of all where outputs are generated; 1 is full.",
            _kv_usage,
        )
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc")  # the second is the older name
    ),
    Family(
        "vllm:cache_config_info",
        GAUGE,
        "Tokens of a KV block, and KV blocks of all workers.",
        ("model_name", "block_size", "num_gpu_blocks"),
        _cache_config,
    ),
)


class ClusterCollector(Collector):
    """Turns `status()` into metrics at each scrape. Holds no state."""

    def __init__(self, registry: CollectorRegistry, status: Callable[[], ClusterStatus]) -> None:
        self._status = status
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return []  # the status is not asked for before the first scrape

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for name, kind, text, labels, samples in FAMILIES:
            family = kind(name, text, labels=labels)
            for values, value in samples(status):
                family.add_metric(values, value)
            if labels or family.samples:
                yield family
