"""Which worker holds which sealed block, as far as one router knows.

Life of a view of one worker: added with an epoch and empty; a snapshot fills it; events keep it up
to date; a gap in their sequence freezes it until the next snapshot; a new epoch empties it; removal
forgets it. Between the routing of a prompt and the worker's own events, speculative entries stand
in for the blocks that are about to be computed there.

The holders of a block are one integer with a bit a worker, so a lookup walks the chain once for all
workers together, and a block evicted from the middle of a chain ends the prefix of its worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.kv_events import KVEvents, KVSnapshot
from engine.node import NodeId


@dataclass(slots=True, eq=False)
class _View:
    """What is known of one worker. In step with it exactly when `seq == seen`."""

    worker: NodeId
    slot: int  # bit of this worker in the masks
    epoch: int
    seq: int | None = None  # last event (or snapshot) applied; None: nothing yet
    seen: int = -1  # highest event heard of, applied or not
    asked_at: float | None = None
    real: set[bytes] = field(default_factory=set)
    speculative: dict[bytes, float] = field(default_factory=dict)  # hash -> when it expires

    @property
    def in_step(self) -> bool:
        return self.seq is not None and self.seq >= self.seen


class PrefixIndex:
    """Owned by a router. Invariant: bit s of `_masks[h]` is set exactly when the view in slot s has
    h in `real` or in `speculative`, never in both; no mask is 0."""

    def __init__(
        self,
        snapshot_retry_s: float = 1.0,
        speculative_s: float = 10.0,
        max_speculative: int = 200_000,
    ) -> None:
        self._snapshot_retry_s = snapshot_retry_s
        self._speculative_s = speculative_s
        self._max_speculative = max_speculative
        self._views: dict[NodeId, _View] = {}
        self._slots: list[_View | None] = []
        self._masks: dict[bytes, int] = {}
        self._expiry: deque[tuple[float, _View, bytes]] = deque()
        self._lagging: dict[NodeId, _View] = {}  # views with a gap

    def add(self, worker: NodeId, epoch: int) -> None:
        """Begin to follow `worker`; it is due to be asked for a snapshot."""
        view = self._views.get(worker)
        if view is None:
            if None not in self._slots:
                self._slots.append(None)
            slot = self._slots.index(None)
            view = self._views[worker] = self._slots[slot] = _View(worker, slot, epoch)
        elif epoch > view.epoch:
            self._restart(view, epoch)
        self._note(view)

    def remove(self, worker: NodeId) -> None:
        view = self._views.pop(worker, None)
        if view is not None:
            self._restart(view, view.epoch)
            self._slots[view.slot] = None
            self._lagging.pop(worker, None)

    def apply(self, now: float, news: KVEvents | KVSnapshot) -> bool:
        """Take `news` in. True: the worker has to be asked for a snapshot now.

        News of an unknown worker or a past epoch, and news that is older than what is known, change
        nothing. A later epoch than the known one empties the view.
        """
        view = self._views.get(news.worker)
        if view is None or news.epoch < view.epoch:
            return False
        if news.epoch > view.epoch:
            self._restart(view, news.epoch)
        view.seen = max(view.seen, news.seq)
        if isinstance(news, KVSnapshot):
            if view.seq is None or news.seq > view.seq:
                self._replace(view, news.hashes)
                view.seq = news.seq
        elif view.seq is not None and news.seq == view.seq + 1:
            self._store(view, news.stored)
            self._discard(view, news.removed)
            view.seq = news.seq
        self._note(view)
        return self._ask(now, view)

    def hear(self, now: float, worker: NodeId, epoch: int, event_seq: int) -> bool:
        """The last event of `worker` was `event_seq`, whether it came or not. True: ask it now."""
        view = self._views.get(worker)
        if view is None or epoch != view.epoch:
            return False
        view.seen = max(view.seen, event_seq)
        self._note(view)
        return self._ask(now, view)

    def due(self, now: float) -> list[NodeId]:
        """Workers that have to be asked (again) for a snapshot now."""
        return [view.worker for view in self._lagging.values() if self._ask(now, view)]

    @property
    def in_step(self) -> bool:
        """True when no view has a gap."""
        return not self._lagging

    def speculate(self, now: float, worker: NodeId, hashes: Iterable[bytes]) -> None:
        """Count `hashes` as held by `worker` until it says so itself, or the time is over."""
        self._expire(now)
        view = self._views.get(worker)
        if view is None:
            return
        until = now + self._speculative_s
        for name in hashes:
            if name not in view.real:
                view.speculative[name] = until
                self._masks[name] = self._masks.get(name, 0) | 1 << view.slot
                self._expiry.append((until, view, name))
        while len(self._expiry) > self._max_speculative:
            self._drop_oldest()

    def lookup(self, now: float, hashes: Sequence[bytes]) -> dict[NodeId, int]:
        """For each worker that holds `hashes[0]`: how many blocks of the prefix it holds without a
        hole. O(len of the longest match + workers)."""
        self._expire(now)
        found: dict[NodeId, int] = {}
        holders = self._masks.get(hashes[0], 0) if hashes else 0
        for depth in range(1, len(hashes)):
            if not holders:
                return found
            still = holders & self._masks.get(hashes[depth], 0)
            if still != holders:
                found.update((worker, depth) for worker in self._workers(holders & ~still))
                holders = still
        found.update((worker, len(hashes)) for worker in self._workers(holders))
        return found

    def names(self, worker: NodeId) -> frozenset[bytes]:
        """The blocks that `worker` has said it holds."""
        view = self._views.get(worker)
        return frozenset() if view is None else frozenset(view.real)

    def num_blocks(self, worker: NodeId) -> int:
        """Blocks counted as held by `worker`, speculative ones too."""
        view = self._views.get(worker)
        return 0 if view is None else len(view.real) + len(view.speculative)

    def check_integrity(self) -> None:
        """Assert the class invariant. O(everything): for tests and the simulator."""
        masks: dict[bytes, int] = {}
        for view in self._views.values():
            assert self._slots[view.slot] is view
            assert not view.real & view.speculative.keys()
            for name in (*view.real, *view.speculative):
                masks[name] = masks.get(name, 0) | 1 << view.slot
        assert masks == self._masks
        assert self._lagging == {w: v for w, v in self._views.items() if not v.in_step}
        assert len(self._expiry) <= self._max_speculative

    def _note(self, view: _View) -> None:
        if view.in_step:
            self._lagging.pop(view.worker, None)
        else:
            self._lagging[view.worker] = view

    def _ask(self, now: float, view: _View) -> bool:
        if view.in_step:
            return False
        if view.asked_at is not None and now - view.asked_at < self._snapshot_retry_s:
            return False
        view.asked_at = now
        return True

    def _workers(self, mask: int) -> Iterator[NodeId]:
        while mask:
            lowest = mask & -mask
            view = self._slots[lowest.bit_length() - 1]
            assert view is not None
            yield view.worker
            mask ^= lowest

    def _store(self, view: _View, hashes: Iterable[bytes]) -> None:
        bit = 1 << view.slot
        for name in hashes:
            view.real.add(name)
            view.speculative.pop(name, None)
            self._masks[name] = self._masks.get(name, 0) | bit

    def _discard(self, view: _View, hashes: Iterable[bytes]) -> None:
        for name in hashes:
            if name in view.real:
                view.real.remove(name)
                self._clear(view, name)

    def _replace(self, view: _View, hashes: Sequence[bytes]) -> None:
        self._discard(view, view.real.difference(hashes))
        self._store(view, hashes)

    def _restart(self, view: _View, epoch: int) -> None:
        self._discard(view, tuple(view.real))
        for name in view.speculative:
            self._clear(view, name)
        view.speculative.clear()
        view.epoch, view.seq, view.seen, view.asked_at = epoch, None, -1, None

    def _clear(self, view: _View, name: bytes) -> None:
        left = self._masks[name] & ~(1 << view.slot)
        if left:
            self._masks[name] = left
        else:
            del self._masks[name]

    def _expire(self, now: float) -> None:
        while self._expiry and self._expiry[0][0] <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        until, view, name = self._expiry.popleft()
        # A later speculation on the same block has its own entry; a real block left the dict.
        if view.speculative.get(name) == until:
            del view.speculative[name]
            self._clear(view, name)
