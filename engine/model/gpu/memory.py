"""How much of a GPU's memory the KV pool gets: what is left of a share of it beside the weights and
the largest step, which is run once before the pool is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

RESERVE_BYTES = 512 << 20  # for captured graphs, and for what allocation leaves unused
GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """How many bytes a device has."""

    total: int
    free: int
    reserved: int  # by this process, for tensors
    peak: int  # most that this process has taken for tensors

    def room(self, share: float) -> int:
        """For KV, of `share` of all: beside other processes, what CUDA itself takes, the peak, and
        a reserve. May be negative."""
        others = self.total - self.free - self.reserved
        return int(share * self.total) - others - self.peak - RESERVE_BYTES


def after_a_step(device: torch.device, step: Callable[[], object]) -> DeviceMemory:
    """What is there when `step`, the largest that there will be, has been run; its memory is given
    back."""
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free, torch.cuda.memory_reserved(device), peak)


def spread(num_tokens: int, num_seqs: int, longest: int) -> tuple[int, ...]:
    """Lengths of `num_seqs` prompts, or fewer, which have `num_tokens` together, or less."""
    num_seqs = min(num_seqs, num_tokens)
    each, more = divmod(num_tokens, num_seqs)
    return tuple(min(longest, each + (index < more)) for index in range(num_seqs))
