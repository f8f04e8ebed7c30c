"""Which blocks others are told of: those that a worker holds, whose tokens are known, and whose
parent they have been told of.

Life of a block: named (a prompt has said what its tokens are) or held (a worker has said that it
has it), in any order; then stored in an event, and removed in one; forgotten when there are too
many. Whoever listens attaches a block to its parent, so a block is published below a published one
only: in device memory where the parent is there too, in a lower tier where it is in any. A block
whose parent goes is removed with it, and comes again with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kvrelay.engine.kv.block_hash import unpack
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId

TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)  # that a worker has for itself; each is a bit in a mask
NUM_TIERS = len(TIERS)
WORKER_MASK = (1 << NUM_TIERS) - 1
SLICE = 64  # blocks between two pauses


@dataclass(frozen=True, slots=True)
class Origin:
    """What the blocks of a request have in common, beside their tokens."""

    model: str
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[str, ...] = ()  # what makes blocks not everybody's
    num_public_blocks: int = 0  # from the first one on, they are


@dataclass(slots=True, eq=False)
class Block:
    """Masks have bits of workers, by their numbers, and of their tiers."""

    name: bytes
    parent: Block | None
    tokens: bytes  # as array("I") writes them
    origin: Origin
    extra_keys: tuple[str, ...]
    depth: int  # blocks above it
    held: int = 0
    published: int = 0
    children: set[Block] = field(default_factory=set)


class Change(NamedTuple):
    """What is to be published of one block."""

    block: Block
    tier: Tier
    is_stored: bool


class PublishedBlocks:
    """Owned by one thread. Invariant, outside `take_changes`, but for blocks in `_dirty`: what is
    published of a block is what it is held by, as far as its parent is published. In `_blocks`
    every block comes before its parent: what is forgotten first has no children."""

    def __init__(self, max_blocks: int, pause: Callable[[], object] = lambda: None) -> None:
        """max_blocks: with tokens, and as many without. `pause`: called between parts of what takes
        long."""
        self._max_blocks, self._pause = max_blocks, pause
        self._blocks: dict[bytes, Block] = {}
        self._unnamed: dict[bytes, int] = {}  # held, and nobody has said what their tokens are
        self._dirty: dict[Block, bool] = {}  # as a set that keeps its order; all False
        self.numbers: dict[NodeId, int] = {}  # by worker, as soon as it has said something
        self._idle: set[NodeId] = set()  # others get their numbers if they say no more
        self._changes: dict[int, list[Change]] = {}

    def changed(self, worker: NodeId, tier: Tier, stored: bytes, removed: bytes) -> None:
        number = self._number(worker)
        bit = 1 << (number * NUM_TIERS + TIERS.index(tier))
        for at, name in enumerate(unpack(stored)):
            if at % SLICE == SLICE - 1:
                self._pause()
            block = self._blocks.get(name)
            if block is None:
                self._unnamed[name] = self._unnamed.get(name, 0) | bit
            elif not block.held & bit:
                block.held |= bit
                self._dirty[block] = False
        for name in unpack(removed):
            block = self._blocks.get(name)
            if block is None:
                if (left := self._unnamed.pop(name, 0) & ~bit) != 0:
                    self._unnamed[name] = left
            elif block.held & bit:
                block.held &= ~bit
                self._dirty[block] = False
        while len(self._unnamed) > self._max_blocks:
            del self._unnamed[next(iter(self._unnamed))]

    def forgotten(self, worker: NodeId) -> None:
        """It holds nothing, as far as is known. Takes as long as there are blocks."""
        number = self.numbers.get(worker)
        if number is None:
            return
        mask = WORKER_MASK << (number * NUM_TIERS)
        for at, block in enumerate(self._blocks.values()):
            if block.held & mask:
                block.held &= ~mask
                self._dirty[block] = False
            if at % SLICE == SLICE - 1:
                self._pause()
        left = ((name, held & ~mask) for name, held in self._unnamed.items())
        self._unnamed = {name: held for name, held in left if held}
        self._idle.add(worker)

    def forget_workers(self) -> None:
        for worker in self.numbers:
            self.forgotten(worker)

    def named(self, origin: Origin, tokens: Sequence[int], block_hashes: bytes) -> None:
        """`tokens`: at least as many as the blocks have."""
        size, parent, chain = origin.block_size, None, list[Block]()
        for at, name in enumerate(unpack(block_hashes)):
            if at % SLICE == SLICE - 1:
                self._pause()
            block = self._blocks.get(name)
            if block is None:
                keys = () if at < origin.num_public_blocks else origin.extra_keys
                own = array("I", tokens[at * size : (at + 1) * size]).tobytes()
                held = self._unnamed.pop(name, 0)
                block = self._blocks[name] = Block(name, parent, own, origin, keys, at, held)
                if parent is not None:
                    parent.children.add(block)
                if held:
                    self._dirty[block] = False
            chain.append(block)
            parent = block
        for block in reversed(chain):  # used last, and each before its parent
            del self._blocks[block.name]
            self._blocks[block.name] = block
        while len(self._blocks) > self._max_blocks:
            self._forget(next(iter(self._blocks.values())))

    def take_changes(self) -> list[tuple[NodeId, int, list[Change]]]:
        """By worker, with its number: what has to be published, in this order."""
        names = {number: worker for worker, number in self.numbers.items()}
        devices = self._device_mask()
        due = [(block.depth, id(block), block) for block in self._dirty]
        heapify(due)
        num_done = 0
        while due:  # parents first: so that what is above a block changes no more
            _, _, block = heappop(due)
            if self._dirty.pop(block, True):
                continue
            for child in self._settle(block, devices):
                heappush(due, (child.depth, id(child), child))
            num_done += 1
            if num_done % SLICE == 0:
                self._pause()
        changes, self._changes = self._changes, {}
        for worker in self._idle:
            del self.numbers[worker]
        self._idle.clear()
        return [(names[number], number, _in_order(found)) for number, found in changes.items()]

    def everything(self) -> Iterator[tuple[NodeId, int, list[Change]]]:
        """What has been published and holds, by worker, each block after its parent."""
        in_order = [*reversed(self._blocks.values())]
        for worker, number in self.numbers.items():
            found = [
                Change(block, tier, True)
                for block in in_order
                for place, tier in enumerate(TIERS)
                if block.published >> (number * NUM_TIERS + place) & 1
            ]
            yield worker, number, _in_order(found)

    def check_integrity(self) -> None:
        """Assert the invariant. O(everything): for tests."""
        seen: set[Block] = set()
        devices = self._device_mask()
        for name, block in self._blocks.items():
            assert block.name == name
            assert block.children <= seen, "a child is forgotten after its parent"
            assert block in self._dirty or block.published == self._wanted(block, devices)
            seen.add(block)
        assert not self._unnamed.keys() & self._blocks.keys()

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def _number(self, worker: NodeId) -> int:
        """The lowest that nobody has."""
        self._idle.discard(worker)
        number = self.numbers.get(worker)
        if number is None:
            taken = set(self.numbers.values())
            number = next(n for n in range(len(taken) + 1) if n not in taken)
            self.numbers[worker] = number
        return number

    def _device_mask(self) -> int:
        count = max(self.numbers.values(), default=0) + 1
        return ((1 << (count * NUM_TIERS)) - 1) // WORKER_MASK

    def _wanted(self, block: Block, devices: int) -> int:
        if block.parent is None:
            return block.held
        above = block.parent.published
        anywhere = (above | above >> 1 | above >> 2) & devices
        return block.held & (above & devices | anywhere << 1 | anywhere << 2)

    def _settle(self, block: Block, devices: int) -> Iterable[Block]:
        """Publish what has changed of a block. Returns what is dirty now: what is below it."""
        wanted = self._wanted(block, devices)
        changed = wanted ^ block.published
        if not changed:
            return ()
        block.published = wanted
        while changed:
            place = (changed & -changed).bit_length() - 1
            changed &= changed - 1
            number, tier = divmod(place, NUM_TIERS)
            change = Change(block, TIERS[tier], bool(wanted >> place & 1))
            self._changes.setdefault(number, []).append(change)
        self._dirty.update(dict.fromkeys(block.children, False))
        return block.children

    def _forget(self, block: Block) -> None:
        """Its tokens, and so all that was published of it."""
        del self._blocks[block.name]
        held, block.held = block.held, 0
        self._settle(block, self._device_mask())
        self._dirty.pop(block, None)
        if block.parent is not None:
            block.parent.children.discard(block)
        if held:
            self._unnamed[block.name] = held


def _in_order(changes: Sequence[Change]) -> list[Change]:
    """Those of one worker, each after what it needs, and blocks of a chain together, so that they
    go into one event."""
    stored = [change for change in changes if change.is_stored]
    device = [change for change in stored if change.tier is Tier.DEVICE]
    lower = [change for change in stored if change.tier is not Tier.DEVICE]
    removed = [change for change in changes if not change.is_stored]
    return [*removed, *_by_chain(device), *_by_chain(lower)]


def _by_chain(stored: Sequence[Change]) -> Iterator[Change]:
    own: dict[Block, list[Change]] = {}
    below: dict[Block | None, list[Block]] = {}
    for change in stored:
        block = change.block
        if block not in own:
            below.setdefault(block.parent, []).append(block)
        own.setdefault(block, []).append(change)
    due = [block for block in own if block.parent not in own]
    while due:
        block = due.pop()
        yield from own[block]
        due += below.get(block, ())
