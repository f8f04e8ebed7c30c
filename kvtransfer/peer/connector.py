"""The consumer's side: which KV is read from peers and lower tiers, and when it may be used.

Life of a peer: asked (`KVConnect`) -> answered (`KVConnected`) -> connected by the agent. A new
epoch of the peer begins it again. A peer with another model, dtype or layout is told apart by its
fingerprint before any address is given out: not a byte moves between the two.

Life of an arrival: expected (the request has come) -> started (destination blocks are allocated)
-> reading, as blocks are announced -> confirming, if a producer held them -> settled, with those
blocks that are certain to be good; the worker computes the rest. The same for all sources. A read
has a deadline.

Life of an unsettled read: given up, and not settled in time (the worker that it reads from may be
stopped) -> the sequence goes on with other blocks, and the read keeps its own -> settled: they are
free. One that never settles keeps them as long as the process lives; nothing that a peer says ends
that, since bytes on their way may arrive after it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum
from itertools import count, islice

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.kv.block_pool import BlockPool
from kvrelay.engine.kv.cache_manager import KVCacheManager
from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import Effect, NodeId, Note, Send
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.stats import KVLink
from kvrelay.kvtransfer.agent import (
    MISSING,
    ConnectPeer,
    CopyBlocks,
    CopyDone,
    PeerConnected,
    ReadId,
    TransferId,
)
from kvrelay.kvtransfer.messages import (
    KVConfirmRequest,
    KVConnect,
    KVConnected,
    KVFetch,
    KVReady,
    KVRefused,
    KVRelease,
)
from kvrelay.kvtransfer.peer.arrival import Arrival, Mode, Read, Settled, mismatch
from kvrelay.kvtransfer.peer.handoff import ConsumerEvent, ConsumerState, Key, next_consumer
from kvrelay.kvtransfer.peer.rates import ReadRates
from kvrelay.kvtransfer.tiers.blocks import Source
from kvrelay.kvtransfer.tiers.manager import Tiers
from kvrelay.kvtransfer.tiers.registry import TIERS, has_keys, memory_tiers

MAX_MISSED = 4096  # handoffs whose announcements were dropped, that are remembered
CONFIRM_TIMEOUT_S = 5.0
SETTLE_S = 0.5  # for a read that is given up; then it is left behind
FETCH_TIMEOUT_S = 2.0  # for the first answer to a KVFetch; nothing is computed for it
CONNECT_RETRY_S = 1.0
MAX_LINKS = 32  # that are reported: they are in every message of statistics

Fields = tuple[tuple[str, str], ...]


class Reach(StrEnum):
    CONNECTED = "connected"
    WAITING = "waiting"  # for the handshake, which is under way
    CHANGED = "changed"  # the peer has a later epoch than the one that is wanted


@dataclass(slots=True)
class _Peer:
    epoch: int = -1
    connected: bool = False
    bytes_per_s: float = 0.0  # by a small read, when it was connected; 0: not known
    asked_at: float = float("-inf")


class Peers:
    """Owned by a worker's connector. Invariant: a peer is `connected` iff the agent has said so of
    its present epoch."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._peers: dict[NodeId, _Peer] = {}

    def reach(self, now: float, node: NodeId, epoch: int | None) -> tuple[Reach, list[Effect]]:
        """Whether `node` can be read at `epoch` (None: whichever it has); asks it if not."""
        peer = self._peers.setdefault(node, _Peer())
        if epoch is not None and peer.epoch > epoch:
            return Reach.CHANGED, []
        if peer.connected and (epoch is None or peer.epoch == epoch):
            return Reach.CONNECTED, []
        if now - peer.asked_at < CONNECT_RETRY_S:
            return Reach.WAITING, []
        peer.asked_at = now
        config = self._config
        ask = KVConnect(config.node_id, config.fingerprint, config.compatibility)
        return Reach.WAITING, [Send(node, ask)]

    def on_connect(self, message: KVConnect) -> list[Effect]:
        """Another worker asks how to read this one."""
        config = self._config
        fits = message.fingerprint == config.fingerprint
        answer = KVConnected(
            producer=config.node_id,
            epoch=config.epoch,
            fingerprint=config.fingerprint,
            num_blocks=config.num_blocks,
            metadata=config.agent_metadata if fits else b"",
            compatibility=config.compatibility,
        )
        return [Send(message.consumer, answer)]

    def on_connected(self, message: KVConnected) -> tuple[bool, list[Effect]]:
        """(whether the two fit, effects)."""
        config = self._config
        if message.fingerprint != config.fingerprint:
            text = (
                f"{message.producer} and {config.node_id} exchange no KV: "
                f"{_difference(message.compatibility, config.compatibility)}"
            )
            return False, [Note("error", "kv_incompatible_peer", text)]
        peer = self._peers.setdefault(message.producer, _Peer())
        if message.epoch < peer.epoch or (message.epoch == peer.epoch and peer.connected):
            return True, []
        peer.epoch, peer.connected = message.epoch, False
        connect = ConnectPeer(message.producer, message.epoch, message.num_blocks, message.metadata)
        return True, [connect]

    def on_peer_connected(self, message: PeerConnected) -> tuple[bool | None, list[Effect]]:
        """(True: it can be read now, False: it cannot, None: nothing changed; effects)."""
        peer = self._peers.get(message.peer)
        if peer is None or peer.epoch != message.epoch:
            return None, []
        if message.error is not None:
            return False, [Note("warning", "kv_connect_failed", f"{message.peer}: {message.error}")]
        peer.connected = True
        peer.bytes_per_s = message.bytes_per_s
        if message.not_timed is None:
            return True, []
        text = f"{message.peer} is connected, its rate is not known: {message.not_timed}"
        return True, [Note("warning", "kv_read_not_timed", text)]

    def links(self) -> tuple[KVLink, ...]:
        """To the peers that are connected."""
        known = ((node, peer) for node, peer in self._peers.items() if peer.connected)
        return tuple(KVLink(node, peer.bytes_per_s) for node, peer in islice(known, MAX_LINKS))


@dataclass(frozen=True, slots=True)
class _Unsettled:
    blocks: Seq[int]  # its destination
    sources: Seq[Source]  # in a lower tier; pinned


class UnsettledReads:
    """Owned by a worker's exchange. Invariant: each block that such a read may write to has a
    reference from here, so that it is neither allocated nor sealed."""

    def __init__(self, pool: BlockPool, tiers: Tiers) -> None:
        self._pool = pool
        self._tiers = tiers
        self._reads: dict[TransferId, _Unsettled] = {}
        self.num_taken = 0  # since the start

    @property
    def num_reads(self) -> int:
        return len(self._reads)

    @property
    def num_blocks(self) -> int:
        """Blocks of the device that are kept for them."""
        return sum(len(read.blocks) for read in self._reads.values())

    def take(self, transfer_id: TransferId, blocks: Seq[int], sources: Seq[Source]) -> None:
        """A read whose sequence still has its blocks, and may free them from now on. `sources` are
        pinned, and stay so."""
        self._pool.hold(blocks)
        self._reads[transfer_id] = _Unsettled(blocks, sources)
        self.num_taken += 1

    def on_copy_done(self, done: CopyDone) -> bool:
        """Whether it was one of these."""
        read = self._reads.pop(done.transfer_id, None)
        if read is None:
            return False
        self._pool.release(read.blocks)
        self._tiers.unpin(read.sources)
        return True

    def check_idle(self) -> list[str]:
        return [f"an unsettled read holds {len(o.blocks)} blocks" for o in self._reads.values()]


class Connector:
    """Owns the arrivals of one worker.

    Invariant: an arrival is here until no transfer can write to its destination, or those that may
    are left to `unsettled`; the sources that it loads from are pinned as long."""

    def __init__(
        self, config: WorkerConfig, kv: KVCacheManager, tiers: Tiers, unsettled: UnsettledReads
    ) -> None:
        self.config = config
        self._kv = kv
        self.tiers = tiers
        self.unsettled = unsettled
        self.rates = ReadRates(config, tiers)
        self.peers = Peers(config)
        self.arrivals: dict[Key, Arrival] = {}
        self.settled: list[Settled] = []
        self.failures = Counter[str]()  # why arrivals failed -> how often
        self._early: OrderedDict[Key, list[KVReady]] = OrderedDict()  # their requests will come
        self._max_early = config.max_waiting + config.max_num_seqs  # as many as may be here
        self._missed: OrderedDict[Key, None] = OrderedDict()  # announced when that was exceeded
        self._planned: dict[Key, list[Source | None]] = {}
        self._by_transfer: dict[TransferId, Arrival] = {}
        self._read_ids = map(ReadId, count())

    @property
    def num_reads(self) -> int:
        return len(self._by_transfer)

    def take_settled(self) -> list[Settled]:
        settled, self.settled = self.settled, []
        return settled

    def expect(self, now: float, seq: Sequence, mode: Mode, producer: NodeId) -> list[Effect]:
        """KV of `seq` is read from `producer`, which may have announced blocks already."""
        patience_s = self.config.handoff_timeout_s if mode is Mode.HANDOFF else float("inf")
        arrival = Arrival(seq, mode, producer, now + patience_s)
        self.arrivals[seq.key] = arrival
        if seq.key in self._missed:  # it would wait for what was announced already
            del self._missed[seq.key]
            return self.fail(arrival, "announced_too_early")
        effects: list[Effect] = []
        for ready in self._early.pop(seq.key, ()):
            effects += self.on_ready(now, ready)
        return effects + self.peers.reach(now, producer, arrival.epoch)[1]

    def plan(self, seq: Sequence, sources: list[Source | None]) -> bool:
        """`sources`: blocks of `seq`, which was just allocated, that are loaded from lower tiers;
        they are pinned from now on. Returns whether any of its KV is loaded or read."""
        if sources:
            self.tiers.pin(source for source in sources if source is not None)
            self._planned[seq.key] = sources
        return bool(sources) or seq.key in self.arrivals

    def start(self, now: float, seq: Sequence) -> list[Effect]:
        """`seq` has its blocks; the cached prefix among them is not read."""
        own = self._planned.pop(seq.key, [])
        arrival = self.arrivals.get(seq.key)
        if arrival is None:
            deadline = now + self.config.handoff_timeout_s
            arrival = self.arrivals[seq.key] = Arrival(seq, Mode.LOAD, None, deadline)
        arrival.own, arrival.first, arrival.started_at = own, seq.num_sealed, now
        arrival.state = next_consumer(arrival.state, ConsumerEvent.START)
        effects: list[Effect] = []
        if arrival.mode is Mode.FETCH:
            arrival.deadline = now + min(FETCH_TIMEOUT_S, self.config.handoff_timeout_s)
            effects += self._fetch_prefix(arrival)
        seq.num_arriving = arrival.own_end
        return effects + self._advance(now, arrival)

    def on_ready(self, now: float, ready: KVReady) -> list[Effect]:
        key = (ready.request_id, ready.attempt)
        arrival = self.arrivals.get(key)
        if arrival is None:
            self._keep_early(key, ready)
            return []
        late = arrival.state in (ConsumerState.DRAINING, ConsumerState.CONFIRMING)
        if late or ready.producer != arrival.producer:
            return []
        known = (arrival.epoch, arrival.lease)
        if arrival.epoch is not None and known != (ready.epoch, ready.lease):
            return self.fail(arrival, "producer_changed")
        arrival.deadline = now + self.config.handoff_timeout_s
        if ready.covers > arrival.first and not arrival.covers:
            if not self._kv.expect(arrival.seq, ready.covers):
                return self.fail(arrival, "no_room")
            arrival.covers, arrival.new = ready.covers, [*arrival.offers]  # its table has changed
        arrival.take(now, ready)
        if arrival.is_cut_short:
            return self.fail(arrival, "export_incomplete")
        return self._advance(now, arrival)

    def _keep_early(self, key: Key, ready: KVReady) -> None:
        """Keeps it until its request comes. The oldest of too many are dropped: theirs may not."""
        if key in self._missed:
            return
        self._early.setdefault(key, []).append(ready)
        if len(self._early) > self._max_early:
            oldest, _ = self._early.popitem(last=False)
            self._missed[oldest] = None
            if len(self._missed) > MAX_MISSED:
                self._missed.popitem(last=False)

    def on_connected(self, message: KVConnected) -> list[Effect]:
        fits, effects = self.peers.on_connected(message)
        return effects if fits else effects + self._unreachable(message.producer, "incompatible")

    def on_peer_connected(self, now: float, message: PeerConnected) -> list[Effect]:
        connected, effects = self.peers.on_peer_connected(message)
        if connected is False:
            return effects + self._unreachable(message.peer, "connect_failed")
        if connected:
            self.rates.connected(message.bytes_per_s)
            for arrival in list(self.arrivals.values()):
                if arrival.producer == message.peer:
                    effects += self._advance(now, arrival)
        return effects

    def on_copy_done(self, now: float, done: CopyDone) -> list[Effect]:
        arrival = self._by_transfer.pop(done.transfer_id)
        read = arrival.reads.pop(done.transfer_id)
        arrival.seq.num_reads -= 1
        self.rates.now = now
        if done.error is None and now > read.posted_at:
            peer = (arrival.producer or "") if read.tier is None else ""
            self.rates.add(read.tier, done.num_bytes, now - read.posted_at, peer)
        if arrival.state is ConsumerState.DRAINING:
            if not arrival.reads:
                self._settle(arrival, ConsumerEvent.DONE)
            return []
        effects: list[Effect] = []
        if done.error is not None:
            text = f"{arrival.source_of(read)}: {done.error}"
            effects.append(Note("warning", "kv_read_failed", text))
            bad = read.indices
        else:
            sums = zip(read.indices, done.checksums, strict=True)
            bad = [index for index, value in sums if not arrival.accept(index, value)]
            if bad and done.checksums.count(MISSING) < len(bad):
                effects.append(mismatch(arrival, read, len(bad)))
        arrival.good.update(set(read.indices) - set(bad))
        is_there = done.error is not None and read.tier is not None and has_keys(read.tier)
        if bad and read.tier is not None and not is_there:
            for index in bad:
                self.tiers.discard(arrival.own_source(index))
        why = _why_failed(done, len(bad), is_there=is_there)
        # The prefix up to a bad block of a lower tier is still of use; a producer's is not.
        if bad and (read.tier is None or arrival.mode is Mode.HANDOFF):
            return effects + self.fail(arrival, why)
        if bad:
            self.failures[why] += 1
        return effects + self._advance(now, arrival)

    def on_confirmed(self, key: Key) -> None:
        arrival = self.arrivals.get(key)
        if arrival is not None and arrival.state is ConsumerState.CONFIRMING:
            self._settle(arrival, ConsumerEvent.CONFIRMED)

    def on_refused(self, message: KVRefused) -> list[Effect]:
        arrival = self.arrivals.get((message.request_id, message.attempt))
        if arrival is None:
            return []
        if arrival.state in (ConsumerState.WAITING, ConsumerState.HANDSHAKING):
            arrival.is_asked_back = True
            return self.fail(arrival, "asked_back")
        if arrival.state is not ConsumerState.CONFIRMING:
            return []
        self.failures["refused"] += 1
        self._settle(arrival, ConsumerEvent.REFUSED)
        return []

    def fail(self, arrival: Arrival, why: str) -> list[Effect]:
        """Give `arrival` up. It settles now, or once its last transfer has settled."""
        if arrival.state is ConsumerState.DRAINING:
            return []
        self.failures[why] += 1
        if arrival.reads:
            arrival.state = next_consumer(arrival.state, ConsumerEvent.CANCEL)
        elif arrival.state is ConsumerState.READING:
            self._settle(arrival, ConsumerEvent.ERROR)
        else:
            self._settle(arrival, ConsumerEvent.CANCEL)
        return [Send(arrival.producer, KVRelease(*arrival.key))] if arrival.producer else []

    def tick(self, now: float) -> list[Effect]:
        """Time out arrivals without progress, and reads; repeat handshakes without an answer."""
        effects: list[Effect] = []
        self.rates.now = now
        for arrival in list(self.arrivals.values()):
            if arrival.state is ConsumerState.DRAINING:
                arrival.draining_since = min(arrival.draining_since, now)
                if now >= arrival.draining_since + SETTLE_S:
                    effects.append(self._leave_behind(arrival))
            elif any(now >= read.deadline for read in arrival.reads.values()):
                effects += self.fail(arrival, "read_overdue")
            elif now >= arrival.deadline:
                effects += self.fail(arrival, f"timeout_{arrival.state}")
            elif arrival.state in (ConsumerState.HANDSHAKING, ConsumerState.READING):
                effects += self._advance(now, arrival)
        return effects

    def _advance(self, now: float, arrival: Arrival) -> list[Effect]:
        """Post what can be read; confirm or settle once all blocks have arrived."""
        effects: list[Effect] = []
        reach = Reach.CONNECTED if arrival.producer is None else Reach.WAITING
        if arrival.producer is not None and arrival.epoch is not None:
            reach, effects = self.peers.reach(now, arrival.producer, arrival.epoch)
            if reach is Reach.CHANGED and arrival.state is not ConsumerState.WAITING:
                return self.fail(arrival, "producer_changed")
        if arrival.state is ConsumerState.HANDSHAKING and (arrival.own or reach is Reach.CONNECTED):
            arrival.state = next_consumer(arrival.state, ConsumerEvent.READY)
        if arrival.state is not ConsumerState.READING:
            return effects
        effects += self._post_own(now, arrival)
        if arrival.producer is not None and reach is Reach.CONNECTED:
            effects += self._post_offers(now, arrival)
        if arrival.has_all:
            arrival.state = next_consumer(arrival.state, ConsumerEvent.DONE)
            if arrival.mode is not Mode.HANDOFF and not arrival.offers:
                self._settle(arrival, ConsumerEvent.CONFIRMED)  # own blocks: they were pinned
            else:
                effects += self._ask_confirmation(now, arrival)
        return effects

    def _ask_confirmation(self, now: float, arrival: Arrival) -> list[Effect]:
        arrival.deadline = now + CONFIRM_TIMEOUT_S
        assert arrival.lease is not None
        assert arrival.producer is not None
        request = KVConfirmRequest(*arrival.key, self.config.node_id, arrival.lease)
        return [Send(arrival.producer, request)]

    def _fetch_prefix(self, arrival: Arrival) -> list[Effect]:
        assert arrival.producer is not None
        seq, windows = arrival.seq, self._kv.windows
        hashes = tuple(self._kv.usable_hashes(seq)[arrival.own_end :: windows.count])
        if windows.any and arrival.own:  # its table is laid out for them
            hashes = ()
        fetch = KVFetch(*arrival.key, self.config.node_id, arrival.own_end, hashes)
        return [Send(arrival.producer, fetch)]

    def _post_own(self, now: float, arrival: Arrival) -> list[Effect]:
        effects: list[Effect] = []
        if arrival.is_own_posted:
            return effects
        arrival.is_own_posted = True
        for tier in TIERS:
            todo = [
                index
                for index, source in enumerate(arrival.own, start=arrival.first)
                if source is not None and source.tier is tier
            ]
            if todo:
                slots = tuple(arrival.own_source(index).slot for index in todo)
                names = tuple(arrival.own_source(index).block_hash for index in todo)
                keys = names if has_keys(tier) else ()
                effects.append(self._post(now, arrival, todo, tier, tier, slots, keys))
        return effects

    def _post_offers(self, now: float, arrival: Arrival) -> list[Effect]:
        effects: list[Effect] = []
        new = arrival.take_new()
        for tier in memory_tiers() if new else ():
            todo = [index for index in new if arrival.offers[index].tier is tier]
            if todo:
                blocks = tuple(arrival.offers[index].block for index in todo)
                effects.append(self._post(now, arrival, todo, None, tier, blocks))
        return effects

    def _post(
        self,
        now: float,
        arrival: Arrival,
        indices: list[int],
        own_tier: Tier | None,
        src_tier: Tier,
        src: tuple[int, ...],
        names: tuple[bytes, ...] = (),
    ) -> CopyBlocks:
        transfer_id = next(self._read_ids)
        arrival.posted.update(indices)
        num_asked = sum(each.num_asked(own_tier) for each in self.arrivals.values())
        timeout_s = self.rates.timeout_s(own_tier, len(indices) + num_asked)
        arrival.reads[transfer_id] = Read(indices, own_tier, now, now + timeout_s)
        arrival.seq.num_reads += 1
        self._by_transfer[transfer_id] = arrival
        own, theirs = (self.config.node_id, self.config.epoch), (arrival.producer, arrival.epoch)
        peer, epoch = theirs if own_tier is None else own
        assert peer is not None
        assert epoch is not None
        return CopyBlocks(
            transfer_id=transfer_id,
            peer=peer,
            epoch=epoch,
            src=src,
            dst=tuple(arrival.seq.block_ids[index] for index in indices),
            timeout_s=timeout_s,
            src_tier=src_tier,
            names=names,
        )

    def _unreachable(self, producer: NodeId, why: str) -> list[Effect]:
        effects: list[Effect] = []
        for arrival in list(self.arrivals.values()):
            if arrival.producer == producer and all(i < arrival.own_end for i in arrival.posted):
                effects += self.fail(arrival, why)
        return effects

    def _settle(self, arrival: Arrival, event: ConsumerEvent) -> None:
        assert not arrival.reads
        arrival.state = next_consumer(arrival.state, event)
        del self.arrivals[arrival.key]
        self.tiers.unpin(arrival.own_sources)
        done = arrival.state is ConsumerState.DONE
        end, is_handoff = arrival.good_end(trust_producer=done), arrival.mode is Mode.HANDOFF
        self.settled.append(Settled(arrival, end, done and is_handoff))

    def _leave_behind(self, arrival: Arrival) -> Note:
        """Its reads do not settle: they keep what they may write to, its sequence goes on."""
        left, kept = arrival.reads, set[Source]()
        for transfer_id, read in left.items():
            del self._by_transfer[transfer_id]
            blocks, sources = arrival.ends_of(read)
            self.unsettled.take(transfer_id, blocks, sources)
            kept.update(sources)
        self.tiers.unpin(source for source in arrival.own_sources if source not in kept)
        arrival.reads, arrival.seq.num_reads = {}, 0
        arrival.state = next_consumer(arrival.state, ConsumerEvent.LEAVE)
        del self.arrivals[arrival.key]
        reads = tuple(left.values())
        self.settled.append(Settled(arrival, arrival.first, complete=False, left=reads))
        return self.settled[-1].note()

    def check_idle(self) -> list[str]:
        left = [f"arrival {a.key} is {a.state}" for a in self.arrivals.values()]
        if self._by_transfer:
            left.append(f"transfers {sorted(read.number for read in self._by_transfer)} are live")
        if self._planned:
            left.append(f"loads of {sorted(self._planned)} are planned and not begun")
        return left


def _difference(theirs: Fields, ours: Fields) -> str:
    """Which fields differ, with both values."""
    mine = dict(ours)
    differing = [
        f"{name} is {value} there and {mine[name]} here"
        for name, value in theirs
        if name in mine and mine[name] != value
    ]
    return ", ".join(differing) or "their model, dtype or KV layout differs"


def _why_failed(done: CopyDone, num_bad: int, *, is_there: bool) -> str:
    """A label of `Connector.failures`. `is_there`: storage that has keys did not answer."""
    if done.error is not None:
        return "store_unavailable" if is_there else "read_failed"
    return "object_missing" if done.checksums.count(MISSING) == num_bad else "checksum_mismatch"
