"""What llama.cpp changes in tensors as it converts a checkpoint, undone.

Each takes the fields of config.json and GGUF's tensors, and returns that of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Fields = Mapping[str, Any]
Tensor = torch.Tensor


def same(_: Fields, tensor: Tensor) -> Tensor:
    return tensor


def flat(_: Fields, tensor: Tensor) -> Tensor:
    return tensor.flatten()


def halves_of_queries(fields: Fields, rows: Tensor) -> Tensor:
    return _halves(rows, fields["num_attention_heads"])


def halves_of_keys(fields: Fields, rows: Tensor) -> Tensor:
    return _halves(rows, fields["num_key_value_heads"])


def _halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of each head from pairs (x1, x2), (x1, x2), ... to all x1, then all x2."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def less_one(_: Fields, weight: Tensor) -> Tensor:
    """A norm adds the one as it computes."""
    return weight - 1.0


def logarithm(_: Fields, rate: Tensor) -> Tensor:
    """What is stored is the negative of the exponential. rate: [..., num_heads, ...]"""
    return (-rate.float()).log().flatten()


def logarithm_of_kimi(fields: Fields, rate: Tensor) -> Tensor:
    return logarithm(fields, rate).view(1, 1, -1, 1)


def channels(_: Fields, conv: Tensor) -> Tensor:
    """A convolution [..., channels, ..., kernel] as [channels, 1, kernel]."""
    return conv.reshape(-1, 1, conv.shape[-1])


def keys_and_values(_: Fields, key_up: Tensor, value_up: Tensor) -> Tensor:
    """The second projection of a latent: [heads, rank, nope_dim] and [heads, value_dim, rank]."""
    return torch.cat((key_up.transpose(1, 2), value_up), dim=1).flatten(0, 1)


def alternating(_: Fields, gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss: rows of gate and up by turns."""
    return torch.stack((gate, up), dim=2).flatten(1, 2)


def alternating_columns(fields: Fields, gate: Tensor, up: Tensor) -> Tensor:
    return alternating(fields, gate, up).transpose(1, 2)


def one_behind_the_other(_: Fields, gate: Tensor, up: Tensor) -> Tensor:
    """Llama 4: [experts, inputs, outputs], first those of gate."""
    return torch.cat((gate, up), dim=1).transpose(1, 2)


def turned(_: Fields, matrices: Tensor) -> Tensor:
    return matrices.transpose(1, 2)


# MXFP4. A block of GGUF is an exponent and 16 bytes: the lower halves are the first 16 numbers,
# the upper ones the others. In a checkpoint two neighbours share a byte, the first in its lower
# half. tensors: uint8 [experts, rows, blocks, 17].


def pairs(_: Fields, blocks: Tensor) -> Tensor:
    codes = blocks[..., 1:]
    codes = torch.cat((codes & 15, codes >> 4), dim=-1).unflatten(-1, (16, 2))
    return codes[..., 0] | codes[..., 1] << 4


def exponents(_: Fields, blocks: Tensor) -> Tensor:
    return blocks[..., 0]


def alternating_pairs(fields: Fields, gate: Tensor, up: Tensor) -> Tensor:
    return alternating(fields, pairs(fields, gate), pairs(fields, up))


def alternating_exponents(fields: Fields, gate: Tensor, up: Tensor) -> Tensor:
    return alternating(fields, gate[..., 0], up[..., 0])


# Gated delta nets. In Qwen3.5's files heads of values that share a key are not neighbours, as in
# the checkpoint: those that come first of each key come first.


def by_keys(fields: Fields, rows: Tensor, dim: int = 1) -> Tensor:
    """rows: [heads of values * dim, ...]"""
    keys = fields["linear_num_key_heads"]
    return rows.unflatten(0, (-1, keys, dim)).transpose(0, 1).flatten(0, 2)


def values_by_keys(fields: Fields, rows: Tensor) -> Tensor:
    return by_keys(fields, rows, fields["linear_value_head_dim"])


def outputs_by_keys(fields: Fields, matrix: Tensor) -> Tensor:
    return values_by_keys(fields, matrix.T).T


def last_by_keys(fields: Fields, rows: Tensor) -> Tensor:
    """rows: those of queries, keys, values"""
    first = 2 * fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
    return torch.cat((rows[:first], values_by_keys(fields, rows[first:])))


def channels_by_keys(fields: Fields, conv: Tensor) -> Tensor:
    return channels(fields, last_by_keys(fields, conv))


def logarithm_by_keys(fields: Fields, rate: Tensor) -> Tensor:
    return by_keys(fields, logarithm(fields, rate))


def grouped(fields: Fields, rows: Tensor, gate: Tensor) -> Tensor:
    """Qwen3-Next has all projections of a key's heads together."""
    keys, dim = fields["linear_num_key_heads"], fields["linear_key_head_dim"]
    queries, key, values = rows.split([keys * dim, keys * dim, gate.shape[0]])
    parts = [each.unflatten(0, (keys, -1)) for each in (queries, key, values, gate)]
    return torch.cat(parts, dim=1).flatten(0, 1)
