"""LoRA adapters with random weights, written as PEFT does, and models that they are merged into."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LAYER = re.compile(r"(?:(?:model\.)?(?:language_model\.)?(?:model\.)?|backbone\.)layers\.")


def write_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int = 0,
    rank: int = 8,
    modules: Collection[str] = PROJECTIONS,
    layers: Collection[int] | None = None,
    ranks: Mapping[str, int] = {},
    scale: float = 0.1,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """modules: last parts of the names of those that have it; layers: those that have it, None:
    all; ranks: of modules that have another than `rank`. The product that is added to a weight is
    as large as `scale` times random numbers."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in _weights(model).items():
        module = name.removesuffix(".weight")
        if not _is_handled(name, weight) or module.split(".")[-1] not in modules:
            continue
        if layers is not None and int(module.split("layers.")[1].split(".")[0]) not in layers:
            continue
        (out, width), own = weight.shape, ranks.get(module.split(".")[-1], rank)
        down = torch.randn(own, width, generator=generator) / math.sqrt(own)
        up = scale * torch.randn(out, own, generator=generator)
        tensors[f"base_model.model.{module}.lora_A.weight"] = down.to(dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = up.to(dtype)
    assert tensors, f"no weight of {model} is one of {modules}"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    stated = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    stated |= {"target_modules": sorted(modules), "modules_to_save": None, "use_dora": False}
    stated |= {"rank_pattern": dict(ranks)}
    stated |= {"layers_to_transform": None if layers is None else sorted(layers)}
    (folder / "adapter_config.json").write_text(json.dumps(stated | config))
    return folder


def merge(
    folder: Path, model: Path, adapter: Path, scaling: float | Callable[[str, int], float] = 1.0
) -> Path:
    """A copy of `model` with an adapter in its weights, in float64 and rounded once. scaling: one
    for all, or of a module's name and rank."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    weights = _weights(model)
    parts = load_file(adapter / "adapter_model.safetensors")
    for name, down in parts.items():
        if ".lora_A." in name:
            key = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            up = parts[name.replace("lora_A", "lora_B")]
            factor = scaling if isinstance(scaling, float) else scaling(key, len(down))
            change = factor * (up.double() @ down.double())
            weights[key] = (weights[key].double() + change).to(weights[key].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def linear_modules(model: Path) -> set[str]:
    """Last parts of the names of the layers' matrices that can have an adapter."""
    return {
        name.split(".")[-2] for name, weight in _weights(model).items() if _is_handled(name, weight)
    }


def _is_handled(name: str, weight: torch.Tensor) -> bool:
    is_other = re.search(r"\.experts\.|router|kv_b_proj|\.gate\.weight|conv1d|indexer", name)
    return weight.dim() == 2 and bool(_LAYER.match(name)) and not is_other and ".weight" in name


def _weights(model: Path) -> dict[str, torch.Tensor]:
    files = sorted(model.glob("*.safetensors"))
    return {name: weight for file in files for name, weight in load_file(file).items()}
