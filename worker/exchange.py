"""The KV traffic of a worker as one thing: what it reads from others (connector), what others read
from it (producer), and what moves between its tiers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.core import EngineCore
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import Effect, Send
from kvrelay.engine.sequence import NO_BLOCK, SeqState, Sequence
from kvrelay.engine.stats import Audit
from kvrelay.kvtransfer.agent import CopyDone, PeerConnected, StoreFailed
from kvrelay.kvtransfer.messages import (
    CacheOrder,
    KVConfirmed,
    KVConfirmRequest,
    KVConnect,
    KVConnected,
    KVFetch,
    KVReady,
    KVRefused,
    KVRelease,
)
from kvrelay.kvtransfer.peer.arrival import Mode, Settled, choose_loads
from kvrelay.kvtransfer.peer.connector import Connector, Orphans
from kvrelay.kvtransfer.peer.handoff import ProducerEvent
from kvrelay.kvtransfer.peer.producer import Handoff, Producer
from kvrelay.kvtransfer.tiers.manager import Tiers
from kvrelay.kvtransfer.tiers.registry import TIERS

Handler = Callable[[float, Any], list[Effect]]
"""What a worker does about messages of one type: (now, message) -> effects."""


class KVExchange:
    """Owned by a worker node, over its core. Invariant: every `CopyDone` goes to who
    asked for the copy: the connector, which may have left it to `orphans`, or the tiers."""

    def __init__(self, config: WorkerConfig, core: EngineCore) -> None:
        self._core = core
        self.tiers = Tiers(config, core.kv)
        self.orphans = Orphans(core.kv.pool, self.tiers)
        self.connector = Connector(config, self.tiers, self.orphans)
        self.producer = Producer(config, core.kv, self.tiers, self._forget)
        core.publisher.lower = self.tiers
        self.handlers: dict[type, Handler] = {
            CopyDone: self._on_copy_done,
            KVReady: lambda now, message: self.connector.on_ready(now, message),
            KVConfirmed: self._on_confirmed,
            KVRefused: lambda now, message: self.connector.on_refused(message),
            KVConnect: lambda now, message: self.connector.peers.on_connect(message),
            KVConnected: lambda now, message: self.connector.on_connected(message),
            PeerConnected: lambda now, message: self.connector.on_peer_connected(now, message),
            KVFetch: lambda now, message: self.producer.on_fetch(now, message),
            KVConfirmRequest: self._on_confirm_request,
            KVRelease: self._on_release,
            CacheOrder: lambda now, message: self.tiers.order(now, message),
            StoreFailed: lambda now, message: self.tiers.on_store_failed(now, message),
        }

    def has_external_kv(self, seq: Sequence) -> bool:
        """Whether KV of `seq`, which was just allocated, is read or loaded. Decides which blocks
        are loaded from lower tiers rather than computed, and pins them."""
        core = self._core
        compute_s = core.config.block_size / (core.timing.prefill_tokens_per_s.value or 1e-9)
        sources = choose_loads(seq, core.kv, self.tiers, self.connector.rates.load_s, compute_s)
        return self.connector.plan(seq, sources)

    def advance(self, now: float) -> list[Effect]:
        """After every message: start the transfers that have become possible."""
        return [*self.tiers.advance(now), *self.producer.advance(now)]

    def tick(self, now: float) -> list[Effect]:
        effects = [*self.connector.tick(now), *self.producer.tick(now), *self.tiers.tick(now)]
        core = self._core
        for why, times in self.connector.failures.items():
            core.counters[f"handoff_failed_{why}"] = times
        core.counters.update(self.connector.rates.counters)
        core.counters["kv_reads_left_behind"] = self.orphans.num_taken
        core.counters.update(self.producer.counters)
        core.counters.update(self.tiers.counters)
        return effects

    def end(self, seq: Sequence) -> list[Effect]:
        """Forget `seq` now; its blocks are freed once nothing writes to them."""
        lease = self.producer.leases.get(seq.key)
        if isinstance(lease, Handoff):
            return self.producer.end(lease, ProducerEvent.RELEASE)
        return self._forget(seq)

    def _forget(self, seq: Sequence) -> list[Effect]:
        arrival = self.connector.arrivals.get(seq.key)
        self._core.remove(seq)
        return self.connector.fail(arrival, "cancelled") if arrival is not None else []

    def take_arrived(self, now: float) -> list[Settled]:
        """Arrivals that have ended: what is good of them is sealed, and their sequences are
        scheduled to compute the rest. Blocks of ended sequences are freed."""
        alive: list[Settled] = []
        if not self.connector.settled:  # as after most messages
            return alive
        for settled in self.connector.take_settled():
            seq = settled.arrival.seq
            if seq.state is SeqState.DEAD:
                self._core.scheduler.release_if_settled(seq)
                continue
            self._use(now, settled)
            alive.append(settled)
        return alive

    def _use(self, now: float, settled: Settled) -> None:
        core, arrival, seq = self._core, settled.arrival, settled.arrival.seq
        seq.num_arriving = 0
        seq.is_remote = False
        if seq.state is not SeqState.REMOTE:
            return  # still waiting: it will be admitted as a local one
        if settled.left:
            # What is in the lower tiers may be loaded now, but not from one that did not answer.
            seq.compute_all |= any(read.tier is not None for read in settled.left)
            seq.num_preemptions += 1  # it has lost its blocks, and may find none here
            seq.end_phase("lost", now)
            core.scheduler.readmit(seq)
            return
        if not settled.complete and not core.kv.can_go_on(seq, settled.end):
            seq.compute_all = True
            seq.end_phase("lost", now)
            core.scheduler.readmit(seq)
            return
        size = core.config.block_size
        num_tokens = 0  # not computed because of the next block that has come
        for index in range(arrival.first, settled.end):
            num_tokens += size
            if seq.block_ids[index] == NO_BLOCK:
                continue
            core.kv.checksums[seq.block_ids[index]] = arrival.checksum(index)
            source = arrival.source_tier(index)
            core.count(f"blocks_from_{source}")
            if not settled.complete and not seq.has_own_kv:
                seq.cached_by_source[source] = seq.cached_by_source.get(source, 0) + num_tokens
            num_tokens = 0
        if settled.complete:
            seq.num_computed, seq.has_own_kv = len(seq.tokens), True
        elif settled.end > arrival.first:
            seq.num_computed = settled.end * size
        self._end_phases(now, settled)
        core.kv.seal_computed(seq)
        core.scheduler.compute_here(seq)

    def _end_phases(self, now: float, settled: Settled) -> None:
        """The sequence has waited for what has come: until the producer had computed all of it,
        and from then on; or all of it is lost."""
        arrival, seq = settled.arrival, settled.arrival.seq
        if arrival.mode is not Mode.HANDOFF:
            seq.end_phase(arrival.mode, now)
        elif settled.complete:
            seq.end_phase("prefill_wait", max(arrival.final_at, seq.phase_since))
            seq.end_phase("transfer", now)
        else:
            seq.end_phase("lost", now)

    def _on_confirmed(self, now: float, message: KVConfirmed) -> list[Effect]:
        self.connector.on_confirmed((message.request_id, message.attempt))
        return []

    def _on_confirm_request(self, now: float, message: KVConfirmRequest) -> list[Effect]:
        effects = self.producer.on_confirm_request(message)
        return [self._refuse(message)] if effects is None else effects

    def _on_release(self, now: float, message: KVRelease) -> list[Effect]:
        return self.producer.on_release((message.request_id, message.attempt))

    def _on_copy_done(self, now: float, done: CopyDone) -> list[Effect]:
        effects = self.tiers.on_copy_done(now, done)
        if effects is not None:
            return effects
        return [] if self.orphans.on_copy_done(done) else self.connector.on_copy_done(now, done)

    def _refuse(self, message: KVConfirmRequest) -> Send:
        self._core.count("kv_refused")
        why = f"no lease {message.lease} is held"
        return Send(message.consumer, KVRefused(message.request_id, message.attempt, why))

    def rates(self) -> dict[Tier | None, float]:
        """Bytes per second that requests have read at, by own tier; None: from peers."""
        rates = self.connector.rates
        return {tier: rates.bytes_per_s(tier) for tier in rates.read_bytes_per_s}

    def audit(self, left: list[str]) -> Audit:
        """Where every block is. `left`: what the worker would not have if it were idle."""
        config, pool = self._core.config, self._core.kv.pool
        counts = {
            "device.blocks": pool.num_blocks,
            "device.in_use": pool.num_blocks - pool.num_free,
            "device.evictable": pool.num_evictable,
            "device.blank": pool.num_free - pool.num_evictable,
            "device.left_to_reads": self.orphans.num_blocks,
            "transfers": self.connector.num_reads + self.orphans.num_reads + self.tiers.num_moves,
            "leases": len(self.producer.leases),
        }
        for tier, spec in TIERS.items():
            counts[f"{tier}.blocks"] = spec.num_blocks(config)
            counts[f"{tier}.used"] = self.tiers.num_blocks(tier)
            counts[f"{tier}.pinned"] = self.tiers.num_pinned(tier)
        return Audit(config.node_id, config.epoch, counts, tuple(left))

    def check_idle(self) -> list[str]:
        """What an idle worker must not have; empty if all is well."""
        return [
            *self.connector.check_idle(),
            *self.orphans.check_idle(),
            *self.producer.check_idle(),
            *self.tiers.check_idle(),
        ]
