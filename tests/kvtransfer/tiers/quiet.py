"""When tiers have come to rest, which nothing but a test waits for."""

from __future__ import annotations

from kvrelay.kvtransfer.tiers.manager import Tiers


def is_quiet(tiers: Tiers, now: float) -> bool:
    """Whether nothing is in flight, no move could start and no index be changed; what waits for a
    store that fails does not count."""
    blocks, moves = tiers._blocks, tiers._moves
    if not tiers._pools:
        return True
    if tiers._kv.newly_sealed or tiers._orders or moves.live or moves.to_load:
        return False
    if blocks.to_copy and blocks.may_write(now, blocks.first.tier):
        return False
    for tier, index in blocks.indexes.items():
        if blocks.may_write(now, tier) and (index._removed or index._put or index._stale):
            return False
    for each in blocks.backing:
        is_due = each._to_park or each._is_due(each._to_write.first(), now)
        if each.to_promote or (is_due and blocks.may_write(now, each.pool.tier)):
            return False
    return True
