"""The token log: what the router knows of one request, enough to start it again anywhere.

Life: queued -> dispatched (an `Attempt`) -> ended, or back to queued when the attempt failed. The
log only grows. Workers may lose everything: the next attempt is sent the prompt and the tokens so
far, and goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from engine.kv.block_hash import BlockChain
from engine.kv.tier import Tier
from engine.node import NodeId
from engine.request import FinishReason, SamplingParams, TokenDelta
from engine.stats import WorkerInfo
from router.messages import Submit
from router.placement.endpoint import Endpoint
from router.placement.policy import Decision
from router.retention import RetainOn

CACHE_SOURCES = (*Tier, "peer")  # in the order in which a prefix is put together from them


class Verdict(StrEnum):
    """How a delta fits to the log."""

    NEXT = "next"  # its tokens, if it brings new ones, are now in the log
    GAP = "gap"  # it begins after the end of the log
    DIVERGED = "diverged"  # it contradicts the log


@dataclass(slots=True, eq=False)
class Attempt:
    """One dispatch to a decode worker and perhaps a prefill worker, both of a certain epoch."""

    number: int
    decode: Endpoint
    prefill: Endpoint | None
    sent_at: float
    fetch_from: NodeId | None = None  # lends its KV to whichever of the two computes
    keeper: RetainOn = RetainOn.BOTH  # of its KV; a policy that knows of prefixes chooses
    decision: Decision | None = None  # what was known when it was sent
    route_s: float = 0.0  # that deciding took
    heard_at: float = field(init=False)  # last news of this attempt, or when it was sent
    started: bool = False  # its first token is in the log
    handed_over: bool = False  # the decode worker has produced tokens: it needs nobody any more
    prefill_reported: bool = False  # the prefill worker has done what it was asked for
    probed_at: float | None = None  # None: no probe is out
    silent_probes: int = 0  # sent since the decode worker was last heard
    phases: dict[NodeId, dict[str, float]] = field(default_factory=dict)  # as its workers tell
    first_at: float | None = None  # its first new token came
    first_from: NodeId = ""
    second_at: float | None = None  # the first new token of the other worker came
    last_at: float = 0.0  # its last new token came
    ended_at: float | None = None
    cause: str = ""  # why it was given up; "": it was not

    def __post_init__(self) -> None:
        self.heard_at = self.sent_at

    def hear(self, now: float, worker: NodeId, delta: TokenDelta, has_new: bool) -> None:
        """Keep the times of what `worker` has brought, for the explanation. Its first phases count:
        they end with its first token."""
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


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Owned by the router. Invariant: `tokens` begins with the prompt, only grows, and its output
    part is exactly what was sent to the client."""

    submit: Submit
    sampling: SamplingParams  # max_tokens is cut to the context once that is known
    arrival: int  # number of the Submit: the order within one priority
    submitted_at: float
    deadline: float
    queued_at: float
    tokens: list[int] = field(init=False)
    attempts: list[Attempt] = field(default_factory=list)  # the current one is the last
    current: Attempt | None = None  # None: queued
    failures: int = 0  # attempts that count against the limit
    avoid: list[Endpoint] = field(default_factory=list)  # failed this request; used if none is left
    clamped: bool = False
    fits: Sequence[WorkerInfo] | None = None  # to one of these, as is known already
    first_token_at: float | None = None
    num_cached_tokens: int | None = None  # of the prompt; None: not known yet
    cached_by_source: dict[str, int] = field(default_factory=dict)  # of those, where it is known
    _chains: dict[tuple[bytes, int], BlockChain] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = list(self.submit.tokens)

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.submit.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.submit.tokens)

    def accept(self, delta: TokenDelta) -> Verdict:
        """Append what is new in `delta`. A repeat is NEXT and brings nothing."""
        overlap = len(self.tokens) - delta.position
        if overlap < 0:
            return Verdict.GAP
        known = self.tokens[delta.position : delta.position + len(delta.tokens)]
        ends_early = delta.finish is not None and len(delta.tokens) < overlap
        if delta.position < 0 or ends_early or tuple(known) != delta.tokens[:overlap]:
            return Verdict.DIVERGED
        self.tokens.extend(delta.tokens[overlap:])
        return Verdict.NEXT

    def note_cached(self, num_cached: int, by_source: Mapping[str, int]) -> None:
        """So many tokens were not computed; of the prompt, which is what counts, at most all."""
        left = self.num_cached_tokens = min(num_cached, self.num_prompt_tokens)
        self.cached_by_source = {}
        for source in CACHE_SOURCES:
            count = min(left, by_source.get(source, 0))
            if count > 0:
                self.cached_by_source[str(source)] = count
                left -= count

    def complete(self) -> FinishReason | None:
        """Why nothing has to be generated after the tokens in the log; None: something has to."""
        num_output = self.num_output_tokens
        if (
            num_output
            and num_output >= self.sampling.min_tokens
            and self.tokens[-1] in self.sampling.stop_token_ids
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output >= self.sampling.max_tokens else None

    def block_hashes(self, info: WorkerInfo) -> list[bytes]:
        """Names of the full blocks of `tokens` on workers like `info`. Not to be changed."""
        return self._chain(info).extend(self.tokens)

    def packed_hashes(self, info: WorkerInfo) -> bytearray:
        """The same, one after the other. Not to be changed either, nor kept."""
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
        """Cut max_tokens, once: later attempts are not to be shortened by who happens to be up."""
        if not self.clamped:
            self.clamped = True
            if max_tokens != self.sampling.max_tokens:
                self.sampling = replace(self.sampling, max_tokens=max_tokens)

    def enqueue(self, now: float) -> None:
        self.current = None
        self.queued_at = now

    def dispatch(
        self,
        now: float,
        decode: Endpoint,
        prefill: Endpoint | None,
        fetch_from: NodeId | None = None,
    ) -> Attempt:
        """Begin the next attempt."""
        assert self.current is None, f"{self.request_id} is dispatched already"
        self.current = Attempt(len(self.attempts) + 1, decode, prefill, now, fetch_from)
        self.attempts.append(self.current)
        return self.current
