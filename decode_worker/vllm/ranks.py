"""What each process that runs the model of a vLLM worker copies: its share of KV, out of vLLM's
memory and into it.

Which blocks comes with a step (`Step`), by vLLM's own way from its scheduler to its ranks. Before
the step a rank writes what is to be loaded, all at once; after it, it takes what was filled. Where
vLLM's memory is the host's, it copies that to the worker's memory, which all ranks of a worker map,
in one pass, and says so. From a GPU's it gathers all at once, and from there on its copying thread
has it: that brings it to the host, writes it to the worker's memory, and says so. With one process
saying so is a call; ranks in processes of their own write a line to a pipe. A rank touches its own
bytes of a block alone, so ranks do not wait for each other.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrelay.decode_worker.vllm.memory import (
    ALL,
    Heads,
    Layer,
    LayerForm,
    Region,
    begun,
    gather,
    is_in_host_memory,
    layer_of,
    regions_of,
    scatter,
    to_host,
    unpack,
)

MOST_GATHERED = 512 << 20  # bytes that wait for the copying thread; a step waits beyond them
SETTLE_S = 60.0  # a copy within memory takes milliseconds
MOST_SAID = 500  # characters of an error: a line has to fit into what a pipe takes at once


class Blocks(NamedTuple):
    """Blocks of vLLM's, and of the worker's memory, one for one."""

    ids: list[int]
    rows: list[int]

    def add(self, block_id: int, row: int) -> None:
        self.ids.append(block_id)
        self.rows.append(row)


class Step(NamedTuple):
    """What is copied because of one step of vLLM; each rank says when it has made its copies."""

    number: int = 0  # 0: nothing is
    loads: Blocks = Blocks([], [])
    saves: Blocks = Blocks([], [])


class SharedPool(NamedTuple):
    """Memory of another process of this user and machine, which it keeps open."""

    path: str
    num_blocks: int
    bytes_per_block: int

    def open(self) -> NDArray[np.uint8]:
        """`[num_blocks, bytes_per_block]`; writes are seen by all. Raises OSError."""
        number = os.open(self.path, os.O_RDWR)
        try:
            found = mmap.mmap(number, self.num_blocks * self.bytes_per_block)
        finally:
            os.close(number)
        return np.frombuffer(found, np.uint8).reshape(self.num_blocks, self.bytes_per_block)


def make_shared_pool(num_blocks: int, bytes_per_block: int) -> SharedPool:
    """Memory that comes into use as it is written, and goes with this process and those that have
    it open. Raises OSError."""
    number = os.memfd_create("kvrelay-vllm")
    os.truncate(number, num_blocks * bytes_per_block)
    return SharedPool(f"/proc/{os.getpid()}/fd/{number}", num_blocks, bytes_per_block)


class Said(NamedTuple):
    """A line of what ranks in other processes say."""

    rank: int
    number: int  # the step's whose copies it has made
    why: str = ""  # it makes none any more


class Pipe:
    """What ranks in other processes say, read by a thread of its own, until this process ends."""

    def __init__(self, on_said: Callable[[int, int, str], None]) -> None:
        self._on_said = on_said
        self._read, write = os.pipe()
        self.path = f"/proc/{os.getpid()}/fd/{write}"
        threading.Thread(target=self._run, name="ranks", daemon=True).start()

    def _run(self) -> None:
        decoder = msgspec.json.Decoder(Said)
        with os.fdopen(self._read, "rb") as lines:
            for line in lines:
                self._on_said(*decoder.decode(line))


def say_to(path: str) -> Callable[[int, int, str], None]:
    """A function that writes to a `Pipe`: rank, step, why not. Raises OSError."""
    number = os.open(path, os.O_WRONLY)

    def say(rank: int, step: int, why: str = "") -> None:
        os.write(number, msgspec.json.encode(Said(rank, step, why[:MOST_SAID])) + b"\n")

    return say


@dataclass(slots=True)
class RankCopies:
    """Owned by the thread that runs a rank's model. Invariant: of a step, `say` comes once, when
    nothing that it loads is read and all that it saves is written."""

    rank: int
    say: Callable[[int, int, str], None]  # from any thread: rank, step, why not
    _layers: list[Layer] = field(default_factory=list)
    _regions: list[Region] = field(default_factory=list)
    _saved: list[Region] = field(default_factory=list)  # that no other rank saves
    _pool: Any = None  # [num_blocks, bytes_per_block], a tensor
    _jobs: queue.SimpleQueue[Callable[[], None]] = field(default_factory=queue.SimpleQueue)
    _written: threading.Condition = field(default_factory=threading.Condition)
    _waiting: int = 0  # bytes that were gathered and are not written
    _loading: Any = None  # what the loads of a step read, and when they are done; on a GPU
    _failed: str = ""

    # By the engine's id and rank: what vLLM calls in a rank finds it here.
    made: ClassVar[dict[tuple[str, int], RankCopies]] = {}

    def register(
        self,
        kv_caches: Mapping[str, Any],
        num_blocks: int,
        heads: Callable[[str], Heads | None] = lambda name: ALL,
        layout: str = "",
    ) -> None:
        """vLLM's memory, layer by layer. Layers that share theirs count once. `heads`: of a layer,
        by its name; `layout`: as of `layer_of`."""
        places = {tensor.data_ptr(): name for name, tensor in reversed([*kv_caches.items()])}
        for name, tensor in kv_caches.items():
            if places[tensor.data_ptr()] != name:
                continue
            own = heads(name)
            layer = None if own is None else layer_of(tensor, num_blocks, own, layout)
            if layer is None:
                self._layers = []
                return
            self._layers.append(layer)

    @property
    def forms(self) -> list[LayerForm]:
        """What a block has in each of its layers; []: there are no blocks of layers."""
        return [each.form for each in self._layers]

    def use(self, pool: NDArray[np.uint8] | SharedPool, at: int = 0) -> None:
        """`at`: byte of a block at which the rank's first layer is. Where vLLM's memory is a GPU's,
        the copying thread runs from now on."""
        from kvrelay.kvtransfer.movers.pool import as_tensor

        pool = pool.open() if isinstance(pool, SharedPool) else pool
        self._pool, self._regions = as_tensor(pool), regions_of(self._layers, at)
        self._saved = [each for each in self._regions if not each.is_copy]
        if is_in_host_memory(self._regions):
            return
        threading.Thread(target=self._run, name="copies", daemon=True).start()

    def load(self, step: Step) -> None:
        """Fill vLLM's blocks, before a step."""
        if step.loads.ids:
            kept = scatter(self._regions, *step.loads, self._pool)
            self._loading = (kept, begun()) if kept else None

    def save(self, step: Step) -> None:
        """Take the blocks that a step has filled, after it: vLLM may write there in the next."""
        if not step.number:
            return
        if is_in_host_memory(self._regions):
            if self._saved and step.saves.ids:
                theirs = [each.view for each in self._saved]
                unpack(self._saved, theirs, *step.saves, self._pool)
            self.say(self.rank, step.number, "")
            return
        loading, self._loading = self._loading, None
        found: list[Any] = []
        size = len(step.saves.ids) * sum(each.num_bytes for each in self._saved)
        if size:
            self._wait_for_room(size)
            found = gather(self._saved, step.saves.ids)
        event = begun() if found else None
        self._jobs.put(partial(self._finish, step, loading, found, event, size))

    def _wait_for_room(self, size: int) -> None:
        def has_room() -> bool:
            return self._waiting == 0 or self._waiting + size <= MOST_GATHERED

        with self._written:
            if not self._written.wait_for(lambda: has_room() or self._failed, SETTLE_S):
                raise RuntimeError(f"KV has not been copied for {SETTLE_S:g} s")
            if self._failed:
                raise RuntimeError(f"KV is not copied any more: {self._failed}")
            self._waiting += size

    # On the copying thread

    def _run(self) -> None:
        try:
            while True:
                self._jobs.get()()
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            with self._written:
                self._failed = why
                self._written.notify_all()
            self.say(self.rank, 0, why)

    def _finish(
        self, step: Step, loading: Any, found: Sequence[Any], event: Any, size: int
    ) -> None:
        if event is not None:
            found = to_host(found, event)
        if found:
            rows = step.saves.rows
            unpack(self._saved, found, range(len(rows)), rows, self._pool)
        if loading is not None:
            loading[1].synchronize()
        with self._written:
            self._waiting -= size
            self._written.notify_all()
        self.say(self.rank, step.number, "")


# What vLLM calls in each of its ranks, with its worker there


def process_of(worker: Any) -> int:
    return os.getpid()


def forms_of(worker: Any) -> list[LayerForm]:
    return _of(worker).forms


def use_pool(worker: Any, pool: Any, at: Sequence[int]) -> None:
    """`pool`, `at`: as of `RankCopies.use`, `at` for each rank."""
    _of(worker).use(pool, at[worker.rank])


def backends_of(worker: Any) -> list[str]:
    """Classes that compute attention in its layers."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    found = [each.get_attn_backend() for each in layers if hasattr(each, "get_attn_backend")]
    return [f"{each.__module__}.{each.__qualname__}" for each in found]


def _of(worker: Any) -> RankCopies:
    return RankCopies.made[worker.vllm_config.kv_transfer_config.engine_id, worker.rank]


def join_forms(
    of_ranks: Sequence[Sequence[LayerForm]], tensor_size: int
) -> tuple[list[LayerForm], list[int]]:
    """(layers of all ranks, byte of a block of ours at which each rank's first is). Ranks of one
    pipeline stage have parts of the same layers, and stages follow each other. [], []: there are no
    blocks of layers."""
    firsts = range(0, len(of_ranks), tensor_size)
    stages = [of_ranks[first : first + tensor_size] for first in firsts]
    if not all(stage[0] and all(each == stage[0] for each in stage) for stage in stages):
        return [], []
    sizes = [sum(each.num_bytes for each in stage[0]) for stage in stages]
    at = [sum(sizes[:number]) for number, stage in enumerate(stages) for _ in stage]
    return [*chain.from_iterable(stage[0] for stage in stages)], at
