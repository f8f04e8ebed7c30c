"""Quantized weights of a checkpoint, widened to floats while it is loaded, matrix by matrix.

Each number is (q - zero) * scale, computed in float32 and rounded once to the type that the model
was made in. What the layers' inputs were to be rounded to is not done: they stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.model.checkpoint.packed import (
    scale_values,
    spread,
    unpack_awq,
    unpack_bits,
    unpack_fp4,
)
from engine.model.checkpoint.quantized_config import Group, Quantized
from engine.model.errors import ModelError

Get = Callable[[str], torch.Tensor | None]  # a tensor by its name; None: there is none
NARROW = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


class QuantizedWeights:
    """Owned by a checkpoint, whose tensors it reads."""

    def __init__(self, config: Quantized, dtype: torch.dtype, get: Get) -> None:
        """`dtype`: of what is read here."""
        self._config = config
        self._dtype = dtype
        self._get = get

    def read(self, module: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """The matrix of `module`, [out, in]; None: it is not quantized. Raises ModelError."""
        try:
            return self._read(module, shape)
        except (RuntimeError, IndexError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ModelError(f"{module}: its quantized parts do not fit: {reason}") from error

    def _read(self, module: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        group = self._config.group(module)
        if (words := self._get(f"{module}.qweight")) is not None:
            return self._by_columns(module, words, group, shape)
        packed = self._get(f"{module}.weight_packed")
        if packed is not None and packed.dtype is torch.int32:
            return self._from_words(module, packed, group, shape)
        narrow = packed if packed is not None else self._get(f"{module}.weight")
        if narrow is None or narrow.dtype not in NARROW:
            return None
        numbers = unpack_fp4(narrow) if narrow.dtype is torch.uint8 else narrow.float()
        zero = self._get(f"{module}.weight_zero_point")
        return self._widened(module, numbers, group, None if zero is None else zero.float())

    def _from_words(
        self, module: str, packed: torch.Tensor, group: Group, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Signed numbers, stored with an offset."""
        stated = self._get(f"{module}.weight_shape")
        rows, columns = shape if stated is None else map(int, stated.tolist())
        offset = 1 << (group.bits - 1)
        numbers = unpack_bits(packed, group.bits, columns).float() - offset
        zero = self._get(f"{module}.weight_zero_point")
        if zero is not None and zero.dtype is torch.int32:
            words = zero.T.contiguous()
            zero = unpack_bits(words, group.bits, rows).T.float() - offset
        return self._widened(module, numbers, group, None if zero is None else zero.float())

    def _by_columns(
        self, module: str, words: torch.Tensor, group: Group, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """AWQ and GPTQ hold [in, out], and what belongs to groups as [groups, out]."""
        rows, columns = shape
        zeros = self._needed(f"{module}.qzeros")
        scales = self._needed(f"{module}.scales").float().T
        if self._config.method == "awq":
            numbers, zero = unpack_awq(words).T, unpack_awq(zeros).T
        else:
            numbers = unpack_bits(words.T.contiguous(), group.bits, columns)
            zero = unpack_bits(zeros, group.bits, rows).T + self._config.zero_offset
        places = self._get(f"{module}.g_idx")
        if places is None or not places.numel():
            places = torch.arange(columns) // (group.block[1] or columns)
        places = places.long()
        wide = (numbers.float() - zero.float()[:, places]) * scales[:, places]
        return wide.to(self._dtype)

    def _widened(
        self, module: str, numbers: torch.Tensor, group: Group, zero: torch.Tensor | None
    ) -> torch.Tensor:
        scale = self._scale(module)
        places = self._get(f"{module}.weight_g_idx")  # of each column, its group
        if places is not None and scale.shape[1] > 1:
            scale = scale[:, places.long()]
            zero = None if zero is None else zero[:, places.long()]
        rows, columns = numbers.shape
        block = (group.block[0] or rows, group.block[1] or columns)
        if zero is not None:
            numbers = numbers - spread(_matrix(zero), block, (rows, columns))
        return (numbers * spread(scale, block, (rows, columns))).to(self._dtype)

    def _scale(self, module: str) -> torch.Tensor:
        """[a, b], each of a block."""
        inverse = self._get(f"{module}.weight_scale_inv")  # which multiplies, like the others
        stored = self._needed(f"{module}.weight_scale") if inverse is None else inverse
        scale = _matrix(scale_values(stored))
        if (divisor := self._get(f"{module}.weight_global_scale")) is not None:
            return scale / divisor.float()
        factor = self._get(f"{module}.weight_scale_2")
        return scale if factor is None else scale * factor.float()

    def _needed(self, name: str) -> torch.Tensor:
        tensor = self._get(name)
        if tensor is None:
            raise ModelError(f"there is no tensor {name}")
        return tensor


def _matrix(values: torch.Tensor) -> torch.Tensor:
    """One for all, or one for each row, as [a, b]."""
    return values.reshape(-1, 1) if values.dim() < 2 else values
