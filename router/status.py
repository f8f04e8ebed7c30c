"""The status of a router: totals since its start, and the state of every worker that it knows."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Struct, field

from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Fact, Role, WorkerStats, facts_of, no_stats

if TYPE_CHECKING:
    from kvrelay.router.placement.endpoint import Endpoint

LAYOUT_DIGITS = 12


class LinkLoss(Struct, frozen=True):
    """A bad link, as it is shown: by it, KV often does not come."""

    source: NodeId
    reader: NodeId
    fetches: bool
    lost_share: float
    wait_s: float


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
    """A worker in `/status`, where the facts of `stats` stand beside the others. A router fills in
    what it measures, and nothing of a worker that it does not know; the controller fills in the
    rest. None: not known, and left out.

    Blocks are KV blocks. Units are in the names: `_s` seconds, `_bytes_per_s`, `_tokens_per_s`."""

    worker: Annotated[NodeId, Fact("its name")]
    role: Annotated[Role, Fact("`prefill`, `decode` or `both`")]
    model: Annotated[str | None, Fact("that it serves, where there are several")] = None
    # A `ProcessState`, "draining", or as a router sees it: "up", "backoff" or "down".
    state: Annotated[str, Fact("`up`, `backoff`, `draining` or `down`; or how far its start is")]
    epoch: Annotated[int | None, Fact("counts its starts")] = None
    # By the router that is asked:
    num_blocks: Annotated[int | None, Fact("KV blocks in its pool", "blocks")] = None
    num_used_blocks: Annotated[int | None, Fact("KV blocks held by requests", "used_blocks")] = None
    num_inflight: Annotated[int | None, Fact("requests of this router")] = None
    num_decoding: Annotated[int | None, Fact("those among them that decode there")] = None
    cache_hit_rate: Annotated[
        float | None, Fact("cached tokens / prompt tokens of the requests it reported")
    ] = None
    disk_ratio: Annotated[
        float | None, Fact("bytes of KV on disk to those that it takes there", "disk_ratio")
    ] = None
    cached_tokens_by_source: Annotated[
        dict[str, int] | None, Fact("cached tokens by `device`, `host`, `disk`, `object`, `peer`")
    ] = None
    block_size: Annotated[int | None, Fact("tokens of a block")] = None
    layout: Annotated[str | None, Fact("of its KV: only workers of one layout exchange KV")] = None
    weights: Annotated[
        str | None, Fact("name of the version of its weights ([weights.md](weights.md))")
    ] = None
    graph_bytes: Annotated[
        int | None, Fact("bytes of a rank's GPU that captured decode steps have taken")
    ] = None
    stats: WorkerStats | None = None  # as it said last; its facts stand beside the others
    # By the controller:
    pid: Annotated[int | None, Fact("its process")] = None
    machine: Annotated[str | None, Fact("where it is; empty: nowhere")] = None
    further_machines: Annotated[tuple[str, ...] | None, Fact("where its other ranks are")] = None
    tensor_parallel_size: Annotated[int | None, Fact("its ranks")] = None
    restarts: Annotated[int | None, Fact("times it was started again")] = None
    hangs: Annotated[int | None, Fact("times it was ended because it did not answer")] = None
    last_error: Annotated[str | None, Fact("why it was lost last")] = None
    version: Annotated[str | None, Fact("of kvrelay; `unknown` of one that does not say")] = None
    start_s: Annotated[float | None, Fact("time that it took to start, once it had a process")] = (
        None
    )

    def fact(self, name: str) -> Any:
        """The value of one of WORKER_FACTS; None: not known."""
        return getattr(self if name in OWN_FACTS else self.stats, name, None)

    def facts(self) -> dict[str, Any]:
        """All that is known of it, by name: its own fields and those of its statistics."""
        found = {name: getattr(self, name) for name in OWN_FACTS}
        if self.stats is not None:
            found |= {name: getattr(self.stats, name) for name in STATS_FACTS}
        return {name: value for name, value in found.items() if value not in (None, ())}


OWN_FACTS, STATS_FACTS = facts_of(WorkerStatus), facts_of(WorkerStats)
WORKER_FACTS = OWN_FACTS | STATS_FACTS


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
    disk_bytes = stats.disk_used_bytes if stats else 0
    return WorkerStatus(
        worker=info.worker,
        role=info.role,
        epoch=info.epoch,
        state=state,
        num_blocks=info.num_blocks,
        num_used_blocks=info.num_blocks - stats.num_free_blocks if stats else 0,
        num_inflight=len(endpoint.bookings),
        num_decoding=endpoint.struct.own_decoding,
        cache_hit_rate=endpoint.cached_tokens / max(1, endpoint.prompt_tokens),
        disk_ratio=stats.num_disk_blocks * info.bytes_per_block / disk_bytes
        if stats and disk_bytes
        else 0.0,
        cached_tokens_by_source=dict(endpoint.cached_tokens_by_source),
        block_size=info.block_size,
        layout=info.fingerprint.hex()[:LAYOUT_DIGITS],
        weights=info.weights or None,
        graph_bytes=info.graph_bytes or None,
        stats=stats or no_stats(info.worker, info.epoch),
    )
