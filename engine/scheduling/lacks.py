"""What sequences that wait for blocks lack, so that they are tried again only when that may help.

A try looks up the whole prefix. It is made again once as many blocks have become free, or as many
of its own have been computed by others, as it lacked; what has been used and freed meanwhile
counts too, so it may fail again. Between tries a sequence costs a few comparisons after each
message, however long it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from kvrelay.engine.kv.cache_manager import KVCacheManager, Lack
from kvrelay.engine.sequence import Sequence

TOUCH_SHARE = 4  # see `Lacking.touch_at`


@dataclass(slots=True)
class Lacking:
    """One sequence that waits. Without windows `num_found` blocks of it are cached, from the first;
    with windows, so many rows of the groups without one."""

    version: tuple[object, ...]  # what it was: with other tokens it is another one
    num_found: int = 0
    num_dropped: int = 0  # the pool's, when it was looked up
    num_gained: int = 0  # blocks that others have computed for it since the last try
    lack: Lack | None = None  # at the last try; None: it was not tried
    num_freed: int = 0  # the pool's, then
    state: tuple[int, ...] = ()  # then; in the same one no try succeeds
    touch_at: float = inf  # evictions of the pool, before the next one may be of what it found
    reach: tuple[int, int] = (-1, 0)  # with windows: `num_renamed` of the pool, `num_cached` then


class Lacks:
    """Owned by a scheduler. Invariant: a try that `is_in_vain` says to leave out would fail."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._of: dict[Sequence, Lacking] = {}
        groups = kv.windows.groups
        self._whole = [group for group, window in enumerate(groups) if not window.size]
        # What windows have of a table may differ from try to try.
        self._slack = sum(w.num_blocks + w.chunk_blocks for w in groups if w.size)

    def forget(self, seq: Sequence) -> None:
        """It has been admitted, or has ended."""
        self._of.pop(seq, None)

    def num_cached(self, seq: Sequence) -> int:
        """What the cache manager says. Where the end of a prefix is evicted first, blocks before
        what was found the last time are not looked at."""
        kv, known = self._kv, self._known(seq)
        if kv.windows.any:
            if known.reach[0] != kv.pool.num_renamed:
                known.reach = kv.pool.num_renamed, kv.num_cached(seq)
            return known.reach[1]
        if known.num_dropped != kv.pool.num_dropped:
            known.num_dropped = kv.pool.num_dropped
            self._find(known, kv.num_cached(seq))
        self._look(seq, known)
        return known.num_found

    def is_in_vain(self, seq: Sequence, headroom: int) -> bool:
        """Whether `seq` cannot be admitted, since nothing has happened that could help it."""
        known, pool = self._known(seq), self._kv.pool
        if known.lack is None or pool.num_evictions >= known.touch_at:
            return False
        self._look(seq, known)
        if not known.num_gained and self._state(seq, headroom) == known.state:
            return pool.now < known.lack.free_from
        lacking = known.lack.num_blocks + headroom - self._slack
        return lacking - (pool.num_freed - known.num_freed) > known.num_gained

    def note(self, seq: Sequence, headroom: int) -> None:
        """`seq` was tried, and not admitted."""
        kv, pool, known, lack = self._kv, self._kv.pool, self._known(seq), self._kv.lack
        known.num_found = lack.num_found // kv.windows.count
        known.num_dropped = pool.num_dropped
        known.num_gained = 0
        self._look(seq, known)  # what follows with windows missing may be of use when they come
        least, known.num_gained = lack.num_blocks - known.num_gained, 0
        known.lack = lack._replace(num_blocks=least - headroom)
        known.num_freed, known.state = pool.num_freed, self._state(seq, headroom)
        # A try also renews the use of what it finds. That is evicted after all that is older; where
        # there is little of that, it is not worth a try each time.
        older = (pool.num_evictable_low if seq.is_low else pool.num_evictable) - lack.num_idle
        spared = max(older, lack.num_idle // TOUCH_SHARE, 1)
        known.touch_at = pool.num_evictions + spared if lack.num_idle else inf

    def _known(self, seq: Sequence) -> Lacking:
        version = seq.chain, len(seq.tokens), seq.is_remote, seq.outputs_from
        known = self._of.get(seq)
        if known is None or known.version != version:
            known = self._of[seq] = Lacking(version)
        return known

    def _state(self, seq: Sequence, headroom: int) -> tuple[int, ...]:
        """What a try depends on, but for what is taken, which does not help, and time."""
        pool = self._kv.pool
        state = headroom, pool.num_freed, pool.num_renamed if self._slack else 0
        return (*state, pool.num_used_low, self._kv.num_low) if seq.is_low else state

    def _look(self, seq: Sequence, known: Lacking) -> None:
        """Go on from what was found the last time: back over what was evicted, or forward."""
        count, end = known.num_found, self._kv.num_usable(seq) // self._kv.windows.count
        while count and not self._is_cached(seq, count - 1):
            count -= 1
        while self._whole and count < end and self._is_cached(seq, count):
            count += 1
        self._find(known, count)

    def _find(self, known: Lacking, count: int) -> None:
        known.num_gained += max(0, count - known.num_found) * len(self._whole)
        known.num_found = count

    def _is_cached(self, seq: Sequence, row: int) -> bool:
        names, first = seq.block_hashes, row * self._kv.windows.count
        is_cached = self._kv.pool.is_cached
        return all(is_cached(names[first + group]) for group in self._whole)
