"""What an agent over NIXL keeps of its peers, and of its transfers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.kv.tier import Tier
from engine.node import NodeId
from kvtransfer.agents import nixl_lanes
from kvtransfer.agents.metadata import Space
from kvtransfer.layout import CopySpan

Spans = tuple[CopySpan, ...]


@dataclass(slots=True, eq=False)
class Peer:
    """A peer's incarnation as NIXL knows it. Removed once it is `gone` and `live` is 0."""

    agent: str
    spaces: Mapping[Tier, Space]
    spans: Spans  # of each block; local lists are made for the same
    dlists: dict[Tier, int]
    metadata: bytes = b""
    endpoints: frozenset[int] = frozenset()
    lane: str = nixl_lanes.UNKNOWN
    live: int = 0  # transfers not released
    gone: bool = False  # replaced or disconnected: no new reads
    failed: bool = False


@dataclass(slots=True, eq=False)
class Transfer:
    node: NodeId
    peer: Peer
    handle: int
    settled: bool = False  # NIXL reported its end
    error: str | None = None  # a bad end
    released: bool = False
