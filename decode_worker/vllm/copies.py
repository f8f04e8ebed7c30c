"""KV of vLLM in the worker's own memory: what a request computes is copied there, and what is there
already is not computed.

Life of a table: begun with its request; if some of its blocks are full, these are compared with
their checksums first, and vLLM gets the request then -> as vLLM schedules it, it counts on the
blocks before the first that does not fit -> the step that is scheduled carries to the ranks which
blocks to write to vLLM's memory before it and which to copy out after it (`Step`; what ranks do:
`ranks`) -> when all have, the copying thread here takes checksums of what came, and reports it ->
ended with the request, when nothing of it is on the way any more.

A block of the worker's memory has the KV of all ranks, so whoever takes checksums of it, reads it
or keeps it knows nothing of them. The node gives a block of a table to nobody else before it has
heard of the table's end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrelay.decode_worker.vllm.memory import LayerForm
from kvrelay.decode_worker.vllm.messages import Begin, Copied, Damaged, EngineLost
from kvrelay.decode_worker.vllm.plan import FLOATS, opaque_spec
from kvrelay.decode_worker.vllm.ranks import SETTLE_S, Blocks, Step
from kvrelay.engine.kv.spec import KVSpec
from kvrelay.kvtransfer.layout import HeadShare

Report = Callable[[Copied | Damaged | EngineLost], None]


@dataclass(slots=True)
class _Table:
    key: str
    blocks: list[int]  # in the worker's memory
    checksums: list[int]  # one for each, from the first, that has KV
    num_tokens: int
    saves_tail: bool
    num_good: int  # blocks, from the first, that may be loaded
    num_saved: int  # blocks, from the first, that have KV or are on the way
    num_pending: int = 0  # steps and comparisons that touch it, and have not ended
    checked: range = range(0)  # those that vLLM counts on


class Move(NamedTuple):
    """A request in a step: its blocks at vLLM, which of them are filled from its table before the
    step, and how many of its tokens have KV after it."""

    key: str
    block_ids: Sequence[int]
    loads: range
    num_computed: int


class _Part(NamedTuple):
    """Blocks of a table that are among those that a step fills."""

    table: _Table
    first: int
    rows: list[int]


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
    _num_ranks: int = 1
    _num_steps: int = 0
    _steps: dict[int, _Copying] = field(default_factory=dict)  # by number
    _checksums: Callable[[Sequence[int]], list[int]] = lambda blocks: []
    _jobs: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    _settled: threading.Condition = field(default_factory=threading.Condition)
    _failed: str = ""

    def spec(self, block_size: int, num_heads: int) -> KVSpec | None:
        """The shape of a block, in the terms of ours: `num_heads` heads where all layers have
        these, else so many bytes, whatever is in them. None: there are no blocks of layers."""
        if not self.layers:
            return None
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
        num_full = len(begin.checksums)
        about = [*begin.checksums], len(begin.tokens), begin.saves_tail
        table = _Table(begin.key, [*begin.table], *about, num_good=num_full, num_saved=num_full)
        self.tables[begin.key] = table
        if not num_full or self.pool is None:
            return False
        table.num_pending += 1
        self._jobs.put(partial(self._compare, table, then))
        return True

    def extend(self, key: str, blocks: Sequence[int]) -> None:
        if key in self.tables:
            self.tables[key].blocks += blocks

    def end(self, key: str) -> None:
        """Nothing of it is read or written from now on."""
        if (table := self.tables.pop(key, None)) is not None:
            self._settle(table)

    def check(self, key: str, first: int, end: int) -> range:
        """Those blocks of a table, from `first` on, before which vLLM has all, up to `end`, that it
        need not compute."""
        table = self.tables.get(key)
        if table is None or self.pool is None:
            return range(0)
        self._settle(table)
        table.checked = range(first, max(first, min(end, table.num_good)))
        return table.checked

    def checked(self, key: str) -> range:
        """What `check` has returned last; a table that has ended has none."""
        return self.tables[key].checked if key in self.tables else range(0)

    def plan(self, moves: Sequence[Move], block_size: int) -> Step:
        """What ranks are to copy because of a step. It is called once for each step, in their
        order."""
        loads, saves = Blocks([], []), Blocks([], [])
        tables: list[_Table] = []
        parts: list[_Part] = []
        for move in moves:
            table = self.tables.get(move.key)
            if table is None or self.pool is None:
                continue
            loads.add(move.block_ids, table.blocks, move.loads)
            if new := self._filled(table, move, block_size):
                saves.add(move.block_ids, table.blocks, new)
                parts.append(_Part(table, new.start, [table.blocks[index] for index in new]))
            if new or move.loads:
                tables.append(table)
        if not tables:
            return Step()
        self._num_steps += 1
        with self._settled:
            for table in tables:
                table.num_pending += 1
            self._steps[self._num_steps] = _Copying(tables, parts, {*range(self._num_ranks)})
        return Step(self._num_steps, loads, saves)

    def _filled(self, table: _Table, move: Move, block_size: int) -> range:
        """Blocks that are to be saved after this one, and counts them as saved."""
        end = move.num_computed // block_size
        if table.saves_tail and move.num_computed >= table.num_tokens:
            end = -(-table.num_tokens // block_size)
        new = range(table.num_saved, min(end, len(table.blocks)))
        table.num_saved = max(table.num_saved, new.stop)
        return new

    def _settle(self, table: _Table) -> None:
        """Waits until nothing of it is on the way: a copy of what is in memory, after the step that
        ranks are in."""
        with self._settled:
            if not self._settled.wait_for(lambda: not table.num_pending or self._failed, SETTLE_S):
                raise RuntimeError(f"KV has not been copied for {SETTLE_S:g} s")
            if self._failed:
                raise RuntimeError(self._failed)

    # On any thread

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
        wanted = range(len(table.checksums))
        sums = self._checksums([table.blocks[index] for index in wanted])
        pairs = zip(wanted, sums, strict=True)
        if bad := tuple(at for at, found in pairs if found != table.checksums[at]):
            table.num_good = bad[0]
            about = tuple((table.blocks[at], table.checksums[at]) for at in bad)
            self.report(Damaged(table.key, about))
        then()
        self._done([table])

    def _seal(self, step: _Copying) -> None:
        sums = iter(self._checksums([row for part in step.parts for row in part.rows]))
        for table, first, own in step.parts:
            new = [next(sums) for _ in own]
            if table.num_good == first:
                table.num_good += len(new)
            table.checksums += new
            self.report(Copied(table.key, first, tuple(new)))
        self._done(step.tables)
