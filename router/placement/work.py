"""The plain data of a routing decision: what a request asks of workers, the ways to serve it, what
they cost, and the decision that was made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.router.index.prefix_index import Held
from kvrelay.router.placement.endpoint import Endpoint, LinkLoss


class Seconds(NamedTuple):
    """A cost by its parts."""

    queue: float = 0.0
    load: float = 0.0
    fetch: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    lost: float = 0.0
    memory: float = 0.0
    decode: float = 0.0
    delay: float = 0.0
    stall: float = 0.0
    crowd: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def ttft(self) -> float:
        """How long it takes from the decision to the first token."""
        return self.queue + self.load + self.fetch + self.prefill


class Intake(NamedTuple):
    """How the worker that computes the prompt gets its KV: what its device does not hold is loaded
    from its own lower tiers, then fetched from a peer, and the rest is computed."""

    computed: int  # tokens, as the following
    loaded: int = 0
    fetched: int = 0
    load_s: float = 0.0
    fetch_s: float = 0.0
    fetch_from: NodeId | None = None


class HashedPrompt(NamedTuple):
    """A prompt by the block hashes of workers of one kind (same model and block size)."""

    model: int  # as `Endpoint.model`
    block_size: int
    unit: int  # tokens that a hash stands for
    block_hashes: bytearray  # its full blocks', packed
    mark_group: int = 0  # as in WorkerInfo


class Work(NamedTuple):
    """What a request asks for."""

    num_tokens: int  # prompt and output so far: KV that must be there before the next token
    total_tokens: int  # at most, at its end
    output_tokens: float  # expected from now on
    others_output: float  # per request, on average
    prompts: Sequence[HashedPrompt]  # one for each kind of workers
    avoid: Sequence[Endpoint] = ()  # workers that have failed it, then those that it leaves
    num_left: int = 0  # how many it leaves
    alone: bool = False  # one worker has to do all of it
    patient: bool = False  # it is sent out now, and waits for memory at a worker
    resumes: bool = False  # its client has tokens
    is_low: bool = False  # it is of a low class of service
    need: int = 0  # the key of what has to be loaded for it; 0: nothing


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve the request, as it is explained. For a prefill worker alone, only what comes
    before the first token counts."""

    worker: NodeId
    prefill_from: NodeId | None
    fetch_from: NodeId | None  # the peer whose KV is fetched by the worker that computes the prompt
    cached: Held  # tokens on `worker`
    seconds: Seconds


@dataclass(slots=True)
class RoutingDecision:
    """A choice and its alternatives, so that it can be explained."""

    request_id: str
    attempt: int
    at_s: float  # the router's clock
    policy: str
    num_tokens: int
    decode: NodeId
    prefill: NodeId | None
    fetch_from: NodeId | None  # by `prefill`, or else by `decode`
    seconds: Seconds
    predicted_ttft_s: float
    others_decode: bool  # on the decode worker, when this was decided
    was_measured: bool  # False: no worker had reported yet what prompts cost
    candidates: Callable[[Role], tuple[Candidate, ...]]  # read from native memory when called
    bad_links: tuple[LinkLoss, ...] = ()  # from `prefill`, or to a worker that was chosen

    @property
    def decode_candidates(self) -> tuple[Candidate, ...]:
        """Candidates are sorted, the best first."""
        return self.candidates(Role.DECODE)

    @property
    def prefill_candidates(self) -> tuple[Candidate, ...]:
        return self.candidates(Role.PREFILL)
