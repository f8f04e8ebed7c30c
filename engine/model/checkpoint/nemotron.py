"""Nemotron-H and Nemotron 3: each layer is attention, Mamba 2, an MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvrelay.engine.model.checkpoint.fields import count, number, refuse
from kvrelay.engine.model.checkpoint.hybrid import check_steps, kernel, mamba2
from kvrelay.engine.model.config import ATTENTION, EXPERTS, MLP, Experts
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.state_layout import MAMBA2

Raw = Mapping[str, Any]
KINDS = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), MAMBA2),
    **dict.fromkeys(("*", "attention", "full_attention"), ATTENTION),
    **dict.fromkeys(("-", "mlp"), MLP),
    **dict.fromkeys(("E", "moe"), EXPERTS),
}
"""What a layer is, by a letter of `hybrid_override_pattern` or an entry of `layers_block_type`."""


def nemotron_h(raw: Raw) -> dict[str, Any]:
    """What `families.base` takes. Raises ModelError.

    Steps of Mamba 2 have no limit, as in the makers' code; in that of transformers they are at
    least `time_step_min`."""
    refuse(
        raw, "attention_bias", "mamba_proj_bias", "moe_latent_size", "sliding_window", "use_bias"
    )
    check_steps(raw)
    for key, needed in {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}.items():
        if raw.get(key, needed) != needed:
            raise ModelError(f"config.json: {key} {raw[key]!r} is not supported, only {needed!r}")
    stated = raw.get("layers_block_type") or raw.get("layer_types")
    stated = stated or raw.get("hybrid_override_pattern") or "ME*-"
    unknown = [each for each in stated if each not in KINDS]
    if unknown:
        raise ModelError(f"config.json: a layer that is {unknown[0]!r} is not supported")
    kinds = tuple(KINDS[each] for each in stated)
    eps = raw.get("layer_norm_epsilon", raw.get("norm_eps", 1e-5))
    renamed = {"rms_norm_eps": eps, "num_hidden_layers": len(kinds)}
    return {
        "raw": {"head_dim": raw.get("attention_head_dim", 128), **raw, **renamed},
        "experts": _experts(raw) if EXPERTS in kinds else None,
        "activation": "squared_relu",
        "layer_ropes": (-1,) * len(kinds),
        "layer_kinds": kinds,
        "single_blocks": True,
        "recurrent": mamba2(
            conv_kernel=kernel(raw, "conv_kernel", 4),
            has_biases=bool(raw.get("use_conv_bias", True)),
            num_heads=count(raw, "mamba_num_heads", 128),
            num_key_heads=count(raw, "n_groups", 8),
            key_dim=count(raw, "ssm_state_size", 128),
            value_dim=count(raw, "mamba_head_dim", 64),
            scales=(1.0,) * 5,
        ),
    }


def _experts(raw: Raw) -> Experts:
    return Experts(
        num_experts=count(raw, "n_routed_experts", 8),
        num_per_token=count(raw, "num_experts_per_tok", 2),
        intermediate_size=count(raw, "moe_intermediate_size", 7688),
        shared_size=count(raw, "moe_shared_expert_intermediate_size", 7688),
        normalize=bool(raw.get("norm_topk_prob", True)),
        scale=number(raw, "routed_scaling_factor", 1.0),
        scoring="sigmoid",
        num_groups=count(raw, "n_group", 1),
        num_chosen_groups=count(raw, "topk_group", 1),
        has_bias=True,
    )
