"""config.json: what is accepted, what is refused and in which words, and the digest."""

import json
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.kv.spec import KVSpec
from kvrelay.engine.model.checkpoint.families import parse, read_config
from kvrelay.engine.model.config import INT8_GROUP, ModelConfig, RopeScaling, weights_bytes
from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.cpu.linear import Heads, Matrix
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.ops import kv_planes
from kvrelay.engine.model.quantize import GROUP
from tests.engine.model.checkpoint.published import MODELS
from tests.engine.model.runners import model_runner
from tests.engine.model.tiny import make_checkpoint, make_pool

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def read(path, generation=None, **changes) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(LLAMA | changes))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return read_config(path)


def test_defaults_are_those_of_the_format(tmp_path):
    config = read(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.ropes[0].theta) == (4, 16, 10000.0)
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()
    assert config.kv_spec(16, "float32") == KVSpec(2, 4, 16, 16, "float32")


def test_ends_of_sequence_are_those_of_both_files(tmp_path):
    config = read(tmp_path, {"eos_token_id": [7, 9]}, eos_token_id=5, bos_token_id=1)
    assert config.eos_token_ids == (5, 7, 9)
    assert config.bos_token_id == 1


@pytest.mark.parametrize(
    "spelled",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
    ],
    ids=["older", "newer"],
)
def test_rope_is_read_from_either_spelling(tmp_path, spelled):
    config = read(tmp_path, **spelled)
    assert config.ropes[0].theta == 5e5
    assert config.ropes[0].scaling == RopeScaling("linear", 2.0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "GemmaForCausalLM is not supported; supported: L",
        ),
        ({"architectures": None}, "architecture None is not supported"),
        ({"hidden_size": None}, "hidden_size is None, a positive integer is needed"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"num_key_value_heads": 3}, "4 heads over 3 KV heads"),
        ({"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "rope scaling ntk"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is None, a number is needed"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor is None"),
        ({"sliding_window": 1024}, "sliding_window 1024"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', a number is needed"),
        ({"rope_scaling": "linear"}, "not understood"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_computed_is_refused_in_one_line(tmp_path, changes, told):
    with pytest.raises(ModelError, match=told) as error:
        read(tmp_path, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 4096},
        {"sliding_window": 512, "use_sliding_window": False},
        {"sliding_window": 512, "layer_types": ["full_attention"] * 2},
    ],
    ids=str,
)
def test_windows_that_hide_nothing_are_accepted(tmp_path, changes):
    assert read(tmp_path, **changes).num_layers == 2


def test_missing_and_malformed_files_are_named(tmp_path):
    with pytest.raises(ModelError, match="nowhere does not exist"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_config(tmp_path)


def test_digests_differ_with_the_weights_only(tmp_path):
    make_checkpoint("llama", tmp_path)
    config = read_config(tmp_path)
    first = config.digest(tmp_path)
    assert first == read_config(tmp_path).digest(tmp_path)
    assert len(first) == 32
    file = tmp_path / "model.safetensors"
    tuned = {name: tensor + 0.01 for name, tensor in load_file(file).items()}
    save_file(tuned, file, metadata={"format": "pt"})
    other = config.digest(tmp_path)
    assert other != first, "same shapes and sizes, other numbers: another model"


def test_weights_bytes_bound_the_parameters(tmp_path):
    hybrids = ("lfm2", "qwen3-next", "qwen3.5", "falcon-h1-norm", "kimi-linear")
    for family in (
        "llama",
        "qwen2",
        "qwen3",
        "gemma2",
        "mixtral",
        "deepseek2",
        "deepseek3",
        "gemma4",
        "gemma4-inputs",
        *hybrids,
    ):
        model = make_checkpoint(family, tmp_path)
        config = read_config(tmp_path)
        counted = {p.data_ptr(): p.numel() for n, p in model.named_parameters() if "bias" not in n}
        assert config.num_parameters == sum(counted.values())
        assert weights_bytes(config, "bfloat16") >= 2 * config.num_parameters


def held_bytes(value):
    """Sums all tensors in weights, but for the outputs that pad packed matrices to whole panels."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Matrix | Heads):
        panel = 2 * kernels.load(default_cache_dir()).kvr_vector_width()
        return value.data.nbytes * value.rows / (-(-value.rows // panel) * panel)
    if is_dataclass(value):
        value = tuple(getattr(value, field.name) for field in fields(value))
    return sum(map(held_bytes, value)) if isinstance(value, tuple) else 0


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek3"])
def test_weights_bytes_are_what_a_cpu_holds(checkpoint_of, family, quantization):
    runner = model_runner(
        checkpoint_of(family),
        num_blocks=1,
        threads=1,
        dtype="float32",
        quantization=quantization,
    )
    held = held_bytes(runner._decoder._weights)
    planned = weights_bytes(runner.config, "float32", quantization)
    # Among small matrices the one with the most scales counts for all.
    assert planned == pytest.approx(held, rel=0.02 if quantization != "int4" else 0.04)
    assert INT8_GROUP == GROUP


def test_config_and_resolve_do_not_import_torch():
    script = "import sys, engine.model.checkpoint.resolve; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
    assert torch.__version__


@pytest.mark.parametrize(
    ("num_layers", "whole", "window", "size"),
    [
        (18, range(5, 18, 6), 512, 3),  # Gemma 3 270M
        (34, range(5, 34, 6), 1024, 5),  # 4B
        (62, range(5, 62, 6), 1024, 11),  # 27B
        (24, range(1, 24, 2), 128, 12),  # gpt-oss 20B
        (32, (), 4096, 32),  # Mistral 7B v0.1
        (30, range(30), 0, 30),
    ],
)
def test_layers_share_blocks_with_those_of_their_window(tmp_path, num_layers, whole, window, size):
    windows = tuple(0 if layer in whole else window for layer in range(num_layers))
    config = replace(read(tmp_path), num_layers=num_layers, windows=windows)
    groups, spec = config.kv_groups(), config.kv_spec(16, "bfloat16")
    assert sorted(layer for _, layers in groups for layer in layers) == [*range(num_layers)]
    assert all(windows[layer] == shown for shown, layers in groups for layer in layers)
    assert [shown for shown, _ in groups] == [*spec.windows]
    assert spec.num_layers == max(len(layers) for _, layers in groups) == size
    places = config.kv_places()
    assert len({*places.values()}) == len(places) == num_layers
    assert all(index < size for _, index in places.values())
    empty = spec.num_layers * spec.num_groups - num_layers
    assert empty <= num_layers / 10


@pytest.mark.parametrize(
    ("name", "parts", "sizes", "all_bytes", "kept"),
    [
        ("Gemma 4", 2, [5, *8 * [3], 1], 245_760, 24_576),
        ("MiMo-V2", 4, [9, *7 * [5], 4], 230_400, 25_600),
    ],
)
def test_layers_of_different_heads_are_in_blocks_of_the_same_bytes(
    name, parts, sizes, all_bytes, kept
):
    published = next(model for model in MODELS if model.name == name)
    config = parse(published.config, {})
    groups, spec = config.kv_groups(), config.kv_spec(16, "bfloat16")
    assert [len(layers) for _, layers in groups] == sizes
    assert (spec.num_kv_heads, spec.bytes_per_token) == (parts, all_bytes)
    per_token = spec.bytes_per_block // 16
    assert per_token * [window for window, _ in groups].count(0) == kept
    for heads, (_, layers) in zip(spec.heads, groups, strict=True):
        own = len(layers) * heads.numbers("bfloat16") * 2
        assert own <= per_token
        assert not spec.bytes_per_block % heads.num_heads


def test_a_layer_that_reads_anothers_keys_has_no_room_of_its_own(tmp_path):
    make_checkpoint("gemma4", tmp_path)
    config = read_config(tmp_path)
    assert config.kv_owners == (0, 1, 2, 1, 2, 1)
    assert sorted(layer for _, layers in config.kv_groups() for layer in layers) == [0, 1, 2]
    places = config.kv_places()
    assert [places[layer] for layer in (3, 4, 5)] == [places[1], places[2], places[1]]
    assert config.last_kv_layer == 2


@pytest.mark.parametrize("kind", [torch.float32, torch.uint8])
@pytest.mark.parametrize("family", ["gemma4", "gemma4-sparse", "mimo-v2", "gemma3"])
def test_planes_of_layers_do_not_overlap(checkpoint_of, family, kind):
    config = read_config(checkpoint_of(family))
    pool = make_pool(config, kind).zero_()
    places = config.kv_places()
    for layer, planes in kv_planes(pool, config).items():
        group, _ = places[layer]
        for plane in planes if config.keeps_kv(layer) else ():
            assert not plane[group].any()  # a block of that group
            plane[group] = 1
