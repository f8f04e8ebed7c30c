"""The indexer of DeepSeek sparse attention as a checkpoint stores it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.ops import Ops
from kvrelay.engine.model.weights import IndexerWeights

Get = Callable[..., torch.Tensor]  # a tensor by its name and shape


def indexer_weights(get: Get, config: ModelConfig, layer: int, ops: Ops) -> IndexerWeights | None:
    """Those of one layer; None: it has none. Raises ModelError."""
    latent, name = config.latent, "self_attn.indexer."
    indexer = config.indexer
    if latent is None or indexer is None or not indexer.scores_in(layer):
        return None
    heads, dim, hidden = indexer.num_heads, indexer.head_dim, config.hidden_size
    rotated = torch.arange(latent.rope_dim)
    if indexer.interleaved:
        rotated = torch.cat((rotated[0::2], rotated[1::2]))
    order = torch.cat((torch.arange(latent.rope_dim, dim), rotated))  # they come first in the file
    queries = get(name + "wq_b.weight", heads * dim, latent.q_rank)
    queries = queries.unflatten(0, (heads, dim))[:, order].flatten(0, 1)
    return IndexerWeights(
        queries=ops.matrix(queries, None, "index_queries"),
        keys=ops.matrix(get(name + "wk.weight", dim, hidden)[order], None, "index_keys"),
        weights=ops.router(get(name + "weights_proj.weight", heads, hidden)),
        norm=ops.vector(get(name + "k_norm.weight", dim)[order]),
        norm_bias=ops.vector(get(name + "k_norm.bias", dim)[order]),
    )
