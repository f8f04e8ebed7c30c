"""Formats that name the tool between markers, and then give its arguments as JSON: DeepSeek, Kimi,
and gpt-oss's Harmony, which marks everything."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence

from kvrelay.cluster.api.output.events import Events
from kvrelay.cluster.api.output.format import CallSyntax, Parsed, ToolFormat
from kvrelay.cluster.api.output.reader import Emit, Read, Reader
from kvrelay.cluster.api.output.tools import Tool

_FENCE = "```"


class _InSection(ToolFormat):
    """`section`, then calls: `begin` head `args` JSON `end`."""

    section: str
    section_end: str
    begin: str
    args: str
    end: str

    @abstractmethod
    def named(self, head: str, reader: Reader) -> Read[tuple[str, str | None]]:
        """The tool of a call and the call's own id. An empty name: it is no call."""

    def before_json(self, reader: Reader) -> Read[None]:
        yield from reader.space()

    def parse(self, reader: Reader, events: Events, tools: Sequence[Tool]) -> Parsed:
        outside = (self.begin, self.section, self.section_end)
        while (marker := (yield from reader.until(*outside, emit=events.text))) is not None:
            if marker != self.begin:
                continue
            start = reader.at - len(marker)
            head: list[str] = []
            name, call_id = "", None
            if (yield from reader.until(self.args, self.end, emit=head.append)) == self.args:
                name, call_id = yield from self.named("".join(head).strip(), reader)
            if not name:
                events.text(reader.text[start : reader.at])
                continue
            events.call(name, call_id)
            yield from self.before_json(reader)
            yield from reader.json_value(events.arguments)
            yield from reader.up_to(self.end, *outside)
            yield from reader.literal(self.end)


class DeepSeek(_InSection):
    """V3 writes `function<sep>name` and the arguments in a fence, V3.1 `name<sep>{...}`."""

    name = "deepseek"
    section, section_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    begin, args, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    markers = (section, begin, args, end, section_end)
    opening = begin

    def __init__(self, template: str = "") -> None:
        self._fenced = f"{_FENCE}json" in template

    def named(self, head: str, reader: Reader) -> Read[tuple[str, str | None]]:
        if head != "function" or (yield from reader.peek()) == "{":
            return head, None
        names: list[str] = []
        ended = yield from reader.until("\n", emit=names.append)
        return ("".join(names).strip() if ended else ""), None

    def before_json(self, reader: Reader) -> Read[None]:
        yield from reader.space()
        if (yield from reader.literal(_FENCE)):
            yield from reader.literal("json")
            yield from reader.space()

    def syntax(self, tool: Tool) -> CallSyntax:
        begin, end = f"{self.begin}{tool.name}{self.args}", self.end
        if self._fenced:
            begin = f"{self.begin}function{self.args}{tool.name}\n{_FENCE}json\n"
            end = f"\n{_FENCE}{self.end}"
        between = "\n" if self._fenced else ""
        return CallSyntax(self.section, begin, end, between, self.section, self.section_end)


class Kimi(_InSection):
    """Calls are `functions.name:0`, counted; that is also their id."""

    name = "kimi"
    section, section_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    begin, args, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    markers = (section, begin, args, end, section_end)
    opening = begin

    def named(self, head: str, reader: Reader) -> Read[tuple[str, str | None]]:
        yield from ()
        return re.sub(r":\d+$", "", head).removeprefix("functions."), head

    def syntax(self, tool: Tool) -> CallSyntax:
        begin = f"{self.begin}functions.{tool.name}:"
        section = self.section, self.section_end
        return CallSyntax(self.section, begin, self.end, "", *section, number_end=self.args)


class Harmony(ToolFormat):
    """Messages with a channel: `analysis` is reasoning, `commentary to=functions.name` a call, what
    else there is, text."""

    name = "harmony"
    start, channel, constrain = "<|start|>", "<|channel|>", "<|constrain|>"
    message, end, call = "<|message|>", "<|end|>", "<|call|>"
    markers = (start, channel, constrain, message, end, call, "<|return|>")

    def parse(self, reader: Reader, events: Events, tools: Sequence[Tool]) -> Parsed:
        last: Emit | None = None
        while True:
            header: list[str] = []
            marker = yield from reader.until(self.message, emit=header.append)
            head = "".join(header)
            if marker is None:
                if self.channel not in head and self.start not in head:
                    events.text(head)  # it does not follow the format
                return
            recipient = re.search(r"to=([^\s<]+)", head)
            emit = events.text
            if recipient is not None:
                events.call(recipient[1].removeprefix("functions."))
                emit = events.arguments
            elif re.search(r"<\|channel\|>\s*analysis", head):
                emit = events.reasoning
            if last == events.reasoning and emit != last:
                events.end_reasoning()
            elif emit == last and recipient is None:
                emit("\n\n")  # messages are paragraphs
            if recipient is not None and (yield from reader.peek()) == "{":
                yield from reader.json_value(emit)  # in whose strings markers are no markers
            yield from reader.until(self.end, self.call, "<|return|>", emit=emit)
            last = emit

    def syntax(self, tool: Tool) -> CallSyntax:
        to = f"to=functions.{tool.name} "
        begin = f"{self.channel}commentary {to}{self.constrain}json{self.message}"
        between = f"{self.call}{self.start}assistant"
        return CallSyntax(f"{self.channel}commentary to=", begin, "", between)
