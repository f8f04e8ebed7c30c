"""Reads traces that others have published: Mooncake's JSON lines and Azure's CSV.

A file is known by what is in it, whatever it is called, compressed with gzip or not. What a line
must not say ends the reading with one message: file, line, value, and what would be right. What can
be mended is mended, and stated in the notes of the trace. Arrivals count from the first one.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO

from kvrelay.lab.replay.trace import Trace, TraceRequest
from kvrelay.router.config import MAX_PRIORITY

BLOCK_TOKENS = 512  # both in what Mooncake publishes and in what follows it
MAX_LINE_BYTES = 16 << 20
MAX_TOKENS = 1 << 24  # in a prompt or an answer
MAX_ID = (1 << 63) - 1
_GZIP_MAGIC = b"\x1f\x8b"
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(Exception):
    """One line for the user: file, line, value, and what would be right."""


class _BadValueError(Exception):
    """What is wrong with a line; the reader adds where it is."""


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """The trace in `path`, or the first `limit` requests of it. Raises TraceError."""
    try:
        with path.open("rb") as file:
            stream = _unpacked(file)
            lines = _lines(stream, path)
            name = path.name.split(".")[0]
            return _mended(name, *_requests(lines, path, limit))
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"{path}: {reason}") from error


def _unpacked(file: BinaryIO) -> BinaryIO:
    magic = file.read(len(_GZIP_MAGIC))
    file.seek(0)
    if magic != _GZIP_MAGIC:
        return file
    return io.BufferedReader(gzip.GzipFile(fileobj=file))


def _lines(stream: BinaryIO, path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(
                f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes; one request a line"
            )
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise TraceError(
                f"{path}, line {number}: byte {line[error.start]:#04x} is not UTF-8 text"
            ) from error
        if text:
            yield number, text


def _requests(
    lines: Iterator[tuple[int, str]], path: Path, limit: int | None
) -> tuple[list[TraceRequest], list[str]]:
    """What the lines say, in their order, and notes."""
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{path}: empty; expected one request a line")
    number, text = first
    parse = _mooncake
    if text.startswith("{"):
        lines = _with_first(first, lines)
    else:
        columns = [name.strip() for name in next(csv.reader([text]))]
        if not set(_AZURE_COLUMNS) <= set(columns):
            raise TraceError(
                f"{path}, line {number}: {_shown(text)} begins neither a Mooncake trace (JSON "
                f"objects) nor an Azure one (a header with {', '.join(_AZURE_COLUMNS)})"
            )
        parse = _azure_parser(columns)
    requests = []
    for number, text in islice(lines, limit):
        try:
            requests.append(parse(text))
        except _BadValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
    if not requests:
        raise TraceError(f"{path}: no request in it; expected one a line")
    notes = []
    if not any(request.block_ids for request in requests):
        notes.append("the trace does not say what prompts share: nothing is reused")
    return requests, notes


def _with_first(
    first: tuple[int, str], rest: Iterator[tuple[int, str]]
) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _mooncake(text: str) -> TraceRequest:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        raise _BadValueError(f"{_shown(text)} is not JSON; expected an object") from None
    if not isinstance(line, dict):
        raise _BadValueError(f"{_shown(text)} is not a JSON object")
    request = TraceRequest(
        at_s=_milliseconds(line) / 1e3,
        input_length=_count(line, "input_length", 1),
        output_length=_count(line, "output_length", 0),
        block_ids=_block_ids(line),
        session=None if line.get("session_id") is None else str(_name(line, "session_id")),
        tenant=_name(line, "tenant"),
        priority=_count(line, "priority", -MAX_PRIORITY, MAX_PRIORITY) if "priority" in line else 0,
        model=_name(line, "model"),
    )
    wanted = math.ceil(request.input_length / BLOCK_TOKENS)
    if request.block_ids and len(request.block_ids) != wanted:
        raise _BadValueError(
            f"hash_ids has {len(request.block_ids)} ids; an input_length of "
            f"{request.input_length} takes {wanted} blocks of {BLOCK_TOKENS} tokens"
        )
    return request


def _milliseconds(line: dict[str, Any]) -> float:
    value = _member(line, "timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_ID:
        raise _BadValueError(f"timestamp is {_shown(value)}; expected milliseconds, 0 or more")
    return float(value)


def _count(line: dict[str, Any], key: str, least: int, most: int = MAX_TOKENS) -> int:
    value = _member(line, key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _BadValueError(
            f"{key} is {_shown(value)}; expected a whole number from {least} to {most}"
        )
    return value


def _block_ids(line: dict[str, Any]) -> tuple[int, ...]:
    value = _member(line, "hash_ids")
    if not isinstance(value, list):
        raise _BadValueError(f"hash_ids is {_shown(value)}; expected a list of whole numbers")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_ID:
            raise _BadValueError(f"hash_ids has {_shown(item)}; expected whole numbers, 0 or more")
    return tuple(value)


def _name(line: dict[str, Any], key: str) -> str:
    value = line.get(key, "")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _BadValueError(f"{key} is {_shown(value)}; expected a text")
    return str(value)


def _member(line: dict[str, Any], key: str) -> Any:
    if key not in line:
        raise _BadValueError(f"there is no {key} among {_shown(', '.join(line) or 'no keys')}")
    return line[key]


def _azure_parser(columns: list[str]) -> Any:
    at, context, generated = (columns.index(name) for name in _AZURE_COLUMNS)

    def parse(text: str) -> TraceRequest:
        cells = [cell.strip() for cell in next(csv.reader([text]))]
        if len(cells) != len(columns):
            raise _BadValueError(
                f"{_shown(text)} has {len(cells)} columns; expected {len(columns)}: "
                f"{', '.join(columns)}"
            )
        return TraceRequest(
            at_s=_seconds(cells[at]),
            input_length=_cell(cells[context], columns[context], 1),
            output_length=_cell(cells[generated], columns[generated], 0),
        )

    return parse


def _seconds(cell: str) -> float:
    try:
        moment = datetime.fromisoformat(cell)  # it drops the last of seven decimals: 100 ns
    except ValueError:
        raise _BadValueError(
            f"TIMESTAMP is {_shown(cell)}; expected one like 2023-11-16 18:15:46.6805900"
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return moment.timestamp()


def _cell(cell: str, column: str, least: int) -> int:
    # int() alone would also take "1_000" and " 7".
    if not (cell.isascii() and cell.isdigit() and len(cell) < 19) or int(cell) < least:
        raise _BadValueError(
            f"{column} is {_shown(cell)}; expected a whole number, {least} or more"
        )
    if int(cell) > MAX_TOKENS:
        raise _BadValueError(f"{column} is {cell}; expected at most {MAX_TOKENS}")
    return int(cell)


def _mended(name: str, requests: list[TraceRequest], notes: list[str]) -> Trace:
    """Sorted, counted from the first arrival, with an answer for each and chained ids."""
    out_of_order = sum(later.at_s < earlier.at_s for earlier, later in pairwise(requests))
    if out_of_order:
        requests.sort(key=lambda request: request.at_s)  # stable: groups keep their order
        notes.append(
            f"arrivals went back in time {out_of_order} times; the requests have been sorted"
        )
    silent = sum(request.output_length == 0 for request in requests)
    if silent:
        notes.append(f"{silent} requests without an answer get one of 1 token")
    chained, num_renamed = _chained(request.block_ids for request in requests)
    if num_renamed:
        notes.append(
            f"{num_renamed} hash_ids follow different beginnings; they count as different blocks"
        )
    start_s = requests[0].at_s
    return Trace(
        name=name,
        requests=tuple(
            replace(
                request,
                at_s=request.at_s - start_s,
                output_length=max(1, request.output_length),
                block_ids=ids,
            )
            for request, ids in zip(requests, chained, strict=True)
        ),
        block_tokens=BLOCK_TOKENS,
        notes=tuple(notes),
    )


def _chained(prompts: Iterable[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], int]:
    """Prompts in which equal ids mean equal beginnings, by a new id for each (what precedes, id);
    and how many ids had to be made different."""
    names: dict[tuple[int, int], int] = {}
    chained = []
    for prompt in prompts:
        before, ids = -1, []
        for block_id in prompt:
            before = names.setdefault((before, block_id), len(names))
            ids.append(before)
        chained.append(tuple(ids))
    return chained, len(names) - len({block_id for _, block_id in names})


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
