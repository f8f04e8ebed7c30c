"""Whether a request fits on a worker at all, and how long its output may be there."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.engine.request import Refusal
from kvrelay.engine.stats import WorkerInfo
from kvrelay.router.record import Rejection


def blocks_needed(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def fits(info: WorkerInfo, num_tokens: int) -> bool:
    """Could an empty worker hold a sequence that ends at `num_tokens` tokens?"""
    needed = blocks_needed(num_tokens, info.block_size)
    needed = min(needed, info.max_seq_blocks or needed)
    return num_tokens <= info.max_model_len and needed <= info.num_blocks


def clamp_max_tokens(
    num_prompt: int, max_tokens: int, workers: Sequence[WorkerInfo]
) -> int | Rejection:
    """`max_tokens`, cut to the longest context among `workers` (at least one); or why the request
    can be served by none of them."""
    limit = max([info.max_model_len for info in workers])
    if num_prompt == 0:
        return Rejection(Refusal.CONTEXT_LENGTH, "the prompt has 0 tokens; it needs at least 1")
    if num_prompt + 1 > limit:
        return Rejection(
            Refusal.CONTEXT_LENGTH,
            f"the prompt has {num_prompt} tokens; with at least 1 token of output, "
            f"{limit - 1} fit into the context of {limit}",
        )
    max_tokens = min(max_tokens, limit - num_prompt)
    for info in workers:
        if fits(info, num_prompt + max_tokens):
            return max_tokens
    largest = max(workers, key=lambda info: info.num_blocks * info.block_size)
    needed = blocks_needed(num_prompt + max_tokens, largest.block_size)
    return Rejection(
        Refusal.NEVER_FITS,
        f"{num_prompt} prompt + {max_tokens} output tokens need {needed} KV blocks of "
        f"{largest.block_size} tokens; the largest worker has {largest.num_blocks}",
    )
