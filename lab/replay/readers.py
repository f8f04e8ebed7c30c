"""Reads traces that others have published: Mooncake's JSON lines, Azure's CSV, agents' sessions.

A file is known by what is in it, compressed with gzip, xz or not. What a line must not say ends the
reading with one message: file, line, value, and what would be right. What can be mended is mended,
and stated in the notes of the trace. Arrivals count from the first one.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

from kvrelay.lab.replay.agents import Draw, are_sessions, read_sessions
from kvrelay.lab.replay.lines import (
    MAX_TOKENS,
    BadValueError,
    TraceError,
    amount,
    count,
    hash_ids,
    lines_of,
    opened,
    parsed,
    shown,
)
from kvrelay.lab.replay.trace import Trace, TraceRequest
from kvrelay.router.config import MAX_PRIORITY

BLOCK_TOKENS = 512  # both in what Mooncake publishes and in what follows it
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_trace(path: Path, limit: int | None = None, draw: Draw = Draw()) -> Trace:
    """The trace in `path`, or the first `limit` requests of it; of agents' sessions (a file, or a
    folder of files) those that `draw` says. Raises TraceError."""
    if are_sessions(path):
        if limit is not None:
            raise TraceError(f"{path}: these are sessions; --sessions takes some of them")
        return read_sessions(path, draw)
    if draw != Draw(seed=draw.seed):
        raise TraceError(
            f"{path}: its requests do not wait for answers; --sessions, --start-rate and the like "
            "are for sessions of agents"
        )
    with opened(path) as stream:
        lines = lines_of(stream, path)
        return _mended(path.name.split(".")[0], *_requests(lines, path, limit))


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
        lines = chain((first,), lines)
    else:
        columns = [name.strip() for name in next(csv.reader([text]))]
        if not set(_AZURE_COLUMNS) <= set(columns):
            raise TraceError(
                f"{path}, line {number}: {shown(text)} begins neither a Mooncake trace (JSON "
                f"objects) nor an Azure one (a header with {', '.join(_AZURE_COLUMNS)})"
            )
        parse = _azure_parser(columns)
    requests = []
    for number, text in islice(lines, limit):
        try:
            requests.append(parse(text))
        except BadValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
    if not requests:
        raise TraceError(f"{path}: no request in it; expected one a line")
    notes = []
    if not any(request.block_ids for request in requests):
        notes.append("the trace does not say what prompts share: nothing is reused")
    return requests, notes


def _mooncake(text: str) -> TraceRequest:
    line = parsed(text)
    request = TraceRequest(
        at_s=amount(line, "timestamp", "milliseconds") / 1e3,
        input_length=count(line, "input_length", 1),
        output_length=count(line, "output_length", 0),
        block_ids=tuple(hash_ids(line)),
        session=None if line.get("session_id") is None else str(_name(line, "session_id")),
        tenant=_name(line, "tenant"),
        priority=count(line, "priority", -MAX_PRIORITY, MAX_PRIORITY) if "priority" in line else 0,
        model=_name(line, "model"),
    )
    wanted = math.ceil(request.input_length / BLOCK_TOKENS)
    if request.block_ids and len(request.block_ids) != wanted:
        raise BadValueError(
            f"hash_ids has {len(request.block_ids)} ids; an input_length of "
            f"{request.input_length} takes {wanted} blocks of {BLOCK_TOKENS} tokens"
        )
    return request


def _name(line: dict[str, Any], key: str) -> str:
    value = line.get(key, "")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadValueError(f"{key} is {shown(value)}; expected a text")
    return str(value)


def _azure_parser(columns: list[str]) -> Any:
    at, context, generated = (columns.index(name) for name in _AZURE_COLUMNS)

    def parse(text: str) -> TraceRequest:
        cells = [cell.strip() for cell in next(csv.reader([text]))]
        if len(cells) != len(columns):
            raise BadValueError(
                f"{shown(text)} has {len(cells)} columns; expected {len(columns)}: "
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
        raise BadValueError(
            f"TIMESTAMP is {shown(cell)}; expected one like 2023-11-16 18:15:46.6805900"
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return moment.timestamp()


def _cell(cell: str, column: str, least: int) -> int:
    # int() alone would also take "1_000" and " 7".
    if not (cell.isascii() and cell.isdigit() and len(cell) < 19) or int(cell) < least:
        raise BadValueError(f"{column} is {shown(cell)}; expected a whole number, {least} or more")
    if int(cell) > MAX_TOKENS:
        raise BadValueError(f"{column} is {cell}; expected at most {MAX_TOKENS}")
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


def _chained(prompts: Iterable[Sequence[int]]) -> tuple[list[tuple[int, ...]], int]:
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
