"""What other libraries have packed, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvrelay.engine.model.checkpoint.quantized import QuantizedWeights
from kvrelay.engine.model.checkpoint.quantized_config import parse_quantized
from kvrelay.engine.model.errors import ModelError

GROUPS_OF_32 = {"bits": 4, "group_size": 32}
STATED = {  # what other libraries have packed
    "awq-4": GROUPS_OF_32 | {"quant_method": "awq", "zero_point": True, "version": "gemm"},
    **{
        f"gptq-{bits}{end}": {
            "quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": bool(end),
            "sym": False, "checkpoint_format": "gptq",
        }
        for bits in (2, 3, 4, 8)
        for end in ("", "-ordered")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", STATED)
def test_what_autoawq_and_autogptq_have_packed(case: str) -> None:
    """`packed_by_others.safetensors`: for each case what AutoAWQ 0.2.9 or AutoGPTQ 0.7.1 has packed
    of a random matrix, and what it makes of that again, in float32."""
    packed = load_file(Path(__file__).with_name("packed_by_others.safetensors"))
    find = lambda name: None if name.endswith(".weight") else packed.get(name)  # noqa: E731
    reader = QuantizedWeights(parse_quantized(STATED[case]), torch.float32, find)
    wanted = packed[f"{case}.weight"]
    found = reader.read(case, tuple(wanted.shape))
    assert found is not None
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quantized by bitsandbytes are not supported; supported",
        ),
        ({"quant_method": "torchao"}, "or f32. A worker of vLLM may run it: engine.runs = 'vllm'"),
        ({}, "quantized by unknown are not"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv' is not supported, only gemm"),
        ({"quant_method": "gptq", "bits": 5}, "bits 5 is not supported, only 2, 3, 4, 8"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo 'W4A8' is not"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "blocks of [128], two lengths"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "marlin-24",
                "config_groups": {"g": {"targets": ["Linear"]}},
            },
            "g: format 'marlin-24' is not supported, only dense, pack-quantized",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}},
            "sparsity_config.format 'sparse-bitmask' is not",
        ),
    ],
)
def test_what_is_not_understood_is_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=re.escape(told)):
        parse_quantized(config)
