"""What a worker tells routers about requests."""

from __future__ import annotations

from dataclasses import dataclass

from engine.node import NodeId
from engine.request import Refusal, TokenDelta


@dataclass(frozen=True, slots=True)
class TokenDeltas:
    """One frame per step and router: the new tokens of every request of that router."""

    worker: NodeId
    epoch: int
    deltas: tuple[TokenDelta, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker will not serve (or no longer knows) this attempt."""

    worker: NodeId
    epoch: int
    request_id: str
    attempt: int
    reason: Refusal
    detail: str
