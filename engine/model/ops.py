"""The operations a decoder is made of, and how they are prepared for one step.

Three sets exist: `TorchOps` (any device, the reference), `CpuOps` (compiled kernels) and
`TritonOps` (kernels for GPUs). A set owns the KV pool and the rotary tables; `begin` tells it about
the batch that the following calls belong to.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

from engine.model.batch import Batch
from engine.model.config import Rope, RopeScaling

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

    def gated_matrix(self, weight: torch.Tensor, role: str) -> Any:
        """Prepare [gate; up], each [width, in], for `gated`."""
        ...

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        """Prepare the weight of a norm."""
        ...

    def heads(self, weight: torch.Tensor, role: str) -> Any:
        """Prepare per-head matrices [num_heads, in, out] for `per_head`."""
        ...

    def router(self, weight: torch.Tensor) -> Any:
        """Prepare a router [num_experts, hidden_size] for `add_experts`."""
        ...

    def begin(self, batch: Batch) -> None: ...

    def run_layers(self, hidden: torch.Tensor, layers: Any, batch: Batch) -> torch.Tensor | None:
        """All layers (a tuple of `LayerWeights`) at once, if the set has a faster way than the
        calls below: hidden [N, hidden_size], which is overwritten -> [R, hidden_size] of the rows
        to be sampled. None: nothing was done."""
        ...

    def embed(self, table: Any, tokens: torch.Tensor) -> torch.Tensor:
        """[num_tokens] -> a fresh [num_tokens, hidden_size]."""
        ...

    def linear(self, x: torch.Tensor, matrix: Any) -> torch.Tensor:
        """[n, in] -> [n, out]."""
        ...

    def add_linear(self, hidden: torch.Tensor, x: torch.Tensor, matrix: Any) -> None:
        """hidden [n, out] += x [n, in] @ matrix."""
        ...

    def gated(self, x: torch.Tensor, matrix: Any) -> torch.Tensor:
        """[n, in] -> [n, width]: activation(x @ gate) * (x @ up), with the model's activation."""
        ...

    def cap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """cap * tanh(logits / cap), in place."""
        ...

    def per_head(self, x: torch.Tensor, heads: Any) -> torch.Tensor:
        """[N, num_heads, in] -> [N, num_heads, out]."""
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

    def latent_write(self, q_rope: torch.Tensor, latent: torch.Tensor, layer: int) -> None:
        """Multi-head latent attention. q_rope [N, num_heads, rope_dim], contiguous, is rotated in
        place; latent [N, rank + rope_dim], contiguous and normed in front, is rotated behind and
        written to the pool."""
        ...

    def latent_attention(self, queries: torch.Tensor, layer: int) -> torch.Tensor:
        """queries [N, num_heads, rank + rope_dim], the first part absorbed into the latent's space
        -> [N, num_heads, rank]: scores over all that is cached, values are its first `rank`."""
        ...

    def experts(self, gate_ups: Any, downs: Any) -> Any:
        """Prepare stacked experts: gate_ups [E, 2 * width, hidden], downs [E, hidden, width]."""
        ...

    def add_experts(self, hidden: torch.Tensor, x: torch.Tensor, layer: Any) -> None:
        """x [N, hidden_size] is sent to the experts of `layer` (`ExpertsWeights`) that its router
        chooses, whose logits are of float32; what they make of it is added to hidden."""
        ...


def rope_tables(
    rope: Rope, max_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [max_positions, rope.dim / 2], float32."""
    half = torch.arange(0, rope.dim, 2, dtype=torch.int64).float()
    freq = 1.0 / (rope.theta ** (half / rope.dim))
    factor = 1.0
    if rope.scaling is not None:
        freq = _scaled(freq, rope, rope.scaling, max_positions)
        factor = rope.scaling.attention_factor
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), freq)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def _scaled(
    freq: torch.Tensor, rope: Rope, scaling: RopeScaling, max_positions: int
) -> torch.Tensor:
    """Llama 3: frequencies of long wavelengths are divided by `factor`, those of short ones are
    kept, and between the two bounds they are blended (Llama 3.1 model card). YaRN: the same with
    bounds in rotations over the original length and a blend by index (Peng et al. 2023, sec. 3.2).
    LongRoPE: each has a divisor of its own (Ding et al. 2024)."""
    if scaling.kind == "linear":
        return freq / scaling.factor
    if scaling.kind == "longrope":
        long = scaling.is_long(max_positions)
        return freq / torch.tensor(scaling.long_factors if long else scaling.short_factors)
    if scaling.kind == "llama3":
        wavelength = 2 * torch.pi / freq
        keep = scaling.original_max_position / wavelength - scaling.low_freq_factor
        keep = (keep / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    else:
        low = _index_of(scaling.beta_fast, rope, scaling)
        high = _index_of(scaling.beta_slow, rope, scaling)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.dim - 1)
        ramp = (torch.arange(len(freq)) - low) / max(high - low, 0.001)
        keep = 1 - ramp.clamp(0.0, 1.0)
    return (1 - keep) * freq / scaling.factor + keep * freq


def _index_of(rotations: float, rope: Rope, scaling: RopeScaling) -> float:
    """Which frequency turns `rotations` times over the original length."""
    turns = scaling.original_max_position / (rotations * 2 * math.pi)
    return rope.dim * math.log(turns) / (2 * math.log(rope.theta))
