"""Gemma 4's calls: values nearly as in JSON, but that texts stand between tokens of their own, and
keys as they are: `<|tool_call>call:send{to:<|"|>Ann<|"|>,copies:3}<tool_call|>`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvrelay.cluster.api.output.events import Events
from kvrelay.cluster.api.output.format import CallSyntax, Parsed, ToolFormat
from kvrelay.cluster.api.output.reader import Emit, Read, Reader, is_json
from kvrelay.cluster.api.output.tools import Tool

MAX_DEPTH = 64  # values within values


class Gemma(ToolFormat):
    name = "gemma4"
    begin, end, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    markers = (begin, end, quote)
    opening = begin

    def parse(self, reader: Reader, events: Events, tools: Sequence[Tool]) -> Parsed:
        while (yield from reader.until(self.begin, emit=events.text)) is not None:
            start, marker = reader.at - len(self.begin), None
            names: list[str] = []
            if (yield from reader.literal("call:")):
                marker = yield from reader.until("{", self.end, self.begin, emit=names.append)
            name = "".join(names).strip()
            if marker != "{" or not name:
                events.text(reader.text[start : reader.at])
                continue
            events.call(name)
            yield from self._values(reader, events.arguments, "}", 1)
            yield from reader.up_to(self.end, self.begin)
            yield from reader.literal(self.end)

    def _values(self, reader: Reader, emit: Emit, closing: str, depth: int) -> Read[bool]:
        """Read values up to `closing`, each behind its key if that is a brace; what opens them has
        been read. False: they did not end, or are none."""
        emit("{" if closing == "}" else "[")
        separator = ""
        while True:
            yield from reader.space()
            if (yield from reader.literal(closing)):
                emit(closing)
                return True
            if closing == "}":
                keys: list[str] = []
                if (yield from reader.until(":", closing, self.end, emit=keys.append)) != ":":
                    return False
                key = "".join(keys).replace(self.quote, "").strip().strip('"')
                separator += json.dumps(key, ensure_ascii=False) + ": "
            emit(separator)
            if not (yield from self._value(reader, emit, depth)):
                return False
            yield from reader.space()
            yield from reader.literal(",")
            separator = ", "

    def _value(self, reader: Reader, emit: Emit, depth: int) -> Read[bool]:
        yield from reader.space()
        if (yield from reader.literal(self.quote)):
            emit('"')
            escaped = lambda text: emit(json.dumps(text, ensure_ascii=False)[1:-1])  # noqa: E731
            ended = yield from reader.until(self.quote, emit=escaped)
            emit('"' if ended else "")
            return ended is not None
        first = yield from reader.peek()
        if first and first in "{[":
            reader.at += 1
            closing = "}" if first == "{" else "]"
            return depth < MAX_DEPTH and (yield from self._values(reader, emit, closing, depth + 1))
        if first == '"':
            return (yield from reader.json_value(emit))
        begin = reader.at
        while (char := (yield from reader.peek())) and char not in ",]}<":
            reader.at += 1
        text = reader.text[begin : reader.at].strip()
        if text and char:
            emit(text if is_json(text) else json.dumps(text, ensure_ascii=False))
        return bool(text and char)

    def syntax(self, tool: Tool) -> CallSyntax:
        raise NotImplementedError("texts are not JSON's")
