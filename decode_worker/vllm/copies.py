"""KV of vLLM in the worker's own memory: what a request computes is copied there block by block,
and what is there already is not computed.

Life of a table: begun with its request, some of its blocks full -> as vLLM schedules the request,
those that it lacks are compared with their checksums, and it counts on those before the first
that does not fit -> these are copied to it -> each block that a step fills is copied out, and
reported -> ended with the request, at the end of a step or between two. All of it on the thread
that steps vLLM; the node gives a block of a table to nobody else before it has heard of the
table's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrelay.decode_worker.vllm.messages import Begin, Copied, Damaged
from kvrelay.decode_worker.vllm.plan import FLOATS, opaque_spec
from kvrelay.engine.kv.spec import KVSpec
from kvrelay.kvtransfer.layout import HeadShare


@dataclass(slots=True)
class _Table:
    blocks: list[int]  # in the worker's memory
    checksums: list[int]  # one for each, from the first, that has KV
    num_tokens: int
    saves_tail: bool
    num_good: int  # blocks, from the first, before one that was found damaged
    checked: range = range(0)  # those that were compared last


class Move(NamedTuple):
    """A request in a step: its blocks at vLLM, which of them are filled from its table before the
    step, and how many of its tokens have KV after it."""

    key: str
    block_ids: Sequence[int]
    loads: range
    num_computed: int


class Layer(NamedTuple):
    """vLLM's memory for one; `tensor.select(dim, block)` is what it has in a block."""

    tensor: Any
    dim: int


def _by_block(tensor: Any, num_blocks: int) -> Layer | None:
    """None where it has no part for each block. Attention may divide a block into smaller ones,
    which follow each other."""
    shape = list(tensor.shape)
    if num_blocks in shape:
        return Layer(tensor, shape.index(num_blocks))
    if shape[0] % num_blocks:
        return None
    return Layer(tensor.unflatten(0, (num_blocks, -1)), 0)


@dataclass(slots=True)
class Copies:
    """Owned by a worker's vLLM thread. Invariant: a block of vLLM that is loaded has the bytes that
    were saved: they were compared before vLLM gave memory to its request, so damage never reaches
    vLLM's prefix cache. What is reported as `Copied` was written before, and only once."""

    pool: NDArray[np.uint8] | None = None  # [num_blocks, bytes_per_block]; None: nothing is copied
    tables: dict[str, _Table] = field(default_factory=dict)
    done: list[Copied | Damaged] = field(default_factory=list)
    _layers: list[Layer] = field(default_factory=list)
    _checksums: Callable[[Sequence[int]], list[int]] = lambda blocks: []

    def register(self, kv_caches: dict[str, Any], num_blocks: int) -> None:
        """vLLM's memory, layer by layer. Layers that share theirs count once."""
        found = {tensor.data_ptr(): tensor for tensor in kv_caches.values()}
        layers = [_by_block(each, num_blocks) for each in found.values()]
        self._layers = [each for each in layers if each is not None]
        if len(self._layers) < len(layers):
            self._layers = []

    def spec(self, block_size: int, num_heads: int) -> KVSpec | None:
        """The shape of a block, in the terms of ours: `num_heads` heads where all layers have
        these, else so many bytes, whatever is in them. None: there are no blocks of layers."""
        if not self._layers:
            return None
        sizes = {each.tensor.select(each.dim, 0).numel() for each in self._layers}
        dtypes = {str(each.tensor.dtype).removeprefix("torch.") for each in self._layers}
        if len(sizes) == len(dtypes) == 1 and dtypes <= FLOATS:
            head_dim, rest = divmod(min(sizes), 2 * num_heads * block_size)
            if not rest:
                return KVSpec(len(self._layers), num_heads, head_dim, block_size, dtypes.pop())
        num_bytes = sum(
            each.tensor.select(each.dim, 0).numel() * each.tensor.element_size()
            for each in self._layers
        )
        return opaque_spec(num_bytes, block_size)

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
        """The worker's memory, and how checksums of its blocks are taken."""
        from kvrelay.kvtransfer.checksum import checksum_blocks  # not where there are no copies

        self.pool, self._checksums = pool, partial(checksum_blocks, pool, share=share)

    def begin(self, begin: Begin) -> None:
        about = len(begin.tokens), begin.saves_tail, len(begin.checksums)
        self.tables[begin.key] = _Table([*begin.table], [*begin.checksums], *about)

    def extend(self, key: str, blocks: Sequence[int]) -> None:
        if key in self.tables:
            self.tables[key].blocks += blocks

    def end(self, key: str) -> None:
        self.tables.pop(key, None)

    def check(self, key: str, first: int, end: int) -> range:
        """Compare the blocks of a table from `first` on, before which vLLM has all, up to `end`,
        with their checksums. Returns those that it need not compute; those that do not have their
        bytes are reported."""
        table = self.tables.get(key)
        if table is None or self.pool is None:
            return range(0)
        wanted = range(first, max(first, min(end, table.num_good)))
        if wanted != table.checked:  # else vLLM had no memory for it then
            sums = self._checksums([table.blocks[index] for index in wanted])
            pairs = zip(wanted, sums, strict=True)
            if bad := tuple(at for at, found in pairs if found != table.checksums[at]):
                about = tuple((table.blocks[at], table.checksums[at]) for at in bad)
                self.done.append(Damaged(key, about))
                table.num_good = bad[0]
            table.checked = range(first, max(first, min(end, table.num_good)))
        return table.checked

    def checked(self, key: str) -> range:
        """What `check` has returned last; a table that has ended has none."""
        return self.tables[key].checked if key in self.tables else range(0)

    def load(self, moves: Sequence[Move]) -> None:
        """Fill vLLM's blocks, before a step."""
        for move in moves:
            if (table := self.tables.get(move.key)) is None:
                continue
            for index in move.loads:
                for layer, part in self._parts(table.blocks[index], move.block_ids[index]):
                    layer.copy_(part)

    def save(self, moves: Sequence[Move], block_size: int) -> None:
        """Copy the blocks that a step has filled, after it."""
        for move in moves:
            table = self.tables.get(move.key)
            if table is None or self.pool is None:
                continue
            end = move.num_computed // block_size
            if table.saves_tail and move.num_computed >= table.num_tokens:
                end = -(-table.num_tokens // block_size)
            new = range(len(table.checksums), min(end, len(table.blocks)))
            if not new:
                continue
            for index in new:
                for layer, part in self._parts(table.blocks[index], move.block_ids[index]):
                    part.copy_(layer)
            sums = self._checksums([table.blocks[index] for index in new])
            if table.num_good == new.start:
                table.num_good = new.stop
            table.checksums += sums
            self.done.append(Copied(move.key, new.start, tuple(sums)))

    def _parts(self, block: int, at_vllm: int) -> list[tuple[Any, Any]]:
        """vLLM's block and its part of ours, layer by layer."""
        from kvrelay.kvtransfer.movers.pool import as_tensor

        assert self.pool is not None
        raw, at, found = as_tensor(self.pool[block]), 0, []
        for tensor, dim in self._layers:
            theirs = tensor.select(dim, at_vllm)
            end = at + theirs.numel() * theirs.element_size()
            found.append((theirs, raw[at:end].view(theirs.dtype).view(theirs.shape)))
            at = end
        return found

    def take_done(self) -> tuple[Copied | Damaged, ...]:
        done, self.done = tuple(self.done), []
        return done
