"""A LoRA adapter's matrices, put in the order that the model's own have.

What a family does with the rows of a weight (stacks them, changes their order, scales them) holds
for the rows of an adapter's `lora_B` as well. So the model's own loader reads them: it asks for
weights [out, in] and gets [out, rank], where each projection of a layer has ranks of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from kvrelay.engine.adapter_copies import read_registered
from kvrelay.engine.adapters import (
    CONFIG_NAME,
    MAX_BYTES,
    MAX_CONFIG_BYTES,
    WEIGHTS_NAME,
    AdapterError,
    Scaling,
    read_config,
)
from kvrelay.engine.model.checkpoint.load import Checkpoint, Layer
from kvrelay.engine.model.checkpoint.names import ROOTS, renamed
from kvrelay.engine.model.checkpoint.recurrent import MODULE_NAMES
from kvrelay.engine.model.config import ModelConfig
from kvrelay.engine.model.cpu.huge_pages import HugePages
from kvrelay.engine.model.ops import Ops
from kvrelay.engine.model.terms import RowTerms, Term
from kvrelay.engine.model.weights import Weights
from kvrelay.engine.needs import Need
from kvrelay.engine.support import Capability, Trait, refusal_of

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
    root: str  # what its full name begins with
    down: torch.Tensor
    up: torch.Tensor
    first: int  # its ranks among those of the layer
    was_asked: bool = False


@dataclass(frozen=True, slots=True)
class _Rows:
    """In place of a matrix: [out, ranks of the layer]."""

    up: torch.Tensor
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class AdapterLoader:
    """Loads adapters for one model with these weights, beside steps."""

    model_dir: Path
    config: ModelConfig
    ops: Ops
    weights: Weights
    max_bytes: int  # all that a worker holds
    device: torch.device

    def __call__(self, need: Need) -> RowTerms:
        """Reads and prepares one. Raises AdapterError."""
        place = Trait.CPU if self.device.type == "cpu" else Trait.GPU
        if why := refusal_of(Capability.ADAPTERS, (place,)):
            raise AdapterError(why)
        most = 2 * self.max_bytes + MAX_CONFIG_BYTES  # a file may be twice as wide
        with torch.inference_mode():
            return load_adapter(need, self.model_dir, self.config, self.ops, self.weights, most)


def load_adapter(
    adapter: Need,
    model_dir: Path,
    config: ModelConfig,
    ops: Ops,
    weights: Weights,
    most: int = MAX_BYTES,
) -> RowTerms:
    """For the model that was loaded from `model_dir` with `ops`; of at most `most` bytes on disk.
    Raises AdapterError."""
    files = read_registered(adapter, most)
    try:
        tensors = safetensors.torch.load(files.weights)
    except (SafetensorError, ValueError, KeyError) as error:
        raise AdapterError(f"{WEIGHTS_NAME} is damaged: {error}") from None
    for name, tensor in tensors.items():
        _check_finite(name, tensor)
    modules = _modules(tensors, files.scaling)
    recorder: Any = getattr(ops, "recording", lambda alone: alone)(_Recorder())
    pairs: list[tuple[Any, Any]] = []
    memory = HugePages()
    for index, mine, found in _layers(modules, model_dir, config, recorder):
        for matrix, rows in _pairs(weights.layers[index], found):
            term = _term(matrix, rows, mine, ops, memory)
            if term is not None:
                pairs.append((matrix, term))
    return RowTerms(tuple(pairs))


def check_adapter(folder: Path, model_dir: Path, config: ModelConfig) -> int:
    """Whether `load_adapter` will load it for the model in `model_dir`: its shapes go the way that
    its matrices will. Returns how many numbers a worker keeps of it. Raises AdapterError."""
    try:
        with safe_open(str(folder / WEIGHTS_NAME), framework="pt") as file:
            shapes = {}
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)  # mapped, and read one after the other
                _check_finite(name, tensor)
                shapes[name] = tensor.to("meta")
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise AdapterError(f"{WEIGHTS_NAME} is damaged: {error}") from None
    scaling = read_config(folder)
    modules = _modules(shapes, scaling)
    total = 0
    for index, mine in modules.items():
        for each in mine:
            full, rank = f"{each.root}layers.{index}.{each.name}", len(each.down)
            if rank != (stated := scaling.rank_of(full)):
                raise AdapterError(
                    f"{full} has rank {rank}, and {CONFIG_NAME} says {stated} (r, rank_pattern)"
                )
            total += each.down.numel() + each.up.numel()
    for _ in _layers(modules, model_dir, config, _Recorder()):
        pass
    return total


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raises AdapterError where one of its numbers is none."""
    if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
        raise AdapterError(f"{name} has values that are no finite numbers")


def _layers(
    modules: dict[int, list[_Module]], model_dir: Path, config: ModelConfig, recorder: Any
) -> Iterator[tuple[int, list[_Module], Any]]:
    """Has the model's loader read each layer that an adapter changes: its number, its modules, and
    what the loader made of them. Raises AdapterError, ModelError."""
    checkpoint = Checkpoint(model_dir)
    root = next((r for r in ROOTS if checkpoint.has(r + "embed_tokens.weight")), ROOTS[0])
    last = next((name for name in MODULE_NAMES if checkpoint.has(f"{root}{name}.weight")), "norm")
    for index, mine in sorted(modules.items()):
        if index >= config.num_layers:
            raise AdapterError(f"it has layer {index}, the model has {config.num_layers} layers")
        prefix = f"{root}layers.{index}."
        part: Any = _Part(checkpoint, mine, prefix)
        found = _AdapterLayer(part, config, recorder, prefix, index, MODULE_NAMES[last]).load()
        for module in mine:
            if not module.was_asked:
                raise AdapterError(
                    f"layer {index}, {module.name} is not handled in this model; {_LINEAR}"
                )
        yield index, mine, found


def _modules(tensors: Mapping[str, torch.Tensor], scaling: Scaling) -> dict[int, list[_Module]]:
    """Sorts the matrices, layer by layer. Raises AdapterError."""
    parts: dict[tuple[str, int, str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match["root"] not in _ROOTS or tensor.dim() != 2:
            raise AdapterError(f"{name} is not handled; {_LINEAR}")
        place = match["root"], int(match["layer"]), match["module"]
        parts.setdefault(place, {})[match["part"]] = tensor
    if not parts:
        raise AdapterError("it has no lora_A and lora_B")
    modules: dict[int, list[_Module]] = {}
    for (root, index, name), both in parts.items():
        down, up = both.get("A"), both.get("B")
        if down is None or up is None or len(down) != up.shape[1]:
            shapes = {f"lora_{part}": [*tensor.shape] for part, tensor in both.items()}
            raise AdapterError(f"layer {index}, {name}: {shapes} do not fit each other")
        others = modules.setdefault(index, [])
        if any(each.name == name for each in others):
            raise AdapterError(f"layer {index}, {name} is there twice, by two names")
        scale = scaling.of(f"{root}layers.{index}.{name}", len(down))
        first = sum(len(other.down) for other in others)
        others.append(_Module(name, root, down.float(), up.float() * scale, first))
    return modules


class _Part:
    """Stands for a checkpoint: has an adapter's part of a layer."""

    is_interleaved = False  # adapters are made for transformers' order of rows
    quantized = None

    def __init__(self, checkpoint: Checkpoint, modules: list[_Module], prefix: str) -> None:
        self._checkpoint, self._prefix = checkpoint, prefix
        self._modules = {module.name: module for module in modules}
        self._num_ranks = sum(len(module.down) for module in modules)
        self._device = modules[0].up.device

    def has(self, name: str) -> bool:
        return self._checkpoint.has(name)

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """What is no matrix counts for nothing here."""
        if len(shape) != 2 or not name.endswith(".weight") or ".kv_b_proj." in name:
            return torch.zeros(1).expand(shape)
        rows, width = shape
        whole = torch.zeros(rows, self._num_ranks, device=self._device)
        module = self._module(name.removesuffix(".weight"))
        if module is not None:
            if (len(module.up), module.down.shape[1]) != (rows, width):
                raise AdapterError(
                    f"{self._prefix}{module.name} is for"
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


class _AdapterLayer(Layer):
    def _experts(self) -> Any:
        """Not asked for, so an adapter that has them is refused."""
        return None

    _indexer = _experts


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


def _term(
    matrix: Any, rows: _Rows, modules: list[_Module], ops: Ops, memory: HugePages
) -> Term | None:
    """Has the ranks that change this matrix; None: there are none."""
    used = rows.up.any(0)
    parts = [m for m in modules if used[m.first : m.first + len(m.down)].any()]
    if not parts:
        return None
    down = torch.cat([m.down for m in parts])
    up = torch.cat([rows.up[:, m.first : m.first + len(m.down)] for m in parts], dim=1)
    return ops.term(matrix, down, up.contiguous(), memory, is_gated=rows.is_gated)
