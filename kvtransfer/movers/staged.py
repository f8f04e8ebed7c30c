"""A disk agent for a GPU without GPUDirect Storage: reads are staged in host memory.

Life of a staged read: it waits for slots of the staging area -> a batch of its blocks is read into
them -> copied to the device, and the slots are free again -> the next batch, until all have come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.agent import Agent
from kvrelay.kvtransfer.movers.pool import check_block_ids

if TYPE_CHECKING:
    import torch

STAGING_BLOCKS = 32
"""At the end of the host arena, beyond what the host tier has: enough to keep a disk busy."""


@dataclass(slots=True, eq=False)
class _Staged:
    """Blocks before `done` are on the device; `slots` hold the batch behind them."""

    peer: NodeId
    src: list[int]
    dst: list[int]
    done: int = 0
    slots: list[int] = field(default_factory=list)
    handle: Any = None  # the batch's; None: it has not been posted


class StagedAgent:
    """Implements kvtransfer.agent.Agent over a DiskAgent, and owns it.

    Invariant: a slot of the staging area is free, or of one read that has not been released."""

    def __init__(
        self, agent: Agent, device: torch.Tensor, arena: NDArray[np.uint8], first_slot: int
    ) -> None:
        """`device`: the pool, `[num_blocks, ...]`; `arena`: the host memory that `agent` knows,
        `[num_host_blocks, bytes_per_block]`, whose rows from `first_slot` on are for staging."""
        import torch

        assert first_slot < len(arena), (first_slot, len(arena))
        self._agent = agent
        self._device = device.flatten(1).view(torch.uint8)
        self._arena = torch.from_numpy(arena)
        self._free = list(range(first_slot, len(arena)))

    def metadata(self) -> bytes:
        return self._agent.metadata()

    def connect(self, peer: NodeId, epoch: int, num_blocks: int, metadata: bytes) -> None:
        self._agent.connect(peer, epoch, num_blocks, metadata)

    def disconnect(self, peer: NodeId) -> None:
        self._agent.disconnect(peer)

    def post_copy(
        self,
        peer: NodeId,
        src: list[int],
        dst: list[int],
        src_tier: Tier = Tier.DEVICE,
        dst_tier: Tier = Tier.DEVICE,
        **options: Any,
    ) -> Any:
        if dst_tier is not Tier.DEVICE:
            return self._agent.post_copy(peer, src, dst, src_tier, dst_tier, **options)
        check_block_ids(peer, src, dst, max(src, default=0) + 1, len(self._device))
        staged = _Staged(peer, src, dst)
        self._post(staged)
        return staged

    def poll(self, handle: Any) -> bool:
        if not isinstance(handle, _Staged):
            return self._agent.poll(handle)
        if handle.handle is None:
            self._post(handle)
        elif self._agent.poll(handle.handle) and self._agent.release(handle.handle):
            self._copy(handle)
            handle.handle = None
            self._post(handle)
        return handle.done == len(handle.src)

    def release(self, handle: Any) -> bool:
        if not isinstance(handle, _Staged):
            return self._agent.release(handle)
        if handle.handle is not None and not self._agent.release(handle.handle):
            return False
        handle.handle = None
        self._free += handle.slots
        handle.slots = []
        return True

    def close(self) -> None:
        self._agent.close()

    def _post(self, staged: _Staged) -> None:
        """Read the next batch, if there is one and slots are free. Raises AgentError."""
        count = min(len(staged.src) - staged.done, len(self._free))
        if not count:
            return
        src = staged.src[staged.done : staged.done + count]
        slots = self._free[:count]
        staged.handle = self._agent.post_copy(staged.peer, src, slots, Tier.DISK, Tier.HOST)
        del self._free[:count]
        staged.slots = slots

    def _copy(self, staged: _Staged) -> None:
        """The batch to the device; waits for the copy, since its slots are written again."""
        import torch

        dst = staged.dst[staged.done : staged.done + len(staged.slots)]
        for slot, block in zip(staged.slots, dst, strict=True):
            self._device[block].copy_(self._arena[slot], non_blocking=True)
        if self._device.is_cuda:
            torch.cuda.current_stream(self._device.device).synchronize()
        staged.done += len(dst)
        self._free += staged.slots
        staged.slots = []
