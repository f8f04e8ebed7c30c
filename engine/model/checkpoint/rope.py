"""Rotary embeddings as config.json states them.

They are `rope_scaling` beside `rope_theta`, or `rope_parameters`, either for all layers or one for
each kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvrelay.engine.model.checkpoint.fields import count, number, numbers
from kvrelay.engine.model.config import Rope, RopeScaling
from kvrelay.engine.model.errors import ModelError

SLIDING = "sliding_attention"
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


def read_rope(
    raw: Mapping[str, Any], head_dim: int, theta: float = 10000.0, layer_type: str = ""
) -> Rope:
    """The rotary embedding of heads of `head_dim`; theta: where the file states none.
    layer_type: of layers of this kind, where kinds have their own."""
    spec = rope_spec(raw, layer_type)
    partial = spec.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    dim = int(head_dim * (1.0 if partial is None else float(partial)))
    if spec.get("rope_type") == "proportional":  # the other dimensions turn by nothing
        theta = number(spec, "rope_theta", theta)
        scaling = RopeScaling("proportional", number(spec, "factor", 1.0), turning=dim // 2)
        return Rope(theta, head_dim, scaling)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise ModelError(
            f"config.json: partial_rotary_factor {partial} rotates {dim} of {head_dim} dimensions, "
            "an even number of them is needed"
        )
    theta = number(spec, "rope_theta", number(raw, "rope_theta", theta))
    return Rope(theta, dim, _scaling(raw, spec, dim))


def rope_spec(raw: Mapping[str, Any], layer_type: str = "") -> Mapping[str, Any]:
    """The settings of the scaling, from either key; {} if there are none."""
    newer = raw.get("rope_parameters") or {}
    if "full_attention" in newer or SLIDING in newer:
        kinds = [each for each in newer.values() if each]
        if not layer_type and kinds[1:] and kinds[0] != kinds[1]:
            raise ModelError(f"rope_parameters that differ by layer ({newer}) are not supported")
        newer = newer.get(layer_type or "full_attention") or {}
    return {**(raw.get("rope_scaling") or {}), **newer}


def text_positions(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What rotates by a position in time, height and width (mrope), for texts alone: there the
    three are one."""
    spec = dict(rope_spec(raw))
    if spec.get("rope_type", spec.get("type")) != "mrope":
        return raw
    spec = {key: value for key, value in spec.items() if key not in ("type", "mrope_section")}
    return {**raw, "rope_scaling": None, "rope_parameters": {**spec, "rope_type": "default"}}


def query_growth(raw: Mapping[str, Any]) -> dict[str, Any]:
    """How queries grow with their position, as Llama 4, Ministral 3 and Mistral 4 were trained."""
    spec = rope_spec(raw)
    if not (beta := spec.get("llama_4_scaling_beta")):
        return {}
    length = count(spec, "original_max_position_embeddings")
    return {"query_growth": float(beta), "query_growth_length": length}


def _scaling(raw: Mapping[str, Any], spec: Mapping[str, Any], dim: int) -> RopeScaling | None:
    kind = spec.get("rope_type", spec.get("type", "default"))
    if kind == "su" or (kind == "yarn" and "long_factor" in spec):  # early names, in Phi-3 files
        kind = "longrope"
    if kind not in KINDS:
        raise ModelError(f"rope scaling {kind} is not supported; supported: {', '.join(KINDS)}")
    # Dynamic scaling starts past max_position_embeddings, which no sequence exceeds here.
    if kind in ("default", "dynamic"):
        return None
    if kind == "linear":
        return RopeScaling("linear", number(spec, "factor"))
    longest = count(raw, "max_position_embeddings")
    stated = {**spec, **{k: v for k, v in raw.items() if k == "original_max_position_embeddings"}}
    original = count(stated, "original_max_position_embeddings", longest)
    if kind == "llama3":
        return RopeScaling(
            kind,
            factor=number(spec, "factor"),
            low_freq_factor=number(spec, "low_freq_factor"),
            high_freq_factor=number(spec, "high_freq_factor"),
            original_max_position=original,
        )
    if kind == "longrope":
        factor = number(spec, "factor", longest / original)
        spread = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return RopeScaling(
            kind,
            factor,
            original_max_position=original,
            short_factors=numbers(spec, "short_factor", dim // 2),
            long_factors=numbers(spec, "long_factor", dim // 2),
            attention_factor=number(spec, "attention_factor", spread),
        )
    factor = number(spec, "factor")
    return RopeScaling(
        kind,
        factor,
        original_max_position=original,
        beta_fast=float(spec.get("beta_fast") or 32),
        beta_slow=float(spec.get("beta_slow") or 1),
        truncate=bool(spec.get("truncate", True)),
        attention_factor=number(spec, "attention_factor", _yarn_spread(factor, spec)),
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """By how much YaRN sharpens attention (Peng et al. 2023, eq. 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_spread(factor: float, spec: Mapping[str, Any]) -> float:
    mscale, all_dim = spec.get("mscale"), spec.get("mscale_all_dim")
    if mscale and all_dim:  # DeepSeek: the rest of it is in the scale of scores
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor, 1.0)
