"""Which worker holds which sealed block in which tier, as far as one router knows.

Life of a view of one worker: added with an epoch and empty; a snapshot fills it; events keep it up
to date; a gap in their sequence freezes it until the next snapshot; a new epoch empties it; removal
forgets it. Between the routing of a prompt and the worker's own events, speculative entries stand
in for the blocks that are about to come into its device memory.

A lookup asks four things of each worker: how far its device holds the prefix, how far its memory,
how far any of its tiers, and how far it has said so itself. A block's answers are one integer with
four bits a worker, so the chain is walked once for all of them together, and a block evicted from
the middle of a chain ends the prefix of its worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.kv_events import KVEvents, KVSnapshot
from engine.node import NodeId
from engine.tier import Tier, TierNames

# What is known of one block at one worker.
_DEVICE, _HOST, _DISK, _EXPECTED = 1, 2, 4, 8
_SAID = _DEVICE | _HOST | _DISK
_IN_DEVICE = _DEVICE | _EXPECTED
_FACT = {Tier.DEVICE: _DEVICE, Tier.HOST: _HOST, Tier.DISK: _DISK}

_NUM_RUNS = 4  # bits of one worker in a mask: the four things that a lookup asks


def _answers(facts: int) -> int:
    """Bits of the runs that a block with these facts is part of."""
    device = bool(facts & _IN_DEVICE)
    memory = device or bool(facts & _HOST)
    return device | memory << 1 | bool(facts) << 2 | bool(facts & _SAID) << 3


_ANSWERS = tuple(_answers(facts) for facts in range(16))


@dataclass(frozen=True, slots=True)
class Held:
    """How much of a prefix a worker holds, as three runs one after the other, in blocks (or, after
    `times`, in tokens). A block that is in several tiers counts for the fastest.

    `said` is how much of it, from the first block on, the worker itself has said it holds, in
    whatever tier: the rest is only on its way there, and cannot be lent."""

    device: int = 0
    host: int = 0  # each of them in device or host memory
    disk: int = 0  # each in any tier
    said: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk

    def times(self, factor: int) -> Held:
        """The same in another unit."""
        return Held(
            self.device * factor, self.host * factor, self.disk * factor, self.said * factor
        )


@dataclass(slots=True, eq=False)
class _View:
    """What is known of one worker. In step with it exactly when `seq == seen`."""

    worker: NodeId
    slot: int  # place of this worker's bits in the masks
    epoch: int
    seq: int | None = None  # last event (or snapshot) applied; None: nothing yet
    seen: int = -1  # highest event heard of, applied or not
    asked_at: float | None = None
    facts: dict[bytes, int] = field(default_factory=dict)  # hash -> what is known of it; never 0
    expected: dict[bytes, float] = field(default_factory=dict)  # speculative hash -> its end
    num_device: int = 0  # of `facts`, those in device memory or expected there

    @property
    def in_step(self) -> bool:
        return self.seq is not None and self.seq >= self.seen


class PrefixIndex:
    """Owned by a router. Invariant: the bits of slot s in `_masks[h]` are the answers to the facts
    that the view in slot s has of h; a block is expected exactly when it has an end in `expected`,
    and then it is not said to be in device memory; no mask is 0."""

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
                self._replace(view, news)
                view.seq = news.seq
        elif view.seq is not None and news.seq == view.seq + 1:
            for change in (TierNames(Tier.DEVICE, news.stored, news.removed), *news.tiers):
                self._store(view, change.stored, _FACT[change.tier])
                self._discard(view, change.removed, _FACT[change.tier])
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
        """Count `hashes` as in device memory of `worker` until it says so itself, or the time is
        over."""
        self._expire(now)
        view = self._views.get(worker)
        if view is None:
            return
        until = now + self._speculative_s
        for name in hashes:
            if not view.facts.get(name, 0) & _DEVICE:
                view.expected[name] = until
                self._change(view, name, add=_EXPECTED)
                self._expiry.append((until, view, name))
        while len(self._expiry) > self._max_speculative:
            self._drop_oldest()

    def lookup(self, now: float, hashes: Sequence[bytes]) -> dict[NodeId, Held]:
        """How much of the prefix each worker holds that holds `hashes[0]`.
        O(len of the longest match + workers)."""
        self._expire(now)
        ends: dict[int, list[int]] = {}  # slot -> length of each run
        runs = self._masks.get(hashes[0], 0) if hashes else 0
        for depth in range(1, len(hashes)):
            if not runs:
                break
            still = runs & self._masks.get(hashes[depth], 0)
            if still != runs:
                _end(ends, runs ^ still, depth)
                runs = still
        _end(ends, runs, len(hashes))
        found: dict[NodeId, Held] = {}
        for slot, (device, memory, anywhere, said) in ends.items():
            view = self._slots[slot]
            assert view is not None
            found[view.worker] = Held(device, memory - device, anywhere - memory, said)
        return found

    def names(self, worker: NodeId, tier: Tier = Tier.DEVICE) -> frozenset[bytes]:
        """The blocks that `worker` has said it holds in `tier`."""
        view = self._views.get(worker)
        facts = {} if view is None else view.facts
        return frozenset(name for name, known in facts.items() if known & _FACT[tier])

    def holdings(self, hashes: Iterable[bytes]) -> dict[NodeId, dict[Tier, int]]:
        """How many of `hashes` each worker has said it holds, by tier; no zeros."""
        found: dict[NodeId, dict[Tier, int]] = {}
        for name in hashes:
            mask = self._masks.get(name, 0)
            while mask:
                slot = ((mask & -mask).bit_length() - 1) // _NUM_RUNS
                mask &= ~((1 << _NUM_RUNS) - 1 << _NUM_RUNS * slot)
                view = self._slots[slot]
                assert view is not None
                for tier, fact in _FACT.items():
                    if view.facts[name] & fact:
                        counts = found.setdefault(view.worker, {})
                        counts[tier] = counts.get(tier, 0) + 1
        return found

    def num_blocks(self, worker: NodeId) -> int:
        """Blocks counted as in device memory of `worker`, speculative ones too."""
        view = self._views.get(worker)
        return 0 if view is None else view.num_device

    def check_integrity(self) -> None:
        """Assert the class invariant. O(everything): for tests and the simulator."""
        masks: dict[bytes, int] = {}
        for view in self._views.values():
            assert self._slots[view.slot] is view
            assert 0 not in view.facts.values()
            expected = {name for name, facts in view.facts.items() if facts & _EXPECTED}
            assert expected == view.expected.keys()
            assert not any(view.facts[name] & _DEVICE for name in expected)
            assert view.num_device == sum(bool(f & _IN_DEVICE) for f in view.facts.values())
            for name, facts in view.facts.items():
                answers = _ANSWERS[facts] << _NUM_RUNS * view.slot
                masks[name] = masks.get(name, 0) | answers
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

    def _store(self, view: _View, hashes: Iterable[bytes], fact: int) -> None:
        for name in hashes:
            if fact == _DEVICE and view.expected.pop(name, None) is not None:
                self._change(view, name, add=_DEVICE, drop=_EXPECTED)
            else:
                self._change(view, name, add=fact)

    def _discard(self, view: _View, hashes: Iterable[bytes], fact: int) -> None:
        for name in hashes:
            self._change(view, name, drop=fact)

    def _replace(self, view: _View, snapshot: KVSnapshot) -> None:
        tiers = (TierNames(Tier.DEVICE, snapshot.hashes), *snapshot.tiers)
        for tier, fact in _FACT.items():
            held = {name for told in tiers if told.tier is tier for name in told.stored}
            gone = [n for n, facts in view.facts.items() if facts & fact and n not in held]
            self._discard(view, gone, fact)
            self._store(view, held, fact)

    def _restart(self, view: _View, epoch: int) -> None:
        for name in tuple(view.facts):
            self._change(view, name, drop=_SAID | _EXPECTED)
        view.expected.clear()
        view.epoch, view.seq, view.seen, view.asked_at = epoch, None, -1, None

    def _change(self, view: _View, name: bytes, add: int = 0, drop: int = 0) -> None:
        """The one place where facts change, and with them the mask."""
        old = view.facts.get(name, 0)
        new = (old | add) & ~drop
        if new == old:
            return
        if new:
            view.facts[name] = new
        else:
            del view.facts[name]
        view.num_device += bool(new & _IN_DEVICE) - bool(old & _IN_DEVICE)
        turned = (_ANSWERS[old] ^ _ANSWERS[new]) << _NUM_RUNS * view.slot
        if turned:
            mask = self._masks.get(name, 0) ^ turned
            if mask:
                self._masks[name] = mask
            else:
                del self._masks[name]

    def _expire(self, now: float) -> None:
        while self._expiry and self._expiry[0][0] <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        until, view, name = self._expiry.popleft()
        # A later speculation on the same block has its own entry; a real block left the dict.
        if view.expected.get(name) == until:
            del view.expected[name]
            self._change(view, name, drop=_EXPECTED)


def _end(ends: dict[int, list[int]], runs: int, length: int) -> None:
    """Note `length` for each of the runs."""
    while runs:
        lowest = runs & -runs
        slot, run = divmod(lowest.bit_length() - 1, _NUM_RUNS)
        ends.setdefault(slot, [0] * _NUM_RUNS)[run] = length
        runs ^= lowest
