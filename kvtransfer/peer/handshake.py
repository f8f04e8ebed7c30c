"""Peers that this worker can read: the handshake with each, once per pair and epoch.

Life of a peer: asked (`KVConnect`) -> answered (`KVConnected`) -> connected by the agent. A new
epoch of the peer begins it again. A peer with another model, dtype or layout is told apart by its
fingerprint before any address is given out: not a byte moves between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from engine.config import WorkerConfig
from engine.node import Effect, NodeId, Note, Send
from engine.stats import KVLink
from kvtransfer.agent import ConnectPeer, PeerConnected
from kvtransfer.messages import KVConnect, KVConnected

CONNECT_RETRY_S = 1.0
MAX_LINKS = 32  # that are told: they are in every message of statistics

Fields = tuple[tuple[str, str], ...]


class Reach(StrEnum):
    CONNECTED = "connected"
    WAITING = "waiting"  # for the handshake, which is under way
    CHANGED = "changed"  # the peer has a later epoch than the one that is wanted


@dataclass(slots=True)
class _Peer:
    epoch: int = -1
    connected: bool = False
    bytes_per_s: float = 0.0  # of a small read, when it was connected; 0: not known
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


def _difference(theirs: Fields, ours: Fields) -> str:
    """Which fields differ, with both values."""
    mine = dict(ours)
    differing = [
        f"{name} is {value} there and {mine[name]} here"
        for name, value in theirs
        if name in mine and mine[name] != value
    ]
    return ", ".join(differing) or "their model, dtype or KV layout differs"
