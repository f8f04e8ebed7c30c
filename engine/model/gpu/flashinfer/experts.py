"""A mixture of experts by FlashInfer's CUTLASS kernels: grouped products, activation and sum.

They take the projection that is not activated first: [up; gate], where ours are [gate; up], so the
halves change places once, when weights are prepared. The sum over a token's experts is not fused
into the last product: fused, it is made of atomic additions, whose order differs from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.gpu.flashinfer.division import DTYPES

ALIGN = 8  # numbers of 16 bits that their loads take at once


@dataclass(frozen=True, slots=True)
class FusedExperts:
    up_gates: torch.Tensor  # [num_experts, 2 * width, hidden_size]
    downs: torch.Tensor  # [num_experts, hidden_size, width]

    def add(
        self,
        library: Any,
        hidden: torch.Tensor,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        out = torch.empty_like(hidden)
        library.cutlass_fused_moe(
            input=x.contiguous(),
            token_selected_experts=chosen.to(torch.int32),
            token_final_scales=weights.float().contiguous(),
            fc1_expert_weights=self.up_gates,
            fc2_expert_weights=self.downs,
            output_dtype=x.dtype,
            quant_scales=[],
            output=out,
            use_fused_finalize=False,
        )
        hidden += out


def lack_of(config: ModelConfig, dtype: torch.dtype, quantization: str) -> str:
    """Why FlashInfer cannot compute the experts, by what its sources say; "": it can."""
    experts = config.experts
    assert experts is not None
    if dtype not in DTYPES or quantization == "int8":  # in fp8 experts have 16 bits
        return "FlashInfer's take 16-bit weights"
    if config.activation != "silu":
        return f"FlashInfer's have no gate with {config.activation}"
    if config.hidden_size % ALIGN or experts.intermediate_size % ALIGN:
        return f"FlashInfer's take sizes that {ALIGN} divides"
    return ""


def fuse(gate_ups: torch.Tensor, downs: torch.Tensor) -> FusedExperts:
    """gate_ups [E, 2 * width, hidden], downs [E, hidden, width], on the device."""
    return FusedExperts(torch.cat(gate_ups.chunk(2, dim=1)[::-1], dim=1), downs.contiguous())
