"""GGUF's tensors become safetensors, tensor by tensor, by the names that transformers has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.gguf.architectures import LAYER, TOP, Family, Part
from kvrelay.engine.model.gguf.file import GGUFFile
from kvrelay.engine.model.gguf.metadata import TABLES, Metadata

SHARD_BYTES = 4 << 30
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+)")
_KINDS = ("weight", "bias")
_WIDTHS = {"F32": torch.float32, "F16": torch.float16}  # matrices; others become bf16
_NOT_OFFSET = ("ssm_norm",)  # norms without the one that the others have


@dataclass(frozen=True, slots=True)
class Job:
    """What a tensor that is written is made of."""

    name: str
    sources: tuple[str, ...]
    make: Callable[..., torch.Tensor] | None = None
    expert: int | None = None
    is_packed: bool = False


def write_weights(
    meta: Metadata,
    family: Family,
    config: dict[str, Any],
    target: Path,
    progress: Callable[[str], None],
) -> None:
    """Shards of at most about SHARD_BYTES, so that a large file needs no memory of its size."""
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    size = num_shards = total = 0

    def flush(name: str) -> None:
        progress(f"converting {meta.source.path.name}: writing {name}")
        save_file(shard, str(target / name), metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    def run(job: Job) -> tuple[str, torch.Tensor]:
        return job.name, _made(job, meta.source, family, config)

    # Two at a time: unpacking is numpy, which lets go of the interpreter, and holds little memory.
    with ThreadPoolExecutor(2) as pool:
        for name, tensor in pool.map(run, list(jobs_of(meta, family))):
            if size and size + tensor.nbytes > SHARD_BYTES:
                num_shards += 1
                flush(f"model-{num_shards:05d}.safetensors")
                size = 0
            shard[name] = tensor
            size += tensor.nbytes
            total += tensor.nbytes
    if not num_shards:
        flush("model.safetensors")
        return
    flush(f"model-{num_shards + 1:05d}.safetensors")
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def keeps_packed(meta: Metadata, family: Family) -> bool:
    """Whether some tensors stay as they are, in MXFP4. Raises ModelError."""
    return any(job.is_packed for job in jobs_of(meta, family))


def jobs_of(meta: Metadata, family: Family) -> Iterator[Job]:
    """Raises ModelError where a tensor is not known."""
    source, names = meta.source, {**LAYER, **family.names}
    tables = [*names.values(), *(each for each in family.packed.values())]
    parts = [part for each in tables for part in (each if isinstance(each, tuple) else (each,))]
    taken = {other for part in parts if isinstance(part, Part) for other in part.others}
    for name, info in source.tensors.items():
        found = _LAYER_TENSOR.fullmatch(name)
        if name in TABLES or (found and int(found[1]) >= meta.num_layers):
            continue
        if found is None:
            yield Job(_top_name(source, family, name), (name,))
            continue
        layer, own = found[1], found[2]
        if own in taken:
            continue
        rule = family.packed.get(own) if source.kind(name).name == "MXFP4" else None
        is_packed, rule = rule is not None, rule or names.get(own)
        prefix = f"{family.root}layers.{layer}."
        if isinstance(rule, Part):
            rule = (rule,)
        if isinstance(rule, tuple):
            for part in rule:
                assert isinstance(part, Part)
                sources = (name, *(f"blk.{layer}.{other}" for other in part.others))
                yield Job(prefix + part.name, sources, part.make, is_packed=is_packed)
            continue
        stem, _, kind = own.rpartition(".")
        template = names.get(stem)
        if not isinstance(template, str) or kind not in _KINDS:
            raise ModelError(f"{source.path}: tensor {name} is not part of a supported {meta.arch}")
        if "{}" not in template:
            yield Job(f"{prefix}{template}.{kind}", (name,))
            continue
        for expert in range(info.shape[0]):
            yield Job(f"{prefix}{template.format(expert)}.{kind}", (name,), expert=expert)


def _top_name(source: GGUFFile, family: Family, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    found = {**TOP, **family.top}.get(stem)
    if found is None or kind not in _KINDS:
        raise ModelError(f"{source.path}: tensor {name} is not part of a supported model")
    return f"{found}.{kind}"


def _made(job: Job, source: GGUFFile, family: Family, config: dict[str, Any]) -> torch.Tensor:
    missing = [name for name in job.sources if name not in source.tensors]
    if missing:
        raise ModelError(f"{source.path} has no tensor {missing[0]}")
    if job.is_packed:
        tensors = [torch.from_numpy(source.blocks(name).copy()) for name in job.sources]
    else:
        tensors = [_read(source, name, job.expert) for name in job.sources]
    stem = job.sources[0].rpartition(".")[0]
    if family.has_larger_norms and stem.endswith("norm") and not stem.endswith(_NOT_OFFSET):
        tensors = [each - 1.0 for each in tensors]
    made = tensors[0] if job.make is None else job.make(config, *tensors)
    return made.contiguous()


def _read(source: GGUFFile, name: str, expert: int | None) -> torch.Tensor:
    """Matrices in the type that holds what is stored, or bf16; vectors in float32."""
    shape = source.tensors[name].shape
    dtype = _WIDTHS.get(source.kind(name).name, torch.bfloat16)

    def read(index: int | None) -> torch.Tensor:
        values = np.require(source.get(name, index), requirements=["C", "W"])
        tensor = torch.from_numpy(values)
        return tensor.to(dtype) if len(shape) > 1 else tensor

    if expert is not None or len(shape) < 3:
        return read(expert)
    whole = torch.empty(shape, dtype=dtype)
    for index in range(shape[0]):
        whole[index] = read(index)
    return whole
