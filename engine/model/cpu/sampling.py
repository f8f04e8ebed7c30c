"""Drawing tokens on a CPU with the compiled kernels: what `sampling.sampler` draws with
torch, without its threads, which spin for a while after where the kernels' own should run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvrelay.engine.model.cpu.kernels import structure
from kvrelay.engine.model.sampling.sampler import is_greedy
from kvrelay.engine.step import ScheduledSeq

DRAW = np.dtype(structure("Draw"))
_WORD = (1 << 64) - 1


class CpuDraw:
    """Draws tokens as `engine.model.sampling.sampler.draw` does."""

    def __init__(self, library: Any, num_threads: int) -> None:
        self._lib, self._threads = library, num_threads

    def __call__(self, logits: torch.Tensor, seqs: list[ScheduledSeq]) -> list[int]:
        assert logits.is_contiguous()
        assert logits.dtype == torch.float32
        draws = np.array([draw_of(seq) for seq in seqs], DRAW)
        tokens = np.empty(len(seqs), np.int64)
        self._lib.kvr_draw(
            logits.data_ptr(),
            *logits.shape,
            draws.ctypes.data,
            tokens.ctypes.data,
            self._threads,
        )
        drawn: list[int] = tokens.tolist()
        return drawn


def draw_of(seq: ScheduledSeq) -> tuple[float, float, float, int, int, int, int]:
    """Returns the kernel's parameters for a draw without a mask."""
    s = seq.sampling
    heat = 0.0 if is_greedy(s) else s.temperature
    return heat, s.min_p, s.top_p, s.top_k, s.seed & _WORD, len(seq.context), 0
