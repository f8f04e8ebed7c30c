"""What is wrong with a checkpoint is told by name, whatever the family."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.checkpoint.load import load_weights
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.torch_ops import TorchOps
from kvrelay.engine.model.weights import Weights
from tests.engine.model.tiny import MAX_LEN, make_pool


def saved(source, path, tensors):
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text((source / "config.json").read_text())
    return path


def load(path) -> Weights:
    config = read_config(path)
    ops = TorchOps(config, make_pool(config, torch.float32), torch.float32, MAX_LEN)
    return load_weights(path, config, ops, lambda _: None)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("phi3", "model.layers.1.self_attn.qkv_proj.weight"),
        ("gemma2", "model.layers.0.post_feedforward_layernorm.weight"),
        ("gemma3-part", "language_model.model.layers.0.self_attn.q_norm.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
        ("qwen3-moe", "model.layers.2.mlp.gate.weight"),
        ("deepseek2", "model.layers.1.mlp.shared_experts.up_proj.weight"),
        ("deepseek3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("deepseek3", "model.layers.0.self_attn.kv_b_proj.weight"),
    ],
)
def test_a_tensor_of_another_shape_is_named(checkpoint_of, tmp_path, family, name):
    tensors = load_file(checkpoint_of(family) / "model.safetensors")
    shape = list(tensors[name].shape)
    tensors[name] = torch.zeros(3, 5)
    with pytest.raises(ModelError) as error:
        load(saved(checkpoint_of(family), tmp_path, tensors))
    assert f"{name} has shape [3, 5], {shape} is needed" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "name", "told"),
    [
        ("phi3", "model.layers.1.self_attn.qkv_proj.weight", "self_attn.q_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2.weight", ""),
        ("deepseek3", "model.layers.1.mlp.gate.e_score_correction_bias", ""),
    ],
)
def test_a_missing_tensor_is_named(checkpoint_of, tmp_path, family, name, told):
    tensors = load_file(checkpoint_of(family) / "model.safetensors")
    del tensors[name]
    with pytest.raises(ModelError, match=f"has no tensor .*{told or name}"):
        load(saved(checkpoint_of(family), tmp_path, tensors))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_weights_in_a_type_that_is_not_known_are_named(checkpoint_of, tmp_path, dtype):
    tensors = load_file(checkpoint_of("qwen2") / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    with pytest.raises(ModelError, match=f"{name} is {dtype}, which is not supported"):
        load(saved(checkpoint_of("qwen2"), tmp_path, tensors))


@pytest.mark.parametrize("family", ["llama", "deepseek3"])
def test_what_is_loaded_does_not_keep_the_files_mapped(checkpoint_of, tmp_path, family):
    """Weights are copies: the file may be replaced while the model runs."""
    path = checkpoint_of(family)
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    weights = load(tmp_path)
    first = [tensor.clone() for tensor in tensors_of(weights)]
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.seek(100_000)
        file.write(b"\xff" * 300_000)
    assert len(first) > 10
    assert all(torch.equal(a, b) for a, b in zip(first, tensors_of(weights), strict=True))


def test_stacked_experts_may_be_stored_by_inputs(checkpoint_of, tmp_path):
    """Published files of Qwen3-VL with experts have [experts, in, out]."""
    path = checkpoint_of("qwen3-vl-moe-part")
    stored = load_file(path / "model.safetensors")
    turned = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor
        for name, tensor in stored.items()
    }
    assert any(tensor.shape != stored[name].shape for name, tensor in turned.items())
    both = (tensors_of(load(each)) for each in (path, saved(path, tmp_path, turned)))
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def tensors_of(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for each in value for tensor in tensors_of(each)]
    if hasattr(value, "__slots__"):
        return [tensor for name in value.__slots__ for tensor in tensors_of(getattr(value, name))]
    return []
