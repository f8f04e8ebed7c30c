"""How long a pass takes on a GPU by its data sheet: the slower of computing and reading memory.

  pass_s    = max(FLOPs / (peak * 0.55), bytes / (bandwidth * 0.8)) + all-reduces + 1 ms
  FLOPs     = 2 * layers' parameters * tokens + 2 * head's parameters * sequences
              + 4 * heads * head_dim * layers * (query, key) pairs
  bytes     = weights, once a pass + KV read by decodes + KV written

`docs/timing.md` gives the sources of the table and the reasons for the two efficiencies.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.lab.timing.timing import Links, TimingError, read_json

COMPUTE_EFFICIENCY = 0.55
MEMORY_EFFICIENCY = 0.8
LINK_EFFICIENCY = 0.8
PASS_S = 1e-3  # scheduling, launching kernels, sampling
ALL_REDUCE_S = 10e-6  # the latency of one within a machine; two a layer
MEMORY_FOR_WEIGHTS = 0.9  # share of a GPU's memory, or nothing is left for KV


@dataclass(frozen=True, slots=True)
class Gpu:
    """What one GPU does, and its links in one direction."""

    flops: float  # dense bf16
    hbm_bytes_per_s: float
    memory_bytes: float
    gpu_bytes_per_s: float  # to the other GPUs of its machine
    network_bytes_per_s: float  # to other machines
    host_bytes_per_s: float  # PCIe


GPUS = {
    "h100": Gpu(989e12, 3.35e12, 80e9, 450e9, 50e9, 64e9),
    "h200": Gpu(989e12, 4.8e12, 141e9, 450e9, 50e9, 64e9),
    "a100-80g": Gpu(312e12, 2.039e12, 80e9, 300e9, 25e9, 32e9),
    "l40s": Gpu(362e12, 0.864e12, 48e9, 32e9, 25e9, 32e9),
    "b200": Gpu(2250e12, 8e12, 180e9, 900e9, 50e9, 64e9),
    "mi300x": Gpu(1307e12, 5.3e12, 192e9, 448e9, 50e9, 64e9),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Describes a dense decoder with gated feed-forward layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    dtype_bytes: int = 2

    @property
    def layer_parameters(self) -> int:
        """Counts all layers together; biases and norms, a thousandth of it, are left out."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """Counts the output projection. The input table is looked up, neither computed nor read."""
        return self.vocab * self.hidden

    @property
    def weights_bytes(self) -> int:
        return (self.layer_parameters + self.head_parameters) * self.dtype_bytes

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes


MODELS = {
    "llama-3-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "llama-3-70b": Shape(80, 8192, 64, 8, 128, 28672, 128256),
    "qwen2.5-7b": Shape(28, 3584, 28, 4, 128, 18944, 152064),
    "qwen2.5-32b": Shape(64, 5120, 40, 8, 128, 27648, 152064),
    "qwen2.5-72b": Shape(80, 8192, 64, 8, 128, 29568, 152064),
    "mistral-7b": Shape(32, 4096, 32, 8, 128, 14336, 32768),
    "smollm2-135m": Shape(30, 576, 9, 3, 64, 1536, 49152),
}


@dataclass(frozen=True, slots=True)
class Roofline:
    """A Timing of `tensor_parallel` GPUs that hold one model together. Owned by whoever made it."""

    name: str
    gpu: Gpu
    tensor_parallel: int
    shape: Shape
    links: Links

    def pass_s(
        self,
        prompt_tokens: int,
        prompt_pairs: float,
        num_prompts: int,
        num_decodes: int,
        kv_tokens: int,
        pool_tokens: int,
    ) -> float:
        shape, gpus = self.shape, self.tensor_parallel
        tokens = prompt_tokens + num_decodes
        pairs = prompt_pairs + kv_tokens
        flops = (
            2.0 * shape.layer_parameters * tokens
            + 2.0 * shape.head_parameters * (num_prompts + num_decodes)
            + 4.0 * shape.heads * shape.head_dim * shape.layers * pairs
        )
        num_bytes = shape.weights_bytes + shape.bytes_per_token * (kv_tokens + tokens)
        compute_s = flops / (self.gpu.flops * gpus * COMPUTE_EFFICIENCY)
        memory_s = num_bytes / (self.gpu.hbm_bytes_per_s * gpus * MEMORY_EFFICIENCY)
        return max(compute_s, memory_s) + self._all_reduces_s(tokens) + PASS_S

    def _all_reduces_s(self, tokens: int) -> float:
        """Two a layer over the hidden state of all tokens, as a ring: each GPU sends and receives
        2 (n - 1) / n of it."""
        gpus, shape = self.tensor_parallel, self.shape
        if gpus == 1:
            return 0.0
        sent = 2.0 * (gpus - 1) / gpus * tokens * shape.hidden * shape.dtype_bytes
        each_s = ALL_REDUCE_S + sent / (self.gpu.gpu_bytes_per_s * LINK_EFFICIENCY)
        return 2.0 * shape.layers * each_s


def parse_roofline(text: str) -> Roofline:
    """GPU:MODEL, as in `h100:llama-3-8b`, `h100x8:llama-3-70b` or `l40s:/models/x/config.json`.
    Raises TimingError."""
    hardware, _, model = text.partition(":")
    found = re.fullmatch(r"(.+?)(?:x([1-9]\d?))?", hardware.lower())
    name = found[1] if found else hardware
    if found is None or name not in GPUS:
        raise TimingError(f"timing {text!r}: no GPU {name!r}{_instead(name, GPUS)}")
    gpu, number = GPUS[name], int(found[2] or 1)
    shape = _shape(text, model)
    fits = MEMORY_FOR_WEIGHTS * gpu.memory_bytes
    if shape.weights_bytes > number * fits:
        least = -int(-shape.weights_bytes // fits)
        raise TimingError(
            f"timing {text!r}: weights of {shape.weights_bytes / 1e9:.0f} GB do not fit into"
            f" {number} x {gpu.memory_bytes / 1e9:.0f} GB; expected {name}x{least} or more"
        )
    links = Links(
        bytes_per_token=shape.bytes_per_token,
        peer_bytes_per_s=number * gpu.network_bytes_per_s * LINK_EFFICIENCY,
        host_bytes_per_s=number * gpu.host_bytes_per_s * LINK_EFFICIENCY,
    )
    return Roofline(text, gpu, number, shape, links)


def _shape(text: str, model: str) -> Shape:
    if model.lower() in MODELS:
        return MODELS[model.lower()]
    path = Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json" or path.is_file():
        return read_shape(path)
    hint = _instead(model, MODELS)
    raise TimingError(f"timing {text!r}: no model and no config.json {model!r}{hint}")


def read_shape(path: Path) -> Shape:
    """From a Hugging Face config.json of a dense decoder. Raises TimingError."""
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise TimingError(f"{path}: not a JSON object")
    experts = [
        key for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in raw
    ]
    if experts:
        raise TimingError(f"{path}: {experts[0]} = {raw[experts[0]]}: expected a dense model")
    heads = _count(path, raw, "num_attention_heads")
    hidden = _count(path, raw, "hidden_size")
    kind = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16")
    return Shape(
        layers=_count(path, raw, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_count(path, raw, "num_key_value_heads", heads),
        head_dim=_count(path, raw, "head_dim", max(1, hidden // heads)),
        intermediate=_count(path, raw, "intermediate_size"),
        vocab=_count(path, raw, "vocab_size"),
        dtype_bytes=4 if kind == "float32" else 2,
    )


def _count(path: Path, raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TimingError(f"{path}: {key} = {value!r}: expected a positive whole number")
    return value


def _instead(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
