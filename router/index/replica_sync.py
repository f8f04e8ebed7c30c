"""What routers tell each other: where they have sent prompts whose blocks no event has told of yet.

A router knows at once which blocks will come into a worker's memory because of what it sends there;
the others would hear of it only when they are computed, and send prompts that begin alike to be
computed elsewhere. So it tells them: a message for each order, with the blocks that are new to the
worker. It may be lost: it only says what the worker's own events will say a little later.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv.block_hash import HASH_BYTES
from engine.node import NodeId, Send
from engine.stats import RouterDown, RouterUp
from router.index.prefix_index import PrefixIndex
from router.record import Attempt, RequestRecord

MAX_TOLD = 4096  # blocks of one prompt; what is longer waits for the worker's own events


@dataclass(frozen=True, slots=True)
class Placed:
    """From another router: these blocks are about to come into device memory of `worker`.
    `block_hashes` is packed: 16 bytes a block."""

    worker: NodeId
    epoch: int
    block_hashes: bytes


class ReplicaSync:
    """Owned by a router. `routers` are the others that the controller has named."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.routers: list[NodeId] = []

    def on_router_up(self, now: float, up: RouterUp) -> None:
        if up.router not in self.routers:
            self.routers.append(up.router)

    def on_router_down(self, now: float, down: RouterDown) -> None:
        if down.router in self.routers:
            self.routers.remove(down.router)

    def learn(self, now: float, placed: Placed) -> None:
        view = self._index.views.get(placed.worker)
        if view is not None and view.epoch == placed.epoch:
            self._index.speculate(now, placed.worker, placed.block_hashes)

    def tell(self, now: float, log: RequestRecord, attempt: Attempt) -> list[Send]:
        """To all other routers: what `attempt` will bring its workers that they do not hold."""
        sends: list[Send] = []
        for endpoint in (attempt.decode, attempt.prefill):
            if endpoint is None or not self.routers:
                continue
            info = endpoint.info
            block_hashes = log.packed_hashes(info)
            held = self._index.lookup(now, block_hashes).held(info.worker).said
            new = block_hashes[held * HASH_BYTES : (held + MAX_TOLD) * HASH_BYTES]
            if new:
                placed = Placed(info.worker, info.epoch, bytes(new))
                sends += [Send(router, placed) for router in self.routers]
        return sends
