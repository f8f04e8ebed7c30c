"""What an operator may choose about the computation on a GPU. Plain data; imports no kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Used on a GPU only."""

    max_num_seqs: int = 64  # decodes of one step that fixed inputs are made for
    graphs: bool = True  # capture decode passes as CUDA graphs
