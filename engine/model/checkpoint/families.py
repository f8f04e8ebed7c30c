"""Families of models: what each one's config.json means for the one decoder.

Keys and defaults are those of transformers. Settings that the decoder does not implement are
refused, by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrelay.engine.model.checkpoint import hybrid, sparse
from kvrelay.engine.model.checkpoint.fields import (
    biases,
    count,
    head_dim_of,
    ids,
    number,
    read_json,
    refuse,
)
from kvrelay.engine.model.checkpoint.gemma import gemma2, gemma3
from kvrelay.engine.model.checkpoint.gemma4 import gemma4
from kvrelay.engine.model.checkpoint.granite import granite
from kvrelay.engine.model.checkpoint.llama4 import llama4
from kvrelay.engine.model.checkpoint.mimo import mimo_v2
from kvrelay.engine.model.checkpoint.mistral import read_raw
from kvrelay.engine.model.checkpoint.names import TEXT_KINDS
from kvrelay.engine.model.checkpoint.nemotron import nemotron_h
from kvrelay.engine.model.checkpoint.quantized_config import quantization_of
from kvrelay.engine.model.checkpoint.rope import (
    SLIDING,
    query_growth,
    read_rope,
    rope_spec,
    text_positions,
    yarn_mscale,
)
from kvrelay.engine.model.checkpoint.vision import read_vision
from kvrelay.engine.model.checkpoint.windows import every_layer, optional_window, windows_of
from kvrelay.engine.model.config import Experts, Latent, ModelConfig
from kvrelay.engine.model.errors import ModelError

Raw = Mapping[str, Any]
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
MISTRAL_YARN: Raw = {  # what Ministral 3 and Mistral 4 are without a word about rotation
    "type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MINISTRAL3_YARN: Raw = {"factor": 16.0, "original_max_position_embeddings": 16384}
MISTRAL4_YARN: Raw = {"factor": 128.0, "original_max_position_embeddings": 8192}
LATENT_EPS = 1e-6  # norms of latents have it, whatever rms_norm_eps says; no file states it


def read_config(path: Path) -> ModelConfig:
    """The configuration of the model in directory `path`, from its config.json and, if there is
    one, its generation_config.json. Raises ModelError."""
    if not path.is_dir():
        raise ModelError(f"model directory {path} does not exist")
    raw = read_raw(path)
    generation: Raw = {}
    if (path / "generation_config.json").is_file():
        generation = read_json(path / "generation_config.json")
    quantized = quantization_of(path, raw)
    try:
        config = parse(raw, generation)
        packed = "" if quantized is None else quantized.packed_experts
        if config.experts is not None and packed:
            config = replace(config, experts=replace(config.experts, packed=packed))
        return replace(config, vision=read_vision(path, raw))
    except KeyError as error:
        raise ModelError(f"{path / 'config.json'} does not state {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path / 'config.json'} is not understood: {error}") from error


def parse(raw: Raw, generation: Raw) -> ModelConfig:
    """What config.json and generation_config.json describe. Raises ModelError, and KeyError,
    TypeError, ValueError or AttributeError for files that make no sense."""
    named = (raw.get("architectures") or [None])[0]
    if named not in FAMILIES:
        raise ModelError(f"architecture {named} is not supported; supported: {', '.join(FAMILIES)}")
    config = FAMILIES[named](raw)
    scaling = config.ropes[0].scaling
    if scaling is not None and scaling.kind == "yarn":  # some files state the length before it
        longest = int(scaling.factor * scaling.original_max_position)
        longest = max(config.max_position_embeddings, longest)
        config = replace(config, max_position_embeddings=longest)
    longest = config.max_position_embeddings  # a window of that length hides nothing
    windows = tuple(window if window < longest else 0 for window in config.windows)
    sources = (raw, generation, raw.get("text_config") or {})
    ends = {end for source in sources for end in ids(source, "eos_token_id")}
    starts = [start for source in sources for start in ids(source, "bos_token_id")]
    return replace(
        config,
        architecture=named,
        windows=windows if any(windows) else (),
        bos_token_id=next(iter(starts), None),
        eos_token_ids=tuple(sorted(ends)),
    )


def base(raw: Raw, **changes: Any) -> ModelConfig:
    """What all families have in common; `changes` are fields of ModelConfig that differ."""
    refuse(raw, "mlp_bias", "use_bidirectional_attention")
    act = raw.get("hidden_activation") or raw.get("hidden_act") or "silu"
    if act not in ACTIVATIONS:
        raise ModelError(f"hidden_act {act} is not supported; supported: {', '.join(ACTIVATIONS)}")
    hidden, heads = count(raw, "hidden_size"), count(raw, "num_attention_heads")
    kv_heads = changes.pop("num_kv_heads", 0) or count(raw, "num_key_value_heads", heads)
    head_dim = changes.pop("head_dim", 0) or count(raw, "head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise ModelError(f"{heads} heads over {kv_heads} KV heads of {head_dim} is not supported")
    fields: dict[str, Any] = {
        "architecture": "",
        "num_layers": count(raw, "num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": count(raw, "intermediate_size"),
        "vocab_size": count(raw, "vocab_size"),
        "rms_norm_eps": number(raw, "rms_norm_eps", 1e-6),
        "ropes": changes.pop("ropes", ()) or (read_rope(raw, head_dim),),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "attention_bias": False,
        "output_bias": False,
        "qk_norm": False,
        "max_position_embeddings": count(raw, "max_position_embeddings"),
        "bos_token_id": None,
        "eos_token_ids": (),
        "activation": ACTIVATIONS[act],
        "num_mtp_layers": raw.get("num_nextn_predict_layers") or 0,
    }
    return ModelConfig(**(fields | changes))


def _llama(raw: Raw) -> ModelConfig:
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    has_windows = SLIDING in (raw.get("layer_types") or [SLIDING])
    if window and has_windows and window < count(raw, "max_position_embeddings"):
        raise ModelError(f"sliding_window {window} is not supported with LlamaForCausalLM")
    return base(raw, **biases(raw))


def _mistral(raw: Raw) -> ModelConfig:
    window = raw.get("sliding_window", 4096)
    return base(raw, windows=windows_of(raw, window, every_layer))


def _qwen_windows(raw: Raw) -> tuple[int, ...]:
    first = raw.get("max_window_layers", 28)
    return windows_of(raw, optional_window(raw), lambda index: index >= first)


def _qwen2(raw: Raw) -> ModelConfig:
    return base(raw, attention_bias=True, windows=_qwen_windows(raw))


def _qwen3(raw: Raw) -> ModelConfig:
    raw = {"head_dim": 128, **raw}
    return base(raw, qk_norm=True, windows=_qwen_windows(raw), **biases(raw))


def _glm(raw: Raw, **changes: Any) -> ModelConfig:
    raw = {"head_dim": 128, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5, **raw}
    has_bias = bool(raw.get("attention_bias", True))
    return base(raw, attention_bias=has_bias, interleaved=True, **changes)


def _qwen2_vl(raw: Raw) -> ModelConfig:
    return _qwen2({"rope_theta": 1e6, "rms_norm_eps": 1e-5, **text_positions(raw)})


def _qwen3_vl(raw: Raw) -> ModelConfig:
    return _qwen3({"rope_theta": 5e5, **text_positions(raw)})


def _qwen3_vl_moe(raw: Raw) -> ModelConfig:
    sizes = {"num_experts_per_tok": 4, "moe_intermediate_size": 1408, "head_dim": 128}
    # Weights are made to sum to one, whatever the file says.
    always = {"norm_topk_prob": True, "use_sliding_window": False}
    return _qwen3_moe({"rope_theta": 5e5, **sizes, **text_positions(raw), **always})


def _smollm3(raw: Raw) -> ModelConfig:
    raw = {"tie_word_embeddings": True, **raw}
    layers, every = count(raw, "num_hidden_layers"), count(raw, "no_rope_layer_interval", 4)
    rotated = raw.get("no_rope_layers") or [(i + 1) % every for i in range(layers)]
    config = base(
        raw,
        ropes=(read_rope(raw, head_dim_of(raw), 2e6),),
        layer_ropes=tuple(0 if rotated[index] else -1 for index in range(layers)),
        windows=windows_of(raw, optional_window(raw), lambda index: not rotated[index]),
        **biases(raw),
    )
    return replace(config, layer_ropes=()) if not any(config.layer_ropes) else config


def _phi3(raw: Raw) -> ModelConfig:
    raw = {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **raw}
    return base(raw, windows=windows_of(raw, raw.get("sliding_window"), every_layer))


def _seed_oss(raw: Raw) -> ModelConfig:
    return base(
        {"head_dim": 128, **raw},
        attention_bias=bool(raw.get("attention_bias", True)),
        output_bias=bool(raw.get("attention_out_bias")),
    )


def _ministral3(raw: Raw) -> ModelConfig:
    raw = {"head_dim": 128, "rms_norm_eps": 1e-5, **raw}
    raw = _with_yarn(raw, {**MINISTRAL3_YARN, "rope_theta": 1e6})
    windows = windows_of(raw, raw.get("sliding_window"), every_layer)
    return base(raw, windows=windows, **query_growth(raw))


def _with_yarn(raw: Raw, default: Raw) -> Raw:
    stated = raw.get("rope_parameters") or raw.get("rope_scaling")
    return raw if stated else {**raw, "rope_parameters": {**MISTRAL_YARN, **default}}


def _mixtral(raw: Raw) -> ModelConfig:
    raw = {"rms_norm_eps": 1e-5, **raw}
    experts = Experts(
        num_experts=count(raw, "num_local_experts", 8),
        num_per_token=count(raw, "num_experts_per_tok", 2),
        intermediate_size=count(raw, "intermediate_size"),
        normalize=True,
    )
    return base(
        raw,
        ropes=(read_rope(raw, head_dim_of(raw), 1e6),),
        windows=windows_of(raw, raw.get("sliding_window"), every_layer),
        experts=_checked(experts),
    )


def _minimax_m2(raw: Raw) -> ModelConfig:
    refuse(raw, "shared_intermediate_size")
    stated = {"scoring_func": "sigmoid", "qk_norm_type": "per_layer", "use_qk_norm": True}
    for key, needed in {**stated, "use_routing_bias": True}.items():
        if raw.get(key, needed) != needed:
            raise ModelError(f"config.json: {key} {raw[key]!r} is not supported, only {needed!r}")
    raw = {"head_dim": 128, **raw}
    if raw.get("rotary_dim"):
        raw = {"partial_rotary_factor": count(raw, "rotary_dim") / raw["head_dim"], **raw}
    experts = Experts(
        num_experts=count(raw, "num_local_experts", 256),
        num_per_token=count(raw, "num_experts_per_tok", 8),
        intermediate_size=count(raw, "intermediate_size", 1536),
        normalize=True,
        scoring="sigmoid",
        has_bias=True,
    )
    return base(
        raw,
        ropes=(read_rope(raw, raw["head_dim"], 5e6),),
        qk_norm=True,
        norms_all_heads=True,
        experts=_checked(experts),
    )


def _gpt_oss(raw: Raw) -> ModelConfig:
    limits = (number(raw, "swiglu_alpha", 1.702), number(raw, "swiglu_limit", 7.0))
    if limits != (1.702, 7.0):
        raise ModelError(f"config.json: swiglu_alpha and _limit {limits}, not 1.702 and 7.0")
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    yarn |= {"truncate": False, "original_max_position_embeddings": 4096, "rope_theta": 150000.0}
    raw = {"head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True, **raw}
    if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
        raw["rope_parameters"] = yarn
    experts = Experts(
        num_experts=count(raw, "num_local_experts", 128),
        num_per_token=count(raw, "num_experts_per_tok", 4),
        intermediate_size=count(raw, "intermediate_size", 2880),
        normalize=True,
        has_biases=True,
    )
    windows = windows_of(raw, raw.get("sliding_window", 128), lambda index: index % 2 == 0)
    return base(
        raw,
        windows=windows,
        experts=_checked(experts),
        learned_sinks=True,
        activation="clamped_swish",
        **biases(raw),
    )


def _qwen_experts(raw: Raw, **changes: Any) -> Experts:
    dense = sorted(raw.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))) or raw.get("decoder_sparse_step", 1) != 1:
        raise ModelError(
            f"config.json: mlp_only_layers {dense} with decoder_sparse_step "
            f"{raw.get('decoder_sparse_step', 1)} is not supported; only first layers may be dense"
        )
    experts = Experts(
        num_experts=count(raw, "num_experts", raw.get("num_local_experts")),
        num_per_token=count(raw, "num_experts_per_tok", 8),
        intermediate_size=count(raw, "moe_intermediate_size", 768),
        normalize=bool(raw.get("norm_topk_prob", False)),
        first_layer=len(dense),
        **changes,
    )
    return _checked(experts)


def _qwen2_moe(raw: Raw) -> ModelConfig:
    sizes = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    raw = {"shared_expert_intermediate_size": 5632, **sizes, **raw}
    shared = count(raw, "shared_expert_intermediate_size")
    return base(
        raw,
        attention_bias=bool(raw.get("qkv_bias", True)),
        windows=_qwen_windows(raw),
        experts=_qwen_experts(raw, shared_size=shared, shared_gate=True),
    )


def _qwen3_moe(raw: Raw) -> ModelConfig:
    windows = windows_of(raw, optional_window(raw), every_layer)
    return base(raw, qk_norm=True, windows=windows, experts=_qwen_experts(raw), **biases(raw))


def _qwen3_5(raw: Raw, experts: Experts | None = None) -> ModelConfig:
    refuse(raw, "attention_bias")
    raw = {"head_dim": 256, "partial_rotary_factor": 0.25, **raw}
    # Qwen3-Next has the layer, and its config.json says nothing of it.
    drafts = raw.get("mtp_num_hidden_layers", raw.get("num_nextn_predict_layers", 1)) or 0
    return base(raw, experts=experts, num_mtp_layers=drafts, **hybrid.qwen3_next(raw))


def _qwen3_next(raw: Raw) -> ModelConfig:
    raw = {"norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10, **raw}
    return _gated_moe({"intermediate_size": 5632, **raw})


def _qwen3_5_moe(raw: Raw) -> ModelConfig:
    return _gated_moe({**raw, "norm_topk_prob": True})  # whatever the file says


def _gated_moe(raw: Raw) -> ModelConfig:
    sizes = {"num_experts": 256, "moe_intermediate_size": 512, "intermediate_size": 512}
    raw = {"shared_expert_intermediate_size": 512, **sizes, **raw}
    shared = count(raw, "shared_expert_intermediate_size")
    return _qwen3_5(raw, _qwen_experts(raw, shared_size=shared, shared_gate=True))


def _falcon_h1(raw: Raw) -> ModelConfig:
    return base({"rms_norm_eps": 1e-5, **raw}, **hybrid.falcon_h1(raw))


def _lfm2(raw: Raw) -> ModelConfig:
    raw = {"rms_norm_eps": raw.get("norm_eps", 1e-5), **raw}
    changes = hybrid.lfm2(raw)
    ropes = (read_rope(raw, head_dim_of(raw), 1e6),)
    return base({**raw, "intermediate_size": changes["intermediate_size"]}, ropes=ropes, **changes)


def _lfm2_moe(raw: Raw) -> ModelConfig:
    raw = {"intermediate_size": 7168, "block_auto_adjust_ff_dim": False, **raw}
    experts = Experts(
        num_experts=count(raw, "num_experts", 32),
        num_per_token=count(raw, "num_experts_per_tok", 4),
        intermediate_size=count(raw, "moe_intermediate_size", 1792),
        normalize=bool(raw.get("norm_topk_prob", True)),
        scoring="sigmoid",
        scale=number(raw, "routed_scaling_factor", 1.0),
        has_bias=bool(raw.get("use_expert_bias", True)),
        first_layer=raw.get("num_dense_layers", 2),
    )
    return replace(_lfm2(raw), experts=_checked(experts))


def _deepseek(raw: Raw, experts: Experts, interleaved: bool) -> ModelConfig:
    refuse(raw, "attention_bias")
    latent = Latent(
        rank=count(raw, "kv_lora_rank", 512),
        q_rank=count(raw, "q_lora_rank", 1536) if raw.get("q_lora_rank", 1536) else None,
        nope_dim=count(raw, "qk_nope_head_dim", 128),
        rope_dim=count(raw, "qk_rope_head_dim", 64),
        value_dim=count(raw, "v_head_dim", 128),
        interleaved=interleaved,
        scale=_latent_scale(number(raw, "rms_norm_eps", LATENT_EPS)),
    )
    scale, spec = float(latent.nope_dim + latent.rope_dim) ** -0.5, rope_spec(raw)
    if spec.get("mscale_all_dim") and spec.get("rope_type", spec.get("type")) != "default":
        scale *= yarn_mscale(number(spec, "factor"), number(spec, "mscale_all_dim")) ** 2
    return base(
        raw,
        num_kv_heads=1,
        head_dim=latent.rank + latent.rope_dim,
        ropes=(read_rope(raw, latent.rope_dim),),
        attention_scale=scale,
        latent=latent,
        experts=_checked(experts),
    )


def _latent_scale(eps: float) -> float:
    """What latents are multiplied by, so that a norm with `eps` divides them as one with LATENT_EPS
    does, up to 5e-7 of their square: a power of two rounds nothing."""
    return 2.0 ** round(math.log2(eps / LATENT_EPS) / 2) if eps > 0.0 else 1.0


def _deepseek_experts(raw: Raw, **changes: Any) -> Experts:
    width = count(raw, "moe_intermediate_size")
    if raw.get("moe_layer_freq", 1) != 1:
        raise ModelError(f"config.json: moe_layer_freq {raw['moe_layer_freq']} is not supported")
    return Experts(
        num_experts=count(raw, "n_routed_experts"),
        num_per_token=count(raw, "num_experts_per_tok"),
        intermediate_size=width,
        shared_size=width * (raw.get("n_shared_experts") or 0),
        scale=number(raw, "routed_scaling_factor", 1.0),
        first_layer=raw.get("first_k_dense_replace", 0),
        **changes,
    )


def _deepseek_v2(raw: Raw) -> ModelConfig:
    refuse(raw, "norm_topk_prob")
    raw = {"n_shared_experts": 2, **raw}
    method = raw.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(
            f"config.json: topk_method {method} is not supported; "
            "supported: greedy, group_limited_greedy"
        )
    groups = {}
    if method != "greedy":
        groups = {
            "num_groups": count(raw, "n_group"),
            "num_chosen_groups": count(raw, "topk_group"),
        }
    return _deepseek(raw, _deepseek_experts(raw, normalize=False, **groups), interleaved=True)


def _deepseek_v3(raw: Raw) -> ModelConfig:
    defaults = {"n_shared_experts": 1, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
    raw = {**defaults, **raw}
    experts = _deepseek_experts(
        raw,
        normalize=bool(raw.get("norm_topk_prob", True)),
        scoring="sigmoid",
        num_groups=count(raw, "n_group", 8),
        num_chosen_groups=count(raw, "topk_group", 4),
        has_bias=True,
    )
    return _deepseek(raw, experts, interleaved=bool(raw.get("rope_interleave", True)))


def _glm4_experts(raw: Raw) -> Experts:
    return _deepseek_experts(
        raw,
        normalize=bool(raw.get("norm_topk_prob", True)),
        scoring="sigmoid",
        num_groups=count(raw, "n_group", 1),
        num_chosen_groups=count(raw, "topk_group", 1),
        has_bias=True,
    )


def _glm4_moe(raw: Raw) -> ModelConfig:
    raw = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, **raw}
    return base(
        raw,
        attention_bias=bool(raw.get("attention_bias")),
        qk_norm=bool(raw.get("use_qk_norm")),
        experts=_checked(_glm4_experts({"n_shared_experts": 1, **raw})),
    )


def _first_sparse(kinds: list[str]) -> int:
    dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if "dense" in kinds[dense:]:
        raise ModelError("config.json: mlp_layer_types with dense layers after sparse ones")
    return dense


def _glm4_moe_lite(raw: Raw) -> ModelConfig:
    dense = _first_sparse(raw.get("mlp_layer_types") or ["dense"])
    defaults = {"rms_norm_eps": 1e-5, "q_lora_rank": 768, "qk_nope_head_dim": 192}
    defaults |= {"v_head_dim": 256, "n_shared_experts": 1, "routed_scaling_factor": 1.8}
    raw = {**defaults, **raw}
    experts = _glm4_experts({**raw, "first_k_dense_replace": dense})
    return _deepseek(raw, experts, interleaved=bool(raw.get("rope_interleave", True)))


def _kimi_linear(raw: Raw) -> ModelConfig:
    raw, changes = hybrid.kimi_linear(raw)
    dense = raw.get("first_k_dense_replace", 1)
    if kinds := raw.get("mlp_layer_types"):
        dense = _first_sparse(kinds)
    experts = _glm4_experts({**raw, "first_k_dense_replace": dense})
    return replace(_deepseek(raw, experts, interleaved=False), **changes)


def _mistral4(raw: Raw) -> ModelConfig:
    if raw.get("n_group", 1) != 1:
        raise ModelError(f"config.json: n_group {raw['n_group']} is not supported, only 1")
    defaults = {"kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64}
    raw = _with_yarn({**defaults, "n_shared_experts": 1, **raw}, MISTRAL4_YARN)
    experts = _deepseek_experts(raw, normalize=bool(raw.get("norm_topk_prob", True)))
    # It says which part of a head is rotated, which the two lengths of a latent's query say too.
    whole = {"partial_rotary_factor": 1.0}
    raw = {**raw, **whole, "rope_parameters": {**rope_spec(raw), **whole}}
    interleaved = bool(raw.get("rope_interleave", True))
    return replace(_deepseek(raw, experts, interleaved), **query_growth(raw))


def _text_of(raw: Raw) -> ModelConfig:
    """The language model of a multimodal checkpoint: it is served with text alone."""
    named = raw["architectures"][0]
    is_flat = named in FLAT and "text_config" not in raw
    text: Raw = {**raw, "model_type": TEXT_KINDS[named]} if is_flat else raw["text_config"]
    kind = text.get("model_type") or TEXT_KINDS[named]
    if kind not in TEXT_MODELS:
        known = ", ".join(TEXT_MODELS)
        raise ModelError(f"config.json: text_config is of {kind}; supported: {known}")
    # The output layer belongs to the model around it, so what that says counts.
    tied = {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}
    return TEXT_MODELS[kind]({**text, **tied})


def _checked(experts: Experts) -> Experts:
    e = experts
    size = e.num_experts // e.num_groups
    if (
        e.num_experts % e.num_groups
        or e.num_chosen_groups > e.num_groups
        or e.num_per_token > e.num_chosen_groups * size
        or (e.has_bias and size < 2)
    ):
        raise ModelError(
            f"{e.num_per_token} of {e.num_experts} experts in {e.num_chosen_groups} of "
            f"{e.num_groups} groups is not possible"
        )
    return experts


FAMILIES: dict[str, Callable[[Raw], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SmolLM3ForCausalLM": _smollm3,
    "Phi3ForCausalLM": _phi3,
    "Gemma2ForCausalLM": lambda raw: base(**gemma2(raw)),
    "Gemma3ForCausalLM": lambda raw: base(**gemma3(raw)),
    "Gemma3ForConditionalGeneration": _text_of,
    "Gemma4ForCausalLM": lambda raw: base(**gemma4(raw)),
    "Gemma4ForConditionalGeneration": _text_of,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "DeepseekV32ForCausalLM": lambda raw: sparse.deepseek_v32(raw, _deepseek_v3),
    "Glm4MoeForCausalLM": _glm4_moe,
    "Glm4MoeLiteForCausalLM": _glm4_moe_lite,
    "GlmForCausalLM": _glm,
    "Glm4ForCausalLM": lambda raw: _glm(raw, sandwich_norms=True),
    "GlmMoeDsaForCausalLM": lambda raw: sparse.glm_moe_dsa(raw, _deepseek_v3),
    "GptOssForCausalLM": _gpt_oss,
    "GraniteForCausalLM": lambda raw: base(**granite(raw)),
    "Llama4ForCausalLM": lambda raw: base(**llama4(raw)),
    "Llama4ForConditionalGeneration": _text_of,
    "KimiK25ForConditionalGeneration": _text_of,
    "KimiLinearForCausalLM": _kimi_linear,
    "Kimi_K25ForConditionalGeneration": _text_of,
    "MiMoV2FlashForCausalLM": lambda raw: base(**mimo_v2(raw)),
    "MiniMaxM2ForCausalLM": _minimax_m2,
    "Ministral3ForCausalLM": _ministral3,
    "Mistral3ForConditionalGeneration": _text_of,
    "Mistral4ForCausalLM": _mistral4,
    "FalconH1ForCausalLM": _falcon_h1,
    "Lfm2ForCausalLM": _lfm2,
    "Lfm2MoeForCausalLM": _lfm2_moe,
    "NemotronHForCausalLM": lambda raw: base(**nemotron_h(raw)),
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen2VLForConditionalGeneration": _text_of,
    "Qwen2_5_VLForConditionalGeneration": _text_of,
    "Qwen3VLForConditionalGeneration": _text_of,
    "Qwen3VLMoeForConditionalGeneration": _text_of,
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5ForConditionalGeneration": _text_of,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": _text_of,
    "SeedOssForCausalLM": _seed_oss,
}
TEXT_MODELS: dict[str, Callable[[Raw], ModelConfig]] = {
    "deepseek_v3": _deepseek_v3,
    "gemma3_text": lambda raw: base(**gemma3(raw)),
    "gemma4_text": lambda raw: base(**gemma4(raw)),
    "kimi_k2": _deepseek_v3,
    "llama4_text": lambda raw: base(**llama4(raw)),
    "ministral3": _ministral3,
    "mistral": _mistral,
    "mistral4": _mistral4,
    "qwen2_vl_text": _qwen2_vl,
    "qwen2_5_vl_text": _qwen2_vl,
    "qwen3_vl_text": _qwen3_vl,
    "qwen3_vl_moe_text": _qwen3_vl_moe,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe,
}
"""The language model within another, by the `model_type` of its text_config."""
FLAT = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
"""Whose first files have the keys of the language model among those of the whole."""
