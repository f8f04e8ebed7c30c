"""Rules of eviction to compare on a trace: how many blocks each finds in a cache of one size.

Each `serve` gets the blocks of one prompt and returns how many of its prefix were there. The ends
of prompts are used before their beginnings, so that they are evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Protocol


class Cache(Protocol):
    def serve(self, names: list[bytes]) -> int: ...


class SegmentedLRU:
    """Blocks that were used once, and blocks that were used again; each part by recency. Evicts
    from the first part as long as it has more than `share` of the cache. With one part: LRU."""

    def __init__(self, size: int, share: float = 0.0, *, segmented: bool = True) -> None:
        self.size, self.share, self.segmented = size, share, segmented
        self.new: OrderedDict[bytes, None] = OrderedDict()
        self.reused: OrderedDict[bytes, None] = OrderedDict()

    def serve(self, names: list[bytes]) -> int:
        found = _run(names, lambda name: name in self.new or name in self.reused)
        for name in reversed(names):
            if name in self.reused:
                self.reused.move_to_end(name)
            elif name in self.new and self.segmented:
                del self.new[name]
                self.reused[name] = None
            else:
                self.new[name] = None
                self.new.move_to_end(name)
        while len(self.new) + len(self.reused) > self.size:
            first = self.new if len(self.new) > self.share * self.size else self.reused
            (first or self.new).popitem(last=False)
        return found


class S3Fifo:
    """A small queue of new blocks, a main queue of those that were used in it, and the names of
    blocks that left the small one unused. Both are first in, first out, with a second chance."""

    def __init__(self, size: int, share: float) -> None:
        self.size, self.share = size, share
        self.small: OrderedDict[bytes, int] = OrderedDict()  # name -> uses
        self.main: OrderedDict[bytes, int] = OrderedDict()
        self.ghosts: OrderedDict[bytes, None] = OrderedDict()

    def serve(self, names: list[bytes]) -> int:
        found = _run(names, lambda name: name in self.small or name in self.main)
        for name in reversed(names):
            queue = self.main if name in self.main else self.small
            if name in queue:
                queue[name] = min(3, queue[name] + 1)
            elif name in self.ghosts:
                del self.ghosts[name]
                self.main[name] = 0
            else:
                self.small[name] = 0
        while len(self.small) + len(self.main) > self.size:
            if len(self.small) > self.share * self.size or not self.main:
                self._evict_small()
            else:
                self._evict_main()
        return found

    def _evict_small(self) -> None:
        name, uses = self.small.popitem(last=False)
        if uses:
            self.main[name] = 0
            return
        self.ghosts[name] = None
        if len(self.ghosts) > self.size:
            self.ghosts.popitem(last=False)

    def _evict_main(self) -> None:
        name, uses = self.main.popitem(last=False)
        if uses:
            self.main[name] = uses - 1


def _run(names: list[bytes], is_here: Callable[[bytes], bool]) -> int:
    for count, name in enumerate(names):
        if not is_here(name):
            return count
    return len(names)


POLICIES: dict[str, Callable[[int], Cache]] = {
    "LRU": partial(SegmentedLRU, segmented=False),
    **{
        f"segmented LRU, {share:.0%} new": partial(SegmentedLRU, share=share)
        for share in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
    },
    **{f"S3-FIFO, {share:.0%} small": partial(S3Fifo, share=share) for share in (0.1, 0.5, 0.7)},
}
