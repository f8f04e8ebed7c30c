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
METHODS = (
    *("compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "awq", "gptq", "auto-round", "mxfp4"),
)
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
_PATTERN = re.compile(r"[*+?^$()\[\]{}|\\]")  # characters that no name of a module has
WAY_OUT = "A worker of vLLM may run it: engine.runs = 'vllm'"
WHOLE = 0  # rows or columns of a block: all of them


@dataclass(frozen=True, slots=True)
class Group:
    """How some of the modules are quantized. block: rows and columns of [out, in] that share a
    scale."""

    target: str = ""  # a name, "re:" and a pattern, or a class; "": all modules
    bits: int = 8  # 0: they are not quantized
    block: tuple[int, int] = (WHOLE, WHOLE)

    def closeness(self, module: str) -> int:
        """How closely the target describes `module`: 3 by its name, 2 by a pattern, 1 by what may
        be its class, 0 not at all."""
        if self.target.startswith("re:"):
            return 2 if re.match(self.target[3:], module) else 0
        if self.target == module:
            return 3
        return 1 if not self.target or self.target[:1].isupper() else 0


@dataclass(frozen=True, slots=True)
class Quantized:
    """How a checkpoint is quantized. Which modules are, its tensors say. Of groups that describe a
    module equally closely, the first counts."""

    method: str
    groups: tuple[Group, ...]
    zero_offset: int = 0  # what is added to zero points as stored

    @property
    def packed_experts(self) -> str:
        """One of `config.PACKED_BYTES`, where experts may stay as they are stored."""
        if self.method == "fp8":
            return "fp8" if all(self.groups[0].block) else ""
        return self.method if self.method == "mxfp4" else ""

    def group(self, module: str) -> Group:
        """That of `module`, which is quantized. Raises ModelError."""
        found = max(self.groups, key=lambda group: group.closeness(module))
        if not found.closeness(module):
            named = ", ".join(group.target for group in self.groups)
            raise ModelError(
                f"{module} is quantized, and quantization_config states no width for it: its"
                f" groups are of {named}"
            )
        if not found.bits:
            raise ModelError(
                f"{module} is quantized, and {found.target!r} in quantization_config says that it"
                " is not"
            )
        return found

    def num_numbers(self, name: str, shape: Sequence[int], stored: str) -> int:
        """Numbers of the matrix that tensor `name` holds; 0: it holds none of a matrix. `stored`:
        its type, as in safetensors files. Raises ModelError."""
        module = name.rpartition(".")[0]
        if name.endswith((".weight", *PACKED)):
            if stored not in ("I32", "U8"):
                return prod(shape)
            word_bits, bits = (8, 4) if stored == "U8" else (32, self.group(module).bits)
            return prod(shape) * word_bits // bits
        if ".experts." not in name or name.endswith(("_scales", "_scale", "_scale_inv")):
            return 0
        if self.method == "mxfp4" or stored == "F8_E4M3":
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
            return Quantized(method, _modelopt(raw))
        case "awq":
            return Quantized(method, (_awq(raw),))
        case "gptq":
            return _gptq(raw)
        case "auto-round":
            return _auto_round(raw)
        case "mxfp4":  # gpt-oss: of stacked experts
            return Quantized(method, (Group(bits=4, block=(1, 32)),))
    raise ModelError(
        f"weights quantized by {method} are not supported; supported: {', '.join(METHODS)}, and"
        f" bf16, f16 or f32. {WAY_OUT}"
    )


def _compressed(raw: Raw) -> tuple[Group, ...]:
    sparse = (raw.get("sparsity_config") or {}).get("format", "dense")
    _one_of("sparsity_config.format", sparse, ("dense",))
    if (raw.get("transform_config") or {}).get("config_groups"):
        raise ModelError(f"quantization_config: transform_config is not supported. {WAY_OUT}")
    groups = []
    for name, each in (raw.get("config_groups") or {}).items():
        _one_of(f"{name}: format", each.get("format") or raw.get("format", "dense"), FORMATS)
        weights = each.get("weights")
        if weights:
            bits, block = count(weights, "num_bits"), _strategy(weights)
            groups += [Group(str(target), bits, block) for target in each.get("targets") or ("",)]
    # In the order of compressed-tensors. Modules that are not of class Linear here match by name.
    groups.sort(key=lambda group: (group.target not in ("", "Linear"), group.target))
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


def _modelopt(raw: Raw) -> tuple[Group, ...]:
    algorithm, layers = raw.get("quant_algo"), raw.get("quantized_layers")
    if algorithm == "MIXED_PRECISION" and isinstance(layers, dict):
        return tuple(_modelopt_group(each, name) for name, each in layers.items())
    return (_modelopt_group(raw),)


def _modelopt_group(raw: Raw, target: str = "") -> Group:
    algorithm = raw.get("quant_algo")
    _one_of(f"{target}: quant_algo" if target else "quant_algo", algorithm, ("FP8", "NVFP4"))
    of_fp4 = (1, count(raw, "group_size", 16))
    return Group(target) if algorithm == "FP8" else Group(target, bits=4, block=of_fp4)


def _awq(raw: Raw) -> Group:
    bits: Any = raw.get("bits", raw.get("w_bit", 4))
    _one_of("bits", bits, (4,))
    layout = str(raw.get("version", raw.get("format", "gemm"))).lower()
    _one_of("version", layout, ("gemm",))
    return Group(bits=bits, block=(1, _group_size(raw, raw.get("q_group_size", 128))))


def _gptq(raw: Raw) -> Quantized:
    layout = raw.get("checkpoint_format") or raw.get("format") or "gptq"
    _one_of("checkpoint_format", layout, ("gptq", "gptq_v2"))
    # The first rule whose pattern matches counts; "-:" takes modules out.
    rules = [(str(key), each or {}) for key, each in (raw.get("dynamic") or {}).items()]
    groups = [
        Group("re:" + rule[2:], bits=0)
        if rule.startswith("-:")
        else _integers({**raw, **changes}, "re:" + rule.removeprefix("+:"))
        for rule, changes in rules
    ]
    # The first format has zero points less one.
    return Quantized("gptq", (*groups, _integers(raw)), zero_offset=1 if layout == "gptq" else 0)


def _auto_round(raw: Raw) -> Quantized:
    """Which layout its modules have, GPTQ's or AWQ's, it states itself."""
    layout = raw.get("packing_format", "auto_round:auto_gptq")
    _one_of("packing_format", layout, ("auto_round:auto_gptq", "auto_round:auto_awq"))
    _one_of("data_type", raw.get("data_type", "int"), ("int",))
    method = layout.rpartition("_")[2]
    groups = []
    for name, changes in (raw.get("extra_config") or {}).items():
        target = f"re:.*(?:{name})" if _PATTERN.search(name) else name
        stated = {**raw, **changes}
        is_plain = stated.get("bits", 16) >= 16
        groups.append(Group(target, bits=0) if is_plain else _integers(stated, target))
    groups.append(_integers(raw))
    if method == "awq":
        for group in groups:
            _one_of(f"{group.target or 'all modules'}: bits", group.bits, (0, 4))
    return Quantized(method, tuple(groups), zero_offset=1)


def _integers(raw: Raw, target: str = "") -> Group:
    _one_of(f"{target}: bits" if target else "bits", raw.get("bits"), GPTQ_BITS)
    return Group(target, raw["bits"], (1, _group_size(raw, -1)))


def _group_size(raw: Raw, default: int) -> int:
    size = raw.get("group_size", default)
    return WHOLE if size == -1 else count({"group_size": size}, "group_size")


def _one_of(what: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        listed = ", ".join(map(str, known))
        raise ModelError(
            f"quantization_config: {what} {value!r} is not supported, only {listed}. {WAY_OUT}"
        )


def float_type(raw: Mapping[str, Any]) -> str:
    """The type that the model was made in: of weights that are widened."""
    parts, keys = (raw, raw.get("text_config") or {}), ("dtype", "torch_dtype")
    named = (part[key] for part in parts for key in keys if part.get(key))
    stated = str(next(named, "float32")).removeprefix("torch.")
    return stated if stated in ("bfloat16", "float16") else "float32"
