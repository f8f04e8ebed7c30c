"""What this machine computes on: a device by name, and what its CPU is fast at."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from kvrelay.engine.cache_dir import default_cache_dir
from kvrelay.engine.model.cpu import kernels
from kvrelay.engine.model.cpu.linear import fastest_kind
from kvrelay.engine.model.errors import ModelError


def find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device {name} is not supported; supported: auto, cpu, cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {name} was asked for, but torch sees no CUDA device")
    return device


def gpu_bytes() -> int:
    """Memory of a GPU of this machine; 0: torch sees none."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(0).total_memory)


def is_bf16_faster() -> bool:
    """Whether this CPU multiplies 16-bit matrices faster than float32."""
    try:
        return fastest_kind(kernels.load(default_cache_dir())) > 0
    except kernels.KernelsUnavailable:
        return cpu_has_bf16()


def cpu_tiles() -> str:
    """Names this kind of CPU, and whether it multiplies in tiles: those who do keep numbers in
    another order."""
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return f"cpu {platform.machine()}{' amx' if has_tiles else ''}"


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16, and so torch does."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
