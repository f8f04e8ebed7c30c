"""What is replayed: requests with their arrival, their sizes, and what of them is shared.

A prompt is named by the ids of its blocks of `Trace.block_tokens` tokens. Ids are chained: equal
ids mean equal tokens from the start of the prompt to the end of that block.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace. Without `block_ids` nothing of its prompt is shared with any other."""

    at_s: float  # arrival, from the start of the trace
    input_length: int  # tokens
    output_length: int
    block_ids: tuple[int, ...] = ()  # the last one may be partial
    session: str | None = None
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival."""

    name: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int = 512
    notes: tuple[str, ...] = field(default=())  # what a reader had to mend, one line each

    @property
    def duration_s(self) -> float:
        """From the start of the trace to its last arrival."""
        return self.requests[-1].at_s if self.requests else 0.0
