"""Quantized checkpoints: written by compressed-tensors itself, and by hand where a format has no
library that runs here. Their logits are those of the widened weights, to the last bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized import helpers
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.roofline import count_weights
from tests.engine.model.tiny import Driver, tokens_of

Tensors = dict[str, torch.Tensor]
PARTS = re.compile(r"_(blocks|scales)$")


def ints(num_bits: int, strategy: str, *, symmetric: bool, **more: Any) -> dict[str, Any]:
    more["symmetric"] = symmetric
    return {"num_bits": num_bits, "type": "int", "strategy": strategy, **more}


def floats(num_bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": num_bits, "type": "float", "strategy": strategy, **more}


OF_32 = {"group_size": 32}
MX = {"group_size": 32, "scale_dtype": "torch.uint8"}
NV = {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # format, arguments of the weights
    "int4-groups": ("pack-quantized", ints(4, "group", symmetric=True, **OF_32)),
    "int4-groups-zeros": ("pack-quantized", ints(4, "group", symmetric=False, **OF_32)),
    "int4-ordered": ("pack-quantized", ints(4, "group", symmetric=False, **OF_32)),
    "int3-channels": ("pack-quantized", ints(3, "channel", symmetric=True)),
    "int8-packed": ("pack-quantized", ints(8, "channel", symmetric=False)),
    "int8-channels": ("int-quantized", ints(8, "channel", symmetric=True)),
    "int8-whole": ("int-quantized", ints(8, "tensor", symmetric=False)),
    "fp8-whole": ("float-quantized", floats(8, "tensor")),
    "fp8-channels": ("float-quantized", floats(8, "channel")),
    "fp8-blocks": ("float-quantized", floats(8, "block", block_structure=[64, 128])),
    "nvfp4": ("nvfp4-pack-quantized", floats(4, "tensor_group", **NV)),
    "mxfp4": ("mxfp4-pack-quantized", floats(4, "group", **MX)),
    "mxfp8": ("mxfp8-quantized", floats(8, "group", **MX)),
}


def is_quantized(name: str) -> bool:
    """The projections of layers, not what chooses experts."""
    return bool(re.search(r"layers\..*proj.*\.weight$", name))


def write(source: Path, path: Path, tensors: Tensors, config: dict[str, Any] | None) -> None:
    path.mkdir()
    raw = json.loads((source / "config.json").read_text())
    raw |= {"quantization_config": config} if config else {}
    (path / "config.json").write_text(json.dumps(raw))
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")


def logits(path: Path, **options: Any) -> torch.Tensor:
    return Driver(path, "torch", **options).feed(("a", tokens_of(20, 1)), ("b", tokens_of(5, 2)))


def assert_alike(
    source: Path, folder: Path, stored: Tensors, widened: Tensors, config: dict[str, Any] | None
) -> None:
    """What is stored gives the logits of the weights that it stands for."""
    write(source, folder / "stored", stored, config)
    write(source, folder / "widened", widened, None)
    assert torch.equal(logits(folder / "stored"), logits(folder / "widened"))


def extremes(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the least and the largest number that share each scale."""
    rows, columns = weight.shape
    match args.strategy:
        case "tensor":
            return weight.min().reshape(1), weight.max().reshape(1)
        case "channel":
            return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "block":
            high, wide = args.block_structure
            padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
            blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
            return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, args.group_size))
    return groups.amin(-1), groups.amax(-1)


def compressed(
    weight: torch.Tensor, kind: str, args: QuantizationArgs, *, ordered: bool = False
) -> tuple[Tensors, torch.Tensor]:
    """(what is stored, and the weight that it stands for), by compressed-tensors. `ordered`: as
    its older versions, and GPTQ, do with the columns."""
    compressor = BaseCompressor.get_value_from_registry(kind)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    if ordered:  # columns by their weight, then in groups
        order = weight.square().sum(0).argsort(descending=True)
        places = torch.empty_like(order, dtype=torch.int32)
        places[order] = (torch.arange(len(order)) // args.group_size).to(torch.int32)
        stored, widened = compressed(weight[:, order], kind, args)
        return _ordered(stored, widened, order, places, args), widened[:, order.argsort()]
    state: Tensors = {"weight": weight}
    global_scale = None
    if args.strategy == "tensor_group":
        global_scale = generate_gparam(*(each.reshape(1) for each in torch.aminmax(weight)))
        state["weight_global_scale"] = global_scale
    scale, zero = calculate_qparams(*extremes(weight, args), args, global_scale)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    stored = compressor.compress(state, scheme)
    if args.symmetric:
        stored.pop("weight_zero_point", None)
    if kind == "nvfp4-pack-quantized":  # which it would round to bfloat16
        pairs = stored["weight_packed"]
        numbers = unpack_fp4_from_uint8(pairs, len(weight), weight.shape[1], torch.float32)
        scale = stored["weight_scale"].float()
        return stored, dequantize(numbers, scale, args=args, global_scale=global_scale)
    return stored, compressor.decompress(stored, scheme)["weight"].float()


def _ordered(
    stored: Tensors,
    widened: torch.Tensor,
    order: torch.Tensor,
    places: torch.Tensor,
    args: QuantizationArgs,
) -> Tensors:
    """`stored` with its columns in their own order again, each with the number of its group."""
    numbers = helpers.unpack_from_int32(stored["weight_packed"], args.num_bits, widened.shape)
    numbers = numbers[:, order.argsort()].contiguous()
    packed = helpers.pack_to_int32(numbers, args.num_bits)
    return stored | {"weight_packed": packed, "weight_g_idx": places}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", ["llama", "deepseek3"])
def test_compressed_tensors(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, family: str, case: str
) -> None:
    kind, fields = CASES[case]
    args = QuantizationArgs(**fields)
    tensors = load_file(checkpoint_of(family) / "model.safetensors")
    stored, widened = dict(tensors), dict(tensors)
    num_quantized = 0
    for name, weight in tensors.items():
        group = args.group_size or 1
        if not is_quantized(name) or weight.shape[1] % group:
            continue
        parts, widened[name] = compressed(weight, kind, args, ordered=case == "int4-ordered")
        del stored[name]
        stored |= {f"{name.removesuffix('.weight')}.{part}": t for part, t in parts.items()}
        num_quantized += 1
    assert num_quantized > 10
    groups = {"group_0": {"targets": ["Linear"], "weights": fields}}
    config = {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}
    assert_alike(checkpoint_of(family), tmp_path, stored, widened, config)
    counts = [
        count_weights(tmp_path / each, read_config(tmp_path / each), "cpu", "float32", "none")
        for each in ("stored", "widened")
    ]
    assert counts[0].every == pytest.approx(counts[1].every, rel=0.03)  # words may not be full
    assert counts[0].bytes_per_number == counts[1].bytes_per_number


def test_groups_of_different_widths(llama: Path, tmp_path: Path) -> None:
    """As layers of a mixed scheme: one names modules, another their class."""
    wide, narrow = CASES["int8-packed"], CASES["int4-groups"]
    tensors = load_file(llama / "model.safetensors")
    stored, widened = dict(tensors), dict(tensors)
    for name in filter(is_quantized, tensors):
        kind, fields = wide if "down_proj" in name else narrow
        parts, widened[name] = compressed(tensors[name], kind, QuantizationArgs(**fields))
        del stored[name]
        stored |= {f"{name.removesuffix('.weight')}.{part}": t for part, t in parts.items()}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "narrow": {"targets": ["Linear"], "weights": narrow[1]},
            "wide": {"targets": ["re:.*down_proj"], "weights": wide[1]},
        },
    }
    assert_alike(llama, tmp_path, stored, widened, config)
    # What was widened may be made narrow again, for the integer kernels.
    again = {"quantization": "int8"}
    assert torch.equal(logits(tmp_path / "stored", **again), logits(tmp_path / "widened", **again))


def in_fp8_blocks(source: Path, block: tuple[int, int]) -> tuple[Tensors, Tensors]:
    """Tensors with a scale, called inverse, for each block, and what they stand for."""
    tensors = load_file(source / "model.safetensors")
    stored, widened = dict(tensors), dict(tensors)
    for name in filter(is_quantized, tensors):
        rows, columns = tensors[name].shape
        scale = torch.rand(-(-rows // block[0]), -(-columns // block[1])) * 0.01
        each = scale.repeat_interleave(block[0], 0)[:rows]
        each = each.repeat_interleave(block[1], 1)[:, :columns]
        stored[name] = (tensors[name] / each).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        widened[name] = stored[name].float() * each
    return stored, widened


def fp8_config(block: tuple[int, int]) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [*block]}


@pytest.mark.parametrize("block", [(128, 128), (16, 16)])
def test_deepseek_as_it_is_published(
    block: tuple[int, int], checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """With blocks in which experts end, and with whole ones."""
    stored, widened = in_fp8_blocks(checkpoint_of("deepseek3"), block)
    assert_alike(checkpoint_of("deepseek3"), tmp_path, stored, widened, fp8_config(block))


def in_mxfp4(source: Path) -> tuple[Tensors, Tensors]:
    """Tensors of a gpt-oss as it is published, its experts drawn anew, and what those stand for."""
    stored, widened = load_file(source / "model.safetensors"), {}
    random = torch.Generator().manual_seed(5)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        number, columns, rows = stored.pop(name).shape
        shape = (number, rows, columns // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
        scales = torch.randint(122, 126, shape[:3], dtype=torch.uint8, generator=random)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        widened[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return stored, widened


def test_gpt_oss_as_it_is_published(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Experts in MXFP4, stacked; transformers says what they stand for."""
    source = checkpoint_of("gpt-oss")
    stored, widened = in_mxfp4(source)
    assert len(widened) == 2 * 3
    plain = {name: tensor for name, tensor in stored.items() if not PARTS.search(name)}
    config = {"quant_method": "mxfp4"}
    assert_alike(source, tmp_path, stored, plain | widened, config)
    count = partial(count_weights, device="cpu", dtype="float32", quantization="none")
    counts = [count(tmp_path / name, read_config(source)).experts for name in ("stored", "widened")]
    assert counts == [3 * 8 * 3 * 96 * 160 + 3 * 8 * (2 * 160 + 96)] * 2
    name = next(name for name in stored if name.endswith("_scales"))
    write(source, tmp_path / "cut", stored | {name: stored[name][:, :-1]}, config)
    with pytest.raises(ModelError, match=r"blocks \[8, .* and scales \[8, .* do not make \[8, "):
        logits(tmp_path / "cut")


def test_parts_that_do_not_fit_are_named(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
    config = {"quant_method": "fp8"}
    write(llama, tmp_path / "without", tensors, config)
    with pytest.raises(ModelError, match=f"there is no tensor {name}.weight_scale"):
        logits(tmp_path / "without")
    tensors[f"{name}.weight_scale"] = torch.ones(3)
    write(llama, tmp_path / "other", tensors, config)
    with pytest.raises(ModelError, match=f"{name}: its quantized parts do not fit"):
        logits(tmp_path / "other")


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_modelopt(llama: Path, tmp_path: Path, algorithm: str) -> None:
    """Its second scale multiplies; the file that states it may be one of its own."""
    tensors = load_file(llama / "model.safetensors")
    stored, widened = dict(tensors), dict(tensors)
    fp4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in filter(is_quantized, tensors):
        rows, columns = tensors[name].shape
        if algorithm == "FP8":
            scale = tensors[name].abs().max() / 448
            stored[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = scale
            widened[name] = stored[name].float() * scale
            continue
        codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
        scale = torch.rand(rows, columns // 16).to(torch.float8_e4m3fn)
        stored[name] = codes[:, ::2] | codes[:, 1::2] << 4
        stored[f"{name}_scale"], stored[f"{name}_scale_2"] = scale, torch.tensor(0.03)
        each = (scale.float() * 0.03).repeat_interleave(16, 1)
        widened[name] = fp4[codes.int()] * each
    write(llama, tmp_path / "stored", stored, None)
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
    (tmp_path / "stored" / "hf_quant_config.json").write_text(json.dumps(stated))
    write(llama, tmp_path / "widened", widened, None)
    assert torch.equal(logits(tmp_path / "stored"), logits(tmp_path / "widened"))
