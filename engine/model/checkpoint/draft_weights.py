"""Loading the weights of a drafter's head, of any kind that `drafters` tells apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvrelay.engine.model.checkpoint.load import Checkpoint, Layer, offset_norm
from kvrelay.engine.model.checkpoint.names import table_and_head
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.draft_config import EAGLE, EAGLE3, MEDUSA, MTP, PREFIXES, DraftConfig
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.ops import Ops
from kvrelay.engine.model.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class MtpNames:
    """What a checkpoint calls the parts of the layer that drafts; modules, without `.weight`."""

    layer: str  # what names within the layer begin with
    fc: str
    embed_norm: str
    state_norm: str
    norm: str  # before the head
    state_first: bool = False  # `fc` reads the hidden state before the token's embedding


_QWEN = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
MTP_NAMES = {"Qwen3": MtpNames("mtp.layers.0.", *_QWEN)}
"""By what the architecture begins with. Others have it as a layer behind their last one."""


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """Matrices and norms as `Ops` has prepared them; a norm that is None is not there."""

    heads: tuple[Any, ...]  # to logits, Medusa's one for each token ahead; None: the model's own
    tokens: torch.Tensor | None = None  # [draft vocabulary]: which they are; None: all
    blocks: tuple[tuple[Any, ...], ...] = ()  # Medusa's, of each head
    norms_states: bool = False  # hidden states are read behind the model's last norm
    is_fused: bool = False  # `fc` makes one state of three, and the layer reads it beside the token
    adds_normed: bool = False  # where it is: the layer adds to the normed state
    fc: Any = None
    table: Any = None
    embed_norm: torch.Tensor | None = None
    state_norm: torch.Tensor | None = None
    input_norm: torch.Tensor | None = None
    qkv: Any = None
    out: Any = None
    mlp_norm: torch.Tensor | None = None
    gate_up: Any = None
    down: Any = None
    norm: torch.Tensor | None = None  # before the head
    layer: LayerWeights | None = None  # in place of the parts above: of the model's own kind


def load_head(config: DraftConfig, path: Path, model: ModelConfig, ops: Ops) -> DraftWeights:
    """path: of the model's checkpoint. Raises ModelError."""
    if config.kind == MTP:
        return _mtp(config, model, Checkpoint(path), ops)
    checkpoint = Checkpoint(config.path)
    if config.kind == MEDUSA:
        return _medusa(config, model, checkpoint, ops)
    return _eagle(config, path, model, checkpoint, ops)


def _medusa(
    config: DraftConfig, model: ModelConfig, checkpoint: Checkpoint, ops: Ops
) -> DraftWeights:
    width, count = model.hidden_size, config.num_blocks
    blocks, heads = [], []
    for head in range(config.num_heads):
        own = []
        for block in range(count):
            name = f"{head}.{block}.linear"
            weight = checkpoint.get(f"{name}.weight", width, width)
            own.append(ops.matrix(weight, checkpoint.get(f"{name}.bias", width), "draft_block"))
        blocks.append(tuple(own))
        weight = checkpoint.get(f"{head}.{count}.weight", model.vocab_size, width)
        heads.append(ops.matrix(weight, None, "draft_logits"))
    return DraftWeights(tuple(heads), blocks=tuple(blocks), norms_states=True)


def _mtp(config: DraftConfig, model: ModelConfig, checkpoint: Checkpoint, ops: Ops) -> DraftWeights:
    """Reads the layer that the model's checkpoint has for it."""
    assert config.layers is not None
    names, width = _mtp_names(checkpoint, model), model.hidden_size

    def norm(name: str) -> torch.Tensor:
        return offset_norm(checkpoint.get(f"{name}.weight", width), model, ops)

    fc = checkpoint.get(f"{names.fc}.weight", width, 2 * width)
    if names.state_first:
        fc = fc.roll(width, dims=1)
    return DraftWeights(
        heads=(None,),
        norms_states=True,
        fc=ops.matrix(fc, None, "draft_fc"),
        embed_norm=norm(names.embed_norm),
        state_norm=norm(names.state_norm),
        norm=norm(names.norm),
        layer=Layer(checkpoint, config.layers, ops, names.layer, 0, {}).load(),
    )


def _mtp_names(checkpoint: Checkpoint, model: ModelConfig) -> MtpNames:
    """Those of the first layer that drafts."""
    named, (root, _, _) = model.architecture, table_and_head(checkpoint, model)
    own = next((each for start, each in MTP_NAMES.items() if named.startswith(start)), None)
    behind = f"{root}layers.{model.num_layers}."
    fc, norm = f"{behind}eh_proj", f"{behind}shared_head.norm"
    return own or MtpNames(behind, fc, f"{behind}enorm", f"{behind}hnorm", norm)


def _eagle(
    config: DraftConfig, path: Path, model: ModelConfig, checkpoint: Checkpoint, ops: Ops
) -> DraftWeights:
    layer, kind = config.layers, config.kind
    assert layer is not None
    prefix, hidden, is_fused = PREFIXES[kind], layer.hidden_size, kind == EAGLE3
    width, depth = layer.intermediate_size, hidden * (2 if is_fused else 1)

    def norm(name: str) -> torch.Tensor | None:
        has = checkpoint.has(f"{name}.weight")
        return ops.vector(checkpoint.get(f"{name}.weight", hidden)) if has else None

    def rows(name: str, count: int) -> torch.Tensor:
        return checkpoint.get(f"{prefix}{name}.weight", count, depth if "attn" in name else hidden)

    kv = layer.num_kv_heads * layer.head_dim
    sizes = {"q": layer.num_heads * layer.head_dim, "k": kv, "v": kv}
    qkv = torch.cat([rows(f"self_attn.{name}_proj", count) for name, count in sizes.items()])
    biases = None
    if layer.attention_bias:
        names = [(f"{prefix}self_attn.{name}_proj.bias", count) for name, count in sizes.items()]
        biases = torch.cat([checkpoint.get(*each) for each in names])
    out = checkpoint.get(f"{prefix}self_attn.o_proj.weight", hidden, sizes["q"])
    gate_up = torch.cat([rows(f"mlp.{name}_proj", width) for name in ("gate", "up")])
    down = checkpoint.get(f"{prefix}mlp.down_proj.weight", hidden, width)
    bias = checkpoint.get("fc.bias", hidden) if checkpoint.has("fc.bias") else None
    fc = checkpoint.get("fc.weight", hidden, hidden * (3 if is_fused else 2))
    mlp_norm = norm(f"{prefix}post_attention_layernorm")
    if mlp_norm is None:
        raise ModelError(f"{config.path} has no tensor {prefix}post_attention_layernorm.weight")
    input_norm = norm(f"{prefix}input_layernorm")
    table = None
    if checkpoint.has("embed_tokens.weight"):
        table = ops.table(checkpoint.get("embed_tokens.weight", model.vocab_size, hidden))
    tokens = _tokens(config, model, checkpoint)
    return DraftWeights(
        heads=(_head(path, model, checkpoint, tokens, ops),),
        tokens=tokens,
        norms_states=kind == EAGLE,
        is_fused=is_fused,
        adds_normed=config.adds_normed,
        fc=ops.matrix(fc, bias, "draft_fc"),
        table=table,
        embed_norm=input_norm if is_fused else norm("embed_norm"),
        state_norm=norm(f"{prefix}hidden_norm") if is_fused else norm("hidden_norm"),
        input_norm=None if is_fused else input_norm,
        qkv=ops.qkv(qkv, biases, 0),
        out=ops.matrix(out, None, "out"),
        mlp_norm=mlp_norm,
        gate_up=ops.gated_matrix(gate_up, "gate_up"),
        down=ops.matrix(down, None, "down"),
        norm=norm("norm"),
    )


def _tokens(config: DraftConfig, model: ModelConfig, checkpoint: Checkpoint) -> torch.Tensor | None:
    """Which tokens of the model the drafter's are. EAGLE-3 stores how far apart the two are."""
    if not config.draft_vocab:
        return None
    found = checkpoint.find("d2t")
    assert found is not None
    tokens = found.long()
    if config.kind == EAGLE3:
        tokens = tokens + torch.arange(len(tokens))
    if len(tokens.unique()) < len(tokens) or tokens.min() < 0 or tokens.max() >= model.vocab_size:
        raise ModelError(
            f"{config.path}: d2t has tokens {tokens.min()} to {tokens.max()}, each once in the"
            f" model's vocabulary of {model.vocab_size} is needed"
        )
    return tokens


def _head(
    path: Path,
    model: ModelConfig,
    checkpoint: Checkpoint,
    tokens: torch.Tensor | None,
    ops: Ops,
) -> Any:
    """Prepares what makes logits; None: the model's own does."""
    if not checkpoint.has("lm_head.weight"):
        if tokens is None:
            return None
        head = table_and_head(Checkpoint(path), model)[2]
        return ops.matrix(head[tokens], None, "draft_logits")
    count = model.vocab_size if tokens is None else len(tokens)
    weight = checkpoint.get("lm_head.weight", count, model.hidden_size)
    return ops.matrix(weight, None, "draft_logits")
