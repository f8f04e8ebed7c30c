"""The operations a decoder is made of, and how they are prepared for one step.

Two sets exist: `TorchOps` (any device) and `CpuOps` (compiled kernels). A set owns the KV pool and
the rotary tables; `begin` tells it about the batch that the following calls belong to.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from engine.model.batch import Batch
from engine.model.config import ModelConfig

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Ops(Protocol):
    """Results may live in buffers of the set: one is valid until the same call is made again."""

    def table(self, weight: torch.Tensor) -> Any:
        """Prepare an embedding table [vocab_size, hidden_size]."""
        ...

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor | None, role: str) -> Any:
        """Prepare a weight [out, in] for `linear`; `role` names the buffer of its results."""
        ...

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        """Prepare the weight of a norm."""
        ...

    def begin(self, batch: Batch) -> None: ...

    def embed(self, table: Any, tokens: torch.Tensor) -> torch.Tensor:
        """[num_tokens] -> a fresh [num_tokens, hidden_size]."""
        ...

    def linear(self, x: torch.Tensor, matrix: Any) -> torch.Tensor:
        """[n, in] -> [n, out]."""
        ...

    def add_linear(self, hidden: torch.Tensor, x: torch.Tensor, matrix: Any) -> None:
        """hidden [n, out] += x [n, in] @ matrix."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def rope_write(
        self,
        qkv: torch.Tensor,
        layer: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
    ) -> None:
        """qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: norm (where given) and
        rotate queries and keys in place, and write keys and values to the pool."""
        ...

    def attention(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        """Rotated queries in qkv -> [num_tokens, num_heads * head_dim]."""
        ...

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[n, 2 * intermediate_size] -> [n, intermediate_size]."""
        ...


def rope_tables(
    config: ModelConfig, max_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [max_positions, head_dim / 2], float32.

    Llama 3 scaling: frequencies of long wavelengths are divided by `factor`, those of short ones
    are kept, and between the two bounds they are blended (Llama 3.1 model card).
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float()
    freq = 1.0 / (config.rope_theta ** (half / config.head_dim))
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        freq = freq / scaling.factor
    elif scaling is not None:
        wavelength = 2 * torch.pi / freq
        blend = scaling.original_max_position / wavelength - scaling.low_freq_factor
        blend = (blend / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
        freq = (1 - blend) * freq / scaling.factor + blend * freq
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), freq)
    return angles.cos().to(device), angles.sin().to(device)
