"""How blocks below the device are used: noted once for a run of blocks, and applied to each of them
when it is looked at.

Life of a run: a request uses blocks that are there, one after the other in its prefix: they become
a run -> used as one by the requests that go on from there -> divided where another one parts from
it -> gone with its last block. A turn of a session adds one run, and uses those before it.

Recency is numbered so that blocks need not be written to: a use of a prefix takes as many numbers
as there are blocks, and each has what is left of them behind it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvrelay.engine.kv.block_hash import group_hash
from kvrelay.engine.kv.tier import Retention

MAX_PLACED = 1024  # blocks whose runs are looked for in a use


@dataclass(slots=True, eq=False)
class Run:
    """Blocks of a prefix that have been used together, since they are a run.

    Invariant: `members` are those that are below the device or on their way there; `missing` are
    others, of layers that read all tokens. `fresh` and `again` are members."""

    names: list[bytes]  # the first group's, row by row
    first: int  # row in the prefix
    top: int = 0  # recency of the prefix's first block
    last_used: float = 0.0
    expires_at: float = 0.0
    to_disk: bool = False
    is_approximate: bool = False
    is_low: bool = True
    num_uses: int = 0
    indexed_until: float = 0.0  # no record in an index ends before; 0: not looked at
    members: dict[bytes, Usage] = field(default_factory=dict)
    missing: dict[bytes, int] = field(default_factory=dict)  # their entries in the prefix
    fresh: dict[Usage, None] = field(default_factory=dict)  # no second request has used these
    again: dict[Usage, None] = field(default_factory=dict)  # tiers lack what they had of these
    late: dict[bytes, int] = field(default_factory=dict)  # no members yet: entries in the prefix

    @property
    def end(self) -> int:
        return self.first + len(self.names)

    def use(self, now: float, top: int, retention: Retention) -> None:
        self.top = top
        self.last_used = max(self.last_used, now)
        self.expires_at = max(self.expires_at, now + retention.keep_s)
        self.to_disk |= retention.to_disk
        self.is_approximate |= retention.is_approximate
        self.is_low &= retention.is_low
        self.num_uses += 1

    def add(self, usage: Usage, index: int) -> None:
        """`usage`, of entry `index` of the prefix, has had the uses of this run so far."""
        usage.run, usage.index, usage.uses_seen = self, index, self.num_uses
        self.members[usage.block_hash] = usage
        self.missing.pop(usage.block_hash, None)
        self.indexed_until = 0.0
        if not usage.is_reused:
            self.fresh[usage] = None


@dataclass(slots=True, eq=False)
class Usage:
    """How one block is used; shared by all tiers that hold it. What its run has been used since is
    in here after `settled`.

    Invariant: no two blocks have the same `recency`; no number here ever shrinks."""

    block_hash: bytes
    recency: int  # grows from use to use; within one, the beginning of the sequence has more
    last_used: float
    expires_at: float
    to_disk: bool
    num_uses: int = 0  # times that a request began or ended with it here
    parked: bool = False  # it should be on disk soon
    is_approximate: bool = False  # it may be kept in fewer bits
    is_low: bool = False  # only requests of low classes of service have used it
    run: Run | None = None
    index: int = 0  # entry of the prefix
    uses_seen: int = 0  # how many of the run's uses are in here

    @property
    def is_reused(self) -> bool:
        """By a second request: the end of the one that made it was the first use."""
        return self.num_uses > 1

    def settled(self) -> Usage:
        run = self.run
        if run is not None and run.num_uses != self.uses_seen:
            self.recency = max(self.recency, run.top - self.index)
            self.last_used = max(self.last_used, run.last_used)
            self.expires_at = max(self.expires_at, run.expires_at)
            self.to_disk |= run.to_disk
            self.is_approximate |= run.is_approximate
            self.is_low &= run.is_low
            self.num_uses += run.num_uses - self.uses_seen
            self.uses_seen = run.num_uses
            self.parked = False
        return self


class Runs:
    """Owned by `TierBlocks`. Invariant: each run is here by its first name, and has a member; no
    block is in two. A name says what is before it: where two prefixes have one alike, they are
    alike up to there."""

    def __init__(self, num_groups: int, offered: Sequence[int]) -> None:
        """`offered`: groups whose blocks are wanted whenever the device has them."""
        self._by_first: dict[bytes, Run] = {}
        self._count = num_groups
        self._offered = frozenset(offered)
        self._has_windows = len(self._offered) < num_groups
        self._by_row: dict[bytes, Run] = {}  # with windows, by each of its names
        self._came: dict[bytes, None] = {}  # since, with windows: they may belong to a run

    def keep(self, run: Run) -> None:
        """It has all its rows now."""
        if run.members:
            self._by_first[run.names[0]] = run
            if self._has_windows and self._by_row.get(run.names[-1]) is not run:
                self._by_row.update(dict.fromkeys(run.names, run))

    def come(self, usage: Usage) -> None:
        """It is below the device from now on, in no run. Those without a window are `missing`
        where a run has their row; the others are looked for, once each."""
        if self._has_windows and self._by_row:
            self._came[usage.block_hash] = None

    def place_late(self) -> None:
        """Find the runs of what has come, but for so much that it may wait for a later use."""
        for name in [*islice(self._came, MAX_PLACED)]:
            del self._came[name]
            for group in range(self._count):
                first = group_hash(name, group)  # changes a name back, too
                if (run := self._by_row.get(first)) is not None:
                    row = run.first + run.names.index(first)
                    run.late[name] = row * self._count + group
                    break

    def find(self, names: Sequence[bytes], row: int, end: int) -> Run | None:
        """The run that begins with this row, up to where a prefix of these names and `end` rows
        parts from it: it is divided there."""
        run = self._by_first.get(names[row * self._count])
        if run is None:
            return None

        def differs(at: int) -> bool:
            return run.names[at] != names[(row + at) * self._count]

        num_alike = min(len(run.names), end - row)
        if differs(num_alike - 1):
            num_alike = 1 + bisect_left(range(1, num_alike - 1), True, key=differs)
        if num_alike < len(run.names):
            self._divide(run, num_alike)
        return run if run.members else None

    def lose(self, usage: Usage) -> None:
        """It is nowhere below the device any more."""
        run = usage.run
        if run is None:
            self._came.pop(usage.block_hash, None)
            return
        usage.run = None
        del run.members[usage.block_hash]
        run.fresh.pop(usage, None)
        run.again.pop(usage, None)
        if usage.index % self._count in self._offered:
            run.missing[usage.block_hash] = usage.index
        if not run.members:
            self._drop(run)

    def check_integrity(self, usages: dict[bytes, Usage]) -> None:
        """Assert the invariants. Cost: O(number of blocks)."""
        for name, run in self._by_first.items():
            assert run.names[0] == name
            assert run.members
            assert not run.members.keys() & run.missing.keys()
            for block_hash, usage in run.members.items():
                assert usage.run is run
                assert usages[block_hash] is usage
                assert run.first <= usage.index // self._count < run.end
            for usage in (*run.fresh, *run.again):
                assert usage.block_hash in run.members
            if self._has_windows:
                assert all(self._by_row[name] is run for name in run.names)
            assert set(run.fresh) == {u for u in run.members.values() if not u.settled().is_reused}

    def _divide(self, run: Run, num_rows: int) -> None:
        """Its first rows stay in it, the others become a run of their own."""
        tail = Run(run.names[num_rows:], run.first + num_rows, run.top)
        tail.last_used, tail.expires_at, tail.num_uses = run.last_used, run.expires_at, run.num_uses
        tail.to_disk, tail.is_approximate, tail.is_low = run.to_disk, run.is_approximate, run.is_low
        tail.indexed_until = run.indexed_until
        del run.names[num_rows:]
        at = tail.first * self._count
        for usage in [usage for usage in run.members.values() if usage.index >= at]:
            tail.members[usage.block_hash] = run.members.pop(usage.block_hash)
            usage.run = tail
            for of, others in ((run.fresh, tail.fresh), (run.again, tail.again)):
                if usage in of:
                    others[usage] = of.pop(usage)
        for name in [name for name, index in run.missing.items() if index >= at]:
            tail.missing[name] = run.missing.pop(name)
        for name in [name for name, index in run.late.items() if index >= at]:
            tail.late[name] = run.late.pop(name)
        self.keep(tail)
        if not tail.members:
            self._forget_rows(tail)
        if not run.members:
            self._drop(run)

    def _drop(self, run: Run) -> None:
        """Its last block has gone."""
        if self._by_first.pop(run.names[0], None) is not None:
            self._forget_rows(run)

    def _forget_rows(self, run: Run) -> None:
        for name in run.names if self._has_windows else ():
            self._by_row.pop(name, None)
