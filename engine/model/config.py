"""What a checkpoint is: the shape of the decoder, read from a Hugging Face directory.

`ModelConfig.from_dir` accepts exactly what the decoder can compute and names whatever it cannot.
Neither torch nor transformers is imported here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from engine.config import DTYPE_BYTES, KVSpec
from engine.model.cache import file_identity
from engine.model.errors import ModelError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. `linear` uses `factor` alone; the rest is Llama 3's."""

    kind: str  # "linear" | "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder needs to know. Checked: a value of this type can be computed."""

    architecture: str  # a key of ARCHITECTURES
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool  # of the query, key and value projections
    output_bias: bool  # of the attention's output projection
    qk_norm: bool  # RMSNorm over head_dim of queries and keys
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # of config.json and generation_config.json together

    @staticmethod
    def from_dir(path: Path) -> ModelConfig:
        """Read `path`/config.json. Raises ModelError."""
        if not path.is_dir():
            raise ModelError(f"model directory {path} does not exist")
        raw = read_json(path / "config.json")
        generation: Mapping[str, Any] = {}
        if (path / "generation_config.json").is_file():
            generation = read_json(path / "generation_config.json")
        try:
            return _parse(raw, generation)
        except KeyError as error:
            raise ModelError(f"{path / 'config.json'} does not state {error}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"{path / 'config.json'} is not understood: {error}") from error

    def kv_spec(self, block_size: int, dtype: str) -> KVSpec:
        return KVSpec(self.num_layers, self.num_kv_heads, self.head_dim, block_size, dtype)

    def digest(self, path: Path) -> bytes:
        """32 bytes; differs between two checkpoints that compute different KV from the same tokens.

        Of the weights, names, sizes and samples spread over each file are read, not all.
        """
        shape = asdict(self)
        del shape["bos_token_id"], shape["eos_token_ids"]
        digest = blake2b(digest_size=32, person=b"kvrelay-model")
        digest.update(json.dumps(shape).encode())
        for file in sorted(path.glob("*.safetensors")):
            digest.update(file.name.encode() + file_identity(file))
        return digest.digest()

    @property
    def num_parameters(self) -> int:
        heads = self.num_heads + 2 * self.num_kv_heads
        attention = self.hidden_size * self.head_dim * (heads + self.num_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + tables + self.hidden_size


def weights_bytes(config: ModelConfig, dtype: str) -> int:
    """What the weights may take in memory, at most: a tied table is held twice, once packed."""
    tied = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    return (config.num_parameters + tied) * DTYPE_BYTES[dtype]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    named = raw.get("architectures") or [None]
    if named[0] not in ARCHITECTURES:
        raise ModelError(
            f"architecture {named[0]} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    family = ARCHITECTURES[named[0]]
    _refuse_variants(raw)
    hidden, heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
    kv_heads = _count(raw, "num_key_value_heads", heads)
    head_dim = _count(raw, "head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise ModelError(f"{heads} heads over {kv_heads} KV heads of {head_dim} is not supported")
    max_positions = _count(raw, "max_position_embeddings")
    theta, scaling = _rope(raw, max_positions)
    bias = bool(raw.get("attention_bias")) and family != "mistral"
    return ModelConfig(
        architecture=named[0],
        num_layers=_count(raw, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_count(raw, "intermediate_size"),
        vocab_size=_count(raw, "vocab_size"),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
        qk_norm=family == "qwen3",
        max_position_embeddings=max_positions,
        bos_token_id=next(iter(_ids(raw, "bos_token_id") + _ids(generation, "bos_token_id")), None),
        eos_token_ids=tuple(
            sorted({*_ids(raw, "eos_token_id"), *_ids(generation, "eos_token_id")})
        ),
    )


def _count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}, a positive integer is needed")
    return value


def _ids(raw: Mapping[str, Any], key: str) -> list[int]:
    value = raw.get(key)
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list) else [int(value)]


def _refuse_variants(raw: Mapping[str, Any]) -> None:
    """Settings that would change the computation in ways the decoder does not know."""
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {raw['hidden_act']} is not supported; supported: silu")
    if raw.get("mlp_bias"):
        raise ModelError("mlp_bias is not supported")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"quantized weights ({method}) are not supported; use bf16, f16 or f32")
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    layers = raw.get("layer_types") or ["sliding_attention"]
    if window and "sliding_attention" in layers and window < raw.get("max_position_embeddings", 0):
        raise ModelError(
            f"sliding_window {window} (below max_position_embeddings "
            f"{raw['max_position_embeddings']}) is not supported; full attention is needed"
        )


def _rope(raw: Mapping[str, Any], max_positions: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling), from the older pair of keys or from `rope_parameters`."""
    spec = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(spec.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = spec.get("rope_type", spec.get("type", "default"))
    if spec.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("partial_rotary_factor is not supported")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", float(spec["factor"]))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            factor=float(spec["factor"]),
            low_freq_factor=float(spec["low_freq_factor"]),
            high_freq_factor=float(spec["high_freq_factor"]),
            original_max_position=int(spec.get("original_max_position_embeddings", max_positions)),
        )
    raise ModelError(f"rope scaling {kind} is not supported; supported: default, linear, llama3")
