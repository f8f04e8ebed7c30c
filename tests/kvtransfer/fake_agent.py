"""An agent whose reads do as the test says, and a store that refuses."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import AgentError, CopyBlocks, StoreIndex
from kvrelay.kvtransfer.store import StoreError


@dataclass
class FakeAgent:
    """Reads do what the test says: `states[n]` of the n-th read is "stalled", "done" or an error
    text; `pinned` handles cannot be released yet."""

    states: list[str] = field(default_factory=list)
    pinned: set[int] = field(default_factory=set)
    live: set[int] = field(default_factory=set)
    num_reads: int = 0
    closed: bool = False

    def metadata(self) -> bytes:
        return b"fake"

    def connect(self, peer: str, epoch: int, num_blocks: int, metadata: bytes) -> None:
        if metadata == b"bad":
            raise AgentError(f"{peer} differs\nin everything")

    def disconnect(self, peer: str) -> None:
        pass

    def post_copy(
        self,
        peer: str,
        src: list[int],
        dst: list[int],
        src_tier: Tier = Tier.DEVICE,
        dst_tier: Tier = Tier.DEVICE,
    ) -> int:
        if peer == "dead":
            raise AgentError("read from dead: no")
        self.live.add(self.num_reads)
        if len(self.states) == self.num_reads:
            self.states.append("stalled")
        self.num_reads += 1
        return self.num_reads - 1

    def poll(self, handle: int) -> bool:
        assert handle in self.live
        state = self.states[handle]
        if state in ("stalled", "done"):
            return state == "done"
        raise AgentError(state)

    def release(self, handle: int) -> bool:
        if handle in self.pinned:
            return False
        self.live.remove(handle)
        return True

    def close(self) -> None:
        self.live.clear()
        self.closed = True


def a_read(
    transfer_id: int = 1, peer: str = "p", epoch: int = 1, timeout_s: float = 5, **tiers: Tier
) -> CopyBlocks:
    return CopyBlocks(transfer_id, peer, epoch, (0, 1), (2, 3), timeout_s, **tiers)


class RefusingStore:
    """A store whose index cannot be changed."""

    closed = False

    def update(self, change: StoreIndex) -> None:
        raise StoreError("no space")

    def check(self) -> None:
        return None

    def close(self) -> None:
        self.closed = True
