"""What requests need, in a worker's memory: loaded beside the steps when it is first used, and
dropped when others need the place, what was not used for the longest first.

A step runs with what is there; a sequence whose need is not there yet comes again in the next step.
Where those in use leave no room, they take turns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from time import perf_counter

from kvrelay.engine.model.parallel.shard import Shard
from kvrelay.engine.model.terms import RowTerms
from kvrelay.engine.needs import Loaded, Need, NeedError
from kvrelay.engine.step import ScheduledSeq

IDLE_WAIT_S = 0.05  # for one that is loaded, where a step has nothing else to do
TURN_S = 0.5  # in memory, at least, before one that waits takes the place of one in use
MAX_FAILED = 1024  # remembered, so that a step need not wait for each of their requests again
MAX_PUBLISHED = 256  # the last that were used
SMOOTHING = 0.3  # share that the last time counts, in the mean of load times
RETRY_S = 10.0  # after a failure: the files may be there now

ALONE = Shard(0, 1)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    future: Future[RowTerms]
    since: float
    nbytes: float  # before it is loaded: expected
    used: int = 0  # the last step that had it
    # As `_look` has seen it:
    is_loaded: bool = False
    has_failed: bool = False

    def state(self) -> tuple[bool, bool, float]:
        """Whether it is loaded here, or has failed here, and its bytes."""
        if not self.future.done():
            return False, False, 0.0
        if self.future.exception() is not None:
            return False, True, 0.0
        return True, False, self.future.result().nbytes


class Loads:
    """Those of one runner. Called from the thread that runs steps; they are loaded in another.

    Invariant: after `choose`, what is loaded takes at most `max_bytes`."""

    def __init__(
        self,
        load: Callable[[Need], RowTerms],
        max_bytes: int,
        clock: Callable[[], float] = perf_counter,
        total: Callable[[list[float]], list[float]] = list,
        shard: Shard = ALONE,
    ) -> None:
        """load: may raise NeedError; it runs beside steps. total: adds up over the ranks, which
        call `choose` with the same sequences."""
        self._load_one, self._max_bytes, self._clock = load, max_bytes, clock
        self._total, self._shard = total, shard
        self._thread = ThreadPoolExecutor(1, "loads")
        self._entries: dict[bytes, _Entry] = {}
        self._waits: dict[bytes, float] = {}  # since when, of those that find no room
        self._failed: dict[bytes, tuple[float, str]] = {}  # until when, and why
        self._step = 0
        self.num_loads = 0
        self._load_s = 0.0

    def held(self, seqs: Sequence[ScheduledSeq]) -> Loaded | None:
        """What is reported to routers after a step of `seqs`; None: none of them needs anything."""
        if all(seq.need is None for seq in seqs):
            return None
        loaded = [(-e.used, digest) for digest, e in self._entries.items() if e.is_loaded]
        return Loaded(tuple(d for _, d in sorted(loaded)[:MAX_PUBLISHED]), self._load_s)

    def _load(self, need: Need) -> RowTerms:
        began = self._clock()
        loaded = self._load_one(need)
        took_s = self._clock() - began
        self._load_s += (SMOOTHING if self._load_s else 1.0) * (took_s - self._load_s)
        return loaded

    def choose(self, seqs: Sequence[ScheduledSeq]) -> tuple[set[int], dict[int, str]]:
        """Index of those of `seqs` whose need is not there yet; and of those whose need cannot be
        loaded, with the reason."""
        wanted: dict[Need, list[int]] = {}
        for index, seq in enumerate(seqs):
            if seq.need is not None:
                wanted.setdefault(seq.need, []).append(index)
        if not wanted:
            return set(), {}
        self._step += 1
        failed = self._look_after(wanted)
        away = self._away(wanted, failed)
        if len(away) + len(failed) == len(seqs) and away:
            futures = [entry.future for entry in self._entries.values() if not entry.is_loaded]
            wait(futures, IDLE_WAIT_S, FIRST_COMPLETED)
            failed = self._look_after(wanted)
            away = self._away(wanted, failed)
        return away, failed

    def loaded(self, seqs: Sequence[ScheduledSeq]) -> dict[bytes, RowTerms]:
        """Those of `seqs`, which `choose` has left in the step."""
        digests = {seq.need.digest for seq in seqs if seq.need is not None}
        return {digest: self._entries[digest].future.result() for digest in digests}

    def _look_after(self, wanted: dict[Need, list[int]]) -> dict[int, str]:
        """Has those loaded that are not there, as far as there is room, and drops what exceeds it.
        Returns which sequences cannot go on, and why."""
        failed: dict[int, str] = {}
        now = self._look()
        for need in wanted:
            if need.digest in self._entries:
                self._entries[need.digest].used = self._step
        for need in sorted(wanted, key=lambda each: self._waits.get(each.digest, now)):
            why = self._begin(need, now)
            if why:
                failed |= dict.fromkeys(wanted[need], why)
        while self._excess(0) > 0:
            self._drop_one(resident_since=now)
        return failed

    def _away(self, wanted: dict[Need, list[int]], failed: dict[int, str]) -> set[int]:
        here = {digest for digest, entry in self._entries.items() if entry.is_loaded}
        away = {i for a, at in wanted.items() if a.digest not in here for i in at}
        return away - failed.keys()

    def _begin(self, need: Need, now: float) -> str:
        """Has it loaded, unless it is there or there is no room; returns why it cannot be."""
        until, why = self._failed.get(need.digest, (0.0, ""))
        if now < until:
            return why
        entry = self._entries.get(need.digest)
        if entry is None:
            expected = max((each.nbytes for each in self._entries.values()), default=0.0)
            if self._has_room(need.digest, expected, now):
                self.num_loads += 1
                future = self._thread.submit(self._load, need)
                self._entries[need.digest] = _Entry(future, now, expected, self._step)
            return ""
        why = self._fault(need, entry)
        if why:
            del self._entries[need.digest]
            while len(self._failed) >= MAX_FAILED:
                del self._failed[next(iter(self._failed))]
            self._failed[need.digest] = (now + RETRY_S, why)
        return why

    def _look(self) -> float:
        """Has what all ranks have in the entries, and returns the clock of the first one: so all of
        them choose alike."""
        numbers = [0.0 if self._shard.rank else self._clock()]
        for entry in self._entries.values():
            numbers += entry.state()
        now, *counts = self._total(numbers)
        size, each = self._shard.size, iter(counts)
        for entry in self._entries.values():
            num_loaded, num_failed, num_bytes = next(each), next(each), next(each)
            entry.is_loaded, entry.has_failed = num_loaded == size, num_failed > 0
            if entry.is_loaded:
                entry.nbytes = num_bytes / size
        return now

    def _fault(self, need: Need, entry: _Entry) -> str:
        if entry.is_loaded and entry.nbytes > self._max_bytes:
            return (
                f"the {need.kind} takes {entry.nbytes:.0f} bytes, engine.{need.kind}_bytes allows"
                f" {self._max_bytes}"
            )
        if not entry.has_failed:
            return ""
        error = entry.future.exception() if entry.future.done() else None
        if error is None:
            return f"the {need.kind} cannot be loaded by another rank of this worker"
        if isinstance(error, NeedError):
            logger.warning("%s %s cannot be loaded: %s", need.kind, need.source, error)
            return f"the {need.kind} cannot be loaded: {error}"
        logger.error("%s %s cannot be loaded", need.kind, need.source, exc_info=error)
        return f"the {need.kind} cannot be loaded; the worker's log says why"

    def _excess(self, more: float) -> float:
        return sum(entry.nbytes for entry in self._entries.values()) + more - self._max_bytes

    def _has_room(self, digest: bytes, size: float, now: float) -> bool:
        """Whether it may be loaded now. Those that this step does not have make room; where all are
        in use, the one that came first does so, once it has had its turn."""
        while self._entries and self._excess(size) > 0:
            if not self._drop_one(resident_since=now - TURN_S):
                self._waits.setdefault(digest, now)
                return False
        self._waits.pop(digest, None)
        return True

    def _drop_one(self, resident_since: float) -> bool:
        """One that this step does not have, or one that was asked for by then; False: there is
        none."""
        loaded = {digest: entry for digest, entry in self._entries.items() if entry.is_loaded}
        idle = {d: entry.used for d, entry in loaded.items() if entry.used != self._step}
        first = {d: entry.since for d, entry in loaded.items() if entry.since <= resident_since}
        found = idle or first
        if found:
            del self._entries[min(found, key=lambda digest: found[digest])]
        return bool(found)
