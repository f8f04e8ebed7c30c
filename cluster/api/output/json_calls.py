"""Formats whose calls are JSON objects that name the tool: Hermes (also Qwen 2.5 and 3), Llama 3
and 4, and Mistral."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar

from kvrelay.cluster.api.output.events import Events
from kvrelay.cluster.api.output.format import CallSyntax, Parsed, ToolFormat
from kvrelay.cluster.api.output.reader import Read, Reader
from kvrelay.cluster.api.output.tools import Tool

_ARGUMENTS = ("arguments", "parameters")


def call_object(reader: Reader, events: Events, names: Collection[str] | None = None) -> Read[bool]:
    """Read an object with a name, one of `names`, and arguments. False: it is not one."""
    if not (yield from reader.literal("{")):
        return False
    named = has_arguments = False
    early: list[str] = []  # arguments that come before the name
    while True:
        yield from reader.space()
        if (yield from reader.literal("}")):
            break
        key = yield from reader.json_string()
        yield from reader.space()
        if key is None or not (yield from reader.literal(":")):
            return named
        yield from reader.space()
        if key == "name" and not named:
            name = yield from reader.json_string()
            if not name or (names is not None and name not in names):
                return False
            events.call(name)
            events.arguments("".join(early))
            named = True
        elif key in _ARGUMENTS and not has_arguments:
            has_arguments = True
            emit = events.arguments if named else early.append
            if (yield from reader.peek()) == '"':  # JSON within JSON
                text = yield from reader.json_string()
                if text is None:
                    return named
                emit(text.strip() or "{}")
            elif not (yield from reader.json_value(emit)):
                return named
        elif not (yield from reader.json_value()):
            return named
        yield from reader.space()
        yield from reader.literal(",")
    if named and not has_arguments:
        events.arguments("{}")
    return named


class Hermes(ToolFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""

    name = "hermes"
    begin, end = "<tool_call>", "</tool_call>"
    markers = (begin, end)

    def parse(self, reader: Reader, events: Events, tools: Sequence[Tool]) -> Parsed:
        while (yield from reader.until(self.begin, emit=events.text)) is not None:
            start = reader.at - len(self.begin)
            yield from reader.space()
            if not (yield from call_object(reader, events)):
                events.text(reader.text[start : reader.at])
                continue
            yield from reader.up_to(self.end, self.begin)
            yield from reader.literal(self.end)

    def syntax(self, tool: Tool) -> CallSyntax:
        name = json.dumps(tool.name, ensure_ascii=False)
        begin = f'{self.begin}\n{{"name": {name}, "arguments": '
        return CallSyntax(self.begin, begin, f"}}\n{self.end}", "\n")


class Llama3(ToolFormat):
    """`{"name": ..., "parameters": {...}}`, where nothing else is said, or after a tag. Without
    the tag it has to name a tool, since an answer may be an object with a name too."""

    name = "llama3_json"
    opening = tag = "<|python_tag|>"
    markers: ClassVar[tuple[str, ...]] = (tag,)

    def parse(self, reader: Reader, events: Events, tools: Sequence[Tool]) -> Parsed:
        start = reader.at
        names = {tool.name for tool in tools}
        while True:
            yield from reader.space()
            is_tagged = yield from reader.literal(self.tag)
            yield from reader.space()
            if (yield from call_object(reader, events, None if is_tagged else names)):
                yield from reader.space()
                yield from reader.literal(";")
                start = reader.at
                continue
            events.text(reader.text[start : reader.at])
            if (yield from reader.until(self.tag, emit=events.text)) is None:
                return
            reader.at = start = reader.at - len(self.tag)

    def syntax(self, tool: Tool) -> CallSyntax:
        name = json.dumps(tool.name, ensure_ascii=False)
        return CallSyntax("", f'{{"name": {name}, "parameters": ', "}", "; ")


class Llama4(Llama3):
    """Llama 3's objects one after another, behind `<|python_start|>text<|python_end|>` or within
    these. Without them the first has to name a tool."""

    name = "llama4_json"
    begin = "<|python_start|>"
    opening = tag = "<|python_end|>"
    markers = (begin, tag)

    def parse(self, reader: Reader, events: Events, tools: Sequence[Tool]) -> Parsed:
        names: Collection[str] | None = {tool.name for tool in tools}
        while True:
            start = reader.at
            yield from reader.space()
            if (yield from call_object(reader, events, names)):
                yield from reader.space()
                yield from reader.literal(";")
                continue
            events.text(reader.text[start : reader.at])
            if (yield from reader.until(*self.markers, emit=events.text)) is None:
                return
            names = None

    def syntax(self, tool: Tool) -> CallSyntax:
        return replace(super().syntax(tool), between="")


class Mistral(ToolFormat):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}`."""

    name = "mistral"
    begin, call_id, args = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
    markers = (begin, call_id, args)

    def __init__(self, template: str = "") -> None:
        self._named_first = self.args in template

    def parse(self, reader: Reader, events: Events, tools: Sequence[Tool]) -> Parsed:
        while (yield from reader.until(self.begin, emit=events.text)) is not None:
            start = reader.at - len(self.begin)
            yield from reader.space()
            if (yield from reader.peek()) == "[":
                good = yield from self._array(reader, events)
            else:
                good = yield from self._named(reader, events)
            if not good:
                events.text(reader.text[start : reader.at])

    def _array(self, reader: Reader, events: Events) -> Read[bool]:
        yield from reader.literal("[")
        begun = False
        while True:
            yield from reader.space()
            start = reader.at
            if not (yield from call_object(reader, events)):
                break
            begun = True
            yield from reader.space()
            if not (yield from reader.literal(",")):
                yield from reader.literal("]")
                return True
        if begun and not (yield from reader.literal("]")):
            events.text(reader.text[start : reader.at])
        return begun

    def _named(self, reader: Reader, events: Events) -> Read[bool]:
        names: list[str] = []
        marker = yield from reader.until(self.args, self.call_id, "{", emit=names.append)
        name = "".join(names).strip()
        if marker is None or not name:
            return False
        if marker == self.call_id:
            marker = yield from reader.until(self.args, "{")
        if marker == "{":
            reader.at -= 1
        events.call(name)
        yield from reader.space()
        yield from reader.json_value(events.arguments)
        return True

    def new_id(self, seed: str) -> str:
        """Its template takes nine characters, no others."""
        return super().new_id(seed)[-9:]

    def syntax(self, tool: Tool) -> CallSyntax:
        if self._named_first:
            return CallSyntax(self.begin, f"{self.begin}{tool.name}{self.args}", "", "")
        name = json.dumps(tool.name, ensure_ascii=False)
        begin, end = f'{{"name": {name}, "arguments": ', "}"
        return CallSyntax(self.begin, begin, end, ", ", f"{self.begin}[", "]")
