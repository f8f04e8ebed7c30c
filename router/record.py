"""The record of one request: all that is needed to start it again on other workers.

Life: queued -> dispatched (an `Attempt`) -> ended, or back to queued when the attempt failed. Its
tokens only grow. Workers may lose everything: the next attempt is sent the prompt and the tokens so
far, and goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.images import PlacedImage
from kvrelay.engine.kv.block_hash import BlockChain
from kvrelay.engine.kv.tier import Retention, Tier
from kvrelay.engine.messages import Abort
from kvrelay.engine.node import NodeId, Send
from kvrelay.engine.request import (
    NO_OUTPUTS,
    FinishReason,
    PromptOutputs,
    Refusal,
    SamplingParams,
    TokenDelta,
)
from kvrelay.engine.stats import WorkerInfo
from kvrelay.prefill_worker.messages import Prefill
from kvrelay.router.messages import Submit
from kvrelay.router.placement.endpoint import Endpoint, Ends
from kvrelay.router.placement.policy import RoutingDecision

CACHE_SOURCES = (*Tier, "peer")  # in the order in which a prefix is put together from them
EVICT_FIRST = Retention(keep_s=0.0, to_disk=False)
"""Of a copy that is not retained: it is evicted first, and not offloaded."""


@dataclass(frozen=True, slots=True)
class Rejection:
    reason: Refusal
    detail: str
    retry_after_s: float | None = None


CLEARED_TOKENS = 16  # that a request brings on one worker: by then it would have ended it


class Cause(StrEnum):
    """Why an attempt was given up: also the metric label."""

    WORKER_DOWN = "worker_down"
    UNKNOWN = "unknown"
    SILENT = "silent"
    LATE = "late"  # its worker's step does not end: that is not the request's fault
    DIVERGED = "diverged"
    QUEUE_FULL = "queue_full"
    EXECUTION = "execution"  # its worker cannot go on
    OWN_FAILURE = "own_failure"  # a step failed that ran for it alone, on a worker that is well
    REFUSED = "refused"
    WEIGHTS = "weights"  # its worker has changed them: no failure
    MIGRATED = "migrated"  # not a failure: the next attempt has taken over


class WaitsFor(StrEnum):
    """What a request waits for in the router's queue."""

    TURN = "turn"  # others go first, or no worker is up
    MEMORY = "memory"  # for its KV, at a worker
    AGENT = "agent"  # prompts of its own agent, which others would have to wait for as well
    DEADLINE = "deadline"  # workers have so much that it would not end in time beside it
    TARGET = "target"  # a place where its first token is on time


class RetainOn(StrEnum):
    """Which workers of an attempt retain the KV. Other copies are evicted first."""

    BOTH = "both"
    DECODE = "decode"
    PREFILL = "prefill"
    NONE = "none"


class DeltaFit(StrEnum):
    """How a delta fits to the tokens so far."""

    NEXT = "next"  # its tokens, if it brings new ones, are in the record now
    GAP = "gap"  # it begins after their end
    DIVERGED = "diverged"  # it contradicts them


@dataclass(slots=True, eq=False)
class Attempt:
    """One dispatch to a decode worker and perhaps a prefill worker, each of one epoch."""

    number: int
    decode: Endpoint
    prefill: Endpoint | None
    sent_at: float
    fetch_from: NodeId | None = None  # peer that the worker which computes fetches KV from
    num_held: int = 0  # tokens that need not be computed where the prompt is
    num_stored: int = 0  # tokens that the object store has
    num_tokens: int = 0  # prompt and output, when it was sent
    fingerprint: bytes = b""  # that its workers had when it was sent
    weights: tuple[tuple[int, str], ...] = ()  # as a worker has said last, in TokenDelta
    redraws: bool = False  # sampling goes on with draws that are not those of the one before
    is_apart: bool = False  # no other suspect was where it is
    retain_on: RetainOn = RetainOn.BOTH  # the policy "prefix" chooses; baselines retain on both
    decision: RoutingDecision | None = None  # what was known when it was sent
    route_s: float = 0.0  # that deciding took
    last_delta_at: float = field(init=False)  # from either worker; before the first, `sent_at`
    started: bool = False  # its first token is in the record
    handed_over: bool = False  # the decode worker has produced tokens: the prefill worker is done
    prefill_reported: bool = False  # the prefill worker has sent its token
    preempted: bool = False  # it waits for memory at its decode worker
    awaits_prefill: bool = field(init=False)  # its prefill worker still works for it
    probed_at: float | None = None  # None: no probe is out
    silent_probes: int = 0  # sent since the last delta of the decode worker
    links: dict[Ends, bool] = field(default_factory=dict)  # not heard of yet -> whether tried out
    phases: dict[NodeId, dict[str, float]] = field(default_factory=dict)  # as its workers report
    first_at: float | None = None  # its first new token came
    first_from: NodeId = ""
    second_at: float | None = None  # the first new token of the other worker came
    last_at: float = 0.0  # its last new token came
    ended_at: float | None = None
    cause: str = ""  # why it was given up; "": it was not

    def __post_init__(self) -> None:
        self.last_delta_at = self.sent_at
        self.awaits_prefill = self.prefill is not None

    @property
    def workers(self) -> tuple[Endpoint, ...]:
        """Its decode worker, and its prefill worker if it has one."""
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)

    def on_delta(self, now: float, worker: NodeId, delta: TokenDelta, has_new: bool) -> None:
        """Keep the times of what `worker` has sent, for the explanation. Of its phases the first
        report counts: those end with its first token."""
        if delta.phases:
            self.phases.setdefault(worker, delta.phases)
        if not has_new:
            return
        if self.first_at is None:
            self.first_at, self.first_from = now, worker
        elif self.second_at is None and worker != self.first_from:
            self.second_at = now
        self.last_at = now

    def end(self, now: float, cause: str = "") -> None:
        self.ended_at, self.cause = now, cause

    def involves(self, endpoint: Endpoint) -> bool:
        return endpoint is self.decode or endpoint is self.prefill

    def needs(self, endpoint: Endpoint) -> bool:
        """Whether it is lost without that worker."""
        return endpoint is self.decode or (endpoint is self.prefill and not self.handed_over)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Owned by the router. Invariant: `tokens` begins with the prompt, only grows, and its output
    part is exactly what was sent to the client. `leaving` is None unless there is a `current`."""

    submit: Submit
    sampling: SamplingParams  # max_tokens is cut to the context once that is known
    arrival: int  # number of the Submit: the order within one priority
    submitted_at: float
    deadline: float
    queued_at: float
    tokens: list[int] = field(init=False)
    placed_images: Sequence[PlacedImage] = ()
    attempts: list[Attempt] = field(default_factory=list)
    current: Attempt | None = None  # None: queued
    leaving: Attempt | None = None  # that runs on until `current` has brought a token
    failures: int = 0  # attempts that count against the limit: since one brought a new token
    num_late: int = 0  # attempts that were given up since a step did not end
    own_failures: int = 0  # by itself, on workers that are well
    lost_workers: int = 0  # that ended while they served it
    lost_in_a_row: int = 0  # likewise, since it last went on for a while
    lost_apart: int = 0  # those where no other suspect was
    avoid: list[Endpoint] = field(
        default_factory=list
    )  # workers that failed it; used if no other is usable
    num_moves: int = 0
    waited_s: dict[str, float] = field(default_factory=dict)  # in the queue, by `WaitsFor`
    waits_for: str = ""  # while it is there
    waits_since: float = 0.0
    next_move_at: float = 0.0  # not to be moved before
    clamped: bool = False
    fits: Sequence[WorkerInfo] | None = None  # on one of these, as was checked already
    first_token_at: float | None = None
    _outputs: PromptOutputs = NO_OUTPUTS  # the prompt's, that the client does not have yet
    num_cached_tokens: int | None = None  # in the prompt; None: not known yet
    cached_by_source: dict[str, int] = field(default_factory=dict)  # where it is known
    recomputed: dict[str, int] = field(default_factory=dict)  # as in TokenDelta
    images: tuple[int, int] = (0, 0)  # likewise
    drafts: tuple[int, int] = (0, 0)  # draft tokens accepted and rejected
    weights: list[tuple[int, str]] = field(default_factory=list)  # as in Output
    _chains: dict[tuple[bytes, int], BlockChain] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = list(self.submit.tokens)
        if self.submit.images is not None:
            self.placed_images = self.submit.images.placed(self.submit.tokens)

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.submit.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.submit.tokens)

    def accept(self, delta: TokenDelta) -> DeltaFit:
        """Append what is new in `delta`. A repeat is NEXT and brings nothing."""
        overlap = len(self.tokens) - delta.position
        if overlap < 0:
            return DeltaFit.GAP
        known = self.tokens[delta.position : delta.position + len(delta.tokens)]
        ends_early = delta.finish is not None and len(delta.tokens) < overlap
        if delta.position < 0 or ends_early or tuple(known) != delta.tokens[:overlap]:
            return DeltaFit.DIVERGED
        self.tokens.extend(delta.tokens[overlap:])
        return DeltaFit.NEXT

    def note_weights(self, known: tuple[tuple[int, str], ...], first: int) -> None:
        """Positions from `first` on were computed by the weights that `known` names."""
        ends = [*(position for position, _ in known), len(self.tokens)][1:]
        for (position, name), end in zip(known, ends, strict=True):
            is_new = not self.weights or self.weights[-1][1] != name
            if is_new and max(position, first) < end:
                self.weights.append((max(position, first) - self.num_prompt_tokens, name))

    def take_outputs(self, outputs: PromptOutputs) -> None:
        """They have come with the first token: no later attempt has to give them."""
        if self.sampling.reads_prompt:
            self.sampling = replace(
                self.sampling, prompt_logprobs=None, pooling=None, expands=False
            )
            self._outputs = outputs

    def give_outputs(self) -> PromptOutputs:
        """Take them for the client, which gets them once."""
        outputs, self._outputs = self._outputs, NO_OUTPUTS
        return outputs

    def note_cached(self, num_cached: int, by_source: Mapping[str, int]) -> None:
        """So many tokens of the prompt (at most all) were cached, and not computed. What a later
        attempt finds beyond what the first one was to find may be that one's own work."""
        worked = [each for each in self.attempts[:-1] if each.cause != Cause.QUEUE_FULL]
        most = worked[0].num_held if worked else self.num_prompt_tokens
        left = self.num_cached_tokens = min(num_cached, most, self.num_prompt_tokens)
        self.cached_by_source = {}
        for source in CACHE_SOURCES:
            count = min(left, by_source.get(source, 0))
            if count > 0:
                self.cached_by_source[str(source)] = count
                left -= count

    def num_held(self, attempt: Attempt) -> int:
        """Tokens that need not be computed where `attempt` goes. What an earlier one was to compute
        there is not: a full queue refused it, though its blocks are expected still."""
        refused = [
            each.num_held
            for each in self.attempts
            if each.cause == Cause.QUEUE_FULL and set(each.workers) & set(attempt.workers)
        ]
        return min(attempt.num_held, *refused) if refused else attempt.num_held

    def complete(self) -> FinishReason | None:
        """Why no more tokens are to be generated; None: more are."""
        count = self.num_output_tokens
        return self.sampling.finish_reason(self.tokens[-1] if count else None, count)

    def block_hashes(self, info: WorkerInfo) -> Sequence[bytes]:
        """Hashes of the full blocks of `tokens`, on workers like `info`. Not to be changed."""
        return self._chain(info).extend(self.tokens)

    def packed_hashes(self, info: WorkerInfo) -> bytearray:
        """`block_hashes`, packed. Neither to be changed nor kept."""
        chain = self._chain(info)
        chain.extend(self.tokens)
        return chain.packed

    def _chain(self, info: WorkerInfo) -> BlockChain:
        key = (info.fingerprint, info.block_size)
        chain = self._chains.get(key)
        if chain is None:
            scope = self.submit.scope
            chain = self._chains[key] = BlockChain(info.fingerprint, scope, info.block_size)
        return chain

    def clamp(self, max_tokens: int) -> None:
        """Cut max_tokens, once: later attempts do not depend on which workers are up then."""
        if not self.clamped:
            self.clamped = True
            if max_tokens != self.sampling.max_tokens:
                self.sampling = replace(self.sampling, max_tokens=max_tokens)

    @property
    def under_way(self) -> list[Attempt]:
        """The attempts that workers have, the current one first."""
        return [each for each in (self.current, self.leaving) if each is not None]

    def attempt(self, number: int) -> Attempt | None:
        """The attempt of this number, if it is under way."""
        return next((each for each in self.under_way if each.number == number), None)

    @property
    def is_suspect(self) -> bool:
        """Whether the workers that ended while they served it may have ended by it."""
        return self.lost_in_a_row >= 2

    def on_lost_worker(self, attempt: Attempt) -> None:
        """A worker of `attempt` has ended, which may have been its doing."""
        if len(self.tokens) - attempt.num_tokens >= CLEARED_TOKENS:
            self.clear()
        self.lost_workers += 1
        self.lost_in_a_row += 1
        self.lost_apart += attempt.is_apart

    def clear(self) -> None:
        """It has gone on for a while: what was lost before was not its doing."""
        self.lost_in_a_row = self.lost_apart = 0

    def leave(self) -> None:
        """Make room for the next attempt beside the current one."""
        assert self.leaving is None, f"{self.request_id} is leaving already"
        self.current, self.leaving = None, self.current

    def stay(self) -> None:
        """There will be no next attempt."""
        self.current, self.leaving = self.leaving, None

    def enqueue(self, now: float) -> None:
        self.current = None
        self.queued_at = now
        self.wait(now, WaitsFor.TURN)

    def wait(self, now: float, what: str) -> None:
        """From now on it waits for that; "": it has left the queue."""
        if self.waits_for and now > self.waits_since:
            waited_s = self.waited_s.get(self.waits_for, 0.0) + now - self.waits_since
            self.waited_s[self.waits_for] = waited_s
        self.waits_for, self.waits_since = what, now

    def dispatch(
        self,
        now: float,
        decode: Endpoint,
        prefill: Endpoint | None,
        fetch_from: NodeId | None = None,
    ) -> Attempt:
        """Begin the next attempt, now."""
        assert self.current is None, f"{self.request_id} is dispatched already"
        self.wait(now, "")
        self.current = Attempt(len(self.attempts) + 1, decode, prefill, now, fetch_from)
        self.current.num_tokens = len(self.tokens)
        self.current.fingerprint = decode.info.fingerprint
        is_sampled = self.num_output_tokens > 0 and self.sampling.temperature > 0
        self.current.redraws = is_sampled and not decode.info.repeats_draws
        self.attempts.append(self.current)
        return self.current


def dispatch_messages(
    router: NodeId, record: RequestRecord, attempt: Attempt, timeout_s: float
) -> list[Send]:
    """Decode, and Prefill where there is a prefill worker. The worker that computes the prompt is
    told the peer to fetch from; a decode worker that waits for a prefill worker reads from that."""
    decode, prefill = attempt.decode.worker, attempt.prefill
    common: dict[str, Any] = record.submit.carried() | {
        "attempt": attempt.number,
        "router": router,
        "tokens": tuple(record.tokens),
        "num_prompt_tokens": record.num_prompt_tokens,
        "sampling": record.sampling,
        "timeout_s": timeout_s,
        "block_hashes": bytes(record.packed_hashes(attempt.decode.info)),
        "num_held": record.num_held(attempt),
        "num_stored": attempt.num_stored,
        "fingerprint": attempt.fingerprint,
        "is_pinned": bool(record.submit.weights),
    }
    retention = record.submit.retention
    here = retention if attempt.retain_on in (RetainOn.DECODE, RetainOn.BOTH) else EVICT_FIRST
    there = retention if attempt.retain_on in (RetainOn.PREFILL, RetainOn.BOTH) else EVICT_FIRST
    computes: dict[str, Any] = {"fetch_from": attempt.fetch_from}
    common["retention"] = here
    if prefill is None:
        return [Send(decode, Decode(**common, **computes))]
    to_decode = Decode(prefill_from=prefill.worker, **common)
    common["retention"] = there
    to_prefill = Prefill(decode_to=decode, **common, **computes)
    return [Send(decode, to_decode), Send(prefill.worker, to_prefill)]


def abort_messages(
    record: RequestRecord, attempt: Attempt, keep: Endpoint | None
) -> Iterator[Send]:
    """To the workers of `attempt` that still have it, except `keep`."""
    for endpoint in attempt.workers:
        if endpoint is keep or not endpoint.alive:
            continue
        # A prefill worker that has done its part only holds KV, until the decode worker has read
        # it; if that did not happen, or is not known, it has to be told.
        served = attempt.prefill_reported and attempt.handed_over
        if endpoint is attempt.decode or not served:
            yield Send(endpoint.worker, Abort(record.request_id, attempt.number))
