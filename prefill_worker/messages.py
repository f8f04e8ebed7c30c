"""What a router asks of a worker that computes a prompt for another one.

It replies with `TokenDeltas` to the router, and with `KVReady` to the decode worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.engine.messages import WorkRequest
from kvrelay.engine.node import NodeId
from kvrelay.engine.wire.codec import register


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill(WorkRequest):
    """Compute the KV of `tokens`, sample the next token, and hold the blocks for `decode_to`."""

    decode_to: NodeId


register(Prefill)
