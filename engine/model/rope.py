"""Rotary embeddings: cos and sin of every position, with the scalings of long contexts."""

from __future__ import annotations

import math

import torch

from kvrelay.engine.model.config import Rope, RopeScaling


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
    """Index of the frequency with `rotations` full rotations over the original length."""
    turns = scaling.original_max_position / (rotations * 2 * math.pi)
    return rope.dim * math.log(turns) / (2 * math.log(rope.theta))
