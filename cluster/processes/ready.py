"""What the start of a server tells: how far it is, that all are up, or why it cannot begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.cluster.prepare import PreparedModels
from kvrelay.engine.node import NodeId

OnProgress = Callable[[str, str, bool], None]  # part, state, whether it is up


class ServeError(Exception):
    """Serving cannot begin, or cannot go on; one line for the user."""


@dataclass(frozen=True, slots=True)
class Ready:
    """All are up, and the first router takes requests."""

    ports: dict[NodeId, int]  # where each router's API listens
    lines: tuple[str, ...]  # what the KV cache costs
    models: PreparedModels
