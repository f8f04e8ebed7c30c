"""GGUF files of each family and each quantization become what they were made from."""

from __future__ import annotations

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
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.gguf.file import GGUFFile
from tests.engine.model.checkpoint.gguf_files import begin, end, write_gguf

VOCAB = 131
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}
EXPERTS = {"num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 48}
# Name -> transformers' configuration, GGUF architecture, further metadata (key, value).
FAMILIES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "phi3": (
        transformers.Phi3Config(
            **SHAPE, sliding_window=64, rope_parameters=LONG, original_max_position_embeddings=128
        ),
        "phi3",
        {"attention.sliding_window": 64, "rope.scaling.original_context_length": 128},
    ),
    "gemma2": (
        transformers.Gemma2Config(
            **SHAPE, head_dim=32, sliding_window=64, query_pre_attn_scalar=32
        ),
        "gemma2",
        {
            "attention.sliding_window": 64,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        transformers.Gemma3TextConfig(
            **SHAPE, head_dim=32, sliding_window=64, query_pre_attn_scalar=32
        ),
        "gemma3",
        {"attention.sliding_window": 64, "rope.freq_base": 1e6},
    ),
    "mixtral": (
        transformers.MixtralConfig(
            **SHAPE,
            num_local_experts=4,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        "llama",
        {"expert_count": 4, "expert_used_count": 2, "rope.freq_base": 1e6},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=32, num_experts=4),
        "qwen3moe",
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48},
    ),
}


def resolve(path: Path) -> Path:
    return resolve_model(str(path), cache_dir=path.parent / "cache", progress=lambda _: None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_each_family_becomes_its_original(tmp_path: Path, family: str) -> None:
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family][0])
    with torch.no_grad():
        for parameter in model.parameters():  # what conversion can keep as it is
            parameter.copy_((torch.randn_like(parameter) * 0.5).bfloat16())
    model.save_pretrained(tmp_path / "original")
    tensors = load_file(tmp_path / "original" / "model.safetensors")
    config, arch, extra = FAMILIES[family]
    rotations = {
        f"rope_factors_{which}": np.array(LONG[f"{which}_factor"], np.float32)
        for which in ("short", "long")
        if family == "phi3"
    }
    write_gguf(tmp_path / "m.gguf", tensors, config, arch, extra, rotations)
    found = resolve(tmp_path / "m.gguf")
    converted = load_file(found / "model.safetensors")
    assert sorted(converted) == sorted(tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(converted[name].float(), tensor, rtol=0, atol=1e-6, msg=name)

    def shape(path: Path) -> dict[str, Any]:
        config = read_config(path)
        fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
        return fields | {"bos_token_id": None, "eos_token_ids": ()}

    ours, theirs = shape(found), shape(tmp_path / "original")
    for name, value in theirs.items():
        if name not in ("ropes", "rms_norm_eps"):
            assert ours[name] == value, name
    assert ours["rms_norm_eps"] == pytest.approx(theirs["rms_norm_eps"])
    for mine, other in zip(ours["ropes"], theirs["ropes"], strict=True):
        assert (mine.theta, mine.dim) == (other.theta, other.dim)
        assert (mine.scaling is None) == (other.scaling is None)
        if mine.scaling is not None:
            assert mine.scaling.long_factors == other.scaling.long_factors
            assert mine.scaling.short_factors == other.scaling.short_factors
            assert mine.scaling.attention_factor == pytest.approx(other.scaling.attention_factor)


# Largest error beside the largest number, and whether the package can write the kind.
ERRORS = {
    Kind.F16: 1e-3,
    Kind.BF16: 8e-3,
    Kind.Q8_0: 0.01,
    Kind.Q5_1: 0.05,
    Kind.Q5_0: 0.05,
    Kind.Q4_1: 0.1,
    Kind.Q4_0: 0.1,
}


def write_one(path: Path, raw: np.ndarray, kind: Kind, name: str = "t") -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(name, raw, raw_dtype=kind)
    end(writer)
    return GGUFFile(path)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.name)
def test_quantized_tensors_are_unpacked(tmp_path: Path, kind: Kind) -> None:
    values = np.random.default_rng(0).normal(size=(3, 4, 256)).astype(np.float32)
    source = write_one(tmp_path / "q.gguf", gguf.quants.quantize(values, kind), kind)
    found = source.get("t")
    assert found.shape == values.shape
    assert np.abs(found - values).max() <= ERRORS[kind] * np.abs(values).max()
    assert (source.get("t", 1) == found[1]).all()  # one expert of a stack


def test_k_quants_are_unpacked_as_their_layout_says(tmp_path: Path) -> None:
    """Q6_K: 128 bytes of low halves, 64 of high quarters, 16 scales (int8), one factor (f16)."""
    block = np.zeros(210, np.uint8)
    block[:128], block[128:192] = 0x21, 0b11_10_01_00
    block[192:208] = np.arange(1, 17)
    block[208:] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    found = write_one(tmp_path / "k.gguf", block.reshape(1, 210), Kind.Q6_K).get("t")
    low = np.repeat([1, 1, 2, 2], 32)
    high = np.repeat([0, 1, 2, 3], 32)
    numbers = np.tile(low + 16 * high - 32, 2)
    assert (found[0] == 0.5 * np.repeat(np.arange(1, 17), 16) * numbers).all()
    for kind in (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K):
        _, size = gguf.GGML_QUANT_SIZES[kind]
        zeros = write_one(tmp_path / kind.name, np.zeros((2, size), np.uint8), kind).get("t")
        assert zeros.shape == (2, 256)
        assert not zeros.any()


def test_what_cannot_be_unpacked_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "q.gguf"
    write_one(path, np.zeros((4, 256), np.float32), Kind.F32, "blk.0.ffn_up.weight")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(ModelError, match=r"truncated: tensor blk\.0\.ffn_up\.weight reaches to"):
        GGUFFile(path).get("blk.0.ffn_up.weight")
    source = write_one(path, np.zeros((4, 292), np.uint8), Kind.Q8_K)
    with pytest.raises(ModelError, match="tensor t is quantized as Q8_K, which is not supported"):
        source.get("t")
    kind_at = whole.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    path.write_bytes(whole[:kind_at] + b"\xe7\x03\x00\x00" + whole[kind_at + 4 :])
    with pytest.raises(ModelError, match="has the unknown quantization 999"):
        GGUFFile(path).get("blk.0.ffn_up.weight")


@pytest.mark.parametrize(
    ("arch", "extra", "told"),
    [
        ("mamba", {}, r"GGUF architecture mamba is not supported; supported: llama, qwen2"),
        ("gemma2", {"expert_count": 4, "expert_used_count": 2}, "gemma2 with experts is not"),
        ("llama", {"expert_count": 4}, r"does not state llama\.expert_used_count"),
    ],
)
def test_models_that_are_not_known_are_named(
    tmp_path: Path, arch: str, extra: dict[str, int], told: str
) -> None:
    writer = begin(tmp_path / "m.gguf", arch, transformers.LlamaConfig(**SHAPE), extra)
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, 64), np.float32))
    end(writer)
    with pytest.raises(ModelError, match=told) as error:
        resolve(tmp_path / "m.gguf")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache" / "models").iterdir())
