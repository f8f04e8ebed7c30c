"""An agent whose reads do as the test says, and a store that refuses."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import AgentError, CopyBlocks, CopyDone, StoreIndex, TransferId
from kvrelay.kvtransfer.store import StoreError


@dataclass
class FakeAgent:
    """Copies do what the test says: `states[n]` of the n-th is "stalled", "done" or an error text;
    `pinned` ones cannot settle yet."""

    states: list[str] = field(default_factory=list)
    pinned: set[int] = field(default_factory=set)
    live: dict[int, TransferId] = field(default_factory=dict)
    canceled: set[int] = field(default_factory=set)
    num_reads: int = 0
    closed: bool = False

    def metadata(self) -> bytes:
        return b"fake"

    def connect(self, peer: str, epoch: int, num_blocks: int, metadata: bytes) -> None:
        if metadata == b"bad":
            raise AgentError(f"{peer} differs\nin everything")

    def disconnect(self, peer: str) -> None:
        pass

    def copy(self, request: CopyBlocks) -> int:
        return self.begin(request.peer, request.transfer_id)

    def begin(self, peer: str, transfer_id: TransferId) -> int:
        if peer == "dead":
            raise AgentError("read from dead: no")
        self.live[self.num_reads] = transfer_id
        if len(self.states) == self.num_reads:
            self.states.append("stalled")
        self.num_reads += 1
        return self.num_reads - 1

    def poll(self, handle: int) -> CopyDone | None:
        assert handle in self.live
        state = self.states[handle]
        if handle in self.pinned or (state == "stalled" and handle not in self.canceled):
            return None
        return CopyDone(self.live.pop(handle), None if state == "done" else state)

    def cancel(self, handle: int) -> None:
        self.canceled.add(handle)

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
