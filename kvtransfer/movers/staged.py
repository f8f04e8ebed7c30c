"""The disk of a GPU without GPUDirect Storage: reads are staged in host memory.

Life of a staged read: it waits for slots of the staging area -> a batch of its blocks is read into
them -> copied to the device, and the slots are free again -> the next batch, until all have come.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.kv.tier import Tier
from kvrelay.kvtransfer.agent import GIVEN_UP, CopyBlocks, CopyDone, Mover
from kvrelay.kvtransfer.movers.pool import check_block_ids

if TYPE_CHECKING:
    import torch

STAGING_BLOCKS = 32
"""At the end of the host arena, beyond what the host tier has: enough to keep a disk busy."""


@dataclass(slots=True, eq=False)
class _Staged:
    """Blocks before `done` are on the device; `slots` hold the batch behind them."""

    request: CopyBlocks
    done: int = 0
    slots: list[int] = field(default_factory=list)
    batch: Any = None  # its handle; None: it has not been begun
    error: str | None = None

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.done == len(self.request.src)


class StagedMover:
    """A mover over one of the disk, which it owns.

    Invariant: a slot of the staging area is free, or of one read that has not settled."""

    def __init__(
        self, mover: Mover, device: torch.Tensor, arena: NDArray[np.uint8], first_slot: int
    ) -> None:
        """`device`: the pool, `[num_blocks, ...]`; `arena`: the host memory that `mover` knows,
        `[num_host_blocks, bytes_per_block]`, whose rows from `first_slot` on are for staging."""
        import torch

        assert first_slot < len(arena), (first_slot, len(arena))
        self._mover = mover
        self._device = device.flatten(1).view(torch.uint8)
        self._arena = torch.from_numpy(arena)
        self._free = list(range(first_slot, len(arena)))

    def copy(self, request: CopyBlocks) -> Any:
        if request.dst_tier is not Tier.DEVICE:
            return self._mover.copy(request)
        check_block_ids(request, max(request.src, default=0) + 1, len(self._device))
        staged = _Staged(request)
        self._begin(staged)
        return staged

    def poll(self, handle: Any) -> CopyDone | None:
        if not isinstance(handle, _Staged):
            return self._mover.poll(handle)
        if handle.batch is not None:
            done = self._mover.poll(handle.batch)
            if done is None:
                return None
            slots, handle.slots = handle.slots, []
            handle.batch, handle.error = None, handle.error or done.error
            self._free += slots
            if handle.error is None:
                self._to_device(handle, slots)
        if not handle.is_over:
            self._begin(handle)
        return CopyDone(handle.request.transfer_id, handle.error) if handle.is_over else None

    def cancel(self, handle: Any) -> None:
        if not isinstance(handle, _Staged):
            self._mover.cancel(handle)
            return
        handle.error = handle.error or GIVEN_UP
        if handle.batch is not None:
            self._mover.cancel(handle.batch)

    def close(self) -> None:
        self._mover.close()

    def _begin(self, staged: _Staged) -> None:
        """Read the next batch, if slots are free. Raises AgentError."""
        request, end = staged.request, staged.done + len(self._free)
        src = request.src[staged.done : end]
        slots = self._free[: len(src)]
        if not slots:
            return
        batch = replace(request, src=src, dst=tuple(slots), dst_tier=Tier.HOST)
        staged.batch = self._mover.copy(batch)
        del self._free[: len(src)]
        staged.slots = slots

    def _to_device(self, staged: _Staged, slots: list[int]) -> None:
        """The batch in `slots`; waits for the copy, since they are written again."""
        import torch

        dst = staged.request.dst[staged.done : staged.done + len(slots)]
        for slot, block in zip(slots, dst, strict=True):
            self._device[block].copy_(self._arena[slot], non_blocking=True)
        if self._device.is_cuda:
            torch.cuda.current_stream(self._device.device).synchronize()
        staged.done += len(dst)
