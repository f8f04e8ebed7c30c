"""Messages about requests, between routers and workers of either role."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from kvrelay.engine.node import NodeId
from kvrelay.engine.request import Refusal, RequestSpec, TokenDelta
from kvrelay.engine.wire.codec import register


@dataclass(frozen=True, slots=True)
class WorkRequest(RequestSpec):
    """What a router asks of a worker, whether it prefills or decodes: the base of both messages."""

    attempt: int
    router: NodeId
    tokens: tuple[int, ...]  # prompt, then output so far
    num_prompt_tokens: int
    timeout_s: float
    _: KW_ONLY
    fetch_from: NodeId | None = None  # a worker that holds more of the prefix, worth asking
    block_hashes: bytes = b""  # packed, for the full blocks of `tokens`: hashed only once
    num_held: int = 0  # tokens that need not be computed, as far as the router knows
    num_stored: int = 0  # tokens whose KV the object store has, as far as the router knows
    fingerprint: bytes = b""  # whose weights are meant; b"": those it began with
    is_pinned: bool = False  # no others may go on with it


@dataclass(frozen=True, slots=True)
class Abort:
    """To either worker: forget `request_id` if its attempt is at most `attempt`."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Probe:
    """To a worker: send `router` the tokens from `position` on, or that the request is unknown."""

    request_id: str
    attempt: int
    router: NodeId
    position: int


@dataclass(frozen=True, slots=True)
class TokenDeltas:
    """One frame per step and router: the new tokens of every request of that router."""

    worker: NodeId
    epoch: int
    deltas: tuple[TokenDelta, ...]


@dataclass(frozen=True, slots=True)
class Preempted:
    """The worker has no memory left for this attempt, which waits for some: it goes on from the KV
    that is cached then, or elsewhere. Also of one that has waited for its first blocks."""

    worker: NodeId
    epoch: int
    request_id: str
    attempt: int
    awaits_prefill: bool = True  # False: no other worker computes its prompt (any more)


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker will not serve (or no longer knows) this attempt."""

    worker: NodeId
    epoch: int
    request_id: str
    attempt: int
    reason: Refusal
    detail: str


register(Abort, Probe, TokenDeltas, Refused, Preempted)
