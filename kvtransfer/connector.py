"""The consumer's side: which KV comes from elsewhere, and when it may be used.

Life of a handoff here: expected (the request has arrived) -> started (destination blocks are
allocated) -> reading, as the producer announces blocks -> confirming -> settled. Whatever goes
wrong settles it too, with nothing read; then the worker computes the tokens itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from engine.config import WorkerConfig
from engine.node import Effect, NodeId, Note, Send
from engine.request import TokenLogprobs
from engine.sequence import Sequence
from kvtransfer.agent import ConnectPeer, PeerConnected, ReadBlocks, ReadDone
from kvtransfer.handoff import ConsumerEvent, ConsumerState, next_consumer
from kvtransfer.messages import KVConnect, KVConnected, KVRead, KVReady, KVRefused, KVRelease

MAX_EARLY = 256  # handoffs announced before their request has come
CONNECT_RETRY_S = 1.0
CONFIRM_TIMEOUT_S = 5.0

Key = tuple[str, int]  # (request_id, attempt)


@dataclass(slots=True)
class Handoff:
    """One request's KV on its way here.

    Invariant: `seq.num_reads == len(reads)`; block indices in `posted` have been or are being
    read; blocks [0, first_missing) were in the prefix cache."""

    seq: Sequence
    producer: NodeId
    deadline: float
    state: ConsumerState = ConsumerState.WAITING
    epoch: int | None = None  # of the producer that announced the blocks
    lease: int | None = None  # under which it holds them
    source: dict[int, tuple[int, int]] = field(default_factory=dict)  # index -> (block, checksum)
    posted: set[int] = field(default_factory=set)
    reads: dict[int, list[int]] = field(default_factory=dict)  # transfer id -> indices
    first_missing: int = 0
    final: bool = False
    next_token: int | None = None
    next_logprobs: TokenLogprobs | None = None
    final_at: float = 0.0

    @property
    def key(self) -> Key:
        return self.seq.key


@dataclass(slots=True)
class Peer:
    epoch: int = -1
    connected: bool = False
    asked_at: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Settled:
    """A handoff has ended and nothing writes to its blocks. `ok`: all KV of the prompt is here."""

    handoff: Handoff
    ok: bool


class Connector:
    """Owns the handoffs of one consumer and what it knows of its peers.

    Invariant: a handoff is here until no transfer can write to its destination."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.handoffs: dict[Key, Handoff] = {}
        self.peers: dict[NodeId, Peer] = {}
        self.settled: list[Settled] = []
        self.failures: dict[str, int] = {}  # why handoffs failed -> how often
        self._early: OrderedDict[Key, list[KVReady]] = OrderedDict()
        self._by_transfer: dict[int, Handoff] = {}
        self._next_transfer_id = 0

    def take_settled(self) -> list[Settled]:
        settled, self.settled = self.settled, []
        return settled

    def expect(self, now: float, seq: Sequence, producer: NodeId) -> list[Effect]:
        """KV of `seq` is to come from `producer`; what it announced already is remembered."""
        handoff = Handoff(seq, producer, now + self.config.handoff_timeout_s)
        self.handoffs[seq.key] = handoff
        effects: list[Effect] = []
        for ready in self._early.pop(seq.key, ()):
            effects += self.on_ready(now, ready)
        return effects + self._connect(now, producer)

    def start(self, now: float, seq: Sequence) -> list[Effect]:
        """`seq` has its blocks; the cached prefix among them is not read."""
        handoff = self.handoffs[seq.key]
        handoff.first_missing = seq.num_sealed
        handoff.state = next_consumer(handoff.state, ConsumerEvent.START)
        return self._advance(now, handoff)

    def on_ready(self, now: float, ready: KVReady) -> list[Effect]:
        key = (ready.request_id, ready.attempt)
        handoff = self.handoffs.get(key)
        if handoff is None:
            self._early.setdefault(key, []).append(ready)
            if len(self._early) > MAX_EARLY:
                self._early.popitem(last=False)
            return []
        if handoff.state in (ConsumerState.DRAINING, ConsumerState.CONFIRMING):
            return []
        known = (handoff.producer, handoff.epoch, handoff.lease)
        if handoff.epoch is not None and known != (ready.producer, ready.epoch, ready.lease):
            return self.fail(handoff, "producer_changed")
        handoff.epoch, handoff.lease = ready.epoch, ready.lease
        handoff.deadline = now + self.config.handoff_timeout_s
        blocks = zip(ready.block_ids, ready.checksums, strict=True)
        for index, source in enumerate(blocks, start=ready.first):
            handoff.source.setdefault(index, source)
        if ready.final:
            handoff.final = True
            handoff.final_at = now
            handoff.next_token = ready.next_token
            handoff.next_logprobs = ready.next_logprobs
        return self._advance(now, handoff)

    def on_connected(self, now: float, message: KVConnected) -> list[Effect]:
        if message.fingerprint != self.config.fingerprint:
            effects: list[Effect] = [
                Note(
                    "error",
                    "kv_incompatible_peer",
                    f"{message.producer} serves another model, dtype or KV layout (fingerprint"
                    f" {message.fingerprint.hex()[:16]}, here"
                    f" {self.config.fingerprint.hex()[:16]}): no KV is exchanged with it",
                )
            ]
            return effects + self._fail_handshakes(message.producer, "incompatible_peer")
        peer = self.peers.setdefault(message.producer, Peer())
        if message.epoch < peer.epoch or (message.epoch == peer.epoch and peer.connected):
            return []
        peer.epoch, peer.connected = message.epoch, False
        return [ConnectPeer(message.producer, message.epoch, message.num_blocks, message.metadata)]

    def on_peer_connected(self, now: float, message: PeerConnected) -> list[Effect]:
        peer = self.peers.get(message.peer)
        if peer is None or peer.epoch != message.epoch:
            return []
        if message.error is not None:
            note = Note("warning", "kv_connect_failed", f"{message.peer}: {message.error}")
            return [note, *self._fail_handshakes(message.peer, "connect_failed")]
        peer.connected = True
        effects: list[Effect] = []
        for handoff in list(self.handoffs.values()):
            if handoff.producer == message.peer:
                effects += self._advance(now, handoff)
        return effects

    def on_read_done(self, now: float, done: ReadDone) -> list[Effect]:
        handoff = self._by_transfer.pop(done.transfer_id)
        indices = handoff.reads.pop(done.transfer_id)
        handoff.seq.num_reads -= 1
        if handoff.state is ConsumerState.DRAINING:
            if not handoff.reads:
                self._settle(handoff, ConsumerEvent.DONE)
            return []
        if done.error is not None:
            note = Note("warning", "kv_read_failed", f"{handoff.producer}: {done.error}")
            return [note, *self.fail(handoff, "read_failed")]
        expected = [handoff.source[index][1] for index in indices]
        if list(done.checksums) != expected:
            note = Note(
                "error",
                "kv_checksum_mismatch",
                f"KV of {handoff.seq.request_id} from {handoff.producer} does not have the bytes"
                " that were sent; it is computed again",
            )
            return [note, *self.fail(handoff, "checksum_mismatch")]
        return self._advance(now, handoff)

    def on_confirmed(self, key: Key) -> None:
        handoff = self.handoffs.get(key)
        if handoff is not None and handoff.state is ConsumerState.CONFIRMING:
            self._settle(handoff, ConsumerEvent.CONFIRMED)

    def on_refused(self, message: KVRefused) -> list[Effect]:
        handoff = self.handoffs.get((message.request_id, message.attempt))
        if handoff is None or handoff.state is not ConsumerState.CONFIRMING:
            return []
        self._count_failure("refused")
        self._settle(handoff, ConsumerEvent.REFUSED)
        return []

    def fail(self, handoff: Handoff, why: str) -> list[Effect]:
        """Give `handoff` up. It settles now, or when its last transfer has."""
        if handoff.state is ConsumerState.DRAINING:
            return []
        self._count_failure(why)
        if handoff.reads:
            handoff.state = next_consumer(handoff.state, ConsumerEvent.CANCEL)
        elif handoff.state is ConsumerState.READING:
            self._settle(handoff, ConsumerEvent.ERROR)
        else:
            self._settle(handoff, ConsumerEvent.CANCEL)
        return [Send(handoff.producer, KVRelease(*handoff.key))]

    def tick(self, now: float) -> list[Effect]:
        """Time out what has had no news; ask again those who have not answered."""
        effects: list[Effect] = []
        for handoff in list(self.handoffs.values()):
            if now >= handoff.deadline:
                effects += self.fail(handoff, f"timeout_{handoff.state}")
            elif handoff.state is ConsumerState.HANDSHAKING:
                effects += self._advance(now, handoff)
        return effects

    def _advance(self, now: float, handoff: Handoff) -> list[Effect]:
        if handoff.state is ConsumerState.HANDSHAKING and handoff.epoch is not None:
            peer = self.peers.get(handoff.producer, Peer())
            if not peer.connected or peer.epoch < handoff.epoch:
                return self._connect(now, handoff.producer)
            if peer.epoch > handoff.epoch:
                return self.fail(handoff, "producer_changed")
            handoff.state = next_consumer(handoff.state, ConsumerEvent.READY)
        if handoff.state is not ConsumerState.READING:
            return []
        effects = self._post_reads(handoff)
        needed = set(range(handoff.first_missing, len(handoff.seq.block_ids)))
        if handoff.final and not handoff.reads and needed <= handoff.posted:
            handoff.state = next_consumer(handoff.state, ConsumerEvent.DONE)
            effects += self._ask_confirmation(now, handoff)
        return effects

    def _ask_confirmation(self, now: float, handoff: Handoff) -> list[Effect]:
        handoff.deadline = now + CONFIRM_TIMEOUT_S
        assert handoff.lease is not None
        read = KVRead(*handoff.key, consumer=self.config.node_id, lease=handoff.lease)
        return [Send(handoff.producer, read)]

    def _post_reads(self, handoff: Handoff) -> list[Effect]:
        blocks = handoff.seq.block_ids
        todo = [
            index
            for index in sorted(handoff.source)
            if handoff.first_missing <= index < len(blocks) and index not in handoff.posted
        ]
        if not todo:
            return []
        assert handoff.epoch is not None
        transfer_id = self._next_transfer_id
        self._next_transfer_id += 1
        handoff.posted.update(todo)
        handoff.reads[transfer_id] = todo
        handoff.seq.num_reads += 1
        self._by_transfer[transfer_id] = handoff
        return [
            ReadBlocks(
                transfer_id=transfer_id,
                peer=handoff.producer,
                epoch=handoff.epoch,
                src=tuple(handoff.source[index][0] for index in todo),
                dst=tuple(blocks[index] for index in todo),
                timeout_s=self.config.read_timeout_s,
            )
        ]

    def _connect(self, now: float, producer: NodeId) -> list[Effect]:
        """Ask `producer` how to read its pool, unless that is known or was asked just now."""
        peer = self.peers.setdefault(producer, Peer())
        wanted = [h.epoch for h in self.handoffs.values() if h.producer == producer and h.epoch]
        if peer.connected and peer.epoch >= max(wanted, default=-1):
            return []
        if now - peer.asked_at < CONNECT_RETRY_S:
            return []
        peer.asked_at = now
        return [Send(producer, KVConnect(self.config.node_id, self.config.fingerprint))]

    def _fail_handshakes(self, producer: NodeId, why: str) -> list[Effect]:
        effects: list[Effect] = []
        for handoff in list(self.handoffs.values()):
            waits = handoff.state in (ConsumerState.WAITING, ConsumerState.HANDSHAKING)
            if handoff.producer == producer and waits:
                effects += self.fail(handoff, why)
        return effects

    def _settle(self, handoff: Handoff, event: ConsumerEvent) -> None:
        assert not handoff.reads
        handoff.state = next_consumer(handoff.state, event)
        del self.handoffs[handoff.key]
        self.settled.append(Settled(handoff, handoff.state is ConsumerState.DONE))

    def _count_failure(self, why: str) -> None:
        self.failures[why] = self.failures.get(why, 0) + 1

    def check_idle(self) -> list[str]:
        left = [f"handoff {h.key} is {h.state}" for h in self.handoffs.values()]
        if self._by_transfer:
            left.append(f"transfers {sorted(self._by_transfer)} are live")
        return left
