"""Which experts a token is sent to, and with which weights: plain torch, float32."""

from __future__ import annotations

import torch

from engine.model.config import ModelConfig
from engine.model.weights import ExpertsWeights

GROUP_BEST = 2  # experts whose scores, added up, rank a group where choices are corrected


def choose_experts(
    logits: torch.Tensor, layer: ExpertsWeights, config: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [N, num_experts] float32 -> chosen [N, num_per_token] int64 and weights
    [N, num_per_token] float32.

    Groups are ranked by their best expert (DeepSeek-V2), or, with a bias, by their two best
    (DeepSeek-V3). The bias counts for the choice only."""
    experts, bias = config.experts, layer.bias
    assert experts is not None
    if experts.scoring == "sigmoid":  # torch's in float32 depends on how many rows there are
        scores = logits.double().sigmoid().float()
    else:
        scores = logits.softmax(-1)
    ranked = scores if bias is None else scores + bias
    if experts.num_chosen_groups < experts.num_groups:
        groups = ranked.unflatten(-1, (experts.num_groups, -1))  # [N, num_groups, size]
        best = groups.topk(1 if bias is None else GROUP_BEST, dim=-1).values.sum(-1)
        kept = best.topk(experts.num_chosen_groups, dim=-1).indices
        closed = torch.ones_like(best, dtype=torch.bool).scatter_(-1, kept, False)
        ranked = groups.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
    chosen = ranked.topk(experts.num_per_token, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if experts.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * experts.scale
