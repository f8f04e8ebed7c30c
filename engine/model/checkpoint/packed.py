"""Numbers of quantized checkpoints as they are packed in files, back to integers and floats.

Sources: the formats of compressed-tensors, AutoAWQ and GPTQ; OCP's Microscaling formats (MX) 1.0
for FP4 (E2M1) and powers of two as scales (E8M0).
"""

from __future__ import annotations

import torch

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of each of eight columns
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127
_CHUNK_WORDS = 1 << 18  # at a time: bits take 32 bytes each while they are told apart


def unpack_bits(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """words [rows, n] int32, each row a stream of unsigned numbers of `bits` bits, the lowest bits
    first -> [rows, count] int16."""
    rows, width = words.shape
    numbers = torch.empty(rows, count, dtype=torch.int16)
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        for part, out in _chunks(words, numbers):
            each = (part.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
            out.copy_(each.flatten(1)[:, :count])
        return numbers
    places = torch.arange(32, dtype=torch.int32)
    weights = 1 << torch.arange(bits, dtype=torch.int32)
    whole = width * 32 // bits
    for part, out in _chunks(words, numbers):
        stream = ((part.unsqueeze(-1) >> places) & 1).flatten(1)[:, : whole * bits]
        out.copy_((stream.unflatten(1, (whole, bits)) * weights).sum(-1)[:, :count])
    return numbers


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """words [rows, columns / 8] int32 of AWQ's "gemm" layout -> [rows, columns] int16."""
    numbers = unpack_bits(words, 4, 8 * words.shape[1])
    return numbers.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)


def unpack_fp4(pairs: torch.Tensor) -> torch.Tensor:
    """pairs [rows, n] uint8, the first number in the lower half -> [rows, 2 n] float32."""
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
    return table[codes.int()]


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Scales as they are stored, floats of any width or exponents (uint8), as float32."""
    if scale.dtype is torch.uint8:
        exponents = scale.int() - _E8M0_BIAS
        return torch.ldexp(torch.ones(scale.shape), exponents)
    return scale.float()


def spread(scale: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """scale [a, b], each for a block of so many rows and columns -> something that multiplies
    [rows, columns] of `shape`; the last blocks may be cut off. Raises ValueError."""
    for dim in (0, 1):
        if scale.shape[dim] in (1, shape[dim]):
            continue
        if scale.shape[dim] != -(-shape[dim] // block[dim]):
            raise ValueError(f"scales {[*scale.shape]} of blocks {[*block]} for {[*shape]} numbers")
        scale = scale.repeat_interleave(block[dim], dim).narrow(dim, 0, shape[dim])
    return scale


def _chunks(words: torch.Tensor, numbers: torch.Tensor) -> zip[tuple[torch.Tensor, torch.Tensor]]:
    rows = max(1, _CHUNK_WORDS // max(1, words.shape[1]))
    return zip(words.split(rows), numbers.split(rows), strict=True)
