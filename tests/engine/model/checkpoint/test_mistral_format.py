"""params.json and consolidated*.safetensors, as Mistral's own code writes them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.mistral import config_of
from kvrelay.engine.model.checkpoint.quantized_config import quantization_of
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.engine.model.errors import ModelError
from tests.engine.model.checkpoint.mistral_files import to_mistral
from tests.engine.model.checkpoint.published import LARGE3
from tests.engine.model.tiny import Driver, make_checkpoint, rope, tokens_of

TOKENS = tokens_of(70, seed=1)
YARN = {"original_max_position_embeddings": 16, "factor": 8, "beta": 32, "alpha": 1}
SCALING = {"beta": 0.1, "original_max_position_embeddings": 16}
ROPE = rope(
    "yarn",
    factor=8.0,
    attention_factor=1.0,
    llama_4_scaling_beta=0.1,
    original_max_position_embeddings=16,
)


def params_of(raw: dict) -> dict:
    """What a config.json says, in the terms of params.json."""
    own = {
        "dim": raw["hidden_size"],
        "n_layers": raw["num_hidden_layers"],
        "hidden_dim": raw["intermediate_size"],
        "n_heads": raw["num_attention_heads"],
        "n_kv_heads": raw["num_key_value_heads"],
        "norm_eps": raw["rms_norm_eps"],
        "head_dim": raw["head_dim"],
        "vocab_size": raw["vocab_size"],
        "rope_theta": raw["rope_parameters"]["rope_theta"],
        "max_position_embeddings": raw["max_position_embeddings"],
        "llama_4_scaling": SCALING,
        "yarn": {**YARN, "apply_scale": False},
    }
    if "kv_lora_rank" in raw:
        own |= {key: raw[key] for key in LARGE3 if key.endswith(("rank", "pe_head_dim"))}
        own["v_head_dim"] = raw["v_head_dim"]
        own["moe"] = {
            **LARGE3["moe"],
            "num_experts": raw["n_routed_experts"],
            "num_experts_per_tok": raw["num_experts_per_tok"],
            "num_shared_experts": raw["n_shared_experts"],
            "expert_hidden_dim": raw["moe_intermediate_size"],
            "first_k_dense_replace": raw["first_k_dense_replace"],
            "routed_scale": raw["routed_scaling_factor"],
        }
    return own


@pytest.mark.parametrize("family", ["ministral3", "mistral4"])
def test_it_computes_what_the_same_weights_in_the_other_format_do(family, tmp_path):
    model = make_checkpoint(family, tmp_path, ROPE)
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0, -1]
    assert expected.std() > 1.0
    raw = json.loads((tmp_path / "config.json").read_text())
    to_mistral(tmp_path, params_of(raw))
    for kind in ("cpu", "torch"):
        driver = Driver(tmp_path, kind)
        driver.feed(("a", TOKENS[:40]))
        got = driver.feed(("a", TOKENS[40:]))[0]
        torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-4)


def test_mistral_large_3_is_understood(tmp_path):
    (tmp_path / "params.json").write_text(json.dumps(LARGE3))
    config = read_config(tmp_path)
    assert config.architecture == "Mistral4ForCausalLM"
    assert config.num_layers == 61
    assert config.latent is not None
    assert (config.latent.rank, config.latent.q_rank, config.head_dim) == (512, 1536, 576)
    assert config.attention_scale == 192**-0.5  # apply_scale is false
    assert (config.query_growth, config.query_growth_length) == (0.1, 8192)
    (rotary,) = config.ropes
    assert rotary.scaling is not None
    assert (rotary.scaling.factor, rotary.scaling.attention_factor) == (36.0, 1.0)
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.first_layer) == (128, 3)
    assert (config.experts.scoring, config.experts.normalize) == ("softmax", True)
    assert config.eos_token_ids == (2,)


def test_a_scale_for_each_matrix_is_applied(tmp_path):
    make_checkpoint("ministral3", tmp_path, ROPE)
    raw = json.loads((tmp_path / "config.json").read_text())
    to_mistral(tmp_path, params_of(raw))
    plain = Driver(tmp_path, "torch").feed(("a", TOKENS))
    (file,) = tmp_path.glob("*-00001-*")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(".attention.wo.weight"))
    tensors[name] = (tensors[name] * 64).to(torch.float8_e4m3fn)
    tensors[name.replace(".weight", ".qscale_weight")] = torch.tensor(1 / 64)
    save_file(tensors, file)
    params = json.loads((tmp_path / "params.json").read_text())
    params["quantization"] = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    (tmp_path / "params.json").write_text(json.dumps(params))
    got = Driver(tmp_path, "torch").feed(("a", TOKENS))
    assert 0 < (got - plain).abs().max() < 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"yarn": {**LARGE3["yarn"], "apply_scale": True}}, "yarn.apply_scale with latents"),
        ({"moe": None}, "kv_lora_rank without moe"),
        ({"kv_lora_rank": None}, "moe without kv_lora_rank"),
        ({"yarn": None}, "llama_4_scaling without yarn"),
        (
            {"llama_4_scaling": {**SCALING}},
            "over 16 positions is not supported with yarn over 8192",
        ),
        ({"quantization": {"qformat_weight": "int4"}}, "qformat_weight 'int4' is not supported"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_it_does_not_know_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        config_of({**LARGE3, **changes})


def test_quantized_experts_are_announced_as_in_config_json(tmp_path):
    stated = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    found = quantization_of(tmp_path, config_of({**LARGE3, "quantization_config": stated}))
    assert found is not None
    assert found.method == "compressed-tensors"


def test_the_hub_is_asked_for_consolidated_weights_where_there_are_no_others(tmp_path, monkeypatch):
    asked = []

    def fetch(name: str, ignore_patterns: list[str], **_) -> str:
        asked.append(ignore_patterns)
        (tmp_path / "params.json").write_text(json.dumps(LARGE3))
        (tmp_path / "tokenizer.json").write_text("{}")
        if "consolidated*" not in ignore_patterns:
            (tmp_path / "consolidated.safetensors").write_bytes(b"")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve_model("mistralai/Large", progress=lambda _: None) == tmp_path
    assert asked == [["consolidated*", "original/*"], ["original/*"]]
