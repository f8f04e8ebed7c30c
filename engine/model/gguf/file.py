"""Reading a GGUF file: metadata at once, tensors when asked for.

The header is walked here because a vocabulary is a hundred thousand small strings, for which the
`gguf` package's reader takes seconds. Unpacking quantized blocks is left to that package.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from kvrelay.engine.model.errors import ModelError

MAGIC, VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))


@dataclass(frozen=True, slots=True)
class TensorInfo:
    shape: tuple[int, ...]  # outermost first
    kind: int  # a GGMLQuantizationType
    offset: int  # bytes, from the start of the file


class GGUFFile:
    """A mapped file. `metadata` has arrays as lists; `tensors` are in the file's order."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if `path` is not a whole GGUF file of a known version."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        if self._bytes[:4] != MAGIC:
            raise ModelError(f"{path} is not a GGUF file")
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._at = 4
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError, MemoryError, OverflowError) as error:
            raise ModelError(f"{path} is damaged or truncated: {error}") from error

    def get(self, name: str, index: int | None = None) -> np.ndarray:
        """The tensor, or `index` of its outermost dimension, unpacked to float32. Raises
        ModelError."""
        from gguf.quants import dequantize

        kind, rows = self.kind(name), self._rows(name, index)
        try:
            return dequantize(rows, kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} is quantized as {kind.name}, which is not supported"
            ) from error

    def blocks(self, name: str) -> np.ndarray:
        """As it is stored: uint8 [..., blocks of a row, bytes of a block]. Raises ModelError."""
        from gguf import GGML_QUANT_SIZES

        rows, (_, block_bytes) = self._rows(name, None), GGML_QUANT_SIZES[self.kind(name)]
        return rows.reshape(*rows.shape[:-1], -1, block_bytes)

    def _rows(self, name: str, index: int | None) -> np.ndarray:
        """uint8 [..., bytes of a row]"""
        from gguf import GGML_QUANT_SIZES

        info = self.tensors[name]
        per_block, block_bytes = GGML_QUANT_SIZES[self.kind(name)]
        row_bytes = info.shape[-1] // per_block * block_bytes
        shape, offset = info.shape[:-1], info.offset
        if index is not None:
            shape = shape[1:]
            offset += index * prod(shape) * row_bytes
        try:
            raw = np.frombuffer(self._bytes, np.uint8, prod(shape) * row_bytes, offset)
        except ValueError:
            raise ModelError(
                f"{self.path} is truncated: tensor {name} reaches to byte "
                f"{offset + prod(shape) * row_bytes:,}, the file has {len(self._bytes):,}"
            ) from None
        return raw.reshape(*shape, row_bytes)

    def kind(self, name: str) -> Any:
        """Returns a GGMLQuantizationType. Raises ModelError."""
        from gguf import GGMLQuantizationType

        info = self.tensors[name]
        try:
            return GGMLQuantizationType(info.kind)
        except ValueError:
            raise ModelError(
                f"{self.path}: tensor {name} has the unknown quantization {info.kind}"
            ) from None

    def _read_header(self) -> None:
        version, num_tensors, num_values = self._take("IQQ")
        if version not in VERSIONS:
            raise ModelError(f"{self.path} is GGUF version {version}; supported: {VERSIONS}")
        for _ in range(num_values):
            key = self._string()
            self.metadata[key] = self._value(self._take("I")[0])
        table = []
        for _ in range(num_tensors):
            name = self._string()
            shape = self._take(f"{self._take('I')[0]}Q")
            table.append((name, shape[::-1], *self._take("IQ")))
        align = self.metadata.get("general.alignment", 32)
        data = -(-self._at // align) * align
        for name, shape, kind, offset in table:
            self.tensors[name] = TensorInfo(shape, kind, data + offset)

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self._bytes, self._at)
        self._at += struct.calcsize("<" + form)
        return values

    def _string(self) -> str:
        (length,) = self._take("Q")
        if self._at + length > len(self._bytes):
            raise struct.error("a string reaches past the end of the file")
        self._at += length
        return self._bytes[self._at - length : self._at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._take(_SCALARS[kind])[0]
        element, count = self._take("IQ")
        if count > len(self._bytes):
            raise struct.error(f"an array of {count} elements")
        if element in (_STRING, _ARRAY):
            return [self._value(element) for _ in range(count)]
        return list(self._take(f"{count}{_SCALARS[element]}"))
