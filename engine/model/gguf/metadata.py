"""What a GGUF file says of one architecture, and how it rotates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.gguf.file import GGUFFile

Config = dict[str, Any]
Keys = dict[str, str | tuple[str, Any]]
"""Of config.json, and GGUF's, with what stands for one that is missing."""
FREQS = "rope_freqs.weight"
FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
TABLES = (FREQS, *FACTORS.values())  # they are in config.json
LLAMA3_HIGHS = (4.0, 1.0)  # high_freq_factor of Llama 3, of Llama 4
NEVER = 1e30  # divides a frequency that does not turn (Gemma 4)


class Metadata:
    """The keys of an architecture, without its name before them."""

    def __init__(self, source: GGUFFile, arch: str) -> None:
        self.source = source
        self.arch = arch
        self.num_drafting = int(self.get("nextn_predict_layers", 0))
        # Layers that draft tokens come last, and are left out.
        self.num_layers = int(self.need("block_count")) - self.num_drafting

    def get(self, key: str, default: Any = None) -> Any:
        """Stated once for all layers, or for each of them, alike. Floats are the shortest numbers
        that a float32 stands for, which is what they are in config.json."""
        value = self.source.metadata.get(f"{self.arch}.{key}")
        if value is None:
            return default
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(f"{self.source.path}: {self.arch}.{key} differs by layer: {value}")
            value = value[0]
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.source.path} does not state {self.arch}.{key}")
        return value

    def each(self, key: str) -> list[Any]:
        """For each layer. Raises ModelError."""
        value = self.source.metadata.get(f"{self.arch}.{key}")
        values = value if isinstance(value, list) else [self.need(key)] * self.num_layers
        if len(values) < self.num_layers:
            raise ModelError(
                f"{self.source.path}: {self.arch}.{key} has {len(values)} entries for "
                f"{self.num_layers} layers"
            )
        return values[: self.num_layers]

    def has(self, layer: int, stem: str) -> bool:
        return f"blk.{layer}.{stem}" in self.source.tensors

    def layers_with(self, stem: str, *, yes: str, no: str) -> list[str]:
        """Says for each layer whether it has such a tensor."""
        return [yes if self.has(layer, stem) else no for layer in range(self.num_layers)]

    def shape(self, stem: str) -> tuple[int, ...]:
        """That of the first layer's tensor that has one. Raises ModelError."""
        names = (f"blk.{layer}.{stem}" for layer in range(self.num_layers))
        found = next(
            (self.source.tensors[n].shape for n in names if n in self.source.tensors), None
        )
        if found is None:
            raise ModelError(f"{self.source.path} has no tensor blk.*.{stem}")
        return found


def head_dim(meta: Metadata) -> int:
    hidden, heads = int(meta.need("embedding_length")), int(meta.need("attention.head_count"))
    return int(meta.get("attention.key_length", hidden // heads))


def partial_rotation(meta: Metadata) -> dict[str, Any]:
    whole = head_dim(meta)
    rotated = meta.get("rope.dimension_count", whole)
    return {} if rotated == whole else {"partial_rotary_factor": rotated / whole}


def rope_scaling(meta: Metadata) -> dict[str, Any] | None:
    """Stated in the metadata, or, for Llama 3 and Phi-3, present as tables of divisors."""
    source = meta.source
    if FREQS in source.tensors:
        return _llama3(meta)
    original = meta.get("rope.scaling.original_context_length")
    if any(name in source.tensors for name in FACTORS.values()):
        return _longrope(meta, original)
    kind = meta.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": meta.need("rope.scaling.factor")}
    if kind == "yarn":
        return _yarn(meta, original)
    raise ModelError(
        f"{source.path}: rope scaling {kind} is not supported; supported: none, linear, yarn"
    )


def _yarn(meta: Metadata, original: int | None) -> dict[str, Any]:
    stated = {
        "beta_fast": meta.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": meta.get("rope.scaling.yarn_beta_slow"),
        "attention_factor": meta.get("rope.scaling.yarn_attn_factor"),
    }
    return {
        "rope_type": "yarn",
        "factor": meta.need("rope.scaling.factor"),
        "original_max_position_embeddings": original or meta.need("context_length"),
        **{key: value for key, value in stated.items() if value is not None},
    }


def with_mscale(meta: Metadata, unit: float) -> dict[str, Any]:
    """Where the logarithm of YaRN's factor sharpens attention: `unit` is what the file states for
    an mscale_all_dim of 1. It states no mscale, which is the same in all models that are
    published."""
    scaling = rope_scaling(meta)
    stated = meta.get("rope.scaling.yarn_log_multiplier")
    if scaling is not None and stated is not None:
        mscale = float(str(np.float32(stated / unit)))
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    return {"rope_scaling": scaling}


def _llama3(meta: Metadata) -> dict[str, Any]:
    divisors = meta.source.get(FREQS).reshape(-1)
    theta = meta.get("rope.freq_base", 10000.0)
    for high in LLAMA3_HIGHS:
        spec = {
            "rope_type": "llama3",
            "factor": float(divisors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": high,
            "original_max_position_embeddings": 8192,
        }
        if np.allclose(divisors, _llama3_divisors(spec, theta, len(divisors)), rtol=1e-3):
            return spec
    raise ModelError(f"{meta.source.path}: {FREQS} is not Llama 3's kind of rope scaling")


def _llama3_divisors(spec: dict[str, Any], theta: float, half: int) -> np.ndarray:
    wavelength = 2 * np.pi * theta ** (np.arange(half) / half)
    low, high = spec["low_freq_factor"], spec["high_freq_factor"]
    turns = spec["original_max_position_embeddings"] / wavelength
    blend = ((turns - low) / (high - low)).clip(0.0, 1.0) if high > low else turns > low
    return 1.0 / ((1 - blend) / spec["factor"] + blend)


def _longrope(meta: Metadata, original: int | None) -> dict[str, Any]:
    source, longest = meta.source, meta.need("context_length")
    missing = [name for name in FACTORS.values() if name not in source.tensors]
    if missing or original is None:
        lacks = missing[0] if missing else f"{meta.arch}.rope.scaling.original_context_length"
        raise ModelError(f"{source.path}: longrope without {lacks}")
    spread = math.sqrt(1 + math.log(longest / original) / math.log(original))
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "factor": longest / original,
        "attention_factor": meta.get("rope.scaling.attn_factor", spread),
        **{key: source.get(name).reshape(-1).tolist() for key, name in FACTORS.items()},
    }
