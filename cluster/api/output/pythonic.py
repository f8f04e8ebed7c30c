"""Calls as a list of Python calls, `[name(argument=value), ...]`: Llama 4 and others."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Sequence

from kvrelay.cluster.api.output.events import Events
from kvrelay.cluster.api.output.format import CallSyntax, Parsed, ToolFormat
from kvrelay.cluster.api.output.reader import Read, Reader, without_surrogates
from kvrelay.cluster.api.output.tools import Tool

_NAME = re.compile(r"[\w.:/-]+")


class Pythonic(ToolFormat):
    """Where nothing else is said, or between `<|python_start|>` and `<|python_end|>`. Without
    these the first call has to name a tool, since an answer may begin with a bracket too."""

    name = "pythonic"
    begin, end = "<|python_start|>", "<|python_end|>"
    markers = (begin, end)

    def parse(self, reader: Reader, events: Events, tools: Sequence[Tool]) -> Parsed:
        start = reader.at
        yield from reader.space()
        if (yield from reader.peek()) == "[":
            yield from self._calls(reader, events, start, {tool.name for tool in tools})
        else:
            reader.at = start
        while (yield from reader.until(self.begin, emit=events.text)) is not None:
            yield from self._calls(reader, events, reader.at - len(self.begin))

    def _calls(
        self, reader: Reader, events: Events, start: int, names: Collection[str] | None = None
    ) -> Read[None]:
        """Read a list of calls, the first of one of `names`, and the end marker. What is none is
        text."""
        yield from reader.space()
        begun = False
        good = yield from reader.literal("[")
        while good:
            yield from reader.space()
            if begun and (yield from reader.literal("]")):
                yield from reader.literal(self.end)
                return
            parts: list[str] = []
            marker = yield from reader.until("(", "]", "\n", " ", emit=parts.append)
            name = "".join(parts)
            good = marker == "(" and bool(_NAME.fullmatch(name))
            good = good and (begun or names is None or name in names)
            if good:
                begun = True
                events.call(name)
                good = yield from self._arguments(reader, events)
                yield from reader.space()
                yield from reader.literal(",")
        if not begun:
            events.text(reader.text[start : reader.at])
            return
        yield from reader.up_to(self.end, self.begin)
        yield from reader.literal(self.end)

    def _arguments(self, reader: Reader, events: Events) -> Read[bool]:
        separator = "{"
        while True:
            yield from reader.space()
            if (yield from reader.literal(")")):
                events.arguments("{}" if separator == "{" else "}")
                return True
            keys: list[str] = []
            if (yield from reader.until("=", ")", emit=keys.append)) != "=":
                return False
            begin = reader.at
            if not (yield from _value(reader)):
                return False
            text = _as_json(reader.text[begin : reader.at].strip())
            key = json.dumps("".join(keys).strip(), ensure_ascii=False)
            events.arguments(f"{separator}{key}: {text}")
            separator = ", "
            yield from reader.literal(",")

    def syntax(self, tool: Tool) -> CallSyntax:
        raise NotImplementedError("values are Python's, not JSON")


def _as_json(literal: str) -> str:
    """A Python literal's value; what is none is text."""
    try:
        value = ast.literal_eval(literal)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        text = json.dumps(literal, ensure_ascii=False)
    return without_surrogates(text)


def _value(reader: Reader) -> Read[bool]:
    """Read a Python literal, up to the comma or bracket after it. False: it did not end."""
    depth = 0
    while True:
        char = yield from reader.peek()
        if not char:
            return False
        if depth == 0 and char in ",)":
            return True
        reader.at += 1
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char in "'\"":
            while (inside := (yield from reader.peek())) != char:
                if not inside:
                    return False
                reader.at += 1
                if inside == "\\":
                    yield from reader.peek()
                    reader.at += 1
            reader.at += 1
