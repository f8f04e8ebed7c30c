"""What a rank does beside the model, such as moving the KV of its heads; and what ranks say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kvrelay.engine.model.parallel.shard import Shard


class Companion(Protocol):
    """Made in a follower's process once its model is loaded, and owned by it."""

    facts: Any  # what the leader has to know of it; can be pickled

    def receive(self, message: Any) -> None:
        """Something that the leader sent. Must not block: steps come behind it."""
        ...

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """Sums its heads of these blocks of the pool, which are complete."""
        ...

    def begin_checksums(self, block_ids: Sequence[int]) -> Callable[[], list[int]]:
        """Sums once what this thread has launched is done, which the call that is returned waits
        for; it may come from another thread."""
        ...

    def close(self) -> None:
        """It has to end within seconds."""
        ...


Tell = Callable[[Any], None]
"""Send something to the leader; from any thread."""

MakeCompanion = Callable[[Any, "Shard", Tell], Companion]
"""Given the rank's ModelRunner. Can be pickled."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A follower has done the next stage of its start: it can meet the others; it serves."""

    facts: Any = None  # its companion's


@dataclass(frozen=True, slots=True)
class Broken:
    """A follower cannot go on."""

    why: str


@dataclass(frozen=True, slots=True)
class Checksums:
    """Sums `Step.checksum_blocks`, as far as the rank's heads go."""

    step_id: int
    sums: list[int] = field(default_factory=list)
