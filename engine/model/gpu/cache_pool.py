"""The KV pool as kernels address it: one pointer, and element strides that are known at compile
time.

A token's head lies at `block * block_stride + layer * layer_stride + plane * plane_stride + head *
head_stride + offset * head_dim`. In FP8 elements are bytes, and a head's numbers are followed by
its scales: one byte per token, behind `block_size * head_dim`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP8 = torch.uint8  # what a pool of float8_e4m3 is held as


@dataclass(frozen=True, slots=True)
class Pool:
    """`data`: [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim], or uint8
    [num_blocks, num_layers, num_planes, num_kv_heads, bytes_per_head]. What a head has of a plane
    is contiguous. Where values have another size than keys, `data` has the keys' plane alone.
    Owned by the op set that made it; the memory belongs to the runner."""

    data: torch.Tensor
    head_dim: int
    other_dim: int = 0  # that values have, where it is another
    apart: int = 0  # elements from a head's keys to its values, likewise

    def __post_init__(self) -> None:
        assert self.data[0, 0, 0, 0].is_contiguous()
        assert self.data.dim() == (5 if self.is_fp8 else 6)
        assert self.is_fp8 or self.data.shape[5] == self.head_dim

    @property
    def is_fp8(self) -> bool:
        return self.data.dtype == FP8

    @property
    def value_dim(self) -> int:
        return self.other_dim or self.head_dim

    @property
    def num_kv_heads(self) -> int:
        return self.data.shape[3]

    @property
    def block_size(self) -> int:
        return self.data.shape[4] // (self.head_dim + 1) if self.is_fp8 else self.data.shape[4]

    def layer_offset(self, layer: int) -> int:
        """Elements from a block's start to what `layer` holds of it."""
        return layer * self.data.stride(1)

    @property
    def constants(self) -> dict[str, int]:
        """What every kernel that reads or writes the pool is compiled for."""
        return {
            "BLOCK_STRIDE": self.data.stride(0),
            "PLANE_STRIDE": self.apart or self.data.stride(2),
            "HEAD_STRIDE": self.data.stride(3),
            "BLOCK_SIZE": self.block_size,
            "FP8": self.is_fp8,
        }
