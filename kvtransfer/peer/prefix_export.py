"""A worker that lends: another one reads the prefix that it lacks out of this one's caches.

Life of a loan: asked for (`KVFetch`) -> the blocks that are in device or host memory are pinned and
announced (`KVReady`); those on disk only are brought into host memory first -> final -> the pins
end with the consumer's `KVConfirmRequest` (confirmed: they were held throughout), its
`KVRelease`, or the lease. It is the producer's side of a handoff without the computing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.config import WorkerConfig
from engine.kv.cache_manager import KVCacheManager
from engine.kv.tier import Tier
from engine.node import Effect, NodeId, Send
from kvtransfer.messages import KVConfirmed, KVConfirmRequest, KVFetch, KVReady
from kvtransfer.tiers.manager import Source, Tiers

MAX_LOANS = 64
LENT_SHARE = 0.5  # of the device pool, at most: what is lent cannot be evicted
STAGE_TIMEOUT_S = 5.0  # for blocks to come from disk; then what is there is all

Key = tuple[str, int]


@dataclass(slots=True)
class Loan:
    """Blocks `[first, first + num_lent)` of the consumer's sequence are pinned here."""

    key: Key
    consumer: NodeId
    lease: int
    first: int
    block_hashes: tuple[bytes, ...]
    until: float  # end of the lease; before `final`, of the wait for the disk
    num_lent: int = 0
    final: bool = False
    staged: set[bytes] = field(default_factory=set)  # asked for from disk
    blocks: list[int] = field(default_factory=list)  # of the device pool
    sources: list[Source] = field(default_factory=list)  # of the host tier


class Lender:
    """Owned by a worker. Invariant: exactly the blocks and sources of the loans are pinned by it; a
    loan is here as long as its consumer may read."""

    def __init__(self, config: WorkerConfig, kv: KVCacheManager, tiers: Tiers) -> None:
        self._config = config
        self._kv = kv
        self._tiers = tiers
        self.loans: dict[Key, Loan] = {}
        self._num_leases = config.epoch << 32 | 1 << 31  # a prefill worker's own are below
        self.counters: dict[str, float] = {}

    def on_fetch(self, now: float, fetch: KVFetch) -> list[Effect]:
        key = (fetch.request_id, fetch.attempt)
        if key in self.loans:
            return []  # a repeat
        self._num_leases += 1
        timeout_s = min(STAGE_TIMEOUT_S, self._config.lease_s)
        loan = Loan(
            key, fetch.consumer, self._num_leases, fetch.first, fetch.block_hashes, now + timeout_s
        )
        if len(self.loans) >= MAX_LOANS:
            self._count("loans_refused")
            return [self._ready(loan, Tier.DEVICE, (), (), final=True)]
        self._count("loans")
        self.loans[key] = loan
        if self._config.num_host_blocks:
            on_disk = [
                s.block_hash for s in self._tiers.find(loan.block_hashes) if s.tier is Tier.DISK
            ]
            loan.staged = {
                block_hash for block_hash in on_disk if not self._kv.pool.is_cached(block_hash)
            }
            self._tiers.promote([block_hash for block_hash in on_disk if block_hash in loan.staged])
        return self._announce(now, loan, at_least_a_word=True)

    def on_read(self, message: KVConfirmRequest) -> list[Effect] | None:
        """The answer to a consumer that has read a loan; None if the lease is none of these."""
        loan = self.loans.get((message.request_id, message.attempt))
        if loan is None or loan.lease != message.lease:
            return None
        self._count("loaned_blocks", loan.num_lent)
        self._end(loan)
        return [Send(message.consumer, KVConfirmed(*loan.key))]

    def release(self, key: Key) -> None:
        """The consumer does not want it (any more)."""
        loan = self.loans.get(key)
        if loan is not None:
            self._end(loan)

    def advance(self, now: float) -> list[Effect]:
        """Announce what has come from disk meanwhile."""
        waiting = [loan for loan in self.loans.values() if not loan.final]
        return [effect for loan in waiting for effect in self._announce(now, loan)]

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for loan in list(self.loans.values()):
            if now < loan.until:
                continue
            if loan.final:
                self._count("leases_expired")
                self._end(loan)
            else:
                effects += self._finish(now, loan, [])
        return effects

    def _announce(self, now: float, loan: Loan, *, at_least_a_word: bool = False) -> list[Effect]:
        """Pin and announce what can be read now, in order."""
        effects: list[Effect] = []
        while (found := self._lend_run(loan)) is not None:
            tier, blocks, sums = found
            effects.append(self._ready(loan, tier, blocks, sums, final=False))
            loan.num_lent += len(blocks)
        rest = self._tiers.find(loan.block_hashes[loan.num_lent :])
        if rest and rest[0].tier is Tier.DISK and rest[0].block_hash in loan.staged:
            # It is on its way into host memory.
            if at_least_a_word and not effects:
                effects.append(self._ready(loan, Tier.HOST, (), (), final=False))
            return effects
        return self._finish(now, loan, effects)

    def _lend_run(self, loan: Loan) -> tuple[Tier, tuple[int, ...], tuple[int, ...]] | None:
        """Pin the next blocks that are all in one tier; None if there are none."""
        pool, block_hashes = self._kv.pool, loan.block_hashes[loan.num_lent :]
        room = int(LENT_SHARE * pool.num_blocks) - sum(len(n.blocks) for n in self.loans.values())
        blocks = pool.lookup(block_hashes)[: max(0, room)]
        if blocks:
            pool.acquire(blocks)
            loan.blocks += blocks
            return Tier.DEVICE, tuple(blocks), tuple(self._kv.checksums[b] for b in blocks)
        sources: list[Source] = []
        for source in self._tiers.find(block_hashes):
            if source.tier is not Tier.HOST:
                break
            sources.append(source)
        if not sources:
            return None
        self._tiers.pin(sources)
        loan.sources += sources
        return Tier.HOST, tuple(s.slot for s in sources), tuple(s.checksum for s in sources)

    def _finish(self, now: float, loan: Loan, effects: list[Effect]) -> list[Effect]:
        """Nothing more will be lent. A loan of nothing ends here."""
        loan.final = True
        loan.until = now + self._config.lease_s
        if not loan.num_lent:
            self._end(loan)
        return [*effects, self._ready(loan, Tier.DEVICE, (), (), final=True)]

    def _ready(
        self,
        loan: Loan,
        tier: Tier,
        blocks: tuple[int, ...],
        checksums: tuple[int, ...],
        *,
        final: bool,
    ) -> Send:
        first = loan.first + loan.num_lent
        ready = KVReady(
            request_id=loan.key[0],
            attempt=loan.key[1],
            producer=self._config.node_id,
            epoch=self._config.epoch,
            first=first,
            block_ids=blocks,
            checksums=checksums,
            num_tokens=(first + len(blocks)) * self._config.block_size,
            final=final,
            lease=loan.lease,
            tier=tier,
        )
        return Send(loan.consumer, ready)

    def _end(self, loan: Loan) -> None:
        del self.loans[loan.key]
        self._kv.pool.release(loan.blocks)
        self._tiers.unpin(loan.sources)

    def _count(self, name: str, amount: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    def check_idle(self) -> list[str]:
        return [
            f"{len(loan.block_hashes)} blocks are lent for {key}"
            for key, loan in self.loans.items()
        ]
