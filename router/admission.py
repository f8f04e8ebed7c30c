"""Whether a request may come in at all, and the order in which those that came in are served.

A request that no decode worker could ever hold is refused with the sizes; one that could, but not
now, waits. The queue is bounded for new requests; those that come back after a failed attempt keep
their place in it, and are never refused for lack of room (there are at most as many of them as
were dispatched).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.request import Refusal
from engine.stats import WorkerInfo
from router.token_log import LoggedRequest


@dataclass(frozen=True, slots=True)
class Rejection:
    reason: Refusal
    detail: str


def blocks_needed(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def fits(info: WorkerInfo, num_tokens: int) -> bool:
    """Could an empty worker hold a sequence that ends at `num_tokens` tokens?"""
    needed = blocks_needed(num_tokens, info.block_size)
    return num_tokens <= info.max_model_len and needed <= info.num_blocks


def clamp_max_tokens(
    num_prompt: int, max_tokens: int, decodes: Sequence[WorkerInfo]
) -> int | Rejection:
    """`max_tokens`, cut to the longest context among `decodes` (at least one); or why the request
    can be served by none of them."""
    limit = max(info.max_model_len for info in decodes)
    if num_prompt == 0:
        return Rejection(Refusal.CONTEXT_LENGTH, "the prompt has 0 tokens; it needs at least 1")
    if num_prompt + 1 > limit:
        return Rejection(
            Refusal.CONTEXT_LENGTH,
            f"the prompt has {num_prompt} tokens; with at least 1 token of output, "
            f"{limit - 1} fit into the context of {limit}",
        )
    max_tokens = min(max_tokens, limit - num_prompt)
    if any(fits(info, num_prompt + max_tokens) for info in decodes):
        return max_tokens
    largest = max(decodes, key=lambda info: info.num_blocks * info.block_size)
    needed = blocks_needed(num_prompt + max_tokens, largest.block_size)
    return Rejection(
        Refusal.NEVER_FITS,
        f"{num_prompt} prompt + {max_tokens} output tokens need {needed} KV blocks of "
        f"{largest.block_size} tokens; the largest decode worker has {largest.num_blocks}",
    )


class AdmissionQueue:
    """Owned by the router. Invariant: sorted by (priority, arrival), lower first; each request is
    in it at most once."""

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._entries: list[tuple[int, int, LoggedRequest]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, log: LoggedRequest) -> bool:
        at = self._index(log)
        return at < len(self._entries) and self._entries[at][2] is log

    @property
    def overflows(self) -> bool:
        return len(self._entries) > self._max_queue

    def in_order(self) -> Iterable[LoggedRequest]:
        """A copy, so that the queue may change meanwhile."""
        return [log for _, _, log in self._entries]

    def push(self, log: LoggedRequest) -> None:
        assert log not in self, f"{log.request_id} is queued already"
        insort(self._entries, (log.submit.priority, log.arrival, log))

    def remove(self, log: LoggedRequest) -> None:
        assert log in self, f"{log.request_id} is not queued"
        del self._entries[self._index(log)]

    def _index(self, log: LoggedRequest) -> int:
        return bisect_left(self._entries, (log.submit.priority, log.arrival), key=lambda e: e[:2])
