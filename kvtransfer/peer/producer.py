"""The producer's side: KV of this worker that other workers may read, each part under a lease.

Life of a lease: granted -> its blocks are announced (`KVReady`) as they become readable -> held,
once the last announcement is out -> ended: the consumer asks for confirmation (`KVConfirmRequest`:
the blocks were held throughout, `KVConfirmed`), releases it (`KVRelease`), or it expires.

Two kinds. A *handoff* covers a sequence that this worker computes. A *prefix export* (`KVFetch`)
covers blocks that its caches hold: those in device or host memory are pinned and announced at once,
those that only storage has are brought into host memory first.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.block_hash import of_groups
from kvrelay.engine.kv.block_table import NO_BLOCK
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import Effect, NodeId, Send
from kvrelay.engine.request import TokenLogprobs
from kvrelay.engine.sequence import Sequence
from kvrelay.kvtransfer.messages import KVConfirmed, KVConfirmRequest, KVFetch, KVReady, KVRefused
from kvrelay.kvtransfer.peer.handoff import Key, ProducerEvent, ProducerState, next_producer
from kvrelay.kvtransfer.tiers.blocks import Source
from kvrelay.kvtransfer.tiers.manager import Tiers
from kvrelay.kvtransfer.tiers.registry import is_storage

MAX_EXPORTS = 64
EXPORT_SHARE = 0.5  # at most, so much of the device pool: exported blocks cannot be evicted
ASK_BACK_S = 0.25  # then again: the consumer may not have heard of it
STAGE_TIMEOUT_S = 5.0  # for blocks to come from storage; those that have not come are left out


@dataclass(slots=True, kw_only=True)
class Lease:
    """What a consumer may read until it has confirmed it, or the time is over."""

    key: Key
    consumer: NodeId
    number: int  # tells it from another lease of the same request, on other blocks
    state: ProducerState = ProducerState.COMPUTING
    until: float = float("inf")  # its end; of an export before it is held: of the wait for storage


@dataclass(slots=True, kw_only=True)
class Handoff(Lease):
    """Covers the blocks of `seq`, from 0 on."""

    seq: Sequence
    num_tokens: int  # that the consumer asked for
    announced_end: int = 0  # blocks before it were announced
    wanted_at: float = float("-inf")  # when its consumer was last asked to do without


@dataclass(slots=True, kw_only=True)
class PrefixExport(Lease):
    """Covers the blocks of the consumer's sequence with the first `num_exported` of `indices`,
    which were announced, and are pinned here."""

    indices: Seq[int]
    block_hashes: tuple[bytes, ...]  # those of the blocks at `indices`
    first: int
    covers: int  # as in KVReady
    num_exported: int = 0
    staged: set[bytes] = field(default_factory=set)  # asked for from storage
    blocks: list[int] = field(default_factory=list)  # in the device pool
    sources: list[Source] = field(default_factory=list)  # in tiers that are memory

    @property
    def next_index(self) -> int:
        done = self.num_exported
        return self.indices[done - 1] + 1 if done else self.first

    @property
    def next_names(self) -> tuple[bytes, ...]:
        """That of the next block, if there is one."""
        return self.block_hashes[self.num_exported : self.num_exported + 1]

    @property
    def rest(self) -> tuple[bytes, ...]:
        """Hashes of the blocks that are not announced."""
        return self.block_hashes[self.num_exported :]


class Producer:
    """Owned by a worker. Invariant: a lease is in `leases` as long as its consumer may read, and
    its blocks are neither freed nor written meanwhile."""

    def __init__(
        self,
        config: WorkerConfig,
        kv: KVCacheManager,
        tiers: Tiers,
        end_sequence: Callable[[Sequence], list[Effect]],
    ) -> None:
        """`end_sequence` is called when the handoff of a sequence has ended."""
        self._config = config
        self._kv = kv
        self._tiers = tiers
        self._end_sequence = end_sequence
        self.leases: dict[Key, Lease] = {}
        self._staging: dict[Key, PrefixExport] = {}  # those that wait for storage
        # No two lives of a worker share a number, nor do the two kinds.
        self._handoff_numbers = count((config.epoch << 32) + 1)
        self._export_numbers = count((config.epoch << 32 | 1 << 31) + 1)
        self.counters: dict[str, float] = {}

    @property
    def exports(self) -> list[PrefixExport]:
        return [lease for lease in self.leases.values() if isinstance(lease, PrefixExport)]

    def handoff(self, key: Key) -> Handoff:
        lease = self.leases[key]
        assert isinstance(lease, Handoff)
        return lease

    def grant(self, seq: Sequence, consumer: NodeId, num_tokens: int) -> None:
        """A handoff of `seq`, which is to be computed here."""
        number = next(self._handoff_numbers)
        self.leases[seq.key] = Handoff(
            key=seq.key, consumer=consumer, number=number, seq=seq, num_tokens=num_tokens
        )

    def restart(self, handoff: Handoff) -> None:
        """Its sequence has other blocks now. Those that were announced are lost: the rest goes
        under another number, so that the consumer gives the first one up."""
        if handoff.announced_end:
            handoff.number = next(self._handoff_numbers)
            handoff.announced_end = 0

    def hold(self, now: float, lease: Lease) -> None:
        """Everything that it covers is there; the consumer has `lease_s` to confirm."""
        lease.state = next_producer(lease.state, ProducerEvent.COMPUTED)
        lease.until = now + self._config.lease_s
        self._staging.pop(lease.key, None)

    def end(self, lease: Lease, event: ProducerEvent) -> list[Effect]:
        """Its blocks may be freed and written from now on."""
        lease.state = next_producer(lease.state, event)
        del self.leases[lease.key]
        if isinstance(lease, Handoff):
            return self._end_sequence(lease.seq)
        assert isinstance(lease, PrefixExport)
        self._staging.pop(lease.key, None)
        self._kv.pool.release(lease.blocks)
        self._tiers.unpin(lease.sources)
        return []

    def forget_handoff(self, seq: Sequence) -> None:
        """Drop the handoff of a sequence that has ended, if it has one."""
        if isinstance(self.leases.get(seq.key), Handoff):
            del self.leases[seq.key]

    def announce(
        self,
        lease: Lease,
        first: int,
        blocks: tuple[int, ...],
        checksums: tuple[int, ...],
        *,
        tier: Tier = Tier.DEVICE,
        num_tokens: int | None = None,
        covers: int = 0,
        final: bool = False,
        next_token: int | None = None,
        next_logprobs: TokenLogprobs | None = None,
    ) -> Send:
        """Tell the consumer that blocks `[first, first + len(blocks))`, but for those that are -1,
        can be read in `tier`.
        `num_tokens`: positions that are covered so far, unless all blocks are full."""
        full = self._kv.windows.tokens(first + len(blocks))
        ready = KVReady(
            request_id=lease.key[0],
            attempt=lease.key[1],
            producer=self._config.node_id,
            epoch=self._config.epoch,
            first=first,
            block_ids=blocks,
            checksums=checksums,
            num_tokens=full if num_tokens is None else min(full, num_tokens),
            final=final,
            next_token=next_token,
            next_logprobs=next_logprobs,
            lease=lease.number,
            tier=tier,
            covers=covers,
        )
        return Send(lease.consumer, ready)

    def on_confirm_request(self, message: KVConfirmRequest) -> list[Effect] | None:
        """A lease that exists was held throughout: it ends the moment its blocks are freed. None if
        it is not held (any more)."""
        lease = self.leases.get((message.request_id, message.attempt))
        if lease is None or lease.number != message.lease or lease.state is not ProducerState.HELD:
            return None
        if isinstance(lease, PrefixExport):
            self._count("prefix_exported_blocks", lease.num_exported)
        effects = self.end(lease, ProducerEvent.READ)
        return [*effects, Send(message.consumer, KVConfirmed(*lease.key))]

    def on_release(self, key: Key) -> list[Effect]:
        """The consumer does not want it (any more)."""
        lease = self.leases.get(key)
        return [] if lease is None else self.end(lease, ProducerEvent.RELEASE)

    def ask_back(self, now: float, seq: Sequence) -> list[Effect]:
        """The blocks of `seq`, which are held, are wanted here. A consumer that has not begun to
        read them does without, and releases them; one that reads confirms soon."""
        handoff = self.handoff(seq.key)
        if now - handoff.wanted_at < ASK_BACK_S:
            return []
        handoff.wanted_at = now
        self._count("handoffs_asked_back")
        return [Send(handoff.consumer, KVRefused(*handoff.key, "a higher class needs the memory"))]

    def on_fetch(self, now: float, fetch: KVFetch) -> list[Effect]:
        key = (fetch.request_id, fetch.attempt)
        if key in self.leases:
            return []  # a repeat
        windows = self._kv.windows
        names: Seq[bytes] = fetch.block_hashes
        indices: Seq[int] = range(fetch.first, fetch.first + len(names))
        covers = 0
        if windows.any:
            names = of_groups(names, windows.count)
            covers = self._reach(fetch.first, names)
            indices = windows.kept_of(fetch.first, covers, windows.tokens(covers))
            names = tuple(names[index - fetch.first] for index in indices)
        export = PrefixExport(
            key=key,
            consumer=fetch.consumer,
            number=next(self._export_numbers),
            until=now + min(STAGE_TIMEOUT_S, self._config.lease_s),
            indices=indices,
            block_hashes=tuple(names),
            first=fetch.first,
            covers=covers,
        )
        if len(self.exports) >= MAX_EXPORTS:
            self._count("prefix_exports_refused")
            return [self.announce(export, export.first, (), (), final=True)]
        self._count("prefix_exports")
        self.leases[key] = self._staging[key] = export
        self._stage(export)
        return self._export(now, export, is_first=True)

    def advance(self, now: float) -> list[Effect]:
        """Announce what has come from storage meanwhile."""
        due = [
            export
            for export in self._staging.values()
            if self._kv.pool.lookup(export.next_names) or not self._is_staging(export)
        ]
        return [effect for export in due for effect in self._export(now, export)]

    def _is_staging(self, export: PrefixExport) -> bool:
        """Whether its next block is on its way from storage to memory."""
        found = self._tiers.find(export.next_names)
        return any(is_storage(o.tier) and o.block_hash in export.staged for o in found)

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for lease in [lease for lease in self.leases.values() if now >= lease.until]:
            if lease.state is ProducerState.HELD:
                self._count("leases_expired")
                effects += self.end(lease, ProducerEvent.EXPIRE)
            else:
                assert isinstance(lease, PrefixExport)
                effects.append(self._finish(now, lease))
        return effects

    def _stage(self, export: PrefixExport) -> None:
        """Ask for those blocks that only storage has, if there is a tier in memory for them."""
        if self._tiers.memory_tier is None:
            return
        found = self._tiers.find(export.block_hashes)
        stored = [source.block_hash for source in found if is_storage(source.tier)]
        wanted = [each for each in stored if not self._kv.pool.is_cached(each)]
        export.staged = set(wanted)
        self._tiers.promote(wanted)

    def _export(self, now: float, export: PrefixExport, *, is_first: bool = False) -> list[Effect]:
        """Pin and announce what can be read now, in order. The first call announces something in
        any case: the consumer waits for an answer."""
        effects: list[Effect] = []
        while (found := self._pin_run(export)) is not None:
            tier, blocks, sums = found
            effects.append(self._announce_run(export, tier, blocks, sums))
        if self._is_staging(export):
            coming_to = self._tiers.memory_tier
            assert coming_to is not None
            if is_first and not effects:
                effects.append(self._announce_run(export, coming_to, (), ()))
            return effects
        return [*effects, self._finish(now, export)]

    def _reach(self, first: int, names: Seq[bytes]) -> int:
        """The end of the longest prefix that can be continued with what is here. The consumer has
        what comes before `first`."""

        def has(index: int) -> bool:
            if index < first:
                return True
            name = names[index - first]
            return self._kv.pool.is_cached(name) or bool(self._tiers.find([name]))

        known = first // self._kv.windows.count
        return self._kv.windows.reach(first + len(names), has, known)

    def _announce_run(
        self, export: PrefixExport, tier: Tier, blocks: Seq[int], sums: Seq[int]
    ) -> Send:
        """The next blocks of `export`, which are pinned; between them may be some of no use."""
        indices = export.indices[export.num_exported : export.num_exported + len(blocks)]
        first = indices[0] if indices else export.next_index
        spread = {index: at for at, index in enumerate(indices)}
        run = range(first, indices[-1] + 1 if indices else first)
        export.num_exported += len(blocks)
        return self.announce(
            export,
            first,
            tuple(blocks[spread[index]] if index in spread else NO_BLOCK for index in run),
            tuple(sums[spread[index]] if index in spread else 0 for index in run),
            tier=tier,
            covers=export.covers,
        )

    def _pin_run(
        self, export: PrefixExport
    ) -> tuple[Tier, tuple[int, ...], tuple[int, ...]] | None:
        """Pin the next blocks that are all in one tier; None if there are none."""
        pool = self._kv.pool
        room = int(EXPORT_SHARE * pool.num_blocks) - sum(len(e.blocks) for e in self.exports)
        blocks = pool.lookup(export.rest[: max(0, room)])
        if blocks:
            pool.acquire(blocks)
            export.blocks += blocks
            return Tier.DEVICE, tuple(blocks), tuple(self._kv.checksums[b] for b in blocks)
        sources = self._tiers.find(export.rest, one_tier=True)
        if not sources or is_storage(tier := sources[0].tier):
            return None
        self._tiers.pin(sources)
        export.sources += sources
        return tier, tuple(s.slot for s in sources), tuple(s.checksum for s in sources)

    def _finish(self, now: float, export: PrefixExport) -> Send:
        """Nothing more will be exported. A lease on nothing ends here."""
        if export.num_exported:
            self.hold(now, export)
        else:
            self.end(export, ProducerEvent.RELEASE)
        return self.announce(export, export.next_index, (), (), final=True)

    def _count(self, name: str, amount: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    def check_idle(self) -> list[str]:
        return [
            f"{type(lease).__name__} {key} to {lease.consumer} is {lease.state}"
            for key, lease in self.leases.items()
        ]
