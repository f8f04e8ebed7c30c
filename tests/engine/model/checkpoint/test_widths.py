"""Checkpoints whose modules have several widths are read by what is stated of each, and refused by
the module's name where its numbers have another width: they would be read as noise, in the right
shape."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import helpers
from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import load_file

from kvrelay.engine.model.checkpoint.quantized import QuantizedWeights
from kvrelay.engine.model.checkpoint.quantized_config import float_type, parse_quantized
from kvrelay.engine.model.errors import ModelError
from tests.engine.model.checkpoint.test_quantized import (
    CASES,
    Tensors,
    assert_alike,
    compressed,
    is_quantized,
    logits,
    write,
)

ROWS, COLUMNS = 32, 96
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32}


def pack_rows(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """numbers [n, m], unsigned: each row as a stream of `bits` bits in words, lowest first."""
    signed = (numbers - (1 << (bits - 1))).to(torch.int8)
    return helpers.pack_to_int32(signed, bits)


def gptq(name: str, bits: int, size: int = 32, offset: int = 1) -> tuple[Tensors, torch.Tensor]:
    """(what GPTQ stores of a random matrix, the matrix)."""
    random = torch.Generator().manual_seed(bits)
    most = 1 << bits
    numbers = torch.randint(0, most, (ROWS, COLUMNS), generator=random)
    zeros = torch.randint(offset, most, (ROWS, COLUMNS // size), generator=random)
    scales = torch.rand(ROWS, COLUMNS // size, generator=random)
    each = [part.repeat_interleave(size, 1) for part in (zeros, scales)]
    stored = {
        f"{name}.qweight": pack_rows(numbers, bits).T.contiguous(),
        f"{name}.qzeros": pack_rows((zeros - offset).T.contiguous(), bits),
        f"{name}.scales": scales.T.contiguous(),
    }
    return stored, (numbers - each[0]) * each[1]


def read(config: dict[str, Any], stored: Tensors, name: str) -> torch.Tensor | None:
    reader = QuantizedWeights(parse_quantized(config), torch.float32, stored.get)
    return reader.read(name, (ROWS, COLUMNS))


PAIRS = [(a, b) for a in (2, 3, 4, 8) for b in (2, 3, 4, 8) if a != b]


@pytest.mark.parametrize(("bits", "stated"), PAIRS)
def test_gptq_of_another_width_than_stated_is_refused(bits: int, stated: int) -> None:
    stored, wanted = gptq("layers.0.up", bits)
    found = read({**GPTQ, "bits": bits}, stored, "layers.0.up")
    assert found is not None
    assert torch.equal(found, wanted)
    with pytest.raises(ModelError, match=r"layers\.0\.up: its quantized parts do not fit"):
        read({**GPTQ, "bits": stated}, stored, "layers.0.up")


@pytest.mark.parametrize("size", [16, 48, 96, -1])
def test_gptq_of_other_groups_than_stated_is_refused(size: int) -> None:
    stored, _ = gptq("up", 4)
    with pytest.raises(ModelError, match="up: its quantized parts do not fit: 3 groups of"):
        read({**GPTQ, "group_size": size}, stored, "up")


@pytest.mark.parametrize(("bits", "stated"), [*PAIRS, (5, 6), (6, 5), (7, 8)])
def test_packed_integers_of_another_width_than_stated_are_refused(bits: int, stated: int) -> None:
    config: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    numbers = torch.randint(0, 1 << bits, (ROWS, COLUMNS))
    stored = {"up.weight_packed": pack_rows(numbers, bits), "up.weight_scale": torch.ones(ROWS, 3)}
    for width in (bits, stated):
        weights = {"num_bits": width, "strategy": "group", "group_size": 32}
        config["config_groups"] = {"all": {"targets": ["Linear"], "weights": weights}}
        if width == bits:
            found = read(config, stored, "up")
            assert found is not None
            assert torch.equal(found, numbers.float() - (1 << (bits - 1)))
            continue
        with pytest.raises(ModelError, match="up: its quantized parts do not fit"):
            read(config, stored, "up")


def test_awq_of_another_width_or_other_groups_is_refused() -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 32}
    words, zeros = torch.zeros(COLUMNS, ROWS // 8), torch.zeros(3, ROWS // 8)
    stored = {"up.qweight": words.int(), "up.qzeros": zeros.int(), "up.scales": torch.ones(3, ROWS)}
    assert read(config, stored, "up") is not None
    with pytest.raises(ModelError, match="up: its quantized parts do not fit: 3 groups of 16"):
        read({**config, "group_size": 16}, stored, "up")
    of_8 = {"up.qweight": torch.zeros(COLUMNS, ROWS // 4).int()}
    with pytest.raises(ModelError, match="up: its quantized parts do not fit"):
        read(config, stored | of_8, "up")


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"quant_method": "fp8", "weight_block_size": [16, 32]}, (1, 3)),
        ({"quant_method": "fp8", "weight_block_size": [16, 32]}, (2, 1)),
        ({"quant_method": "fp8"}, (32, 3)),
        ({"quant_method": "fbgemm_fp8"}, (2, 1)),
    ],
    ids=str,
)
def test_fp8_with_other_blocks_than_stated_is_refused(
    config: dict[str, Any], scales: tuple[int, int]
) -> None:
    stored = {
        "up.weight": torch.zeros(ROWS, COLUMNS).to(torch.float8_e4m3fn),
        "up.weight_scale": torch.ones(scales),
    }
    with pytest.raises(ModelError, match="up: its quantized parts do not fit: scales"):
        read(config, stored, "up")


@pytest.mark.parametrize("size", [16, 64])
def test_fp4_with_other_groups_than_stated_is_refused(size: int) -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": size}
    config = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"all": {"targets": ["Linear"], "weights": weights}},
    }
    stored = {
        "up.weight_packed": torch.zeros(ROWS, COLUMNS // 2, dtype=torch.uint8),
        "up.weight_scale": torch.full((ROWS, 3), 127, dtype=torch.uint8),
    }
    with pytest.raises(ModelError, match="up: its quantized parts do not fit: scales"):
        read(config, stored, "up")


def test_dynamic_rules_of_gptq_say_the_width_of_a_module() -> None:
    """The first rule whose pattern matches counts; a module that "-:" takes out is not packed."""
    rules = {
        r"-:.*\.gate": {},
        r"+:.*\.3\..*down": {"bits": 2},
        r".*down": {"bits": 8, "group_size": 16},
        r".*up": {"desc_act": True},
    }
    config = {**GPTQ, "dynamic": rules}
    for name, bits, size in (
        ("layers.3.down", 2, 32),
        ("layers.1.down", 8, 16),
        ("layers.1.up", 4, 32),
        ("layers.1.q", 4, 32),
    ):
        stored, wanted = gptq(name, bits, size)
        found = read(config, stored, name)
        assert found is not None
        assert torch.equal(found, wanted), name
    stored, _ = gptq("layers.1.gate", 4)
    with pytest.raises(ModelError, match=r"layers.1.gate is quantized, and 're:\.\*\\\\\.gate' in"):
        read(config, stored, "layers.1.gate")
    assert read(config, {}, "layers.1.gate") is None
    with pytest.raises(ModelError, match=re.escape("re:.*up: bits 5 is not supported, only 2, 3")):
        parse_quantized({**GPTQ, "dynamic": {".*up": {"bits": 5}}})


def test_auto_round_says_the_width_of_a_module() -> None:
    extra = {
        "layers.1.down": {"bits": 8, "group_size": 16},
        "layers.2.down": {"bits": 16, "data_type": "fp"},
        r"layers\.\d.up": {"bits": 2},
    }
    config = {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq", "extra_config": extra}
    for name, bits, size in (
        ("layers.1.down", 8, 16),
        ("model.layers.3.up", 2, 32),
        ("layers.3.down", 4, 32),
    ):
        stored, wanted = gptq(name, bits, size)
        found = read(config, stored, name)
        assert found is not None
        assert torch.equal(found, wanted), name
    stored, _ = gptq("layers.2.down", 4)
    with pytest.raises(ModelError, match=r"layers\.2\.down is quantized, and 'layers\.2\.down' in"):
        read(config, stored, "layers.2.down")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format 'auto_round:llm_comp"),
        ({"data_type": "mx_fp"}, "data_type 'mx_fp' is not supported, only int"),
        (
            {"packing_format": "auto_round:auto_awq", "extra_config": {"a.b": {"bits": 8}}},
            "a.b: bits 8 is not supported, only 0, 4",
        ),
    ],
)
def test_what_auto_round_has_else_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=re.escape(told)):
        parse_quantized({**AUTO_ROUND, **changes})


@pytest.mark.parametrize("regex_first", [False, True])
def test_a_pattern_and_a_class_in_either_order(
    llama: Path, tmp_path: Path, regex_first: bool
) -> None:
    """Groups by a pattern concern what it matches alone, whichever group is first."""
    wide, narrow = CASES["int8-packed"], CASES["int4-groups"]
    tensors = load_file(llama / "model.safetensors")
    stored, widened = dict(tensors), dict(tensors)
    for name in filter(is_quantized, tensors):
        kind, fields = narrow if "mlp" in name else wide
        parts, widened[name] = compressed(tensors[name], kind, QuantizationArgs(**fields))
        del stored[name]
        stored |= {f"{name.removesuffix('.weight')}.{part}": t for part, t in parts.items()}
    groups = {
        "wide": {"targets": ["Linear"], "weights": wide[1]},
        "narrow": {"targets": [r"re:.*mlp\..*"], "weights": narrow[1]},
    }
    if regex_first:
        groups = dict(reversed(groups.items()))
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config["config_groups"] = groups
    assert_alike(llama, tmp_path, stored, widened, config)
    del groups["wide"]
    write(llama, tmp_path / "unnamed", stored, config)
    with pytest.raises(
        ModelError, match=r"self_attn\.q_proj is quantized, and quantization_config"
    ):
        logits(tmp_path / "unnamed")


def test_modelopt_says_the_format_of_each_module() -> None:
    layers = {
        "layers.0.up": {"quant_algo": "FP8"},
        "layers.0.down": {"quant_algo": "NVFP4", "group_size": 16},
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    config["quantized_layers"] = layers
    found = parse_quantized(config)
    assert found.group("layers.0.up").bits == 8
    assert (found.group("layers.0.down").bits, found.group("layers.0.down").block) == (4, (1, 16))
    with pytest.raises(
        ModelError, match=r"layers\.0\.q is quantized, and quantization_config states"
    ):
        found.group("layers.0.q")
    layers["layers.0.up"] = {"quant_algo": "W4A8_AWQ"}
    with pytest.raises(ModelError, match=re.escape("layers.0.up: quant_algo 'W4A8_AWQ' is not")):
        parse_quantized(config)


@pytest.mark.parametrize("family", ["llama4", "qwen3-moe"])
def test_stacked_experts_in_fp8(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    """Llama 4: [experts, in, out] with a scale for each output. Else [experts, out, in], a scale
    for each block, as transformers writes them."""
    source, is_llama4 = checkpoint_of(family), family == "llama4"
    tensors = stacked(load_file(source / "model.safetensors"))
    stored, widened = dict(tensors), dict(tensors)
    names = [
        name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    assert names
    for name in names:
        number, rows, columns = tensors[name].shape
        if is_llama4:
            scale = torch.rand(number, 1, columns) * 0.01
            each = scale
            scale = scale if "gate_up" in name else scale.transpose(1, 2)
        else:
            scale = torch.rand(number, -(-rows // 32), -(-columns // 64)) * 0.01
            each = scale.repeat_interleave(32, 1)[:, :rows].repeat_interleave(64, 2)
            each = each[:, :, :columns]
        stored[name] = (tensors[name] / each).to(torch.float8_e4m3fn)
        stored[f"{name}_scale" if is_llama4 else f"{name}_scale_inv"] = scale
        widened[name] = stored[name].float() * each
    config = {"quant_method": "fbgemm_fp8"} if is_llama4 else {"quant_method": "fp8"}
    config |= {} if is_llama4 else {"weight_block_size": [32, 64]}
    assert_alike(source, tmp_path, stored, widened, config)
    name = next(name for name in stored if "_scale" in name)
    write(source, tmp_path / "cut", stored | {name: stored[name][:, :, :-1]}, config)
    with pytest.raises(ModelError, match=r"experts.*: numbers \[\d, .* and scales \[\d, .* do not"):
        logits(tmp_path / "cut")


def stacked(tensors: Tensors) -> Tensors:
    """Experts one by one, as one tensor for each projection."""
    one = re.compile(r"(.*experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    found: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    rest = {}
    for name, tensor in tensors.items():
        if match := one.fullmatch(name):
            found.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            rest[name] = tensor
    for name, each in found.items():
        number = 1 + max(index for index, _ in each)
        pairs = [torch.cat((each[index, "gate"], each[index, "up"])) for index in range(number)]
        rest[f"{name}.gate_up_proj"] = torch.stack(pairs)
        rest[f"{name}.down_proj"] = torch.stack([each[index, "down"] for index in range(number)])
    return rest


def test_a_part_may_state_the_type_that_weights_are_widened_to() -> None:
    assert float_type({"text_config": {"dtype": "bfloat16"}}) == "bfloat16"
    assert float_type({"dtype": "float16", "text_config": {"dtype": "bfloat16"}}) == "float16"
