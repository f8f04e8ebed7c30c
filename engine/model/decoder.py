"""One decoder for the Llama family. Its members differ in their config and weights only."""

from __future__ import annotations

import torch

from engine.model.batch import Batch
from engine.model.ops import Ops
from engine.model.weights import Weights


class Decoder:
    """Stateless but for the KV pool that `ops` writes. Owned by one runner."""

    def __init__(self, weights: Weights, ops: Ops) -> None:
        self._weights = weights
        self._ops = ops

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits of the rows to be sampled, float32 [R, vocab_size], valid until the next call."""
        ops, weights = self._ops, self._weights
        ops.begin(batch)
        hidden = ops.embed(weights.table, batch.tokens)  # [N, hidden_size]
        for index, layer in enumerate(weights.layers):
            x = ops.rms_norm(hidden, layer.input_norm)
            qkv = ops.linear(x, layer.qkv)  # [N, (num_heads + 2 * num_kv_heads) * head_dim]
            ops.rope_write(qkv, index, layer.q_norm, layer.k_norm)
            ops.add_linear(hidden, ops.attention(qkv, index), layer.out)
            x = ops.rms_norm(hidden, layer.post_norm)
            ops.add_linear(hidden, ops.swiglu(ops.linear(x, layer.gate_up)), layer.down)
        sampled = hidden[batch.sample_rows]
        return ops.linear(ops.rms_norm(sampled, weights.norm), weights.head).float()
