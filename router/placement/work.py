"""What is asked of workers, and ways to serve it: the plain data of a choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.node import NodeId
from router.placement.endpoint import Endpoint


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


class Intake(NamedTuple):
    """How the worker that computes comes to the KV of the prompt: what its device does not hold is
    loaded, then fetched, and the rest computed."""

    computed: int  # tokens, as the following
    loaded: int = 0
    fetched: int = 0
    load_s: float = 0.0
    fetch_s: float = 0.0
    fetch_from: NodeId | None = None


class HashedPrompt(NamedTuple):
    """A prompt as workers of one kind name it."""

    model: int  # as `Endpoint.model`
    block_size: int
    unit: int  # tokens that a name stands for
    block_hashes: bytearray  # of its full blocks, packed


class Work(NamedTuple):
    """What a request asks for."""

    num_tokens: int  # prompt and output so far: KV that must be there before the next token
    total_tokens: int  # that it may come to have
    output_tokens: float  # expected from now on
    prompts: Sequence[HashedPrompt]  # one for each kind of workers
    avoid: Sequence[Endpoint] = ()  # these have failed it
