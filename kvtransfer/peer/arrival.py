"""One request's KV on its way into device memory: from a peer, from this worker's own lower tiers,
or from both.

Which blocks: `[first, end)` of the sequence's table. Those before `first` were in the prefix cache;
those from `end` on are computed. Blocks `[first, first + len(own))` are loaded from this worker's
lower tiers, the others are read from the producer. Blocks outside a window are not in the table,
and are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvrelay.engine.cost import blocks_worth_loading
from kvrelay.engine.kv.block_table import NO_BLOCK
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId, Note
from kvrelay.engine.request import TokenLogprobs
from kvrelay.engine.sequence import Sequence
from kvrelay.kvtransfer.agent import UNKNOWN, TransferId
from kvrelay.kvtransfer.messages import KVReady
from kvrelay.kvtransfer.peer.handoff import ConsumerState, Key
from kvrelay.kvtransfer.tiers.blocks import Source
from kvrelay.kvtransfer.tiers.manager import Tiers


class Mode(StrEnum):
    """What the producer does for it."""

    HANDOFF = "handoff"  # computes all of the prompt and samples the next token
    FETCH = "fetch"  # exports what it holds of the prefix
    LOAD = "load"  # there is no producer: everything is loaded from lower tiers


@dataclass(frozen=True, slots=True)
class Offer:
    """Where the producer has a block."""

    tier: Tier
    block: int
    checksum: int


@dataclass(slots=True)
class Read:
    """A transfer in flight. `tier`: the lower tier that it loads from; None: a peer."""

    indices: list[int]
    tier: Tier | None
    posted_at: float
    deadline: float


@dataclass(slots=True)
class Arrival:
    """The consumer's side of a handoff. Owned by the connector.

    Invariant: `seq.num_reads == len(reads)`; indices in `posted` have been or are being read, those
    in `good` have arrived with the right bytes; `own` are pinned until it has settled."""

    seq: Sequence
    mode: Mode
    producer: NodeId | None
    deadline: float
    state: ConsumerState = ConsumerState.WAITING
    epoch: int | None = None  # that in which the producer announced the blocks
    lease: int | None = None  # under which it holds them
    first: int = 0
    covers: int = 0  # the end of what the producer exports, where it tells it
    own: list[Source | None] = field(default_factory=list)  # None: the table has no block there
    is_own_posted: bool = False  # they are all read from the start on
    offers: dict[int, Offer] = field(default_factory=dict)
    new: list[int] = field(default_factory=list)  # offers that may not be posted yet
    posted: set[int] = field(default_factory=set)
    good: set[int] = field(default_factory=set)
    reads: dict[TransferId, Read] = field(default_factory=dict)
    started_at: float = 0.0
    draining_since: float = float("inf")
    final: bool = False  # the producer offers no more
    next_token: int | None = None
    next_logprobs: TokenLogprobs | None = None
    final_at: float = 0.0
    is_asked_back: bool = False  # the producer needs its memory, and nothing was read yet

    @property
    def key(self) -> Key:
        return self.seq.key

    def take(self, now: float, ready: KVReady) -> None:
        """The producer has announced blocks. With the last ones it has sent the router a token."""
        self.epoch, self.lease = ready.epoch, ready.lease
        blocks = zip(ready.block_ids, ready.checksums, strict=True)
        for index, (block, checksum) in enumerate(blocks, start=ready.first):
            if block != NO_BLOCK and index not in self.offers:
                self.offers[index] = Offer(ready.tier, block, checksum)
                self.new.append(index)
        seq = self.seq
        if seq.awaits_producer:
            seq.is_offered = True
            seq.end_phase("prefill_wait", now)
        if ready.final:
            self.final, self.final_at = True, now
            self.next_token, self.next_logprobs = ready.next_token, ready.next_logprobs
            seq.first_token_sent = ready.next_token is not None

    @property
    def own_end(self) -> int:
        return self.first + len(self.own)

    @property
    def own_sources(self) -> list[Source]:
        return [source for source in self.own if source is not None]

    @property
    def end(self) -> int:
        """The end of the blocks that are expected, as far as is known."""
        if self.mode is Mode.HANDOFF:
            return len(self.seq.block_ids)
        end, limit = self.own_end, len(self.seq.block_ids)
        if self.covers:
            return min(self.covers, limit)
        while end in self.offers and end < limit:
            end += 1
        return end

    @property
    def is_cut_short(self) -> bool:
        """The producer has lost blocks that it was about to export, and a part is of no use."""
        needed = self._needed(self.own_end, min(self.covers, len(self.seq.block_ids)))
        return self.final and any(index not in self.offers for index in needed)

    def _needed(self, first: int, end: int) -> Iterator[int]:
        """Those of entries `[first, end)` that the table has a block for."""
        table = self.seq.block_ids
        count = max(1, table.num_groups)
        for index, block in table.entries(first // count, -(-end // count)):
            if first <= index < end and block != NO_BLOCK:
                yield index

    @property
    def has_all(self) -> bool:
        """No more blocks are expected, and no transfer is in flight."""
        complete = self.final or self.mode is Mode.LOAD
        if not complete or self.reads:
            return False
        return self.posted.issuperset(self._needed(self.first, self.end))

    def good_end(self, *, trust_producer: bool) -> int:
        """The end of the blocks that may be used: in order, with the right bytes, and of those of
        the producer only if it has confirmed them. None of a sequence that has ended: its table is
        empty."""
        limit = min(self.end if trust_producer else self.own_end, len(self.seq.block_ids))
        needed = self._needed(self.first, limit)
        return next((index for index in needed if index not in self.good), max(self.first, limit))

    def take_new(self) -> list[int]:
        """Blocks that have been offered since the last call, and are to be read."""
        new, self.new = self.new, []
        return sorted(i for i in new if self.takes_offer(i) and i not in self.posted)

    def takes_offer(self, index: int) -> bool:
        """Whether this block is read from the producer."""
        table = self.seq.block_ids
        return self.own_end <= index < len(table) and table[index] != NO_BLOCK

    def own_source(self, index: int) -> Source:
        """Where a block before `own_end` that the table has is loaded from."""
        source = self.own[index - self.first]
        assert source is not None
        return source

    def checksum(self, index: int) -> int:
        if index < self.own_end:
            return self.own_source(index).checksum
        return self.offers[index].checksum

    def accept(self, index: int, checksum: int) -> bool:
        """Whether the block that has come has the right bytes."""
        expected = self.checksum(index)
        if expected == UNKNOWN and checksum >= 0:
            source = replace(self.own_source(index), checksum=checksum)
            self.own[index - self.first] = source
            return True
        return checksum == expected

    def num_asked(self, tier: Tier | None) -> int:
        """Blocks of the reads from this source that are under way."""
        return sum(len(read.indices) for read in self.reads.values() if read.tier is tier)

    def ends_of(self, read: Read) -> tuple[list[int], list[Source]]:
        """Blocks that it writes to, and where in lower tiers it reads."""
        blocks = [self.seq.block_ids[index] for index in read.indices]
        is_own = read.tier is not None
        return blocks, [self.own_source(index) for index in read.indices] if is_own else []

    def source_of(self, read: Read) -> str:
        """Whose bytes `read` copies, for log lines."""
        return f"{self.producer}" if read.tier is None else f"the own {read.tier} tier"

    def source_tier(self, index: int) -> str:
        """Where a block came from, for metrics and `usage`."""
        return self.own_source(index).tier if index < self.own_end else "peer"


@dataclass(frozen=True, slots=True)
class Settled:
    """An arrival has ended and nothing writes to its blocks. Blocks `[arrival.first, end)` may be
    used. `complete`: all KV of the prompt is here, and the next token is known. `left`: reads that
    may still write to blocks of the sequence, which has to go on with others."""

    arrival: Arrival
    end: int
    complete: bool
    left: tuple[Read, ...] = ()

    def note(self) -> Note:
        whose = ", ".join(sorted({self.arrival.source_of(read) for read in self.left}))
        name = self.arrival.key[0]
        text = f"{len(self.left)} reads of {name} from {whose} do not settle; it goes on"
        return Note("warning", "kv_read_left_behind", text)


def mismatch(arrival: Arrival, read: Read, count: int) -> Note:
    text = (
        f"{count} KV blocks of {arrival.seq.request_id} from {arrival.source_of(read)} do not"
        " have the bytes that were stored or sent; they are computed again"
    )
    return Note("error", "kv_checksum_mismatch", text)


def choose_loads(
    seq: Sequence,
    kv: KVCacheManager,
    tiers: Tiers,
    load_s: Callable[[Tier], float],
    compute_s: float,
) -> list[Source | None]:
    """Sources of blocks `[num_sealed, num_sealed + len(result))` of `seq`, which has just been
    admitted; None where none is needed, and its table is laid out for that. `load_s`: to load a
    block, by tier; `compute_s`: to compute one."""
    if seq.compute_all:
        return []
    if kv.windows.any:
        return _choose_window(seq, kv, tiers, load_s, compute_s)
    sources = tiers.find(kv.usable_hashes(seq)[seq.num_sealed :])
    count = blocks_worth_loading((load_s(source.tier) for source in sources), compute_s)
    return [*sources[:count]]


def _choose_window(
    seq: Sequence,
    kv: KVCacheManager,
    tiers: Tiers,
    load_s: Callable[[Tier], float],
    compute_s: float,
) -> list[Source | None]:
    """All or nothing: a part of a window is of no use. One that comes from a prefill worker is not
    mixed with what is here."""
    block_hashes, first = kv.usable_hashes(seq), seq.num_sealed
    found: dict[int, Source] = {}

    def has(index: int) -> bool:
        if index < first:
            return seq.block_ids[index] != NO_BLOCK
        found.update((index, source) for source in tiers.find(block_hashes[index : index + 1]))
        return index in found

    windows = kv.windows
    end = 0 if seq.is_remote else windows.reach(len(block_hashes), has, first // windows.count)
    needed = windows.kept_of(first, end, windows.tokens(end)) if end > first else []
    cost_s = sum(load_s(found[index].tier) for index in needed)
    if cost_s >= (end - first) / windows.count * compute_s or not kv.expect(seq, end):
        return []
    chosen = {index: found[index] for index in needed}
    return [chosen.get(index) for index in range(first, end)]
