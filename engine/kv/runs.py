"""Runs of cached blocks: those that follow each other in a prefix, and are used and freed as one.

Life of a run: a sequence frees sealed blocks of its table -> they are a run, with those that it
freed before them -> used by the sequences that hit all of it -> divided where one hits a part ->
evicted from its end. So a turn of a session costs a few runs and its new blocks, whatever came
before them. Runs are short enough that to divide one costs little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

LONGEST = 1024  # blocks of a run


class Place:
    """Runs, in the order of their prefix, that nothing uses: they are one entry of the order of
    eviction, and the last block goes first."""

    __slots__ = ("runs",)

    def __init__(self, run: Run) -> None:
        self.runs = [run]

    @property
    def num_blocks(self) -> int:
        return sum(len(run.blocks) for run in self.runs)

    def eviction_order(self) -> list[int]:
        return [block for run in reversed(self.runs) for block in reversed(run.blocks)]


class Run:
    """Invariant: each block is sealed, and its name says all that is before it; no block has
    references but for the run's users, and none is of a low class."""

    __slots__ = ("blocks", "num_users", "place")

    def __init__(self, blocks: list[int], num_users: int = 0) -> None:
        self.blocks = blocks
        self.num_users = num_users
        self.place: Place | None = None  # only without users


class Runs:
    """Which run each block is in. Owned by a block pool."""

    def __init__(self, num_blocks: int, longest: int = LONGEST) -> None:
        self.longest = longest
        self._of: list[Run | None] = [None] * num_blocks

    def of(self, block: int) -> Run | None:
        return self._of[block]

    def pieces(self, blocks: Sequence[int]) -> Iterator[Run | Sequence[int]]:
        """`blocks`, in order, as whole runs and as blocks that are in none: runs are divided for
        that. Where `blocks` have both ends of a run they have all of it, as they are of a prefix;
        so only the ends are looked at."""
        at, total, of = 0, len(blocks), self._of
        while at < total:
            run = of[blocks[at]]
            if run is None:
                first = at
                while at < total and of[blocks[at]] is None:
                    at += 1
                yield blocks[first:at]
                continue
            if run.blocks[0] != blocks[at]:
                _, run = self.divide(run, run.blocks.index(blocks[at]))
            end = at + len(run.blocks)
            if end > total or blocks[end - 1] != run.blocks[-1]:
                both = zip(run.blocks, blocks[at:end], strict=False)
                alike = next((n for n, (a, b) in enumerate(both) if a != b), total - at)
                run, _ = self.divide(run, alike)
                end = at + alike
            yield run
            at = end

    def rest(self, block: int) -> list[int]:
        """The blocks of its run from there on."""
        run = self._of[block]
        if run is None:
            return [block]
        return run.blocks if run.blocks[0] == block else run.blocks[run.blocks.index(block) :]

    def make(self, blocks: Sequence[int]) -> list[Run]:
        """Runs of blocks that are in none, which have one user."""
        size = self.longest
        runs = [Run([*blocks[at : at + size]], 1) for at in range(0, len(blocks), size)]
        for run in runs:
            self._enter(run, run.blocks)
        return runs

    def append(self, run: Run, blocks: Sequence[int]) -> bool:
        """Whether there is room in `run` for these, which follow; then they are in it."""
        if len(run.blocks) + len(blocks) > self.longest:
            return False
        run.blocks += blocks
        self._enter(run, blocks)
        return True

    def divide(self, run: Run, at: int) -> tuple[Run, Run]:
        """What it has before and from block `at` on. The shorter of both is a new run."""
        is_first = at <= len(run.blocks) // 2
        part = slice(0, at) if is_first else slice(at, None)
        other = Run(run.blocks[part], run.num_users)
        del run.blocks[part]
        self._enter(other, other.blocks)
        if (place := run.place) is not None:
            other.place = place
            place.runs.insert(place.runs.index(run) + (not is_first), other)
        return (other, run) if is_first else (run, other)

    def leave(self, run: Run, blocks: Sequence[int]) -> None:
        """These are in no run any more: all that it has, or its last ones."""
        del run.blocks[len(run.blocks) - len(blocks) :]
        for block in blocks:
            self._of[block] = None

    def alone(self, block: int) -> Run | None:
        """The run of `block`, which has no other one from now on; None: it is in no run."""
        run = self._of[block]
        if run is not None and (at := run.blocks.index(block)):
            _, run = self.divide(run, at)
        if run is not None and len(run.blocks) > 1:
            run, _ = self.divide(run, 1)
        return run

    def all(self) -> set[Run]:
        """Every run. Cost: O(number of blocks)."""
        return {run for run in self._of if run is not None}

    def check_integrity(self) -> None:
        """Assert the class invariant. Cost: O(number of blocks)."""
        for run in self.all():
            assert 0 < len(run.blocks) <= self.longest
            assert all(self._of[block] is run for block in run.blocks)
            assert run.place is None or (run in run.place.runs and not run.num_users)
        assert sum(len(run.blocks) for run in self.all()) == sum(r is not None for r in self._of)

    def _enter(self, run: Run, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._of[block] = run
