"""KV in float8_e4m3 with one power of two per token and head: the reference in plain torch.

A value is `number * 2**(scale - 127)`: the number is OCP's e4m3 without infinities, the scale its
E8M0. A scale follows from that head's vector of that token alone, so KV does not depend on how a
prompt was cut into chunks. Kernels encode and decode to the same bytes.

A number is off by up to a sixteenth of itself, and where keys are large queries are too: a few
outlier dimensions make most of the error of a score. So queries and keys, after the rotary
embedding, are both multiplied by a Hadamard matrix, which changes no score and spreads outliers
over all dimensions (QuaRot, Ashkboos et al. 2024). Latents are not transformed: they are values
too.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., head_dim], any float -> numbers uint8 [..., head_dim], scales uint8 [...].

    The scale is the smallest power of two with max|x| / 2**e <= 448, and 2**-126 at least, so that
    it and its inverse are normal in float32; 1.0 (byte 127) if all of x is zero."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1); 448 is 0.875 * 2**9
    byte = exponent - torch.where(mantissa <= 0.875, 9, 8) + 127
    byte = torch.where(largest == 0, 127, byte.clamp(1, 253)).int()
    scaled = wide * ((254 - byte) << 23).view(torch.float32).unsqueeze(-1)
    numbers = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return numbers.view(torch.uint8), byte.to(torch.uint8)


def decode(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of `encode`: numbers uint8 [..., head_dim], scales uint8 [...] -> [..., head_dim]."""
    # Byte 0 stands for 2**-127, which no encoder writes; it reads as zero.
    factors = (scales.int() << 23).view(torch.float32)
    return (numbers.view(torch.float8_e4m3fn).float() * factors.unsqueeze(-1)).to(dtype)


def hadamard(x: torch.Tensor, half: int) -> torch.Tensor:
    """Multiply the first 2 * half dimensions of x [..., head_dim] by a Hadamard matrix, not
    normalized; the others stay. -> float32.

    Each half is cut into blocks of the largest power of two that divides it, each transformed by
    itself; the last butterfly is between the two halves. Applied twice it is `hadamard_size` times
    x. Sums are of two numbers, from the lowest bit of a dimension's index to the highest, in all
    kernels: so the bytes in the pool are the same.
    """
    out, rest = x.float().tensor_split((2 * half,), dim=-1)
    width = 1
    while half % (2 * width) == 0:
        out = _butterfly(out.unflatten(-1, (-1, 2, width)))
        width *= 2
    return torch.cat((_butterfly(out.unflatten(-1, (1, 2, half))), rest), dim=-1)


def hadamard_inverse(x: torch.Tensor, half: int) -> torch.Tensor:
    """The inverse of `hadamard`, for keys: their products with transformed queries are those of x
    with the queries."""
    out = hadamard(x, half)
    out[..., : 2 * half] /= hadamard_size(half)
    return out


def _butterfly(x: torch.Tensor) -> torch.Tensor:
    """x [..., count, 2, width] -> [..., count * 2 * width]."""
    first, second = x.unbind(-2)
    return torch.stack((first + second, first - second), -2).flatten(-3)


def hadamard_size(half: int) -> int:
    """Order of the Hadamard matrix: dimensions that are transformed together, a power of two."""
    return 2 * (half & -half)


def parts(pool: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of an FP8 pool uint8 [..., bytes_per_head]: its numbers [..., block_size, head_dim] and
    its scales [..., block_size]."""
    block_size = pool.shape[-1] // (head_dim + 1)
    numbers, scales = pool.split([block_size * head_dim, block_size], dim=-1)
    return numbers.unflatten(-1, (block_size, head_dim)), scales
