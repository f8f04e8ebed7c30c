"""Loading the weights of a checkpoint: safetensors files, one or several, mapped into memory.

Tensors are views of the files: a page is read when it is first touched, and never written. Each is
prepared for a set of operations, matrix by matrix, so that memory never holds much more than what
the operations keep.

Quantized weights are widened to floats meanwhile (`quantized`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvrelay.engine.model.checkpoint import gemma4_weights, sparse_weights
from kvrelay.engine.model.checkpoint.fields import read_json
from kvrelay.engine.model.checkpoint.mistral import read_raw
from kvrelay.engine.model.checkpoint.names import MISTRAL, renamed, renames_of, table_and_head
from kvrelay.engine.model.checkpoint.quantized import QuantizedWeights
from kvrelay.engine.model.checkpoint.quantized_config import PACKED, float_type, quantization_of
from kvrelay.engine.model.checkpoint.recurrent import MODULE_NAMES, recurrent_weights
from kvrelay.engine.model.checkpoint.region import OpenRegion
from kvrelay.engine.model.config import Experts, Latent, ModelConfig
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.ops import Ops
from kvrelay.engine.model.stacked import Fp8Blocks, Mxfp4, Stacked
from kvrelay.engine.model.vision.tower import TOWERS, Tower
from kvrelay.engine.model.weights import (
    AttentionWeights,
    ExpertsWeights,
    IndexerWeights,
    LatentWeights,
    LayerWeights,
    MLPWeights,
    RecurrentWeights,
    Weights,
    deinterleaved,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """The tensors of a model directory by name. Files stay mapped as long as it lives."""

    def __init__(self, path: Path, region: OpenRegion | None = None) -> None:
        """region: has the tensors, in place of the files in `path`. Raises ModelError if there are
        no weights or a file is damaged."""
        self._path, self._region = path, region
        self._files: dict[str, Any] = {}
        raw = read_raw(path)
        stated, dtype = quantization_of(path, raw), getattr(torch, float_type(raw))
        self.quantized = None if stated is None else QuantizedWeights(stated, dtype, self.find)
        self._places = self._found()
        self.renames = renames_of(self._places)
        self.is_interleaved = self.renames is MISTRAL  # rotated rows are stored in pairs

    def _found(self) -> dict[str, str]:
        """Returns the file, or the region, that has each tensor."""
        if (region := self._region) is not None:
            self._files[region.path] = region
            return dict.fromkeys(region.keys(), region.path)
        index = self._path / "model.safetensors.index.json"
        if index.is_file():
            places = read_json(index).get("weight_map")
            if not isinstance(places, dict):
                raise ModelError(f"{index} has no weight_map")
            for name in sorted(set(places.values())):
                self._open(name)
            return places
        names = sorted(file.name for file in self._path.glob("*.safetensors"))
        if not names:
            raise ModelError(f"{self._path} has no *.safetensors file")
        return {key: name for name in names for key in self._open(name).keys()}  # noqa: SIM118

    def _open(self, name: str) -> Any:
        file = self._path / name
        try:
            self._files[name] = safe_open(str(file), framework="pt")
        except FileNotFoundError:
            raise ModelError(f"{file} is missing") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged or truncated: {error}") from error
        return self._files[name]

    def has(self, name: str) -> bool:
        """Whether there is such a tensor, or a matrix that is packed."""
        name = renamed(name, self.renames)
        names = [name]
        if self.quantized and name.endswith(".weight"):
            names += [name.removesuffix(".weight") + end for end in PACKED]
        return any(each in self._places for each in names)

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor `name`. Raises ModelError if it is missing or not of `shape`."""
        name, tensor = renamed(name, self.renames), None
        if self.quantized and name.endswith(".weight"):
            tensor = self.quantized.read(name.removesuffix(".weight"), shape)
        if tensor is None:
            tensor = self.find(name)
        if tensor is None:
            raise ModelError(f"{self._path} has no tensor {name}")
        place = self._path / self._places.get(name, "")
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{place}: {name} has shape {list(tensor.shape)}, {list(shape)} is needed"
            )
        if tensor.dtype not in FLOATS:
            raise ModelError(f"{place}: {name} is {tensor.dtype}, which is not supported")
        return tensor

    def find(self, name: str) -> torch.Tensor | None:
        """As it is stored; None: there is none. Raises ModelError."""
        if name not in self._places:  # Mistral's name of a scale
            name = name.replace(".weight_scale", ".qscale_weight")
        place = self._places.get(name)
        if place is None:
            return None
        try:
            tensor: torch.Tensor = self._files[place].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{self._path / place}: {name} cannot be read: {error}") from error
        return tensor


def load_weights(
    path: Path,
    config: ModelConfig,
    ops: Ops,
    progress: Callable[[str], None],
    region: OpenRegion | None = None,
) -> Weights:
    """Read every parameter of `config` from `path`, or the region. Raises ModelError."""
    checkpoint = Checkpoint(path, region)
    root, table, head = table_and_head(checkpoint, config)
    last = next((name for name in MODULE_NAMES if checkpoint.has(f"{root}{name}.weight")), "norm")
    layers = []
    for index in range(config.num_layers):
        prefix = f"{root}layers.{index}."
        layers.append(Layer(checkpoint, config, ops, prefix, index, MODULE_NAMES[last]).load())
        if index % 8 == 7:
            progress(f"loading weights: layer {index + 1} of {config.num_layers}")
    norm = checkpoint.get(f"{root}{last}.weight", config.hidden_size)
    return Weights(
        table=ops.table(table),
        layers=tuple(layers),
        norm=offset_norm(norm, config, ops),
        inputs=gemma4_weights.token_inputs(checkpoint.get, root, config, ops),
        head=ops.matrix(head, None, "logits"),
        tower=_tower(checkpoint, config),
    )


def _tower(checkpoint: Checkpoint, config: ModelConfig) -> Tower | None:
    """What reads images, if the files have it."""
    first = "patch_embed.proj.weight"
    root = next((root for root in TOWERS if checkpoint.has(root + first)), None)
    if config.vision is None or root is None:
        return None
    return Tower(config.vision, lambda name, *shape: checkpoint.get(root + name, *shape))


def offset_norm(weight: torch.Tensor, config: ModelConfig, ops: Ops) -> torch.Tensor:
    return ops.vector(weight.float() + config.norm_offset if config.norm_offset else weight)


class Layer:
    """The tensors of one layer, by their names within it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        ops: Ops,
        prefix: str,
        index: int,
        names: Mapping[str, str],
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._ops = ops
        self._index = index
        self._names, self._scales = names, dict(config.weight_scales)
        self._prefix = prefix

    def load(self) -> LayerWeights:
        c, experts, mlp = self._config, None, None
        if c.has_mlp(self._index):
            mlp = self._mlp("mlp.", c.mlp_width(self._index), "")
        elif c.has_experts(self._index):
            assert c.experts is not None
            experts, has = self._experts(), c.experts.shared_size
            name = "mlp.shared_expert." if c.experts.shared_gate else "mlp.shared_experts."
            name = "mlp." if c.experts.has_norms else name
            mlp = self._mlp(name, has, "shared_") if has else None
        attention_out = mlp_out = None
        before_mlp = "post_attention_layernorm"
        if c.sandwich_norms:
            attention_out = self._norm("post_attention_layernorm", c.hidden_size)
            before_mlp = "pre_feedforward_layernorm"
            mlp_out = self._norm("post_feedforward_layernorm", c.hidden_size)
        input_norm = self._norm("input_layernorm", c.hidden_size)
        return LayerWeights(
            input_norm=input_norm,
            attention=self._mixer() if c.mixes(self._index) else None,
            attention_out_norm=attention_out,
            mlp_norm=input_norm if c.single_blocks else self._norm(before_mlp, c.hidden_size),
            mlp=mlp,
            experts=experts,
            mlp_out_norm=mlp_out,
            beside=self._recurrent() if c.recurrent and c.recurrent.beside_attention else None,
            inputs=gemma4_weights.layer_inputs(self._get, c, self._ops) if c.layer_inputs else None,
            scale=self._get("layer_scalar", 1).item() if c.layer_scales else 1.0,
        )

    def _mixer(self) -> AttentionWeights | LatentWeights | RecurrentWeights:
        """What mixes tokens in this layer."""
        c = self._config
        if not c.attends(self._index):
            return recurrent_weights(self._get, self._has, c, self._ops)
        return self._attention() if c.latent is None else self._latent(c.latent)

    def _recurrent(self) -> RecurrentWeights:
        return recurrent_weights(self._get, self._has, self._config, self._ops)

    def _has(self, name: str) -> bool:
        return self._checkpoint.has(self._prefix + name)

    def _get(self, name: str, *shape: int) -> torch.Tensor:
        module, dot, end = name.rpartition(".")
        name = self._names.get(module, module) + dot + end
        tensor = self._checkpoint.get(self._prefix + name, *shape)
        return tensor * self._scales[module] if module in self._scales else tensor

    def _norm(self, name: str, width: int) -> torch.Tensor:
        return offset_norm(self._get(name + ".weight", width), self._config, self._ops)

    def _stacked(self, fused: str, parts: Sequence[tuple[str, int]]) -> torch.Tensor:
        """Projections with so many rows each as one matrix, which some checkpoints have already."""
        width = self._config.hidden_size
        if self._checkpoint.has(self._prefix + fused + ".weight"):
            return self._get(fused + ".weight", sum(rows for _, rows in parts), width)
        return torch.cat([self._get(name + ".weight", rows, width) for name, rows in parts])

    def _mlp(self, prefix: str, width: int, role: str) -> MLPWeights:
        other = prefix.replace("mlp.", "block_sparse_moe.")  # as Kimi-Linear has them
        prefix = other if self._has(other + "down_proj.weight") else prefix
        names = ("gate_proj", "up_proj") if self._config.is_gated else ("up_proj",)
        gate_up = self._stacked(prefix + "gate_up_proj", tuple((prefix + n, width) for n in names))
        down = self._get(prefix + "down_proj.weight", self._config.hidden_size, width)
        gate, experts = None, self._config.experts
        if role and experts is not None and experts.shared_gate:
            row = self._get("mlp.shared_expert_gate.weight", 1, self._config.hidden_size)
            gate = self._ops.matrix(row, None, "shared_gate")
        return MLPWeights(
            gate_up=self._ops.gated_matrix(gate_up, role + "gate_up"),
            down=self._ops.matrix(down, None, role + "down"),
            gate=gate,
        )

    def _attention(self) -> AttentionWeights:
        c, kv = self._config, self._config.kv_heads(self._index)
        queries, keys = c.num_heads * kv.key_dim, kv.num_heads * kv.key_dim
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        widths = (queries, keys, kv.num_heads * kv.value_dim)
        keeps_kv = c.keeps_kv(self._index)
        parts = [*zip(names, widths, strict=True)][: 3 if keeps_kv else 1]
        has_keys, has_values = (self._has(f"{name}.weight") for name in names[1:])
        if keeps_kv and has_keys and not has_values:
            parts[2] = parts[1]  # one projection is both (Gemma 4)
        qkv_bias = out_bias = None
        if c.attention_bias:
            qkv_bias = torch.cat([self._get(f"{name}.bias", rows) for name, rows in parts])
        if c.output_bias:
            out_bias = self._get("self_attn.o_proj.bias", c.hidden_size)
        gate = None
        if c.output_gate:  # head by head, query and gate by turns
            rows = self._get("self_attn.q_proj.weight", 2 * queries, c.hidden_size)
            both = rows.view(c.num_heads, 2, c.head_dim, -1).transpose(0, 1).flatten(1, 2)
            others = [self._get(f"{n}.weight", size, c.hidden_size) for n, size in parts[1:]]
            qkv, gate = torch.cat((both[0], *others)), self._ops.matrix(both[1], None, "open")
        else:
            qkv = self._stacked("self_attn.qkv_proj", parts)
        if c.interleaved or self._checkpoint.is_interleaved:
            qkv = self._halved(qkv, keys)
            qkv_bias = None if qkv_bias is None else self._halved(qkv_bias[:, None], keys)[:, 0]
        if c.value_scale != 1.0:
            qkv = torch.cat((qkv[: queries + keys], qkv[queries + keys :] * c.value_scale))
        out = self._get("self_attn.o_proj.weight", c.hidden_size, c.num_heads * kv.value_dim)
        sinks = c.learned_sinks and not (c.sinks_in_windows and not c.window(self._index))
        q_width, k_width = (queries, keys) if c.norms_all_heads else (kv.key_dim, kv.key_dim)
        return AttentionWeights(
            qkv=self._ops.qkv(qkv, qkv_bias, self._index),
            q_norm=self._qk_norm("self_attn.q_norm", q_width),
            k_norm=self._qk_norm("self_attn.k_norm", k_width) if keeps_kv else None,
            out=self._ops.matrix(out, out_bias, "out"),
            sinks=self._ops.vector(self._get("self_attn.sinks", c.num_heads)) if sinks else None,
            gate=gate,
        )

    def _halved(self, qkv: torch.Tensor, keys: int) -> torch.Tensor:
        """Rotated rows of queries and keys, stored in pairs, as halves."""
        c = self._config
        heads = qkv[:-keys].view(c.num_heads + c.num_kv_heads, c.head_dim, -1)
        size = 2 * c.rotated_half(self._index)
        turned, rest = heads.split((size, c.head_dim - size), dim=1)
        both = torch.cat((turned[:, 0::2], turned[:, 1::2], rest), dim=1)
        return torch.cat((both.flatten(0, 1), qkv[-keys:]))

    def _qk_norm(self, name: str, width: int) -> torch.Tensor | None:
        c = self._config
        if c.plain_qk_norm and c.rope(self._index) is not None:
            # It is done before rotation, not after: that changes no length.
            return self._ops.vector(torch.ones(width))
        return self._norm(name, width) if c.qk_norm else None

    def _latent(self, latent: Latent) -> LatentWeights:
        c, ops, name = self._config, self._ops, "self_attn."
        head, up = latent.nope_dim + latent.rope_dim, latent.nope_dim + latent.value_dim
        compress = self._get(name + "kv_a_proj_with_mqa.weight", c.head_dim, c.hidden_size)
        pairs = latent.rope_dim if latent.interleaved else 0
        compress = deinterleaved(compress, 1, pairs)
        q_norm, source, width = None, "q_proj", c.hidden_size
        if latent.q_rank is not None:
            q_norm = self._norm(name + "q_a_layernorm", latent.q_rank)
            source, width = "q_b_proj", latent.q_rank
            q_down = self._get(name + "q_a_proj.weight", latent.q_rank, c.hidden_size)
            compress = torch.cat((q_down, compress))
        queries = self._get(f"{name}{source}.weight", c.num_heads * head, width)
        by_head = self._get(name + "kv_b_proj.weight", c.num_heads * up, latent.rank)
        by_head = by_head.view(c.num_heads, up, latent.rank)
        out = self._get(name + "o_proj.weight", c.hidden_size, c.num_heads * latent.value_dim)
        return LatentWeights(
            compress=ops.matrix(compress, None, "latent"),
            q_norm=q_norm,
            kv_norm=self._norm(name + "kv_a_layernorm", latent.rank),
            queries=ops.matrix(deinterleaved(queries, c.num_heads, pairs), None, "queries"),
            key_up=ops.heads(by_head[:, : latent.nope_dim], "key_up"),
            value_up=ops.heads(by_head[:, latent.nope_dim :].transpose(1, 2), "value_up"),
            out=ops.matrix(out, None, "out"),
            indexer=self._indexer(),
        )

    def _indexer(self) -> IndexerWeights | None:
        return sparse_weights.indexer_weights(self._get, self._config, self._index, self._ops)

    def _experts(self) -> ExpertsWeights:
        c, experts = self._config, self._config.experts
        assert experts is not None
        if experts.has_biases:
            return self._experts_with_biases(experts)
        if experts.has_norms:
            return gemma4_weights.experts_with_norms(self._get, c, self._ops)
        prefix, parts = "mlp.", ("gate_proj", "up_proj", "down_proj")
        bias_name = "gate.e_score_correction_bias"
        if self._checkpoint.has(self._prefix + "block_sparse_moe.gate.weight"):
            prefix, parts = "block_sparse_moe.", ("w1", "w3", "w2")
            if not self._has(prefix + bias_name):
                bias_name = "e_score_correction_bias"
        if self._has("feed_forward.gate.weight"):  # LFM2
            prefix, parts, bias_name = "feed_forward.", ("w1", "w3", "w2"), "expert_bias"
        number, width = experts.num_experts, experts.intermediate_size
        router = self._get(prefix + "gate.weight", number, c.hidden_size)
        bias = None
        if experts.has_bias:
            bias = self._ops.vector(self._get(prefix + bias_name, number))
        name = prefix + "experts."
        gate_ups: Stacked
        downs: Stacked
        if experts.scales_inputs and self._checkpoint.has(f"{self._prefix}{name}gate_up_proj"):
            # Llama 4 has [experts, in, out].
            gate_ups = self._transposed(name + "gate_up_proj", number, 2 * width, c.hidden_size)
            downs = self._transposed(name + "down_proj", number, c.hidden_size, width)
        elif self._checkpoint.has(f"{self._prefix}{name}gate_up_proj"):  # stacked already
            gate_ups = self._stack(name + "gate_up_proj", number, 2 * width, c.hidden_size)
            downs = self._stack(name + "down_proj", number, c.hidden_size, width)
        else:
            gate_ups, downs = self._stacked_experts(name, parts[not c.is_gated :])
        return ExpertsWeights(
            router=self._ops.router(router),
            bias=bias,
            experts=self._ops.experts(gate_ups, downs),
        )

    def _experts_with_biases(self, experts: Experts) -> ExpertsWeights:
        """gpt-oss has [experts, in, out] or, in MXFP4, [experts, out, in]; in both, rows of gate
        and up alternate."""
        number, width = experts.num_experts, experts.intermediate_size
        hidden = self._config.hidden_size
        gate_ups = self._transposed("mlp.experts.gate_up_proj", number, 2 * width, hidden)
        downs = self._transposed("mlp.experts.down_proj", number, hidden, width)
        gate_up_bias = self._get("mlp.experts.gate_up_proj_bias", number, 2 * width)
        down_bias = self._get("mlp.experts.down_proj_bias", number, hidden)
        gates, ups = slice(0, None, 2), slice(1, None, 2)
        gate_up_bias = torch.cat((gate_up_bias[:, gates], gate_up_bias[:, ups]), dim=1)
        if isinstance(gate_ups, Mxfp4):
            gate_ups = gate_ups.rows(gates, ups)
        else:
            gate_ups = torch.cat((gate_ups[:, gates], gate_ups[:, ups]), dim=1)
        of_gate_up, of_down = self._ops.expert_biases(gate_up_bias, down_bias)
        return ExpertsWeights(
            router=self._ops.router(self._get("mlp.router.weight", number, hidden)),
            bias=None,
            experts=self._ops.experts(gate_ups, downs),
            router_bias=self._ops.vector(self._get("mlp.router.bias", number)),
            gate_up_bias=of_gate_up,
            down_bias=of_down,
        )

    def _transposed(self, name: str, number: int, rows: int, columns: int) -> torch.Tensor | Mxfp4:
        """The stacked matrices `name`, [number, rows, columns], stored the other way round but
        where they are in MXFP4."""
        found = self._narrow(name, (number, rows, columns), by_inputs=True)
        if found is not None:
            return found
        return self._get(name, number, columns, rows).transpose(1, 2).contiguous()

    def _stack(self, name: str, *shape: int) -> torch.Tensor | Mxfp4:
        found = self._narrow(name, shape, by_inputs=False)
        if found is not None:
            return found
        number, rows, columns = shape
        stored = self._checkpoint.find(self._prefix + name)
        if stored is not None and tuple(stored.shape) == (number, columns, rows) != shape:
            return stored.transpose(1, 2).contiguous()  # as Qwen3-VL is published
        return self._get(name, *shape)

    def _narrow(
        self, name: str, shape: tuple[int, ...], *, by_inputs: bool
    ) -> torch.Tensor | Mxfp4 | None:
        quantized, name = self._checkpoint.quantized, self._prefix + name
        if quantized is None:
            return None
        name = renamed(name, self._checkpoint.renames)
        return quantized.read_stacked(name, shape, by_inputs=by_inputs)

    def _stacked_experts(self, prefix: str, names: tuple[str, ...]) -> tuple[Stacked, Stacked]:
        c, experts = self._config, self._config.experts
        assert experts is not None
        (*into, down), number, width = names, experts.num_experts, experts.intermediate_size
        packed = self._fp8_experts(prefix, names, number) if experts.packed == "fp8" else None
        if packed is not None:
            return packed
        part = self._ops.expert_part(width)
        own, gate_ups, downs = part.stop - part.start, None, None
        for index in range(number):
            name = f"{prefix}{index}."
            rows = [self._get(f"{name}{each}.weight", width, c.hidden_size)[part] for each in into]
            if gate_ups is None or downs is None:
                gate_ups = rows[0].new_empty(number, len(rows) * own, c.hidden_size)
                downs = rows[0].new_empty(number, c.hidden_size, own)
            gate_ups[index] = torch.cat(rows)
            downs[index] = self._get(f"{name}{down}.weight", c.hidden_size, width)[:, part]
        assert gate_ups is not None
        assert downs is not None
        return gate_ups, downs

    def _fp8_experts(
        self, prefix: str, names: tuple[str, ...], number: int
    ) -> tuple[Fp8Blocks, Fp8Blocks] | None:
        """As they are stored; None: they are not in blocks of FP8, or one ends within a block."""
        quantized, renames = self._checkpoint.quantized, self._checkpoint.renames
        experts = self._config.experts
        assert quantized is not None
        assert experts is not None
        part = self._ops.expert_part(experts.intermediate_size)
        is_cut = part.stop - part.start < experts.intermediate_size and self._config.is_gated
        gate_ups: list[Fp8Blocks] = []
        downs: list[Fp8Blocks] = []
        for index in range(number):
            both = []
            for parts in (names[:-1], names[-1:]):
                modules = [f"{self._prefix}{prefix}{index}.{each}" for each in parts]
                found = quantized.blocks_of_fp8([renamed(module, renames) for module in modules])
                if found is None:
                    return None
                both.append(found)
            gate_up, down = both
            if is_cut and down.cuts_at(part.start) and down.cuts_at(part.stop):
                gate_up, down = gate_up.of_halves(part), down.columns(part)
            gate_ups.append(gate_up)
            downs.append(down)
        return Fp8Blocks.stacked(gate_ups), Fp8Blocks.stacked(downs)
