"""What the tests of outputs share: outputs with their events, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvrelay.cluster.api.output.dialect import OutputParser, find_format
from kvrelay.cluster.api.output.events import Arguments, CallBegin, Event, Reasoning, Text, merged
from kvrelay.cluster.api.output.tools import Tool

FENCED, NAMED_FIRST = "```json", "[ARGS]"  # what a template has that means another way of writing
TOOLS = (
    Tool(
        "send",
        {
            "type": "object",
            "properties": {
                "to": {"type": "string"},
                "note": {"type": ["string", "null"]},
                "copies": {"type": "integer"},
                "urgent": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "extra": {},
            },
        },
    ),
    Tool("ping"),
    Tool("a.b:c/d-e"),
)


@dataclass(frozen=True)
class Output:
    """`text`, and all that is read in it, in order."""

    about: str
    text: str
    events: tuple[Event, ...]
    template: str = ""


def outputs() -> dict[str, list[Output]]:
    """Those of each format, from outputs.json, where an event is a text, a thought or a call."""
    known = json.loads((Path(__file__).parent / "outputs.json").read_text())
    return {
        name: [
            Output(
                row["about"], row["text"], tuple(_events(row["events"])), row.get("template", "")
            )
            for row in rows
        ]
        for name, rows in known.items()
    }


def _events(rows: list[Any]) -> Iterator[Event]:
    for row in rows:
        if isinstance(row, str):
            yield Text(row)
        elif "reasoning" in row:
            yield Reasoning(row["reasoning"])
        else:
            yield CallBegin(row["call"], row.get("id"))
            if "arguments" in row:
                yield Arguments(row["arguments"])


def call(name: str, arguments: str = "", call_id: str | None = None) -> list[Event]:
    begin: list[Event] = [CallBegin(name, call_id)]
    return [*begin, Arguments(arguments)] if arguments else begin


def parser(name: str, template: str = "", tools: Sequence[Tool] = TOOLS) -> OutputParser:
    return OutputParser(find_format(name, template), tools)


def read(parser: OutputParser, parts: Iterable[str]) -> list[Event]:
    events = [event for part in parts for event in parser.push(part)]
    return merged(events + parser.finish())


def cut(text: str, places: Iterable[int]) -> list[str]:
    """`text` in parts that end at `places`."""
    ends = sorted({0, len(text), *(min(place, len(text)) for place in places)})
    return [text[a:b] for a, b in pairwise(ends)]


def calls_of(events: Iterable[Event]) -> list[tuple[str, Any]]:
    """Names, and arguments as values."""
    found: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            found.append((event.name, ""))
        elif isinstance(event, Arguments):
            found[-1] = (found[-1][0], found[-1][1] + event.text)
    return [(name, json.loads(text)) for name, text in found]


def text_of(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))
