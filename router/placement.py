"""What is asked of workers, and ways to serve it: the plain data of a choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.node import NodeId
from router.endpoint import Endpoint
from router.prefix_index import NOTHING, Held


class Seconds(NamedTuple):
    """A cost by its parts."""

    queue: float = 0.0
    load: float = 0.0
    fetch: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
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
        """From the decision to the first token."""
        return self.queue + self.load + self.fetch + self.prefill


class Holdings(Protocol):
    """What a lookup of a prompt has found."""

    def held(self, endpoint: Endpoint) -> Held: ...


@dataclass(slots=True)
class Work:
    """What a request asks for."""

    num_tokens: int  # prompt and output so far: KV that must be there before the next token
    holdings: Holdings  # in blocks
    output_tokens: float  # expected from now on
    lenders: tuple[Endpoint, ...] = ()  # whom others may fetch from
    decode_parts: dict[Endpoint, tuple[float, float, float]] = field(
        default_factory=dict, init=False
    )
    _held: dict[Endpoint, Held] = field(default_factory=dict, init=False)
    _lendings: list[tuple[Endpoint, Held]] | None = field(default=None, init=False)

    def held_by(self, endpoint: Endpoint) -> Held:
        """In tokens."""
        held = self._held.get(endpoint)
        if held is None:
            held = self.holdings.held(endpoint)
            if held is not NOTHING:
                held = held.times(endpoint.info.block_size)
            self._held[endpoint] = held
        return held

    @property
    def lendings(self) -> list[tuple[Endpoint, Held]]:
        """The lenders, and what each holds in tokens."""
        if self._lendings is None:
            self._lendings = [(lender, self.held_by(lender)) for lender in self.lenders]
        return self._lendings

    def missing(self, endpoint: Endpoint) -> int:
        """Tokens whose KV is not in device memory of `endpoint`, from wherever it is to come."""
        return self.num_tokens - self.held_by(endpoint).device


class Intake(NamedTuple):
    """How the worker that computes comes to the KV of the prompt: what its device does not hold is
    loaded, then fetched, and the rest computed."""

    computed: int  # tokens, as the following
    loaded: int = 0
    fetched: int = 0
    load_s: float = 0.0
    fetch_s: float = 0.0
    fetch_from: NodeId | None = None


class Placement(NamedTuple):
    """One way to serve a request, or for a prefill worker alone its part of it."""

    seconds: Seconds
    intake: Intake
