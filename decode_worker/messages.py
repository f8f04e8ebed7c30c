"""What a decode worker accepts, beside `engine.messages.Abort` and `Probe` and the producer's."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.engine.kv.block_hash import UNSALTED, CacheScope
from kvrelay.engine.kv.tier import Retention
from kvrelay.engine.node import NodeId
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.wire.codec import register


@dataclass(frozen=True, slots=True)
class Decode:
    """Generate from `tokens` on. With `prefill_from`, wait for that producer's KV (and compute
    what does not come); without it, compute the prompt here."""

    request_id: str
    attempt: int
    router: NodeId
    prefill_from: NodeId | None
    tokens: tuple[int, ...]  # prompt, then output so far
    num_prompt_tokens: int
    sampling: SamplingParams
    timeout_s: float
    scope: CacheScope = UNSALTED
    retention: Retention | None = None  # None: the worker's own
    fetch_from: NodeId | None = None  # a worker that holds more of the prefix, worth asking
    block_hashes: bytes = b""  # packed, of the full blocks of `tokens`: hashed only once
    num_held: int = 0  # of `tokens`, that need not be computed, as far as the router knows


register(Decode)
