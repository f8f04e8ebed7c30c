"""Lines of a trace file, whatever it is compressed with, and checks of what is in them."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

MAX_LINE_BYTES = 64 << 20
MAX_TOKENS = 1 << 24  # in a prompt or an answer
MAX_ID = (1 << 63) - 1
_GZIP_MAGIC, _XZ_MAGIC = b"\x1f\x8b", b"\xfd7zXZ\x00"


class TraceError(Exception):
    """One line for the user: file, line, value, and what would be right."""


class BadValueError(Exception):
    """What is wrong with a line; the reader adds where it is."""


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The unpacked bytes of a file. Raises TraceError, also for what fails while it is read."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_XZ_MAGIC))
            file.seek(0)
            if magic.startswith(_GZIP_MAGIC):
                yield io.BufferedReader(gzip.GzipFile(fileobj=file))
            elif magic == _XZ_MAGIC:
                with lzma.LZMAFile(file) as unpacked:
                    yield cast(BinaryIO, unpacked)
            else:
                yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"{path}: {reason}") from error


def lines_of(stream: BinaryIO, path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise TraceError(
                f"{path}, line {number}: byte {line[error.start]:#04x} is not UTF-8 text"
            ) from error
        if text:
            yield number, text


def parsed(text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        raise BadValueError(f"{shown(text)} is not JSON; expected an object") from None
    if not isinstance(line, dict):
        raise BadValueError(f"{shown(text)} is not a JSON object")
    return line


def count(line: dict[str, Any], key: str, least: int, most: int = MAX_TOKENS) -> int:
    value = member(line, key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BadValueError(
            f"{key} is {shown(value)}; expected a whole number from {least} to {most}"
        )
    return value


def amount(line: dict[str, Any], key: str, unit: str) -> float:
    value = member(line, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_ID:
        raise BadValueError(f"{key} is {shown(value)}; expected {unit}, 0 or more")
    return float(value)


def hash_ids(line: dict[str, Any], key: str = "hash_ids") -> list[int]:
    value = member(line, key)
    if not isinstance(value, list):
        raise BadValueError(f"{key} is {shown(value)}; expected a list of whole numbers")
    if (
        {*map(type, value)} <= {int}
        and min(value, default=0) >= 0
        and max(value, default=0) <= MAX_ID
    ):
        return value
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_ID:
            raise BadValueError(f"{key} has {shown(item)}; expected whole numbers, 0 or more")
    return value


def member(line: dict[str, Any], key: str) -> Any:
    if key not in line:
        raise BadValueError(f"there is no {key} among {shown(', '.join(line) or 'no keys')}")
    return line[key]


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
