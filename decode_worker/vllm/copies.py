"""KV of vLLM in the worker's own memory: what a request computes is copied there, and what is there
already is not computed.

Life of a table: begun with its request; if some of its blocks are full, these are compared with
their checksums first, and vLLM gets the request then -> as vLLM schedules it, it counts on the
blocks before the first that does not fit -> these are written to vLLM's memory before the step,
all at once -> the blocks that a step fills are gathered after it, all at once, and from there on
another thread has them: it writes them to the worker's memory, takes their checksums, and reports
them -> ended with the request, when nothing of it is on the way any more.

Two threads: the one that steps vLLM, which gathers and scatters, and the copying one, which touches
the worker's memory alone. The node gives a block of a table to nobody else before it has heard of
the table's end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrelay.decode_worker.vllm.memory import (
    Layer,
    Region,
    begun,
    gather,
    layer_of,
    regions_of,
    scatter,
    to_host,
    unpack,
)
from kvrelay.decode_worker.vllm.messages import Begin, Copied, Damaged, EngineLost
from kvrelay.decode_worker.vllm.plan import FLOATS, opaque_spec
from kvrelay.engine.kv.spec import KVSpec
from kvrelay.kvtransfer.layout import HeadShare

MOST_GATHERED = 512 << 20  # bytes that wait for the copying thread; a step waits beyond them

SETTLE_S = 60.0  # a copy within memory takes milliseconds

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
    num_pending: int = 0  # jobs of the copying thread
    checked: range = range(0)  # those that vLLM counts on


class Move(NamedTuple):
    """A request in a step: its blocks at vLLM, which of them are filled from its table before the
    step, and how many of its tokens have KV after it."""

    key: str
    block_ids: Sequence[int]
    loads: range
    num_computed: int


class _Part(NamedTuple):
    """Blocks of a table that are among those that were gathered."""

    table: _Table
    first: int
    rows: list[int]


@dataclass(slots=True)
class Copies:
    """Owned by a worker's vLLM thread. Invariant: a block of vLLM that is loaded has the bytes that
    were saved: they were compared before vLLM gave memory to its request, so damage never reaches
    vLLM's prefix cache. What is reported as `Copied` was written before, and only once."""

    pool: NDArray[np.uint8] | None = None  # [num_blocks, bytes_per_block]; None: nothing is copied
    tables: dict[str, _Table] = field(default_factory=dict)
    report: Report = lambda said: None  # from any thread
    _layers: list[Layer] = field(default_factory=list)
    _regions: list[Region] = field(default_factory=list)
    _checksums: Callable[[Sequence[int]], list[int]] = lambda blocks: []
    _jobs: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    _settled: threading.Condition = field(default_factory=threading.Condition)
    _waiting: int = 0  # bytes that were gathered and are not written
    _loading: Any = None  # what the last loads read, and when they are done; on a GPU
    _failed: BaseException | None = None

    def register(self, kv_caches: dict[str, Any], num_blocks: int) -> None:
        """vLLM's memory, layer by layer. Layers that share theirs count once."""
        found = {tensor.data_ptr(): tensor for tensor in kv_caches.values()}
        layers = [layer_of(each, num_blocks) for each in found.values()]
        self._layers = [each for each in layers if each is not None]
        if len(self._layers) < len(layers):
            self._layers = []
        self._regions = regions_of(self._layers)

    def spec(self, block_size: int, num_heads: int) -> KVSpec | None:
        """The shape of a block, in the terms of ours: `num_heads` heads where all layers have
        these, else so many bytes, whatever is in them. None: there are no blocks of layers."""
        if not self._layers:
            return None
        sizes = {each.block.numel() for each in self._layers}
        dtypes = {str(each.tensor.dtype).removeprefix("torch.") for each in self._layers}
        if len(sizes) == len(dtypes) == 1 and dtypes <= FLOATS:
            head_dim, rest = divmod(min(sizes), 2 * num_heads * block_size)
            if not rest:
                return KVSpec(len(self._layers), num_heads, head_dim, block_size, dtypes.pop())
        return opaque_spec(sum(each.num_bytes for each in self._layers), block_size)

    def form(self) -> list[list[Any]]:
        """What vLLM keeps of a block in each layer: two workers mean the same by the bytes of a
        block only if this is the same."""
        found: list[list[Any]] = []
        for tensor, dim in self._layers:
            kept = [i for i in range(tensor.dim()) if i != dim]
            order = sorted(kept, key=tensor.stride, reverse=True)
            found.append([str(tensor.dtype), dim, [tensor.shape[i] for i in kept], order])
        return found

    def use(self, pool: NDArray[np.uint8], share: HeadShare) -> None:
        """The worker's memory, and how checksums of its blocks are taken. The copying thread runs
        from now on."""
        from kvrelay.kvtransfer.checksum import checksum_blocks  # not where there are no copies

        self.pool, self._checksums = pool, partial(checksum_blocks, pool, share=share)
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
        self._post([table], partial(self._compare, table, then))
        return True

    def extend(self, key: str, blocks: Sequence[int]) -> None:
        if key in self.tables:
            self.tables[key].blocks += blocks

    def end(self, key: str) -> None:
        """Nothing of it is read or written from now on."""
        if (table := self.tables.pop(key, None)) is not None:
            self._settle(table)
        self._finish_loading()

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

    def load(self, moves: Sequence[Move]) -> None:
        """Fill vLLM's blocks, before a step."""
        blocks: list[int] = []
        rows: list[int] = []
        for move in moves:
            if (table := self.tables.get(move.key)) is not None:
                blocks += (move.block_ids[index] for index in move.loads)
                rows += (table.blocks[index] for index in move.loads)
        if blocks:
            kept = scatter(self._regions, blocks, rows, self._pool())
            self._loading = (kept, begun()) if kept else None

    def save(self, moves: Sequence[Move], block_size: int) -> None:
        """Gather the blocks that a step has filled, after it."""
        blocks: list[int] = []
        parts: list[_Part] = []
        for move in moves:
            table = self.tables.get(move.key)
            if table is None or self.pool is None:
                continue
            end = move.num_computed // block_size
            if table.saves_tail and move.num_computed >= table.num_tokens:
                end = -(-table.num_tokens // block_size)
            new = range(table.num_saved, min(end, len(table.blocks)))
            if not new:
                continue
            table.num_saved = new.stop
            blocks += (move.block_ids[index] for index in new)
            parts.append(_Part(table, new.start, [table.blocks[index] for index in new]))
        if not parts:
            return
        size = len(blocks) * sum(each.num_bytes for each in self._regions)
        with self._settled:
            self._wait(lambda: self._waiting == 0 or self._waiting + size <= MOST_GATHERED)
            self._waiting += size
        found = gather(self._regions, blocks)
        event = begun() if found[0].device.type != "cpu" else None
        tables = [each.table for each in parts]
        self._post(tables, partial(self._write, parts, found, event, size))

    def _pool(self) -> Any:
        from kvrelay.kvtransfer.movers.pool import as_tensor

        assert self.pool is not None
        return as_tensor(self.pool)

    def _post(self, tables: Sequence[_Table], job: Callable[[], None]) -> None:
        """`job` belongs to all these tables until it is done."""

        def run() -> None:
            job()
            with self._settled:
                for table in tables:
                    table.num_pending -= 1
                self._settled.notify_all()

        with self._settled:
            for table in tables:
                table.num_pending += 1
        self._jobs.put(run)

    def _settle(self, table: _Table) -> None:
        """Waits until nothing of it is on the way: a copy of what is in memory."""
        with self._settled:
            self._wait(lambda: not table.num_pending)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        if not self._settled.wait_for(lambda: is_done() or self._failed is not None, SETTLE_S):
            raise RuntimeError(f"KV has not been copied for {SETTLE_S:g} s")
        if self._failed is not None:
            raise RuntimeError(f"KV is not copied any more: {self._failed}") from self._failed

    def _finish_loading(self) -> None:
        if self._loading is not None:
            self._loading[1].synchronize()
            self._loading = None

    # On the copying thread

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
        except BaseException as error:
            with self._settled:
                self._failed = error
                self._settled.notify_all()
            self.report(EngineLost(f"KV is not copied any more: {type(error).__name__}: {error}"))

    def _compare(self, table: _Table, then: Callable[[], None]) -> None:
        wanted = range(len(table.checksums))
        sums = self._checksums([table.blocks[index] for index in wanted])
        pairs = zip(wanted, sums, strict=True)
        if bad := tuple(at for at, found in pairs if found != table.checksums[at]):
            table.num_good = bad[0]
            about = tuple((table.blocks[at], table.checksums[at]) for at in bad)
            self.report(Damaged(table.key, about))
        then()

    def _write(self, parts: Sequence[_Part], found: Sequence[Any], event: Any, size: int) -> None:
        if event is not None:
            found = to_host(found, event)
        rows = [row for part in parts for row in part.rows]
        unpack(self._regions, found, rows, self._pool())
        sums = iter(self._checksums(rows))
        with self._settled:
            self._waiting -= size
            self._settled.notify_all()
        for table, first, own in parts:
            new = [next(sums) for _ in own]
            if table.num_good == first:
                table.num_good += len(new)
            table.checksums += new
            self.report(Copied(table.key, first, tuple(new)))
