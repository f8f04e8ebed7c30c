"""Checkpoint to parameters: safetensors files, mapped into memory and prepared for a set of ops.

Query, key and value projections become one matrix, gate and up projections another: one read of the
activations and one kernel call instead of three or two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.model.config import ModelConfig, read_json
from engine.model.errors import ModelError
from engine.model.ops import Ops

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, prepared: matrices as `Ops.matrix` made them."""

    input_norm: torch.Tensor
    qkv: Any
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Any
    post_norm: torch.Tensor
    gate_up: Any
    down: Any


@dataclass(frozen=True, slots=True)
class Weights:
    table: Any
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Any


class Checkpoint:
    """The tensors of a model directory by name. Files stay mapped as long as it lives."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if there are no weights or a file is damaged."""
        self._path = path
        self._files: dict[str, Any] = {}
        index = path / "model.safetensors.index.json"
        if index.is_file():
            places = read_json(index).get("weight_map")
            if not isinstance(places, dict):
                raise ModelError(f"{index} has no weight_map")
            self._places: dict[str, str] = places
            for name in sorted(set(places.values())):
                self._open(name)
            return
        names = sorted(file.name for file in path.glob("*.safetensors"))
        if not names:
            raise ModelError(f"{path} has no *.safetensors file")
        self._places = {key: name for name in names for key in self._open(name).keys()}  # noqa: SIM118

    def _open(self, name: str) -> Any:
        file = self._path / name
        try:
            self._files[name] = safe_open(str(file), framework="pt")
        except FileNotFoundError:
            raise ModelError(f"{file} is missing") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged or truncated: {error}") from error
        return self._files[name]

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor `name`. Raises ModelError if it is missing or not of `shape`."""
        place = self._places.get(name)
        if place is None:
            raise ModelError(f"{self._path} has no tensor {name}")
        try:
            tensor = self._files[place].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{self._path / place}: {name} cannot be read: {error}") from error
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._path / place}: {name} has shape {list(tensor.shape)}, "
                f"{list(shape)} is needed"
            )
        if tensor.dtype not in FLOATS:
            raise ModelError(
                f"{self._path / place}: {name} is {tensor.dtype}, which is not supported"
            )
        return tensor


def load_weights(
    path: Path, config: ModelConfig, ops: Ops, progress: Callable[[str], None]
) -> Weights:
    """Read every parameter of `config` from `path`. Raises ModelError."""
    checkpoint = Checkpoint(path)
    table = checkpoint.get("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    head = table
    if not config.tie_word_embeddings:
        head = checkpoint.get("lm_head.weight", config.vocab_size, config.hidden_size)
    layers = []
    for index in range(config.num_layers):
        layers.append(_load_layer(checkpoint, config, ops, index))
        if index % 8 == 7:
            progress(f"loading weights: layer {index + 1} of {config.num_layers}")
    return Weights(
        table=ops.table(table),
        layers=tuple(layers),
        norm=ops.vector(checkpoint.get("model.norm.weight", config.hidden_size)),
        head=ops.matrix(head, None, "logits"),
    )


def _load_layer(checkpoint: Checkpoint, config: ModelConfig, ops: Ops, index: int) -> LayerWeights:
    c, prefix = config, f"model.layers.{index}."
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def get(name: str, *shape: int) -> torch.Tensor:
        return checkpoint.get(prefix + name, *shape)

    def norm(name: str, width: int) -> torch.Tensor:
        return ops.vector(get(name + ".weight", width))

    parts = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    qkv = torch.cat([get(f"self_attn.{n}.weight", rows, c.hidden_size) for n, rows in parts])
    qkv_bias = out_bias = None
    if c.attention_bias:
        qkv_bias = torch.cat([get(f"self_attn.{n}.bias", rows) for n, rows in parts])
    if c.output_bias:
        out_bias = get("self_attn.o_proj.bias", c.hidden_size)
    gate_up = torch.cat(
        [
            get(f"mlp.{name}_proj.weight", c.intermediate_size, c.hidden_size)
            for name in ("gate", "up")
        ]
    )
    down = get("mlp.down_proj.weight", c.hidden_size, c.intermediate_size)
    return LayerWeights(
        input_norm=norm("input_layernorm", c.hidden_size),
        qkv=ops.matrix(qkv, qkv_bias, "qkv"),
        q_norm=norm("self_attn.q_norm", c.head_dim) if c.qk_norm else None,
        k_norm=norm("self_attn.k_norm", c.head_dim) if c.qk_norm else None,
        out=ops.matrix(get("self_attn.o_proj.weight", c.hidden_size, queries), out_bias, "out"),
        post_norm=norm("post_attention_layernorm", c.hidden_size),
        gate_up=ops.matrix(gate_up, None, "gate_up"),
        down=ops.matrix(down, None, "down"),
    )
