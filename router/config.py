"""Configuration of a router: limits, timeouts and the name of its policy. Read once, at start."""

from __future__ import annotations

from msgspec import Struct

POLICIES = (
    "prefix",
    "random",
    "round_robin",
    "least_loaded",
    "session_sticky",
    "prefix_only",
)

MAX_PRIORITY = 100  # requests have one in [-MAX_PRIORITY, MAX_PRIORITY]; lower goes first


class RouterConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits and waits of one router. Block size, context and fingerprint come from `WorkerInfo`.

    Raises ValueError for an unknown policy and for a limit below its least sensible value.
    """

    policy: str = "prefix"  # one of POLICIES; the others are baselines to compare with
    max_queue: int = 1024  # new requests that wait; those that are retried are not counted
    max_queue_wait_s: float = 0.0  # who would wait longer is refused; 0: as its timeout allows
    # requests whose first token can still come within this go before those whose cannot; 0: in the
    # order of arrival
    ttft_target_s: float = 0.0
    low_priority_share: float = (
        0.05  # part of the service, for lower priorities while higher ones wait
    )
    max_inflight_per_worker: int = 128  # requests of this router; the rest waits in its queue
    max_memory_wait_s: float = 3.0  # no worker is chosen where KV blocks are free only later
    max_attempts: int = 6  # in a row that bring no new token; then the request fails
    max_lost_workers: int = 16  # that end while they serve a request; then it fails, tokens or not
    max_timeout_s: float = 3600.0  # a client's timeout is cut to this
    no_workers_wait_s: float = 60.0  # for a first decode worker; then the request fails
    probe_after_s: float = 5.0  # without a delta of a request for this long, its worker is asked
    max_silent_probes: int = 3  # unanswered in a row: the request goes to another worker
    silent_after_s: float = 3.0  # a worker without news for this long is left, and looked after
    tick_s: float = 0.25  # how often deadlines and silences are looked at
    snapshot_retry_s: float = 1.0  # an index with a gap asks again after this
    speculative_s: float = 10.0  # how long a routed prompt counts as cached without an event
    max_speculative: int = 200_000  # such blocks, of all workers together
    backoff_s: float = 0.5  # a worker that failed gets no requests so long; doubles each time
    max_backoff_s: float = 30.0
    max_decisions: int = 512  # kept to be explained
    max_ended: int = 4096  # ids kept, so that a repeated Submit does not run again

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"router policy {self.policy!r} is unknown; one of {POLICIES}")
        for name in (
            "max_inflight_per_worker",
            "max_attempts",
            "max_lost_workers",
            "max_silent_probes",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"router {name} is {getattr(self, name)}; at least 1 is needed")
        for name in (
            "max_queue",
            "max_queue_wait_s",
            "ttft_target_s",
            "max_speculative",
            "max_decisions",
            "max_ended",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"router {name} is {getattr(self, name)}; it cannot be negative")
        if not 0 <= self.low_priority_share <= 0.5:
            raise ValueError(
                f"router low_priority_share is {self.low_priority_share}; it must be in [0, 0.5]"
            )
        for name in (
            "max_timeout_s",
            "probe_after_s",
            "silent_after_s",
            "tick_s",
            "snapshot_retry_s",
            "backoff_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"router {name} is {getattr(self, name)}; it must be above 0")
