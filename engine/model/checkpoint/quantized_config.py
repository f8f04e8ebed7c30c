"""What a checkpoint says of its quantized weights, without torch: which method, and how many
numbers share a scale. What is not understood is refused, by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from kvrelay.engine.model.checkpoint.fields import count, read_json
from kvrelay.engine.model.errors import ModelError

Raw = dict[str, Any]
METHODS = ("compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "awq", "gptq", "mxfp4")
FORMATS = (  # as compressed-tensors names them
    "dense",
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
GPTQ_BITS = (2, 3, 4, 8)
PACKED = (".weight_packed", ".qweight")  # what names of packed matrices end with
MODELOPT_FILE = "hf_quant_config.json"
WHOLE = 0  # rows or columns of a block: all of them


@dataclass(frozen=True, slots=True)
class Group:
    """How some of the modules are quantized. block: rows and columns of [out, in] that share a
    scale."""

    targets: tuple[str, ...] = ()  # names, "re:" and a pattern, or classes; none: all modules
    bits: int = 8
    block: tuple[int, int] = (WHOLE, WHOLE)

    def names(self, module: str) -> bool:
        """Whether one of the targets is about `module` itself, not about its class."""
        return any(
            re.match(target[3:], module) if target.startswith("re:") else target == module
            for target in self.targets
        )


@dataclass(frozen=True, slots=True)
class Quantized:
    """How a checkpoint is quantized. Which modules are, its tensors say."""

    method: str
    groups: tuple[Group, ...]
    zero_offset: int = 0  # what is added to zero points as stored

    def group(self, module: str) -> Group:
        """That of `module`: the one that names it, else the first of a class."""
        named = (group for group in self.groups if group.names(module))
        return next(named, self.groups[0])

    def num_numbers(self, name: str, shape: Sequence[int], stored: str) -> int:
        """Numbers of the matrix that tensor `name` holds; 0: it holds none of a matrix. `stored`:
        its type, as in safetensors files."""
        module = name.rpartition(".")[0]
        if name.endswith((".weight", *PACKED)):
            word_bits = {"I32": 32, "U8": 8}.get(stored, 0)
            bits = 4 if stored == "U8" else self.group(module).bits
            return prod(shape) * word_bits // bits if word_bits else prod(shape)
        if self.method == "mxfp4" and ".experts." in name and not name.endswith("_scales"):
            return prod(shape) * (2 if name.endswith("_blocks") else 1)
        return 0


def quantization_of(path: Path, raw: Raw) -> Quantized | None:
    """Reads how the checkpoint in `path` with this config.json is quantized; None: it is not.
    Raises ModelError."""
    parts = (raw, raw.get("text_config") or {})  # the whole model, its language model
    keys = ("quantization_config", "compression_config")
    stated = next((part[key] for part in parts for key in keys if part.get(key)), None)
    if not stated and (path / MODELOPT_FILE).is_file():
        stated = {"quant_method": "modelopt", **read_json(path / MODELOPT_FILE)["quantization"]}
    return parse_quantized(stated) if stated else None


def parse_quantized(raw: Raw) -> Quantized:
    method = raw.get("quant_method", "unknown")
    match method:
        case "compressed-tensors":
            return Quantized(method, _compressed(raw))
        case "fp8" | "fbgemm_fp8":
            return Quantized(method, (Group(block=_block(raw.get("weight_block_size"))),))
        case "modelopt" | "modelopt_fp4":
            return Quantized(method, (_modelopt(raw),))
        case "awq":
            return Quantized(method, (_awq(raw),))
        case "gptq":
            return _gptq(raw)
        case "mxfp4":  # gpt-oss: of stacked experts
            return Quantized(method, (Group(bits=4, block=(1, 32)),))
    raise ModelError(
        f"weights quantized by {method} are not supported; supported: {', '.join(METHODS)}, and"
        " bf16, f16 or f32"
    )


def _compressed(raw: Raw) -> tuple[Group, ...]:
    sparse = (raw.get("sparsity_config") or {}).get("format", "dense")
    _one_of("sparsity_config.format", sparse, ("dense",))
    if (raw.get("transform_config") or {}).get("config_groups"):
        raise ModelError("quantization_config: transform_config is not supported")
    groups = []
    for name, each in (raw.get("config_groups") or {}).items():
        _one_of(f"{name}: format", each.get("format") or raw.get("format", "dense"), FORMATS)
        weights = each.get("weights")
        if weights:
            targets = tuple(str(target) for target in each.get("targets", ()))
            groups.append(Group(targets, count(weights, "num_bits"), _strategy(weights)))
    return tuple(groups) or (Group(),)


def _strategy(weights: Raw) -> tuple[int, int]:
    match weights.get("strategy"):
        case "block":
            return _block(weights.get("block_structure"))
        case "group" | "tensor_group":
            return 1, count(weights, "group_size")
        case "channel":
            return 1, WHOLE
    return WHOLE, WHOLE


def _block(sizes: Any) -> tuple[int, int]:
    if not sizes:
        return WHOLE, WHOLE
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ModelError(f"quantization_config: blocks of {sizes!r}, two lengths are needed")
    return sizes[0], sizes[1]


def _modelopt(raw: Raw) -> Group:
    algorithm = raw.get("quant_algo")
    _one_of("quant_algo", algorithm, ("FP8", "NVFP4"))
    return Group() if algorithm == "FP8" else Group(bits=4, block=(1, 16))


def _awq(raw: Raw) -> Group:
    bits: Any = raw.get("bits", raw.get("w_bit", 4))
    _one_of("bits", bits, (4,))
    layout = str(raw.get("version", raw.get("format", "gemm"))).lower()
    _one_of("version", layout, ("gemm",))
    return Group(bits=bits, block=(1, _group_size(raw, raw.get("q_group_size", 128))))


def _gptq(raw: Raw) -> Quantized:
    _one_of("bits", raw.get("bits"), GPTQ_BITS)
    layout = raw.get("checkpoint_format") or raw.get("format") or "gptq"
    _one_of("checkpoint_format", layout, ("gptq", "gptq_v2"))
    group = Group(bits=raw["bits"], block=(1, _group_size(raw, -1)))
    # The first format has zero points less one.
    return Quantized("gptq", (group,), zero_offset=1 if layout == "gptq" else 0)


def _group_size(raw: Raw, default: int) -> int:
    size = raw.get("group_size", default)
    return WHOLE if size == -1 else count({"group_size": size}, "group_size")


def _one_of(what: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        listed = ", ".join(map(str, known))
        raise ModelError(f"quantization_config: {what} {value!r} is not supported, only {listed}")


def float_type(raw: Mapping[str, Any]) -> str:
    """The type that the model was made in: of weights that are widened."""
    stated = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return stated if stated in ("bfloat16", "float16") else "float32"
