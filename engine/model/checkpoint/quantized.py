"""Quantized matrices of a checkpoint, as floats.

Each number is (q - zero) * scale, computed in float32 and rounded once to the type that the model
was made in. What the layers' inputs were to be rounded to is not done: they stay as they are. Parts
that do not have the sizes which the stated widths give are refused by the module's name, as they
would be read as noise. Sources: the formats of compressed-tensors, AutoAWQ and GPTQ; OCP's
Microscaling formats (MX) 1.0 for FP4 (E2M1) and powers of two as scales (E8M0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kvrelay.engine.model.checkpoint.quantized_config import Group, Quantized
from kvrelay.engine.model.errors import ModelError
from kvrelay.engine.model.stacked import GROUP, Fp8Blocks, Mxfp4, e8m0, unpack_fp4

Get = Callable[[str], torch.Tensor | None]  # a tensor by its name; None: there is none
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of each of eight columns
_CHUNK_WORDS = 1 << 18  # at a time: bits take 32 bytes each while they are separated
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

    def blocks_of_fp8(self, modules: Sequence[str]) -> Fp8Blocks | None:
        """Those as one matrix, one below the other, as they are stored; None: they are not in FP8
        with a scale for each block. Raises ModelError."""
        parts, block = [], self._config.group(modules[0]).block
        for module in modules:
            numbers = self._get(f"{module}.weight")
            scales = self._get(f"{module}.weight_scale_inv")
            if numbers is None or scales is None or numbers.dtype is not torch.float8_e4m3fn:
                return None
            wanted = [-(-size // each) for size, each in zip(numbers.shape, block, strict=True)]
            if [*scales.shape] != wanted or (numbers.shape[0] % block[0] and len(modules) > 1):
                return None  # that is said where they are widened, if it cannot be
            parts.append((numbers.view(torch.uint8), scales.float()))
        both = (torch.cat(each).unsqueeze(0) for each in zip(*parts, strict=True))
        numbers, scales = both
        return Fp8Blocks(numbers.view(torch.float8_e4m3fn), scales, block, self._dtype)

    def read_stacked(
        self, name: str, shape: tuple[int, ...], *, by_inputs: bool = False
    ) -> torch.Tensor | Mxfp4 | None:
        """The stacked matrices `name`, [number, out, in]: in MXFP4 as gpt-oss has them, blocks
        [..., out, in / 32, 16] with a scale for each, or in FP8 with a scale for each row or block.
        by_inputs: FP8 is stored as [number, in, out], as Llama 4 has it. None: they are not
        quantized. Raises ModelError."""
        if (blocks := self._get(f"{name}_blocks")) is not None:
            return self._from_blocks(name, blocks, shape)
        stored = self._get(name)
        if stored is None or stored.dtype not in NARROW:
            return None
        inverse = self._get(f"{name}_scale_inv")
        scales = _scale_values(self._needed(f"{name}_scale") if inverse is None else inverse)
        block = self._config.group(name).block
        whole = torch.empty(shape, dtype=self._dtype)
        for index in range(shape[0]):
            try:
                scale = scales.flatten() if scales.numel() == 1 else scales[index]
                narrow = stored[index].T if by_inputs else stored[index]
                rows, columns = narrow.shape
                scale = _matrix(scale.flatten()) if by_inputs else _matrix(scale)
                sizes = (block[0] or rows, block[1] or columns)
                whole[index] = narrow.float() * _spread(scale, sizes, (rows, columns))
            except (RuntimeError, IndexError, ValueError) as error:
                raise ModelError(
                    f"{name}: numbers {[*stored.shape]} and scales {[*scales.shape]} do not make "
                    f"{[*shape]}"
                ) from error
        return whole

    def _from_blocks(self, name: str, blocks: torch.Tensor, shape: tuple[int, ...]) -> Mxfp4:
        scales = self._needed(f"{name}_scales")
        number, rows, columns = shape
        wanted = (number, rows, columns // GROUP)
        if columns % GROUP or scales.shape != wanted or blocks.shape != (*wanted, GROUP // 2):
            raise ModelError(
                f"{name}: blocks {[*blocks.shape]} and scales {[*scales.shape]} do not make "
                f"{[*shape]}"
            )
        return Mxfp4(blocks.flatten(2), scales, self._dtype)

    def _read(self, module: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        if (words := self._get(f"{module}.qweight")) is not None:
            return self._by_columns(module, words, self._config.group(module), shape)
        packed = self._get(f"{module}.weight_packed")
        if packed is not None and packed.dtype is torch.int32:
            return self._from_words(module, packed, self._config.group(module), shape)
        narrow = packed if packed is not None else self._get(f"{module}.weight")
        if narrow is None or narrow.dtype not in NARROW:
            return None
        numbers = unpack_fp4(narrow) if narrow.dtype is torch.uint8 else narrow.float()
        zero = self._get(f"{module}.weight_zero_point")
        group = self._config.group(module)
        return self._widened(module, numbers, group, None if zero is None else zero.float())

    def _from_words(
        self, module: str, packed: torch.Tensor, group: Group, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Signed numbers, stored with an offset."""
        stated = self._get(f"{module}.weight_shape")
        rows, columns = shape if stated is None else map(int, stated.tolist())
        offset = 1 << (group.bits - 1)
        numbers = _unpack_bits(packed, group.bits, columns).float() - offset
        zero = self._get(f"{module}.weight_zero_point")
        if zero is not None and zero.dtype is torch.int32:
            words = zero.T.contiguous()
            zero = _unpack_bits(words, group.bits, rows).T.float() - offset
        return self._widened(module, numbers, group, None if zero is None else zero.float())

    def _by_columns(
        self, module: str, words: torch.Tensor, group: Group, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """AWQ and GPTQ hold [in, out], and what belongs to groups as [groups, out]."""
        rows, columns = shape
        zeros = self._needed(f"{module}.qzeros")
        scales = self._needed(f"{module}.scales").float().T
        if self._config.method == "awq":
            numbers, zero = _unpack_awq(words).T, _unpack_awq(zeros).T
        else:
            numbers = _unpack_bits(words.T.contiguous(), group.bits, columns)
            zero = _unpack_bits(zeros, group.bits, rows).T + self._config.zero_offset
        places = self._get(f"{module}.g_idx")
        if places is None or not places.numel():
            size = group.block[1] or columns
            if scales.shape[1] != -(-columns // size):
                raise ValueError(f"{scales.shape[1]} groups of {size} for {columns} columns")
            places = torch.arange(columns) // size
        places = places.long()
        wide = (numbers.float() - zero.float()[:, places]) * scales[:, places]
        return wide.to(self._dtype)

    def _widened(
        self, module: str, numbers: torch.Tensor, group: Group, zero: torch.Tensor | None
    ) -> torch.Tensor:
        scale = self._scale(module)
        places = self._get(f"{module}.weight_g_idx")  # the group that each column has
        if places is not None and scale.shape[1] > 1:
            scale = scale[:, places.long()]
            zero = None if zero is None else zero[:, places.long()]
            group = replace(group, block=(group.block[0], 1))
        rows, columns = numbers.shape
        block = (group.block[0] or rows, group.block[1] or columns)
        if zero is not None:
            numbers = numbers - _spread(_matrix(zero), block, (rows, columns))
        return (numbers * _spread(scale, block, (rows, columns))).to(self._dtype)

    def _scale(self, module: str) -> torch.Tensor:
        """[a, b], each of a block."""
        inverse = self._get(f"{module}.weight_scale_inv")  # which multiplies, like the others
        stored = self._needed(f"{module}.weight_scale") if inverse is None else inverse
        scale = _matrix(_scale_values(stored))
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


def _unpack_bits(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """words [rows, n] int32, each row a stream of unsigned numbers of `bits` bits, the lowest bits
    first -> [rows, count] int16. Raises ValueError where there are more or fewer words than that
    takes: the numbers have another width then."""
    rows, width = words.shape
    if width != -(-count * bits // 32):
        raise ValueError(
            f"{width} words in a row hold {width * 32 // bits} numbers of {bits} bits, not {count}"
        )
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


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """words [rows, columns / 8] int32 of AWQ's "gemm" layout -> [rows, columns] int16."""
    numbers = _unpack_bits(words, 4, 8 * words.shape[1])
    return numbers.unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(1)


def _scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Scales as they are stored, floats of any width or exponents (uint8), as float32."""
    if scale.dtype is torch.uint8:
        return e8m0(scale)
    return scale.float()


def _spread(scale: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """scale [a, b], each for a block of so many rows and columns -> something that multiplies
    [rows, columns] of `shape`; the last blocks may be cut off. Raises ValueError."""
    for dim in (0, 1):
        is_whole = dim == 0 and block[0] in (1, shape[0])  # one for each row, or for all
        if scale.shape[dim] != -(-shape[dim] // block[dim]) and not (
            is_whole and scale.shape[0] in (1, shape[0])
        ):
            raise ValueError(f"scales {[*scale.shape]} of blocks {[*block]} for {[*shape]} numbers")
        if scale.shape[dim] not in (1, shape[dim]):
            scale = scale.repeat_interleave(block[dim], dim).narrow(dim, 0, shape[dim])
    return scale


def _chunks(words: torch.Tensor, numbers: torch.Tensor) -> zip[tuple[torch.Tensor, torch.Tensor]]:
    rows = max(1, _CHUNK_WORDS // max(1, words.shape[1]))
    return zip(words.split(rows), numbers.split(rows), strict=True)
