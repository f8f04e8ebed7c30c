"""Configuration of a router: limits, timeouts and the name of its policy. Read once, at start."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta

from kvrelay.engine.settings import Count, FixedFloat, FixedInt, Positive, Seconds, Section

PolicyName = Literal[
    "prefix",
    "random",
    "round_robin",
    "least_loaded",
    "session_sticky",
    "prefix_only",
]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
MAX_PRIORITY = 100  # requests have one in [-MAX_PRIORITY, MAX_PRIORITY]; lower goes first


class RouterConfig(Section, frozen=True):
    """Limits and waits of one router. Block size, context and fingerprint are in `WorkerInfo`."""

    # prefix, or what to compare it with: random, round_robin, least_loaded, session_sticky,
    # prefix_only
    policy: PolicyName = "prefix"
    max_queue: Count = 1024  # new requests that wait; those that are retried are not counted
    max_queue_wait_s: Seconds = 0.0  # who would wait longer is refused; 0: as its timeout allows
    # requests whose first token can still come within this go before those whose cannot; 0: in the
    # order of arrival
    ttft_target_s: Seconds = 0.0
    # part of the service, for lower priorities while higher ones wait
    low_priority_share: Annotated[float, Meta(ge=0.0, le=0.5)] = 0.05
    # requests of this router, if they are no more than the worker runs at once and an eighth; the
    # rest waits in its queue
    max_inflight_per_worker: Positive = 128
    max_memory_wait_s: FixedFloat = 3.0  # no worker is chosen where KV blocks are free only later
    max_attempts: Positive = 6  # in a row that bring no new token; then the request fails
    # that end while they serve a request; then it fails, tokens or not
    max_lost_workers: FixedInt = 16
    max_timeout_s: FixedFloat = 86_400.0  # a client's timeout is cut to this: a batch's window
    no_workers_wait_s: Seconds = 60.0  # for a first decode worker; then the request fails
    # without a delta of a request for this long, its worker is asked
    probe_after_s: FixedFloat = 5.0
    max_silent_probes: FixedInt = 3  # unanswered in a row: the request goes to another worker
    # a worker without news for this long is left, and looked after
    silent_after_s: Annotated[float, Meta(gt=0.0)] = 3.0
    tick_s: FixedFloat = 0.25  # how often deadlines and silences are looked at
    snapshot_retry_s: FixedFloat = 1.0  # an index with a gap asks again after this
    speculative_s: FixedFloat = 10.0  # how long a routed prompt counts as cached without an event
    max_speculative: FixedInt = 200_000  # such blocks, of all workers together
    backoff_s: FixedFloat = 0.5  # a worker that failed gets no requests so long; doubles each time
    max_backoff_s: FixedFloat = 30.0
    max_decisions: FixedInt = 512  # kept to be explained
    max_ended: FixedInt = 4096  # ids kept, so that a repeated Submit does not run again
