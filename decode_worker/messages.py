"""What a router asks of a worker that generates a request's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.engine.messages import WorkRequest
from kvrelay.engine.node import NodeId
from kvrelay.engine.wire.codec import register


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode(WorkRequest):
    """Generate from `tokens` on. With `prefill_from`, wait for that producer's KV (and compute
    what does not come); without it, compute the prompt here."""

    prefill_from: NodeId | None = None


register(Decode)
