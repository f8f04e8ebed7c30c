"""What the families of `families` have in common: sizes, biases and windows of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.model.checkpoint.fields import count, number, refuse
from engine.model.checkpoint.rope import SLIDING, read_rope
from engine.model.config import ModelConfig
from engine.model.errors import ModelError

Raw = Mapping[str, Any]
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


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
    ropes = changes.pop("ropes", ()) or (read_rope(raw, head_dim),)
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
        "ropes": ropes,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "attention_bias": False,
        "output_bias": False,
        "qk_norm": False,
        "max_position_embeddings": count(raw, "max_position_embeddings"),
        "bos_token_id": None,
        "eos_token_ids": (),
        "activation": ACTIVATIONS[act],
    }
    return ModelConfig(**(fields | changes))


def biases(raw: Raw) -> dict[str, bool]:
    has = bool(raw.get("attention_bias"))
    return {"attention_bias": has, "output_bias": has}


def windows_of(raw: Raw, window: int | None, sliding: Callable[[int], bool]) -> tuple[int, ...]:
    """The window of each layer: of those that `layer_types` or, without it, `sliding` names."""
    layers = count(raw, "num_hidden_layers")
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if sliding(index) else "full_attention" for index in range(layers)]
    unknown = [kind for kind in kinds if kind not in (SLIDING, "full_attention")]
    if unknown or len(kinds) != layers:
        wrong = unknown[0] if unknown else f"of {len(kinds)} layers for {layers}"
        raise ModelError(f"config.json: layer_types {wrong} is not supported")
    if window is None:
        return ()
    if window < 1:
        raise ModelError(f"config.json: sliding_window is {window}, a positive integer is needed")
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def every_layer(_: int) -> bool:
    return True


def optional_window(raw: Raw) -> int | None:
    """Of the families that have a switch for it."""
    return count(raw, "sliding_window", 4096) if raw.get("use_sliding_window") else None


def head_dim_of(raw: Raw) -> int:
    return count(raw, "head_dim", count(raw, "hidden_size") // count(raw, "num_attention_heads"))
