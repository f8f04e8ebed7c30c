"""What is replayed: requests with their arrival, their sizes, and what of them is shared.

A prompt is named by the ids of its blocks of `Trace.block_tokens` tokens. Ids are chained: equal
ids mean equal tokens from the start of the prompt to the end of that block.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise


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


MAX_SPREAD_S = 1.0  # copies of one request come within this


def multiplied(trace: Trace, copies: int) -> Trace:
    """`copies` times the traffic in the same time: every request comes so often, spread evenly
    until the next one of the trace arrives, but over `MAX_SPREAD_S` at most, so that a silence
    stays one. Copies share nothing with each other: they are other users."""
    if copies == 1:
        return trace
    requests = trace.requests
    stride = 1 + max((max(r.block_ids, default=-1) for r in requests), default=-1)
    gaps = [min(MAX_SPREAD_S, b.at_s - a.at_s) for a, b in pairwise(requests)] + [0.0]
    made = [
        replace(
            request,
            at_s=request.at_s + gap * copy / copies,
            block_ids=tuple(copy * stride + each for each in request.block_ids),
            session=None if request.session is None else f"{request.session} {copy}",
        )
        for request, gap in zip(requests, gaps, strict=True)
        for copy in range(copies)
    ]
    made.sort(key=lambda request: request.at_s)
    return replace(trace, name=f"{trace.name} x {copies}", requests=tuple(made))
