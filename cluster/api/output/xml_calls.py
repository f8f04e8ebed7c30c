"""Formats that write each argument between tags, a text as it is: Qwen3-Coder, Seed-OSS,
GLM and MiniMax.

What goes to the client is JSON. A text is sent as it comes; of another value the type that the
schema gives it is needed, so it is sent once it is there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvrelay.cluster.api.output.events import Events
from kvrelay.cluster.api.output.format import CallSyntax, ParameterSyntax, Parsed, ToolFormat
from kvrelay.cluster.api.output.reader import Read, Reader, is_json
from kvrelay.cluster.api.output.tools import Tool


def as_json(text: str, kind: str) -> str:
    """The value that `text` stands for, of a parameter of type `kind`; "": it is not known."""
    stripped = text.strip()
    if kind == "boolean" and stripped.lower() in ("true", "false"):
        return stripped.lower()
    if stripped in ("null", "None"):
        return "null"
    return stripped if is_json(stripped) else json.dumps(text, ensure_ascii=False)


def read_arguments(
    reader: Reader, events: Events, tool: Tool, syntax: ParameterSyntax, *ends: str
) -> Read[None]:
    """Read parameters up to the first of `ends`."""
    separator = "{"
    while True:
        marker = yield from reader.until(syntax.key_begin, *ends)
        if marker is None:
            return
        if marker != syntax.key_begin:
            break
        keys: list[str] = []
        if (yield from reader.until(syntax.key_end, emit=keys.append)) is None:
            return
        key = "".join(keys).strip()
        events.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        if syntax.value_begin:
            yield from reader.until(syntax.value_begin)
        yield from reader.literal(syntax.pad)
        kind = tool.type_of(key) if tool.has(key) else "string"
        closing = (syntax.pad + syntax.value_end, syntax.value_end)
        if "null" in tool.types_of(key) and (yield from reader.literal(f"null{closing[0]}")):
            events.arguments("null")
            continue
        if kind == "string":
            events.arguments('"')
            ended = yield from reader.until(*closing, emit=lambda t: events.arguments(_escaped(t)))
            if ended is None:
                return
            events.arguments('"')
            continue
        begin = reader.at
        if not (yield from reader.json_value()):  # in whose strings tags are no tags
            reader.at = begin
        values = [reader.text[begin : reader.at]]
        if (yield from reader.until(*closing, emit=values.append)) is None:
            return
        events.arguments(as_json("".join(values), kind))
    events.arguments("{}" if separator == "{" else "}")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _tool(tools: Sequence[Tool], name: str) -> Tool:
    return next((tool for tool in tools if tool.name == name), Tool(name))


class _Tagged(ToolFormat):
    """`name_begin` name `name_end` parameters `call_end`, in a section."""

    section: str
    section_end: str
    name_begin: str
    name_end: str
    call_end: str
    parameters: ParameterSyntax

    def parse(self, reader: Reader, events: Events, tools: Sequence[Tool]) -> Parsed:
        outside = (self.section, self.section_end, self.name_begin)
        has_called = False  # in this section
        while (marker := (yield from reader.until(*outside, emit=events.text))) is not None:
            start = reader.at - len(marker)
            if marker == self.section_end:
                events.text("" if has_called else marker)
                has_called = False
                continue
            if marker == self.section:
                yield from reader.space()
                if not (yield from reader.literal(self.name_begin)):
                    events.text(reader.text[start : reader.at])
                    continue
            names: list[str] = []
            if (yield from reader.until(self.name_end, emit=names.append)) is None:
                events.text(reader.text[start : reader.at])
                continue
            name = "".join(names).strip()
            if not name:
                events.text(reader.text[start : reader.at])
                continue
            events.call(name)
            has_called = True
            tool, ends = _tool(tools, name), (self.call_end, self.section_end)
            yield from read_arguments(reader, events, tool, self.parameters, *ends)

    def syntax(self, tool: Tool) -> CallSyntax:
        begin = f"{self.name_begin}{tool.name}{self.name_end}\n"
        section = f"{self.section}\n", f"\n{self.section_end}"
        end = self.call_end
        return CallSyntax(self.section, begin, end, "\n", *section, self.parameters)


class Qwen3Coder(_Tagged):
    name = "qwen3_coder"
    section, section_end = "<tool_call>", "</tool_call>"
    name_begin, name_end, call_end = "<function=", ">", "</function>"
    opening = name_begin
    parameters = ParameterSyntax("<parameter=", ">", "</parameter>", pad="\n")
    markers = (section, section_end)

    def syntax(self, tool: Tool) -> CallSyntax:
        call = super().syntax(tool)
        begin, end = f"{call.first}{call.begin}", f"{call.end}{call.last}"
        return CallSyntax(self.section, begin, end, "\n", parameters=self.parameters)


class SeedOss(Qwen3Coder):
    name = "seed_oss"
    section, section_end = "<seed:tool_call>", "</seed:tool_call>"
    markers = (section, section_end)


class MiniMax(_Tagged):
    name = "minimax"
    section, section_end = "<minimax:tool_call>", "</minimax:tool_call>"
    name_begin, name_end, call_end = '<invoke name="', '">', "</invoke>"
    opening = name_begin
    parameters = ParameterSyntax('<parameter name="', '">', "</parameter>")
    markers = (section, section_end)


class Glm(ToolFormat):
    """`<tool_call>name`, and each argument as a key and a value."""

    name = "glm"
    begin, end, key_begin = "<tool_call>", "</tool_call>", "<arg_key>"
    parameters = ParameterSyntax(key_begin, "</arg_key>", "</arg_value>", "<arg_value>")
    markers = (begin, end, key_begin, "</arg_key>", "<arg_value>", "</arg_value>")
    lead = "\n"

    def parse(self, reader: Reader, events: Events, tools: Sequence[Tool]) -> Parsed:
        while (yield from reader.until(self.begin, emit=events.text)) is not None:
            start = reader.at - len(self.begin)
            names: list[str] = []
            marker = yield from reader.until(self.key_begin, self.end, emit=names.append)
            name = "".join(names).strip()
            if marker is None or not name:
                events.text(reader.text[start : reader.at])
                continue
            reader.at -= len(marker)
            events.call(name)
            tool = _tool(tools, name)
            yield from read_arguments(reader, events, tool, self.parameters, self.end)

    def syntax(self, tool: Tool) -> CallSyntax:
        begin = f"{self.begin}{tool.name}\n"
        return CallSyntax(self.begin, begin, self.end, "\n", parameters=self.parameters)
