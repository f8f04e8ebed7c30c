"""A LoRA adapter's matrices, put in the order that the model's own have.

What a family does with the rows of a weight (stacks them, changes their order, scales them) holds
for the rows of an adapter's `lora_B` as well. So the model's own loader reads them: it asks for
weights [out, in] and gets [out, rank], where each projection of a layer has ranks of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from kvrelay.engine.adapters import Adapter, AdapterError, AdapterFiles, read_adapter
from kvrelay.engine.model.batch import LoadedAdapter
from kvrelay.engine.model.checkpoint.load import Checkpoint, Layer
from kvrelay.engine.model.checkpoint.names import ROOTS, renamed
from kvrelay.engine.model.checkpoint.recurrent import MODULE_NAMES
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.cpu.huge_pages import HugePages
from kvrelay.engine.model.ops import Ops
from kvrelay.engine.model.weights import Weights

_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<root>(?:\w+\.)*?)layers\.(?P<layer>\d+)\."
    r"(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight"
)
_ROOTS = {*ROOTS, "", "backbone."}
_LINEAR = "linear layers of attention, MLPs and recurrent layers can have an adapter"


@dataclass(slots=True)
class _Module:
    """One projection of a layer: `down` [rank, in] and `up` [out, rank], already scaled."""

    name: str
    down: torch.Tensor
    up: torch.Tensor
    first: int  # its ranks among those of the layer
    was_asked: bool = False


@dataclass(frozen=True, slots=True)
class _Rows:
    """In place of a matrix: [out, ranks of the layer]."""

    up: torch.Tensor
    is_gated: bool = False


def load_adapter(
    adapter: Adapter, model_dir: Path, config: ModelConfig, ops: Ops, weights: Weights
) -> LoadedAdapter:
    """For the model that was loaded from `model_dir` with `ops`. Raises AdapterError."""
    files = read_adapter(Path(adapter.source))
    if files.digest != adapter.digest:
        raise AdapterError(
            f"{adapter.source} has changed since it was registered; register it again"
        )
    modules = _modules(adapter.source, files)
    checkpoint = Checkpoint(model_dir)
    root = next((r for r in ROOTS if checkpoint.has(r + "embed_tokens.weight")), ROOTS[0])
    last = next((name for name in MODULE_NAMES if checkpoint.has(f"{root}{name}.weight")), "norm")
    pairs: list[tuple[Any, Any]] = []
    memory = HugePages()
    for index, base in enumerate(weights.layers):
        mine = modules.pop(index, [])
        if not mine:
            continue
        prefix = f"{root}layers.{index}."
        part: Any = _Part(adapter.source, checkpoint, mine, prefix)
        recorder: Any = getattr(ops, "recording", lambda alone: alone)(_Recorder())
        names = MODULE_NAMES[last]
        found = _AdapterLayer(part, config, recorder, prefix, index, names).load()
        _check_all_asked(adapter.source, index, mine)
        for matrix, rows in _pairs(base, found):
            low_rank = _low_rank(matrix, rows, mine, ops, memory)
            if low_rank is not None:
                pairs.append((matrix, low_rank))
    if modules:
        raise AdapterError(
            f"{adapter.source} has layer {min(modules)}, the model has {len(weights.layers)} layers"
        )
    return LoadedAdapter(tuple(pairs))


def _modules(source: str, files: AdapterFiles) -> dict[int, list[_Module]]:
    """Reads the matrices, layer by layer. Raises AdapterError."""
    try:
        tensors = safetensors.torch.load(files.weights)
    except (SafetensorError, ValueError, KeyError) as error:
        raise AdapterError(f"{source}: its safetensors file is damaged: {error}") from None
    parts: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match["root"] not in _ROOTS or tensor.dim() != 2:
            raise AdapterError(f"{source}: {name} is not handled; {_LINEAR}")
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise AdapterError(f"{source}: {name} has values that are no finite numbers")
        parts.setdefault((int(match["layer"]), match["module"]), {})[match["part"]] = tensor
    if not parts:
        raise AdapterError(f"{source} has no lora_A and lora_B")
    modules: dict[int, list[_Module]] = {}
    for (index, name), both in parts.items():
        down, up = both.get("A"), both.get("B")
        if down is None or up is None or len(down) != up.shape[1]:
            shapes = {f"lora_{part}": [*tensor.shape] for part, tensor in both.items()}
            raise AdapterError(f"{source}: layer {index}, {name}: {shapes} do not fit each other")
        scale = files.scaling.of(f"layers.{index}.{name}", len(down))
        others = modules.setdefault(index, [])
        first = sum(len(other.down) for other in others)
        others.append(_Module(name, down.float(), up.float() * scale, first))
    return modules


class _Part:
    """Stands for a checkpoint: has an adapter's part of a layer."""

    is_interleaved = False  # adapters are made for transformers' order of rows
    quantized = None

    def __init__(
        self, source: str, checkpoint: Checkpoint, modules: list[_Module], prefix: str
    ) -> None:
        self._source, self._checkpoint, self._prefix = source, checkpoint, prefix
        self._modules = {module.name: module for module in modules}
        self._num_ranks = sum(len(module.down) for module in modules)

    def has(self, name: str) -> bool:
        return self._checkpoint.has(name)

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """What is no matrix counts for nothing here."""
        if len(shape) != 2 or not name.endswith(".weight") or ".kv_b_proj." in name:
            return torch.zeros(1).expand(shape)
        rows, width = shape
        whole = torch.zeros(rows, self._num_ranks)
        module = self._module(name.removesuffix(".weight"))
        if module is not None:
            if (len(module.up), module.down.shape[1]) != (rows, width):
                raise AdapterError(
                    f"{self._source}: {self._prefix}{module.name} is for"
                    f" {module.down.shape[1]} inputs and {len(module.up)} outputs,"
                    f" the model has {width} and {rows}"
                )
            module.was_asked = True
            whole[:, module.first : module.first + len(module.down)] = module.up
        return whole

    def _module(self, name: str) -> _Module | None:
        stored = renamed(name, self._checkpoint.renames)
        for each in (name, stored):
            _, _, own = each.partition(re.search(r"layers\.\d+\.", each)[0])  # type: ignore[index]
            if own in self._modules:
                return self._modules[own]
        return None


def _check_all_asked(source: str, index: int, modules: list[_Module]) -> None:
    for module in modules:
        if not module.was_asked:
            raise AdapterError(
                f"{source}: layer {index}, {module.name} is not handled in this model; {_LINEAR}"
            )


class _AdapterLayer(Layer):
    def _experts(self) -> Any:
        """Not asked for, so an adapter that has them is refused."""
        return None


class _Recorder:
    """In place of a set of operations: keeps rows of matrices, and nothing else."""

    def matrix(self, weight: torch.Tensor, bias: Any, role: str) -> _Rows:
        return _Rows(weight)

    def qkv(self, weight: torch.Tensor, bias: Any, layer: int) -> _Rows:
        return _Rows(weight)

    def gated_matrix(self, weight: torch.Tensor, role: str) -> _Rows:
        return _Rows(weight, is_gated=True)

    def vector(self, *_: Any) -> None:
        return None

    heads = router = vector


def _pairs(base: Any, found: Any) -> Iterator[tuple[Any, _Rows]]:
    """Matrices of a layer, and what was recorded in their places."""
    found = getattr(found, "inner", found)  # a rank's
    if isinstance(found, _Rows):
        yield base, found
    elif is_dataclass(found):
        for each in fields(found):
            yield from _pairs(getattr(base, each.name), getattr(found, each.name))


def _low_rank(matrix: Any, rows: _Rows, modules: list[_Module], ops: Ops, memory: HugePages) -> Any:
    """Has the ranks that change this matrix; None: there are none."""
    used = rows.up.any(0)
    parts = [m for m in modules if used[m.first : m.first + len(m.down)].any()]
    if not parts:
        return None
    down = torch.cat([m.down for m in parts])
    up = torch.cat([rows.up[:, m.first : m.first + len(m.down)] for m in parts], dim=1)
    up = up.contiguous()
    if getattr(matrix, "is_sum", False):
        rank_ops: Any = ops
        return rank_ops.summed_low_rank(down, up, memory)
    return ops.low_rank(down, up, memory, is_gated=rows.is_gated)
