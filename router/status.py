"""The status of a router: totals since its start, and the state of every worker that it knows."""

from __future__ import annotations

from collections import Counter
from math import inf

from msgspec import Struct, field

from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import GroupBlocks, KVLink, Role
from kvrelay.router.placement.endpoint import Endpoint, LinkLoss

LAYOUT_DIGITS = 12


class Totals(Struct):
    """Counts since the router's start; they only grow. Keys are metric labels."""

    requests: Counter[str] = field(default_factory=Counter)  # by FinishReason or Refusal
    retries: Counter[str] = field(default_factory=Counter)  # by Cause
    migrations: int = 0  # begun, by running requests to other workers
    submitted: int = 0
    attempts: int = 0
    handoffs: int = 0  # attempts with a prefill worker
    fetches: int = 0  # attempts whose prefix is to be read from a third worker
    kv_lost: Counter[str] = field(default_factory=Counter)  # handoffs and fetches: nothing came
    probes: int = 0
    gaps: int = 0
    stale: int = 0  # deltas of attempts that are over
    prompt_tokens: int = 0  # in requests whose prefix hit is known
    cached_tokens: int = 0  # not computed
    cached_tokens_by_source: Counter[str] = field(default_factory=Counter)  # as in `TokenDelta`
    output_tokens: int = 0
    refused_by_tenant: Counter[str] = field(default_factory=Counter)  # for lack of room or time
    sent_by_tenant: Counter[str] = field(default_factory=Counter)  # attempts
    sent_by_class: Counter[str] = field(default_factory=Counter)  # attempts, by class of service
    queue_seconds_by_class: dict[str, float] = field(default_factory=dict)
    ended_by_class: Counter[str] = field(default_factory=Counter)  # that had a token
    ttft_seconds_by_class: dict[str, float] = field(default_factory=dict)  # likewise
    queue_seconds_by_tenant: dict[str, float] = field(default_factory=dict)  # that those waited
    work_by_tenant: dict[str, float] = field(default_factory=dict)  # units of admission.estimates

    def add(self, others: Totals) -> None:
        """What was counted elsewhere, too."""
        for name in self.__struct_fields__:
            mine, other = getattr(self, name), getattr(others, name)
            if isinstance(mine, Counter):
                mine.update(other)
            elif isinstance(mine, dict):
                mine.update({key: mine.get(key, 0.0) + value for key, value in other.items()})
            else:
                setattr(self, name, mine + other)

    def refused(self, tenant: str, reason: str) -> None:
        """Count one refusal, for lack of room or time."""
        self.requests[reason] += 1
        self.refused_by_tenant[tenant] += 1

    def sent(self, tenant: str, tier: str, queue_s: float) -> None:
        """A request of `tenant` was dispatched after so long in the queue. `tier`: its class."""
        self.sent_by_tenant[tenant] += 1
        self.sent_by_class[tier] += 1
        _add(self.queue_seconds_by_tenant, tenant, queue_s)
        _add(self.queue_seconds_by_class, tier, queue_s)

    def worked(self, tenant: str, units: float) -> None:
        _add(self.work_by_tenant, tenant, units)

    def ended(self, tier: str, ttft_s: float) -> None:
        self.ended_by_class[tier] += 1
        _add(self.ttft_seconds_by_class, tier, ttft_s)


def _add(sums: dict[str, float], key: str, amount: float) -> None:
    sums[key] = sums.get(key, 0.0) + amount


class WorkerStatus(Struct, omit_defaults=True, kw_only=True):
    """A worker in `/status`. A router fills in what it measures, and nothing of a worker that it
    does not know; the controller fills in the rest. None: not known, and left out.

    Blocks are KV blocks. Units are in the names: `_s` seconds, `_bytes_per_s`, `_tokens_per_s`."""

    worker: NodeId
    role: Role
    model: str | None = None  # that it serves, where there are several
    state: str  # a `ProcessState`, "draining", or as a router sees it: "up", "backoff" or "down"
    epoch: int | None = None  # counts its starts
    # By the router that is asked:
    num_blocks: int | None = None
    num_used_blocks: int | None = None  # held by requests
    num_cached_blocks: int | None = None  # sealed: found by prefix
    num_running: int | None = None  # requests in its batch
    num_waiting: int | None = None
    num_handoffs: int | None = None  # transfers not settled, and KV held for a consumer
    num_inflight: int | None = None  # requests of this router
    num_decoding: int | None = None  # those among them whose output is generated there
    pending_prefill_tokens: int | None = None
    cache_hit_rate: float | None = None  # cached / prompt tokens of the requests it reported
    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None
    read_bytes_per_s: float | None = None  # KV transfers
    counters: dict[str, float] | None = None  # totals since its start
    num_host_blocks: int | None = None  # blocks of its host memory that hold KV
    num_host_lacking: int | None = None  # that the machine has no memory for
    num_disk_blocks: int | None = None
    disk_used_bytes: int | None = None  # that these take there
    disk_ratio: float | None = None  # bytes of KV to these; 0: none is there
    host_read_bytes_per_s: float | None = None
    disk_read_bytes_per_s: float | None = None
    cached_tokens_by_source: dict[str, int] | None = None
    groups: tuple[GroupBlocks, ...] | None = None  # by kind of groups of layers; None: one
    block_size: int | None = None  # tokens
    links: tuple[KVLink, ...] | None = None  # by which it reads KV from others
    layout: str | None = None  # only workers whose KV has one layout pass it to each other
    weights: str | None = None  # name of their version
    # By the controller:
    pid: int | None = None
    machine: str | None = None  # "": it has none
    further_machines: tuple[str, ...] | None = None  # that have some of its ranks
    tensor_parallel_size: int | None = None  # ranks
    restarts: int | None = None
    hangs: int | None = None  # times that it was ended because it did not answer
    last_error: str | None = None
    version: str | None = None  # the package's; "unknown": it does not say
    start_s: float | None = None  # from the start of its process until it listened


class RouterStatus(Struct, kw_only=True):
    """What a router knows. `totals` is a copy."""

    router: NodeId
    policy: str
    num_live: int = 0  # requests
    num_queued: int = 0  # among them, those that wait for a worker
    cache_hit_rate: float = 0.0  # cached / prompt tokens of all requests
    totals: Totals = field(default_factory=Totals)
    workers: list[WorkerStatus] = field(default_factory=list)
    bad_links: tuple[LinkLoss, ...] = ()  # by which KV often does not come
    prediction_error: float | None = None  # relative, of the time to the first token: the median


def worker_status(now: float, endpoint: Endpoint) -> WorkerStatus:
    info, stats = endpoint.info, endpoint.stats if endpoint.alive else None
    state = "backoff" if now < endpoint.excluded_until else "up"
    state = "draining" if endpoint.excluded_until == inf else state
    state = state if endpoint.alive else "down"
    num_on_disk, disk_bytes = (stats.num_disk_blocks, stats.disk_used_bytes) if stats else (0, 0)
    return WorkerStatus(
        worker=info.worker,
        role=info.role,
        epoch=info.epoch,
        state=state,
        num_blocks=info.num_blocks,
        num_used_blocks=info.num_blocks - stats.num_free_blocks if stats else 0,
        num_cached_blocks=stats.num_cached_blocks if stats else 0,
        num_running=stats.num_running if stats else 0,
        num_waiting=stats.num_waiting if stats else 0,
        num_handoffs=stats.num_handoffs if stats else 0,
        num_inflight=len(endpoint.bookings),
        num_decoding=endpoint.struct.own_decoding,
        pending_prefill_tokens=endpoint.pending_prefill_tokens if endpoint.alive else 0,
        cache_hit_rate=endpoint.cached_tokens / max(1, endpoint.prompt_tokens),
        prefill_tokens_per_s=stats.prefill_tokens_per_s if stats else 0.0,
        decode_step_s=stats.decode_step_s if stats else 0.0,
        read_bytes_per_s=stats.read_bytes_per_s if stats else 0.0,
        counters=dict(stats.counters) if stats else {},
        num_host_blocks=stats.num_host_blocks if stats else 0,
        num_host_lacking=stats.num_host_lacking if stats else 0,
        num_disk_blocks=num_on_disk,
        disk_used_bytes=disk_bytes,
        disk_ratio=num_on_disk * info.bytes_per_block / disk_bytes if disk_bytes else 0.0,
        host_read_bytes_per_s=stats.host_read_bytes_per_s if stats else 0.0,
        disk_read_bytes_per_s=stats.disk_read_bytes_per_s if stats else 0.0,
        cached_tokens_by_source=dict(endpoint.cached_tokens_by_source),
        groups=(stats.groups or None) if stats else None,
        block_size=info.block_size,
        links=stats.links if stats else (),
        layout=info.fingerprint.hex()[:LAYOUT_DIGITS],
        weights=info.weights or None,
    )
