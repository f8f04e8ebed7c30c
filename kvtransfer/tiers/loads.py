"""Which blocks a request loads from its worker's own lower tiers, rather than computes them."""

from __future__ import annotations

from collections.abc import Callable

from engine.cost import blocks_worth_loading
from engine.kv.cache_manager import KVCacheManager
from engine.kv.tier import Tier
from engine.sequence import NO_BLOCK, Sequence
from kvtransfer.tiers.blocks import Source
from kvtransfer.tiers.manager import Tiers


def choose_loads(
    seq: Sequence,
    kv: KVCacheManager,
    tiers: Tiers,
    load_s: Callable[[Tier], float],
    compute_s: float,
) -> list[Source | None]:
    """Sources of blocks `[num_sealed, num_sealed + len(result))` of `seq`, which has just been
    admitted; None where none is needed, and its table is laid out for that. `load_s`: to load a
    block, by tier; `compute_s`: to compute one."""
    if seq.compute_all:
        return []
    if kv.window.size:
        return _choose_window(seq, kv, tiers, load_s, compute_s)
    sources = tiers.find(kv.usable_hashes(seq)[seq.num_sealed :])
    count = blocks_worth_loading((load_s(source.tier) for source in sources), compute_s)
    return [*sources[:count]]


def _choose_window(
    seq: Sequence,
    kv: KVCacheManager,
    tiers: Tiers,
    load_s: Callable[[Tier], float],
    compute_s: float,
) -> list[Source | None]:
    """All or nothing: a part of a window is of no use. One that comes from a prefill worker is not
    mixed with what is here."""
    block_hashes, first = kv.usable_hashes(seq), seq.num_sealed
    found: dict[int, Source] = {}

    def has(index: int) -> bool:
        if index < first:
            return seq.block_ids[index] != NO_BLOCK
        found.update((index, source) for source in tiers.find(block_hashes[index : index + 1]))
        return index in found

    end = 0 if seq.is_remote else kv.window.reach(len(block_hashes), has)
    needed = [index for index in kv.window.kept(end * kv.block_size) if index >= first]
    cost_s = sum(load_s(found[index].tier) for index in needed)
    if cost_s >= (end - first) * compute_s or not kv.expect(seq, end):
        return []
    chosen = {index: found[index] for index in needed}
    return [chosen.get(index) for index in range(first, end)]
