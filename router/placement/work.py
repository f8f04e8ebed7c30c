"""What a request asks of workers, and how one gets the KV of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvrelay.engine.images import PlacedImage
from kvrelay.engine.node import NodeId
from kvrelay.router.placement.endpoint import Endpoint


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
    images: Sequence[PlacedImage] = ()
