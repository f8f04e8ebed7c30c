"""The threads that copy KV: one for memory, and one for each tier of storage, so that a slow disk
holds up nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvrelay.engine.kv.tier import Tier
from kvrelay.engine.node import NodeId
from kvrelay.kvtransfer.agent import ConnectPeer, CopyBlocks, StoreFailed, StoreIndex
from kvrelay.kvtransfer.executor import TransferExecutor, failed_copy
from kvrelay.kvtransfer.tiers.registry import is_storage
from kvrelay.kvtransfer.transfer_loop import TransferLoop
from kvrelay.worker.disk_tier import Storage


class TransferLoops:
    """Takes transfers to the thread that they are for. Owns the threads, and by them the agents and
    the stores."""

    def __init__(
        self,
        memory: TransferExecutor,
        storage: Mapping[Tier, Storage],
        answer: Callable[[Any], None],
        name: NodeId,
    ) -> None:
        """`answer`: called from any of the threads."""
        self._answer = answer
        self._memory = TransferLoop(memory, answer, name=f"{name}-kv")
        self._storage = {
            tier: TransferLoop(each.copies, answer, store=each.store, name=f"{name}-{tier}")
            for tier, each in storage.items()
        }

    @property
    def loops(self) -> dict[str, TransferLoop]:
        """By name."""
        return {"memory": self._memory, **{str(tier): loop for tier, loop in self._storage.items()}}

    def submit(self, request: ConnectPeer | CopyBlocks | StoreIndex) -> None:
        match request:
            case StoreIndex(tier=tier):
                self._submit_to(tier, request)
            case CopyBlocks(src_tier=tier) if is_storage(tier):
                self._submit_to(tier, request)
            case CopyBlocks(dst_tier=tier) if is_storage(tier):
                self._submit_to(tier, request)
            case _:
                self._memory.submit(request)

    def close(self, timeout_s: float) -> None:
        """Copies that run have `timeout_s` to settle."""
        for loop in self.loops.values():
            loop.stop(timeout_s)
        for loop in self.loops.values():
            loop.join(timeout_s)

    def _submit_to(self, tier: Tier, request: CopyBlocks | StoreIndex) -> None:
        missing = f"this worker has no {tier} tier"
        if tier in self._storage:
            self._storage[tier].submit(request)
        elif isinstance(request, CopyBlocks):
            self._answer(failed_copy(request, missing))
        else:
            self._answer(StoreFailed(missing, tier=tier))
