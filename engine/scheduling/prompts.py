"""Which prompts are computed in the next step, and how much of each; and which wait for blocks that
are computed or loaded for another one."""

from __future__ import annotations

from collections.abc import Iterable

from engine.cost import TOKENS_UNIT, FittedCost, order_of
from engine.kv.cache_manager import KVCacheManager
from engine.sequence import Sequence


def choose_prompts(
    running: Iterable[Sequence],
    now: float,
    budget: int,
    cost: FittedCost,
    decode_s: float,
    kv: KVCacheManager,
) -> list[tuple[Sequence, int]]:
    """Which prompts get how many of `budget` tokens. First those of streams that are silent until
    they are computed here. Then the shortest, which is best for the mean latency; but one that has
    waited counts as shorter, so that a long one does not starve. Another prompt joins the pass if
    the passes that are saved, each with its decodes, are worth the delay of those in it.

    decode_s: of a step of the decodes beside them. kv: holds their block tables."""
    pass_s, token_s = cost.weights[0] + decode_s, cost.weights[1] / TOKENS_UNIT

    def order(seq: Sequence) -> tuple[bool, float]:
        compute_s = max(0.0, seq.num_missing * token_s)
        return seq.num_output_tokens == 0, order_of(compute_s, now - seq.arrived_at)

    prompts = sorted((seq for seq in running if seq.num_missing > 1), key=order)
    chosen: list[tuple[Sequence, int]] = []
    for seq in prompts:
        count = min(seq.num_missing, budget, kv.num_covered(seq) - seq.num_computed)
        if count <= 0:
            break
        saved_s = pass_s * (len(prompts) - len(chosen))
        if chosen and token_s > 0 and saved_s < count * token_s * len(chosen):
            break
        chosen.append((seq, count))
        budget -= count
    return chosen


def first_missing(seq: Sequence, kv: KVCacheManager) -> bytes | None:
    """Hash of the first block of a waiting sequence that is no cache hit; None: all are."""
    block_hashes, count = kv.usable_hashes(seq), kv.num_cached(seq)
    return block_hashes[count] if count < len(block_hashes) else None


def hashes_under_way(
    running: Iterable[Sequence], remote: Iterable[Sequence], kv: KVCacheManager
) -> set[bytes]:
    """Hashes of blocks that will be cache hits once a prompt is computed or a load is done."""
    block_hashes = {
        each
        for seq in running
        if seq.num_missing > 1
        for each in kv.usable_hashes(seq)[seq.num_sealed :]
    }
    for seq in remote:
        block_hashes.update(seq.block_hashes[seq.num_sealed : seq.num_arriving])
    return block_hashes
