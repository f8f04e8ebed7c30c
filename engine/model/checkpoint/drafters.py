"""What proposes draft tokens for a model, as its files say: a head that reads the model's hidden
states, or a smaller model of the same vocabulary.

Heads are read as they are published, told apart by the names of their tensors: EAGLE-1 (`fc`,
`layers.0`), EAGLE-3 (`midlayer`), Medusa (`0.0.linear`), and those that `kvrelay draft train`
writes (`layer`). What the model's own checkpoint has is asked for by name. Torch is not imported
here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvrelay.engine.cache_dir import file_digest
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.fields import count, number, read_json
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.engine.model.checkpoint.rope import read_rope
from kvrelay.engine.model.config import ALL_BUT_FIRST, ModelConfig
from kvrelay.engine.model.draft_config import (
    EAGLE,
    EAGLE3,
    MEDUSA,
    MODEL,
    MTP,
    OWN,
    PREFIXES,
    DraftConfig,
)
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.support import Trait, drafter_of, model_traits, refusal_of

MARKS = {  # a tensor that only this kind has
    "midlayer.self_attn.q_proj.weight": EAGLE3,
    "layer.self_attn.q_proj.weight": OWN,
    "layers.0.self_attn.q_proj.weight": EAGLE,
    "0.0.linear.weight": MEDUSA,
    "model.embed_tokens.weight": MODEL,
}


def read_drafter(name: str, model: ModelConfig) -> DraftConfig:
    """The drafter `name`: a folder, a model by the name that serves it, or MTP, which is in the
    model's own checkpoint. Raises ModelError where it is none, or none for `model`."""
    path = Path(name).expanduser()
    if name == MTP and not path.is_dir():
        _check(name, MTP, model_traits(model))
        return _mtp(path, model)
    if not path.is_dir():
        path = resolve_model(name, progress=lambda _: None)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"engine.drafter {path}: a folder with config.json and *.safetensors is needed; convert"
            " *.bin files with safetensors.torch.save_file"
        )
    shapes = {name: shape for file in files for name, shape in shapes_of(file).items()}
    kind = next((kind for name, kind in MARKS.items() if name in shapes), None)
    if kind is None:
        raise ModelError(
            f"engine.drafter {path}: its tensors are of no drafter that is known: it has none of"
            f" {', '.join(MARKS)}"
        )
    reads_none = {Trait.ONLY_WINDOWS} if kind == MEDUSA else set[Trait]()
    _check(path, kind, model_traits(model) - reads_none)
    digest = blake2b(digest_size=16, person=b"kvrelay-drafter")
    for file in (*files, path / "config.json"):
        digest.update(file.name.encode() + b"\0" + file_digest(file) if file.is_file() else b"")
    found = {MODEL: _model, MEDUSA: _medusa}.get(kind, _head)(path, kind, model, shapes)
    size = sum(file.stat().st_size for file in files)
    return replace(found, digest=digest.hexdigest(), file_bytes=size)


def shapes_of(file: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of a safetensors file by name. Raises ModelError."""
    try:
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        return {n: tuple(each["shape"]) for n, each in header.items() if n != "__metadata__"}
    except (OSError, ValueError, KeyError, MemoryError, OverflowError) as error:
        raise ModelError(f"{file} is damaged or truncated: {error}") from error


Shapes = Mapping[str, tuple[int, ...]]


def _head(path: Path, kind: str, model: ModelConfig, shapes: Shapes) -> DraftConfig:
    raw = read_json(path / "config.json")
    hidden, heads = count(raw, "hidden_size"), count(raw, "num_attention_heads")
    _check_width(path, hidden, model)
    wide = 3 if kind == EAGLE3 else 2
    if shapes.get("fc.weight") != (hidden, wide * hidden):
        raise ModelError(
            f"engine.drafter {path}: fc.weight has shape {shapes.get('fc.weight')},"
            f" {(hidden, wide * hidden)} is needed"
        )
    _check_unread(path, kind, raw, shapes)
    bias = f"{PREFIXES[kind]}self_attn.q_proj.bias" in shapes
    layers = _layer_config(raw, model, hidden, heads, bias)
    last = (model.num_layers - 1,)
    captured = _inputs_read(path, raw, model.num_layers) if kind == EAGLE3 else last
    vocab = raw.get("draft_vocab_size") or 0
    if vocab and vocab != model.vocab_size and shapes.get("d2t") != (vocab,):
        raise ModelError(
            f"engine.drafter {path}: draft_vocab_size is {vocab}, but d2t has shape"
            f" {shapes.get('d2t')}"
        )
    norm_inputs = kind == OWN and bool(raw.get("norm_inputs", True))
    vocab = vocab if "d2t" in shapes else 0
    adds_normed = kind == EAGLE3 and bool(raw.get("norm_before_residual"))
    return DraftConfig(kind, path, layers, captured, hidden, vocab, norm_inputs, adds_normed)


def _inputs_read(path: Path, raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers whose outputs are the three that EAGLE-3 reads: what comes into layers 2, n // 2
    and n - 3, where its configuration names no others."""
    own = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    own = own or raw.get("eagle_aux_hidden_state_layer_ids")
    inputs = sorted(own) if own else [2, num_layers // 2, num_layers - 3]
    if len({*inputs}) == len(inputs) == 3 and min(inputs) >= 1 and max(inputs) <= num_layers:
        return tuple(at - 1 for at in inputs)
    raise ModelError(
        f"engine.drafter {path}: EAGLE-3 reads what comes into three layers from 1 on, which are"
        f" {inputs} here (eagle_aux_hidden_state_layer_ids); the model has {num_layers} layers"
    )


def _check_unread(path: Path, kind: str, raw: Mapping[str, Any], shapes: Shapes) -> None:
    """Raises ModelError for what would be left out, so that the head would draft badly."""
    prefix = PREFIXES[kind]
    known = {"fc.weight", "fc.bias", "embed_tokens.weight", "lm_head.weight", "norm.weight"}
    known |= {"d2t", "t2d", *(("embed_norm.weight", "hidden_norm.weight") if kind == OWN else ())}
    of_layer = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj"]
    of_layer += ["mlp.down_proj", *(f"self_attn.{name}_proj" for name in "qkvo")]
    of_layer += ["hidden_norm"] if kind == EAGLE3 else []
    known |= {f"{prefix}{name}.weight" for name in of_layer}
    known |= {f"{prefix}self_attn.{name}_proj.bias" for name in "qkv"}
    unread = sorted(n for n in shapes if n not in known and not n.endswith("inv_freq"))
    fields = [name for name in ("norm_before_fc", "fc_norm", "norm_output") if raw.get(name)]
    if raw.get("hidden_act", "silu") != "silu":
        fields.append(f"hidden_act {raw['hidden_act']}")
    if unread or fields:
        raise ModelError(
            f"engine.drafter {path}: this head has what is not known of {kind}:"
            f" {', '.join([*fields, *unread][:8])}"
        )


def _layer_config(
    raw: Mapping[str, Any], model: ModelConfig, hidden: int, heads: int, bias: bool
) -> ModelConfig:
    head_dim = count(raw, "head_dim", hidden // heads)
    rope = read_rope(raw, head_dim, model.ropes[0].theta if model.ropes else 1e4)
    return ModelConfig(
        architecture="drafter",
        num_layers=1,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=count(raw, "num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=count(raw, "intermediate_size"),
        vocab_size=model.vocab_size,
        rms_norm_eps=number(raw, "rms_norm_eps", model.rms_norm_eps),
        ropes=(rope,),
        tie_word_embeddings=False,
        attention_bias=bias,
        output_bias=False,
        qk_norm=False,
        max_position_embeddings=model.max_position_embeddings,
        bos_token_id=model.bos_token_id,
        eos_token_ids=model.eos_token_ids,
        attention_chunk=ALL_BUT_FIRST,  # nothing comes before the first token
    )


def _medusa(path: Path, kind: str, model: ModelConfig, shapes: Shapes) -> DraftConfig:
    heads = 0
    while f"{heads}.0.linear.weight" in shapes:
        heads += 1
    blocks = 0
    while f"0.{blocks}.linear.weight" in shapes:
        blocks += 1
    _check_width(path, shapes["0.0.linear.weight"][0], model)
    captured = (model.num_layers - 1,)
    width = model.hidden_size
    return DraftConfig(
        kind, path, None, captured, tail_size=width, num_heads=heads, num_blocks=blocks
    )


def _model(path: Path, kind: str, model: ModelConfig, shapes: Shapes) -> DraftConfig:
    own = read_config(path)
    if own.vocab_size != model.vocab_size:
        raise ModelError(
            f"engine.drafter {path}: a model of {own.vocab_size} tokens cannot draft for one of"
            f" {model.vocab_size}: the vocabulary has to be the same"
        )
    if own.recurrent is not None or own.indexer is not None or len(own.kv_groups()) > 1:
        raise ModelError(
            f"engine.drafter {path}: its layers keep KV in several groups or choose what they"
            " attend to; a model whose layers all attend to everything is needed"
        )
    longest = own.max_position_embeddings
    if longest < model.max_position_embeddings:  # it drafts worse beyond, and no token is wrong
        own = replace(own, max_position_embeddings=model.max_position_embeddings)
    return DraftConfig(kind, path, own)


def _mtp(path: Path, model: ModelConfig) -> DraftConfig:
    if not model.num_mtp_layers:
        raise ModelError(
            f"engine.drafter {path}: the model has no layer that drafts: its config.json states no"
            " num_nextn_predict_layers or mtp_num_hidden_layers"
        )
    experts = model.experts and replace(model.experts, first_layer=0, step=1)
    layers = replace(
        model,
        architecture="drafter",
        num_layers=1,
        vocab_size=0,  # tables are the model's
        tie_word_embeddings=False,
        windows=(),
        layer_ropes=(),
        recurrent=None,  # it attends, whatever the model's layers do
        layer_kinds=(),
        vision=None,
        experts=experts,
        attention_chunk=ALL_BUT_FIRST,
    )
    # Its weights are the model's, which every block's hash names.
    return DraftConfig(MTP, path, layers, (model.num_layers - 1,), model.hidden_size, digest=MTP)


def check_drafter(name: str, traits: frozenset[Trait]) -> None:
    """Raises ModelError where a worker with these traits computes none, whatever it is. `name`: as
    in the settings."""
    _check(name, name, traits - {Trait.ONLY_WINDOWS})  # Medusa reads no blocks


def _check(name: str | Path, kind: str, traits: Iterable[Trait]) -> None:
    if why := refusal_of(drafter_of(kind), traits):
        raise ModelError(f"engine.drafter {name}: {why}")


def _check_width(path: Path, hidden: int, model: ModelConfig) -> None:
    if hidden != model.hidden_size:
        raise ModelError(
            f"engine.drafter {path}: it reads hidden states of {hidden} numbers, the model's have"
            f" {model.hidden_size}: it was trained for another model"
        )
