"""KV of vLLM in the worker's own memory: what a request computes is copied there, and what is there
already is not computed.

Life of a table: begun with its request; if some of its blocks are full, these are compared with
their checksums first, and vLLM gets the request then -> as vLLM schedules it, it counts on the
blocks before the first that does not fit -> the step that is scheduled carries to the ranks which
blocks to write to vLLM's memory before it and which to copy out after it (`Step`; what ranks do:
`ranks`) -> when all have, the copying thread here takes checksums of what came, and reports it ->
ended with the request, when nothing of it is on the way any more.

A block of the worker's memory has the KV of all ranks, so whoever takes checksums of it, reads it
or keeps it knows nothing of them.

A table has a row of one entry for each group of layers (`engine.kv.window`), and -1 where it keeps
no block. The node gives a block of a table to nobody else before it has heard of the table's end,
but for those that windows have left when the rows after them were reported: nothing loads these
any more. vLLM keeps no block that its windows have left either, so a step whose rows have no
blocks here yet waits for them, and where vLLM has kept more of a prompt than is here, the node is
asked for a table that goes on there.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrelay.decode_worker.vllm.groups import NULL_BLOCK
from kvrelay.decode_worker.vllm.memory import LayerForm
from kvrelay.decode_worker.vllm.messages import Begin, Copied, Damaged, EngineLost, Extend, Found
from kvrelay.decode_worker.vllm.plan import FLOATS, opaque_spec
from kvrelay.decode_worker.vllm.ranks import SETTLE_S, Blocks, Step
from kvrelay.engine.kv.block_table import NO_BLOCK
from kvrelay.engine.kv.spec import KVSpec
from kvrelay.engine.kv.window import Windows
from kvrelay.kvtransfer.layout import HeadShare

Report = Callable[[Copied | Damaged | Found | EngineLost], None]


@dataclass(slots=True)
class _Table:
    key: str
    blocks: list[int]  # in the worker's memory, by entry
    checksums: Sequence[int]  # for each entry, from the first, that had KV when it began
    num_tokens: int
    saves_tail: bool
    num_good: int  # rows, from the first, of which groups that keep all may be loaded
    num_saved: int  # rows, from the first, that have KV or are on the way
    num_reported: int  # rows, from the first, that the node knows to have KV
    num_covered: int  # rows, from the first, that have their blocks
    bad: set[int] = field(default_factory=set)  # entries that are damaged
    num_pending: int = 0  # steps and comparisons that touch it, and have not ended
    checked: range = range(0)  # rows that vLLM counts on
    is_asked: bool = False  # where it goes on
    has_ended: bool = False  # nothing more is saved


class Move(NamedTuple):
    """A request in a step: its blocks at vLLM for each group of layers, which rows of them are
    filled from its table before the step, and how many of its tokens have KV after it."""

    key: str
    block_ids: Callable[[], Sequence[Sequence[int]]]  # vLLM lists them anew: most steps need none
    loads: range
    num_computed: int


class _Part(NamedTuple):
    """Rows of a table that a step fills, with those of their entries that are saved."""

    table: _Table
    new: range
    entries: Sequence[int]


class _Copying(NamedTuple):
    """A step whose copies are not all done."""

    tables: list[_Table]  # one may be in it twice
    parts: list[_Part]
    ranks: set[int]  # that have not said so


@dataclass(slots=True)
class Copies:
    """Owned by a worker's vLLM thread. Invariant: a block of vLLM that is loaded has the bytes that
    were saved: they were compared before vLLM gave memory to its request, so damage never reaches
    vLLM's prefix cache. What is reported as `Copied` was written before by all ranks, and only
    once."""

    pool: NDArray[np.uint8] | None = None  # [num_blocks, bytes_per_block]; None: nothing is copied
    tables: dict[str, _Table] = field(default_factory=dict)
    report: Report = lambda said: None  # from any thread
    layers: Sequence[LayerForm] = ()  # all ranks'; (): there are no blocks of layers
    windows: Windows = field(
        default_factory=lambda: Windows.of(1)
    )  # which vLLM's groups of layers have
    is_understood: bool = True  # what these groups keep
    _num_ranks: int = 1
    _num_steps: int = 0
    _steps: dict[int, _Copying] = field(default_factory=dict)  # by number
    _checksums: Callable[[Sequence[int]], list[int]] = lambda blocks: []
    _jobs: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    _settled: threading.Condition = field(default_factory=threading.Condition)
    _failed: str = ""

    def spec(self, num_heads: int) -> KVSpec | None:
        """The shape of a block, in the terms of ours: `num_heads` heads where all layers have
        these, else so many bytes, whatever is in them. None: there are no blocks of layers."""
        if not (self.layers and self.is_understood):
            return None
        block_size, sizes = self.windows.block_size, tuple(w.size for w in self.windows.groups)
        return replace(self._block_spec(block_size, num_heads), windows=sizes)

    def _block_spec(self, block_size: int, num_heads: int) -> KVSpec:
        sizes = {each.num_numbers for each in self.layers}
        dtypes = {each.dtype for each in self.layers}
        if len(sizes) == len(dtypes) == 1 and dtypes <= FLOATS:
            head_dim, rest = divmod(min(sizes), 2 * num_heads * block_size)
            if not rest:
                return KVSpec(len(self.layers), num_heads, head_dim, block_size, dtypes.pop())
        return opaque_spec(sum(each.num_bytes for each in self.layers), block_size)

    def use(self, pool: NDArray[np.uint8], share: HeadShare, num_ranks: int = 1) -> None:
        """The worker's memory, and how checksums of its blocks are taken. The copying thread runs
        from now on."""
        from kvrelay.kvtransfer.checksum import checksum_blocks  # not where there are no copies

        self.pool, self._checksums = pool, partial(checksum_blocks, pool, share=share)
        self._num_ranks = num_ranks
        threading.Thread(target=self._run, name="copies", daemon=True).start()

    def close(self) -> None:
        self._jobs.put(None)

    # On the thread that steps vLLM

    def begin(self, begin: Begin, then: Callable[[], None]) -> bool:
        """Whether what the table has is to be compared with its checksums first: `then` is called
        on the copying thread when that is done."""
        count = self.windows.count
        rows = len(begin.checksums) // count
        about = begin.checksums, len(begin.tokens), begin.saves_tail
        covered = (begin.num_covered or len(begin.table)) // count
        table = _Table(begin.key, [*begin.table], *about, rows, rows, rows, covered)
        self.tables[begin.key] = table
        if not rows or self.pool is None:
            return False
        table.num_pending += 1
        self._jobs.put(partial(self._compare, table, then))
        return True

    def end(self, key: str) -> None:
        """Nothing of it is read or written from now on."""
        if (table := self.tables.pop(key, None)) is not None:
            self._settle(table)

    def check(self, key: str, first: int, end: int) -> range:
        """Those rows of a table, from `first` on, before which vLLM has all, up to `end`, that it
        need not compute."""
        table = self.tables.get(key)
        if table is None or self.pool is None:
            return range(0)
        self._settle(table)
        rows = min(end, table.num_good)
        if self.windows.any and table.blocks:
            if first > table.num_saved and not table.has_ended:
                self._ask(table, first)
            rows = self._reach(table, rows)
        table.checked = range(first, max(first, rows))
        return table.checked

    def _ask(self, table: _Table, num_rows: int) -> None:
        """For a table with blocks of windows there: vLLM goes on after so many rows, by itself."""
        table.is_asked = True
        self.report(Found(table.key, num_rows * self.windows.count))
        self._wait(lambda: not table.is_asked)

    def _reach(self, table: _Table, num_rows: int) -> int:
        """Rows, at most so many, after which a request can go on by what the table has."""
        windows, num_tokens = self.windows, table.num_reported * self.windows.block_size

        def has(entry: int) -> bool:
            is_there = table.blocks[entry] != NO_BLOCK and entry not in table.bad
            return is_there and windows.keeps(entry, num_tokens)

        return windows.reach(num_rows * windows.count, has, known=num_rows) // windows.count

    def checked(self, key: str) -> range:
        """What `check` has returned last; a table that has ended has none."""
        return self.tables[key].checked if key in self.tables else range(0)

    def plan(self, moves: Sequence[Move]) -> Step:
        """What ranks are to copy because of a step. It is called once for each step, in their
        order."""
        loads, saves = Blocks([], []), Blocks([], [])
        tables: list[_Table] = []
        parts: list[_Part] = []
        for move in moves:
            table = self.tables.get(move.key)
            if table is None or self.pool is None:
                continue
            end = self._filled(table, move)
            if not move.loads and end <= table.num_saved:
                continue
            block_ids = move.block_ids()
            self._load(table, move, block_ids, loads)
            if part := self._save(table, end, block_ids, saves):
                parts.append(part)
            if part or move.loads:
                tables.append(table)
        if not tables:
            return Step()
        self._num_steps += 1
        with self._settled:
            for table in tables:
                table.num_pending += 1
            self._steps[self._num_steps] = _Copying(tables, parts, {*range(self._num_ranks)})
        return Step(self._num_steps, loads, saves)

    def _load(
        self, table: _Table, move: Move, block_ids: Sequence[Sequence[int]], loads: Blocks
    ) -> None:
        """vLLM has a block wherever one is read."""
        count = self.windows.count
        for row, (group, ids) in product(move.loads, enumerate(block_ids)):
            if not self.windows.any or ids[row] != NULL_BLOCK:
                block = table.blocks[row * count + group]
                if block == NO_BLOCK:
                    raise RuntimeError(f"vLLM reads row {row} of {move.key}, which is not there")
                loads.add(ids[row], block)

    def _save(
        self, table: _Table, end: int, block_ids: Sequence[Sequence[int]], saves: Blocks
    ) -> _Part | None:
        """What the step fills, up to row `end`. None: nothing."""
        first = table.num_saved
        entries, count = list[int](), self.windows.count
        for row in range(first, end):
            own = [
                (entry, ids[row])
                for entry, ids in enumerate(block_ids, start=row * count)
                if table.blocks[entry] != NO_BLOCK
            ]
            if self.windows.any and any(block_id == NULL_BLOCK for _, block_id in own):
                table.has_ended = True  # a window has left what was to be saved
                end = row
                break
            for entry, block_id in own:
                entries.append(entry)
                saves.add(block_id, table.blocks[entry])
        if end <= first:
            return None
        table.num_saved = end
        return _Part(table, range(first, end), entries)

    def _filled(self, table: _Table, move: Move) -> int:
        """Rows, from the first, that are saved after the step. Waits for blocks of those that no
        later step finds at vLLM."""
        size = self.windows.block_size
        end = last = move.num_computed // size
        if table.saves_tail and move.num_computed >= table.num_tokens:
            end = last = -(-table.num_tokens // size)
        elif self.windows.any:
            last = max(window.start(move.num_computed) for window in self.windows.groups)
        if self.windows.any and table.num_covered < last and not table.has_ended:
            self._wait(lambda: table.num_covered >= last or table.has_ended)
        return table.num_saved if table.has_ended else min(end, table.num_covered)

    def _settle(self, table: _Table) -> None:
        """Waits until nothing of it is on the way: a copy of what is in memory, after the step that
        ranks are in."""
        self._wait(lambda: not table.num_pending)

    def _wait(self, is_so: Callable[[], bool]) -> None:
        with self._settled:
            if not self._settled.wait_for(lambda: is_so() or self._failed, SETTLE_S):
                raise RuntimeError(f"KV has not been copied for {SETTLE_S:g} s")
            if self._failed:
                raise RuntimeError(self._failed)

    # On any thread

    def extend(self, extend: Extend) -> None:
        """Comes after what was reported of the table, which has begun: at once, as the thread that
        steps may wait for it."""
        table = self.tables.get(extend.key)
        if table is None:
            return
        with self._settled:
            table.blocks[extend.first : extend.first + len(extend.blocks)] = extend.blocks
            table.num_covered = extend.num_covered // self.windows.count
            table.has_ended |= extend.ends
            table.is_asked = False
            self._settled.notify_all()

    def copied(self, rank: int, number: int, why: str = "") -> None:
        """`rank` has made its copies of the step of this number, or makes none any more."""
        if why:
            self.fail(f"KV is not copied any more: {why}")
            return
        with self._settled:
            step = self._steps[number]
            step.ranks.discard(rank)
            if step.ranks:
                return
            del self._steps[number]
        self._jobs.put(partial(self._seal, step))

    def fail(self, why: str) -> None:
        with self._settled:
            self._failed = self._failed or why
            self._settled.notify_all()
        self.report(EngineLost(why))

    def _done(self, tables: Sequence[_Table]) -> None:
        with self._settled:
            for table in tables:
                table.num_pending -= 1
            self._settled.notify_all()

    # On the copying thread

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
        except BaseException as error:
            self.fail(f"KV is not copied any more: {type(error).__name__}: {error}")

    def _compare(self, table: _Table, then: Callable[[], None]) -> None:
        held = [at for at in range(len(table.checksums)) if table.blocks[at] != NO_BLOCK]
        sums = self._checksums([table.blocks[at] for at in held])
        pairs = zip(held, sums, strict=True)
        if bad := [at for at, found in pairs if found != table.checksums[at]]:
            count, groups = self.windows.count, self.windows.groups
            table.bad.update(bad)
            whole = [at // count for at in bad if not groups[at % count].size]
            table.num_good = min([table.num_good, *whole])
            about = tuple((table.blocks[at], table.checksums[at]) for at in bad)
            self.report(Damaged(table.key, about))
        then()
        self._done([table])

    def _seal(self, step: _Copying) -> None:
        rows = [part.table.blocks[entry] for part in step.parts for entry in part.entries]
        sums, count = iter(self._checksums(rows)), self.windows.count
        for table, new, entries in step.parts:
            found = dict(zip(entries, sums, strict=False))
            new_sums = tuple(found.get(at) for at in range(new.start * count, new.stop * count))
            if table.num_good == new.start:
                table.num_good = new.stop
            table.num_reported = new.stop
            self.report(Copied(table.key, new.start * count, new_sums))
        self._done(step.tables)
