"""GGUF files of every family that llama.cpp converts, as its converter writes them, give the logits
of the checkpoint that they were made from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.cpu.kernels import KernelsUnavailable
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.gguf.architectures import ARCHITECTURES, REFUSED
from kvrelay.engine.model.gguf.convert import convert
from kvrelay.engine.model.gguf.tokenizer import BY_NAME
from tests.engine.model import tiny
from tests.engine.model.checkpoint import llama_cpp_writer as writer
from tests.engine.model.checkpoint.llama_cpp_writer import WRITERS, write
from tests.structure import ROOT

PROMPT = tiny.tokens_of(90, seed=1)
LLAMA3 = tiny.rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
LLAMA4 = {"rope_parameters": {**LLAMA3["rope_parameters"], "high_freq_factor": 1.0}}
MSCALE = {"rope_parameters": {**tiny.MSCALE["rope_parameters"], "mscale": 0.9}}
NO_DENSE = {"mlp_only_layers": []}  # files have none
NEMOTRON_KINDS = ["linear_attention", "moe", "full_attention", "moe", "moe"]
WIDE_GROUPS = {"linear_num_value_heads": 6}  # three to a key
# What differs from the tiny families of other tests: what a file states, or llama.cpp takes for
# granted.
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": LLAMA3,
    "qwen2-moe": NO_DENSE,
    "qwen3-moe": NO_DENSE,
    "qwen3-next": {},
    "qwen3.5": WIDE_GROUPS,
    "qwen3.5-part": {},
    "qwen3.5-moe": WIDE_GROUPS,
    "qwen2-vl-part": {},
    "qwen3-vl-part": {},
    "gpt-oss": {"num_hidden_layers": 4},
    "gemma4": {},
    "gemma4-inputs": {},
    "gemma4-sparse": {},
    "glm4": {},
    "glm4-moe": {},
    "glm4-moe-air": {},
    "glm4-moe-lite": {},
    "deepseek2": MSCALE,
    "deepseek2-groups": {},
    "deepseek3": MSCALE,
    "deepseek32": MSCALE,
    "glm5": {},
    "glm5-shared": {},
    "kimi-k25": MSCALE,
    "kimi-linear": {"num_expert_group": 1, "topk_group": 1},
    "ministral3": {},
    "ministral3-part": {},
    "granite": {},
    "llama4": {
        **LLAMA4,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    "lfm2": {},
    "lfm2-moe": {"routed_scaling_factor": 1.0},
    "mimo-v2": {},
    "minimax-m2": {},
    "nemotron-h": {"layers_block_type": NEMOTRON_KINDS},
    "seed-oss": {},
    "seed-oss-out": {},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
    "falcon-h1": {},
    "falcon-h1-norm": {},
}


def make(path: Path, family: str, **changes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """transformers' model and the tensors of its checkpoint, by the names of a language model."""
    model = tiny.make_checkpoint(family, path, {**CHANGES[family], **changes})
    stored = load_file(path / "model.safetensors")
    tensors = {}
    for name, tensor in stored.items():
        name = name.replace("language_model.model.", "model.")
        name = name.replace("model.language_model.", "model.")
        name = name.replace("language_model.lm_head.", "lm_head.")
        # transformers writes Kimi's dense layers by a name that is not published.
        name = re.sub(r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj.", name)
        if "vision" not in name and "visual" not in name and "projector" not in name:
            tensors[name] = tensor
    return model, tensors


def text_config(model: Any) -> Any:
    return getattr(model.config, "text_config", model.config)


def expected(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0, -1]
    return logits


def error_of(path: Path, wanted: torch.Tensor) -> float:
    """The largest difference of a logit, by the CPU's kernels, where they know the family, and by
    torch."""
    worst = 0.0
    for kind in ("cpu", "torch"):
        try:
            got = tiny.Driver(path, kind, read_config(path)).feed(("a", PROMPT))
        except KernelsUnavailable:
            continue
        worst = max(worst, float((got[0] - wanted).abs().max()))
    return worst


def converted(path: Path, source: Path) -> Path:
    path.mkdir()
    convert(source, path, {}, lambda _: None)
    return path


@pytest.mark.parametrize("family", CHANGES)
def test_a_file_of_each_family_gives_the_logits_of_its_checkpoint(
    tmp_path: Path, family: str
) -> None:
    model, tensors = make(tmp_path / "original", family)
    wanted = expected(model)
    write(tmp_path / "m.gguf", text_config(model), tensors)
    path = converted(tmp_path / "converted", tmp_path / "m.gguf")
    assert error_of(path, wanted) < 1e-4
    if not family.startswith("falcon-h1"):  # whose multipliers are in its weights
        found = load_file(path / "model.safetensors")
        assert sorted(found) == sorted(tensors)
        for name, tensor in tensors.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=2e-6, msg=name)


def test_each_architecture_has_a_family_here_or_in_the_older_test() -> None:
    older = {"qwen2", "qwen3", "phi3", "gemma2", "gemma3"}
    as_others = {"qwen3vlmoe": "qwen3moe", "nemotron_h": "nemotron_h_moe"}
    written = {arch for arch, _, _ in WRITERS.values()}
    assert set(ARCHITECTURES) == written | older | set(as_others)
    for one, other in as_others.items():
        assert ARCHITECTURES[one].names == ARCHITECTURES[other].names
    tested = {text_config_of(family) for family in CHANGES}
    assert tested == set(WRITERS)


def text_config_of(family: str) -> str:
    kind, _ = tiny.FAMILIES[family]
    sub = getattr(kind, "sub_configs", {}).get("text_config")
    if family in ("kimi-k25", "ministral3-part"):  # what is in them may be any
        return "deepseek_v3" if family == "kimi-k25" else "ministral3"
    return str((sub or kind).model_type)


QUANTIZED = {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 256}
BLOCKS = {
    Kind.F16: ("qwen3-moe", {**NO_DENSE}),
    Kind.Q8_0: ("deepseek3", {**MSCALE}),
    Kind.Q5_0: ("qwen3.5-moe", {"linear_key_head_dim": 32, "linear_value_head_dim": 32}),
    Kind.Q4_0: ("glm4-moe", {}),
    Kind.MXFP4: ("gpt-oss", {"num_hidden_layers": 4}),
}


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_a_quantized_file_gives_the_logits_of_its_dequantized_numbers(
    tmp_path: Path, kind: Kind
) -> None:
    family, changes = BLOCKS[kind]
    tiny_changes = {**QUANTIZED, **changes}
    model, tensors = make(tmp_path / "original", family, **tiny_changes)
    config = text_config(model)
    # What is left of each number. Matrices of rows that do not fit stay as they are, in both.
    write(tmp_path / "q.gguf", config, tensors, kind)
    path = converted(tmp_path / "converted", tmp_path / "q.gguf")
    rounded = _rounded(tmp_path / "original", config, tensors, kind)
    assert error_of(path, expected(rounded)) < 1e-4


def _rounded(path: Path, config: Any, tensors: dict[str, torch.Tensor], kind: Kind) -> Any:
    """transformers' model of what the quantized file holds: it is read from a file of float32 that
    has the same numbers."""
    per_block, _ = gguf.GGML_QUANT_SIZES[kind]

    def through(values: np.ndarray, name: str) -> np.ndarray:
        is_wide = values.ndim < 2 or any(each in name for each in writer.WIDE)
        if is_wide or values.shape[-1] % per_block:
            return values
        found = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        tensor = torch.from_numpy(found)
        # Matrices other than of 16 bits are bf16 after conversion.
        return (tensor if kind == Kind.F16 else tensor.bfloat16().float()).numpy()

    plain = path.parent / "plain.gguf"
    out = gguf.GGUFWriter(plain, writer.WRITERS[config.model_type][0])
    source = path.parent / "q.gguf"
    reader = gguf.GGUFReader(source)
    for key, each in reader.fields.items():
        if not key.startswith(("GGUF", "general.architecture")):
            writer_add(out, key, each)
    for name, values in writer.tensors_of(writer.fields_of(config), tensors):
        out.add_tensor(name, through(values, name))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    there = converted(path.parent / "plain", plain)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        there, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def writer_add(out: gguf.GGUFWriter, key: str, each: Any) -> None:
    kinds = each.types
    sub = kinds[1] if len(kinds) > 1 else None
    out.add_key_value(key, each.contents(), kinds[0], sub)


DRAFTING = {"nextn_predict_layers": 1}


def test_layers_that_draft_are_left_out(tmp_path: Path) -> None:
    """They come last; block_count counts them."""
    model, tensors = make(tmp_path / "original", "glm4-moe")
    config = text_config(model)
    further = {
        name.replace("layers.2.", "layers.3."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.2." in name
    }
    wanted = expected(model)
    config.num_hidden_layers = 4
    write(tmp_path / "m.gguf", config, {**tensors, **further}, extra=DRAFTING)
    path = converted(tmp_path / "converted", tmp_path / "m.gguf")
    assert read_config(path).num_layers == 3
    assert error_of(path, wanted) < 1e-4
    assert sorted(load_file(path / "model.safetensors")) == sorted(tensors)


@pytest.mark.parametrize(
    ("family", "extra", "told"),
    [
        ("glm4", {"rope.dimension_sections": [4, 2, 2, 0]}, "glm4 with queries and keys of GLM-4V"),
        ("glm4-moe", {"expert_gating_func": 1}, "glm4moe with expert_gating_func 1, only 2 is"),
        ("mimo-v2", {"attention.value_scale": None}, "does not state mimo2.attention.value_scale"),
        ("llama", {"rope.scaling.type": "su"}, "rope scaling su is not supported"),
    ],
)
def test_what_a_file_does_not_say_for_certain_is_refused(
    tmp_path: Path, family: str, extra: dict[str, Any], told: str
) -> None:
    model, tensors = make(tmp_path / "original", family)
    write(tmp_path / "m.gguf", text_config(model), tensors, extra=extra)
    with pytest.raises(ModelError, match=told) as error:
        converted(tmp_path / "converted", tmp_path / "m.gguf")
    assert "\n" not in str(error.value)


def test_mistral_4_is_refused_with_the_reason(tmp_path: Path) -> None:
    out = gguf.GGUFWriter(tmp_path / "m.gguf", "mistral4")
    out.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    with pytest.raises(ModelError, match="mistral4 is not supported: it does not state how"):
        convert(tmp_path / "m.gguf", tmp_path, {}, lambda _: None)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    model, tensors = make(tmp_path / "original", "llama")
    tensors["blk.0.attn_q.scale"] = torch.ones(1)
    write(tmp_path / "m.gguf", text_config(model), tensors)
    with pytest.raises(
        ModelError, match=r"tensor blk\.0\.attn_q\.scale is not part of a supported"
    ):
        converted(tmp_path / "converted", tmp_path / "m.gguf")


def test_the_page_has_every_architecture_and_every_cut() -> None:
    page = (ROOT / "docs/gguf.md").read_text()
    missing = [name for name in (*ARCHITECTURES, *REFUSED, *BY_NAME) if f"`{name}`" not in page]
    assert not missing
