"""Reads blocks that workers of this machine had in host memory when they died.

Life of an arena here: its worker has died, so that its lock is free -> attached, its blocks are
announced to the node: first those whose names the node has asked for, from the beginning of a
prefix on, then all others, slowly -> read, by copies that the calling thread makes -> left: another
worker wants it, or has removed it.

Where a worker has several ranks, each reads its own parts of arenas. Rank 0 looks for them and says
to which slots they are attached; the others attach the same as soon as theirs are free.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kvrelay.engine.kv.tier import DiskRecord, Tier
from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.agent import (
    AgentError,
    AttachStore,
    CopyBlocks,
    CopyDone,
    DoneAtOnce,
    FindStored,
    StoreFound,
    StoreGone,
)
from kvrelay.kvtransfer.movers.opening import Storage, TierSettings
from kvrelay.kvtransfer.movers.pool import write_blocks
from kvrelay.kvtransfer.store.arena import (
    LeftArena,
    arena_root,
    arenas,
    is_wanted,
    remove_arena,
)
from kvrelay.kvtransfer.store.folder import LOCK, FolderLock

logger = logging.getLogger(__name__)

LOOK_S = 0.02
"""Between two looks for a worker that has died. What it was doing is here within milliseconds."""
LIST_S = 1.0  # between two looks for arenas that are new
MAX_FOUND = 256  # records that are announced at a time: a node has other messages between
PACE_S = 0.002  # between two of those that were asked for; of others, LOOK_S
ASKED_S = 1.0  # names are looked for in arenas that come within this time
MAX_ASKED = 64  # streams that wait for theirs


@dataclass(slots=True, eq=False)
class Attached:
    """An arena, whose slots are `[first, first + num_slots)` of the tier."""

    arena: LeftArena
    first: int
    num_slots: int
    until: float  # by the clock of the agent: what was announced of it has expired by then
    announced: bool = False  # some of its records
    has_more: bool = True  # records to announce
    asked: deque[list[int]] = field(default_factory=deque)  # slots, to be announced first

    @property
    def end(self) -> int:
        return self.first + self.num_slots

    def ask(self, names: tuple[bytes, ...]) -> None:
        found = self.arena.listed.find(names)
        self.asked += (found[at : at + MAX_FOUND] for at in range(0, len(found), MAX_FOUND))


class LeftMover(DoneAtOnce):
    """Reads from arenas of `folder` into a worker's own memory, and is the Store that finds them.
    Owned by a thread of the worker.

    Invariant: a copy is over when `copy` returns, so an arena can be left at any other time.
    """

    def __init__(
        self,
        name: NodeId,
        folder: Path,
        own: Path | None,
        pools: Mapping[Tier, Any],
        clock: Callable[[], float] = time.monotonic,
        *,
        follows: bool = False,
    ) -> None:
        """`folder`: of arenas with blocks of this worker's form; `own`: its own one there;
        `pools`: its memory, `[num_blocks, ...]` each, on the CPU or a GPU. `follows`: it looks for
        nothing but what rank 0 has attached."""
        self._name = name
        self._folder = folder
        self._own = own
        self._pools = dict(pools)
        self._clock = clock
        self._attached: list[Attached] = []
        self._watched: dict[Path, FolderLock] = {}  # not held, as long as a worker has it
        self._list_at = float("-inf")
        self._follows = follows
        self._names: deque[tuple[float, tuple[bytes, ...]]] = deque()  # asked for, until when
        self._announce_at = float("-inf")
        self._asked: dict[Path, AttachStore] = {}  # those of `_watched`, where it follows

    def update(self, change: AttachStore | FindStored) -> None:
        if isinstance(change, FindStored):
            self._find(change.names)
        else:
            self._attach_to(change)

    def check(self, busy: bool) -> list[StoreFound | StoreGone]:
        """What has changed since the last call."""
        now = self._clock()
        changes: list[StoreFound | StoreGone] = []
        for each in list(self._attached):
            has_expired = now > each.until and not each.has_more
            if not (has_expired or each.arena.is_wanted):
                continue
            self._attached.remove(each)
            each.arena.detach()
            if has_expired:
                remove_arena(each.arena.folder)
            if each.announced:
                changes.append(StoreGone(Tier.LEFT, each.first, each.num_slots))
        self._list(now)
        for path, lock in list(self._watched.items()):
            if not lock.retry(fcntl.LOCK_SH):
                continue
            asked = self._asked.pop(path, None)
            del self._watched[path]
            if is_wanted(path):
                lock.release()
            else:
                self._attach(now, path, lock, asked)
        return [*changes, *self._announce(now)]

    def _find(self, names: tuple[bytes, ...]) -> None:
        """Announce these first, of what is attached, and of what soon will be."""
        self._names.append((self._clock() + ASKED_S, names))
        if len(self._names) > MAX_ASKED:
            self._names.popleft()
        for each in self._attached:
            each.ask(names)

    def _attach_to(self, asked: AttachStore) -> None:
        """As soon as it can be read; what was attached to these slots is left."""
        first, end = asked.first_slot, asked.first_slot + asked.num_slots
        path = self._folder / asked.place
        for each in list(self._attached):
            if each.arena.folder == path or (each.first < end and first < each.end):
                self._attached.remove(each)
                each.arena.detach()
        if (lock := FolderLock.look_at(path / LOCK)) is not None:
            if path in self._watched:
                self._watched[path].release()
            self._watched[path], self._asked[path] = lock, asked

    def _list(self, now: float) -> None:
        """Keep the files of the locks open that may come free."""
        if now < self._list_at + LIST_S:
            return
        self._list_at = now
        for path in [path for path, lock in self._watched.items() if not lock.is_in_place]:
            self._watched.pop(path).release()
            self._asked.pop(path, None)
        if self._follows:
            return
        known = {self._own, *self._watched, *(each.arena.folder for each in self._attached)}
        for path in arenas(self._folder):
            if path not in known and (lock := FolderLock.look_at(path / LOCK)) is not None:
                self._watched[path] = lock

    def _attach(self, now: float, path: Path, lock: FolderLock, asked: AttachStore | None) -> None:
        try:
            arena = LeftArena(path, lock)
        except (OSError, ValueError, KeyError) as error:  # it is being made, or removed
            logger.info("%s: nothing to read in %s: %s", self._name, path, error)
            lock.release()
            return
        if asked is None:
            each = Attached(arena, self._room_for(arena.num_slots), arena.num_slots, now)
        else:
            num_slots = min(asked.num_slots, arena.num_slots)
            each = Attached(arena, asked.first_slot, num_slots, now)
        for until, names in self._names:
            if now < until:
                each.ask(names)
        self._attached.append(each)
        self._attached.sort(key=lambda each: each.first)

    @property
    def wait_s(self) -> float:
        """How long the next look may wait."""
        if any(each.asked for each in self._attached):
            return PACE_S
        return LOOK_S if self._watched or self._attached else LIST_S

    def _announce(self, now: float) -> list[StoreFound | StoreGone]:
        """The next records, of one arena after the other."""
        while self._names and self._names[0][0] <= now:
            self._names.popleft()
        if now < self._announce_at:
            return []
        for each in self._attached:
            if each.asked:
                self._announce_at = now + PACE_S
                records = each.arena.listed.records_of(each.asked.popleft())
                found = self._found(now, each, records)
                return [replace(found, has_more=bool(each.asked), was_asked_for=True)]
        for each in self._attached:
            if not each.has_more:
                continue
            records = [*islice(each.arena.records, MAX_FOUND)]
            each.has_more = len(records) == MAX_FOUND
            if records:
                self._announce_at = now + LOOK_S
                return [self._found(now, each, records)]
        return []

    def _found(self, now: float, each: Attached, records: list[DiskRecord]) -> StoreFound:
        each.announced = True
        each.until = max([each.until, *(now + record.keep_s for record in records)])
        moved = tuple(
            DiskRecord(each.first + r.slot, r.block_hash, r.checksum, r.keep_s) for r in records
        )
        place = Tier.LEFT, each.first, each.num_slots
        return StoreFound(*place, moved, each.arena.folder.name, was_asked_for=False)

    def _room_for(self, num_slots: int) -> int:
        """The first gap between the arenas that are attached."""
        first = 0
        for each in self._attached:
            if each.first - first >= num_slots:
                break
            first = each.end
        return first

    def copy(self, request: CopyBlocks) -> CopyDone:
        pool, src = self._pools[request.dst_tier], request.src
        for each in self._attached:
            here = [i for i, slot in enumerate(src) if each.first <= slot < each.end]
            if here:
                found = [each.arena.memory[src[i] - each.first] for i in here]
                write_blocks(pool, [request.dst[i] for i in here], found)
        if not all(any(a.first <= slot < a.end for a in self._attached) for slot in src):
            raise AgentError("the worker whose host memory this was is back")
        return CopyDone(request.transfer_id, None)

    def close(self) -> None:
        for each in self._attached:
            each.arena.detach()
        for lock in self._watched.values():
            lock.release()
        self._attached.clear()
        self._watched.clear()


def open_tier(settings: TierSettings) -> Storage:
    """Raises StoreError where the machine has no shared memory."""
    config, own = settings.config, settings.arena
    place = arena_root() / settings.cluster / settings.part / config.fingerprint.hex()
    own_folder, follows = None if own is None else own.folder, settings.rank > 0
    mover = LeftMover(config.node_id, place, own_folder, settings.memory, follows=follows)
    return Storage(mover, mover)
