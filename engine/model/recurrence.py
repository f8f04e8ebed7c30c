"""Recurrent layers in plain torch: the reference for the kernels.

Everything is float32 and has one order, token by token, so that a prompt cut anywhere leaves the
states and results of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvrelay.engine.model.states import StatePool, StateSpans
from kvrelay.engine.model.weights import RecurrentWeights

_EPS = 1e-6  # added to the squared lengths of queries and keys


def convolve(
    x: torch.Tensor, weights: RecurrentWeights, pool: StatePool, layer: int, spans: StateSpans
) -> torch.Tensor:
    """x [N, channels] -> [N, channels]: each with the inputs before it in its sequence."""
    out = torch.empty_like(x)
    for rows, load, slot in _segments(spans):
        before = pool.load_conv(layer, load)
        inputs = torch.cat((before, x[rows]))
        count = len(inputs) - len(before)
        total = torch.zeros_like(inputs[:count])
        if weights.conv_bias is not None:
            total += weights.conv_bias
        for index, weight in enumerate(weights.conv):
            total += weight * inputs[index : index + count]
        out[rows] = total
        pool.store_conv(layer, slot, inputs[count:])
    return out


class DeltaRows(NamedTuple):
    """What projections and the convolution give of N tokens; all may be columns of wider rows."""

    qkv: torch.Tensor  # [N, conv_channels]: queries, keys, values
    decay: torch.Tensor  # [N, num_heads], or of each key of each head
    beta: torch.Tensor  # [N, num_heads]


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What the recurrence of N tokens in H heads is given."""

    queries: torch.Tensor  # [N, H, key_dim]; by the delta rule of length key_dim ** -0.5
    keys: torch.Tensor  # [N, H, key_dim]; by the delta rule of length 1
    values: torch.Tensor  # [N, H, value_dim]
    kept: torch.Tensor  # [N, H, 1], or [N, H, key_dim]: what is left of the memory
    beta: torch.Tensor  # [N, H, 1]: how much of a correction, or of the value, is added
    skip: torch.Tensor | None  # [H, 1], of Mamba 2, which corrects nothing


def delta_inputs(
    rows: DeltaRows, weights: RecurrentWeights, key_dim: int, num_key_heads: int
) -> DeltaInputs:
    """Makes them from what `Ops.delta_rule` is given."""
    assert weights.rate is not None
    assert weights.decay_bias is not None
    num_heads = len(weights.rate)
    width = num_key_heads * key_dim
    queries, keys, values = rows.qkv.float().tensor_split((width, 2 * width), dim=1)
    queries, keys = (each.unflatten(1, (-1, key_dim)) for each in (queries, keys))
    if weights.skip is None:
        queries, keys = (
            each * torch.rsqrt(each.square().sum(-1, keepdim=True) + _EPS)
            for each in (queries, keys)
        )
        queries = queries * key_dim**-0.5
    together = num_heads // num_key_heads
    soft = F.softplus(rows.decay.float() + weights.decay_bias).unflatten(1, (num_heads, -1))
    return DeltaInputs(
        queries=queries.repeat_interleave(together, dim=1),
        keys=keys.repeat_interleave(together, dim=1),
        values=values.unflatten(1, (num_heads, -1)),
        kept=(weights.rate.unsqueeze(-1) * soft).exp(),
        beta=rows.beta.float().sigmoid().unsqueeze(-1) if weights.skip is None else soft,
        skip=None if weights.skip is None else weights.skip.unsqueeze(-1),
    )


def delta_rule(x: DeltaInputs, pool: StatePool, layer: int, spans: StateSpans) -> torch.Tensor:
    """[N, H, value_dim]: what the memory [H, key_dim, value_dim] says of each query, once it has
    decayed and what it says of the key was corrected, or the value added."""
    out = torch.empty_like(x.values)
    for rows, load, slot in _segments(spans):
        memory = pool.load_memory(layer, load)
        for row in range(rows.start, rows.stop):
            key = x.keys[row].unsqueeze(-1)
            memory = memory * x.kept[row].unsqueeze(-1)
            delta = x.values[row]
            if x.skip is None:
                delta = delta - (memory * key).sum(1)
            memory = memory + key * (delta * x.beta[row]).unsqueeze(1)
            out[row] = (memory * x.queries[row].unsqueeze(-1)).sum(1)
            if x.skip is not None:
                out[row] += x.skip * x.values[row]
        pool.store_memory(layer, slot, memory)
    return out


def _segments(spans: StateSpans) -> Iterator[tuple[slice, int, int]]:
    """Rows, the slot of the state before them, and the slot that takes the state after them."""
    for (first, count), load, store in zip(spans.rows, spans.load, spans.store, strict=True):
        yield slice(first, first + count), load, store
