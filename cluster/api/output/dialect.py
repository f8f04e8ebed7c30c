"""How one model writes: the format of tool calls that its chat template implies, whether it reasons
first, and the parser that turns an output into events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvrelay.cluster.api.output.events import (
    CHANNEL,
    REASONING_TAGS,
    THINK,
    CallBegin,
    Event,
    Events,
    Tags,
    merged,
)
from kvrelay.cluster.api.output.format import Parsed, ToolFormat
from kvrelay.cluster.api.output.gemma_calls import Gemma
from kvrelay.cluster.api.output.json_calls import Hermes, Llama3, Llama4, Mistral
from kvrelay.cluster.api.output.marked_calls import DeepSeek, Harmony, Kimi
from kvrelay.cluster.api.output.pythonic import Pythonic
from kvrelay.cluster.api.output.reader import Read, Reader
from kvrelay.cluster.api.output.tools import Tool
from kvrelay.cluster.api.output.xml_calls import Glm, MiniMax, Qwen3Coder, SeedOss
from kvrelay.cluster.api.text.tool_prompt import knows_tools

FORMATS: dict[str, type[ToolFormat]] = {
    kind.name: kind
    for kind in (
        *(Hermes, Qwen3Coder, Llama3, Pythonic, Mistral, DeepSeek, Glm, Kimi, MiniMax, Harmony),
        *(SeedOss, Llama4, Gemma),
    )
}
_JSON_OF_LLAMA = '"parameters": dictionary of argument name'
# What a template that knows a format contains; the first that is found counts.
_SIGNS: tuple[tuple[str, type[ToolFormat]], ...] = (
    ("<|channel|>", Harmony),
    (Gemma.begin, Gemma),
    (Kimi.section, Kimi),
    (DeepSeek.begin, DeepSeek),
    (MiniMax.section, MiniMax),
    (SeedOss.section, SeedOss),
    (Glm.key_begin, Glm),
    (Qwen3Coder.name_begin, Qwen3Coder),
    (Hermes.begin, Hermes),
    (Mistral.begin, Mistral),
    (Pythonic.begin, Pythonic),
    (Llama3.tag, Llama3),
    (_JSON_OF_LLAMA, Llama3),
)


def find_format(name: str, template: str) -> ToolFormat | None:
    """name: one of FORMATS, "auto" or "none". With "auto", what `template` implies; None: nothing
    that is known."""
    kind = FORMATS.get(name)
    if name == "auto":
        kind = next((kind for sign, kind in _SIGNS if sign in template), None)
        if kind is Pythonic and _JSON_OF_LLAMA in template:  # as Llama 4 is published
            kind = Llama4
    if kind in (Mistral, DeepSeek):
        return kind(template)
    return None if kind is None else kind()


class Part(Protocol):
    """What is new of a choice, as of `cluster.api.openai.parts.Piece`."""

    @property
    def text(self) -> str: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def events(self) -> Sequence[Event]: ...


class OutputParser:
    """Owned by one choice. Life: `push` with each part of the text, then `finish`."""

    def __init__(
        self,
        tools: ToolFormat | None = None,
        given: Sequence[Tool] = (),
        *,
        thinks: Tags | None = None,
        begun: bool = False,
        ended: bool = False,
        calls_first: bool = False,
        most_calls: int | None = None,
    ) -> None:
        """tools: reads calls; None: there are none. thinks: reasoning comes first, in tags. begun:
        the prompt ended with the first of them; ended: with the second. calls_first: what does not
        begin with a call has none. most_calls: that are reported; None: all."""
        self._reader = Reader()
        self._events = Events(self._reader, most_calls)
        if ended:
            self._events.end_reasoning()
        self._tools, self._given, self._calls_first = tools, given, calls_first
        self._thinks, self._begun = thinks, begun
        self._parsed = self._parse()

    @property
    def has_calls(self) -> bool:
        return self._events.has_calls

    def read(self, text: str, *, is_last: bool) -> list[Event]:
        """What `text` adds, and if nothing follows it, what was held back."""
        events = self.push(text) if text else []
        return merged(events + self.finish()) if is_last else events

    def take(self, part: Part) -> list[Event]:
        return self.read(part.text, is_last=part.finish_reason is not None)

    def push(self, text: str) -> list[Event]:
        self._reader.text += text
        return self._go_on()

    def finish(self) -> list[Event]:
        self._reader.ended = True
        events = self._go_on()
        self._events.finish()
        return events + self._events.take()

    def _go_on(self) -> list[Event]:
        next(self._parsed, None)
        return self._events.take()

    def _parse(self) -> Parsed:
        reader, events = self._reader, self._events
        if self._thinks:
            yield from self._reasoning(*self._thinks)
        if self._tools is not None and (yield from self._may_call(self._tools)):
            yield from self._tools.parse(reader, events, self._given)
        yield from reader.all(events.text)

    def _may_call(self, tools: ToolFormat) -> Read[bool]:
        if not self._calls_first or not self._given or isinstance(tools, Harmony):
            return True
        try:
            trigger = tools.syntax(self._given[0]).trigger
        except NotImplementedError:  # a format that no grammar is made for
            return True
        if not trigger:
            return True
        reader, start = self._reader, self._reader.at
        yield from reader.space()
        begins = yield from reader.literal(trigger)
        reader.at = start
        return begins

    def _reasoning(self, think: str, think_end: str) -> Parsed:
        reader, events = self._reader, self._events
        start = reader.at
        yield from reader.space()
        if (yield from reader.literal(think)) or self._begun:
            if think == CHANNEL[0]:
                yield from reader.literal("thought\n")
            yield from reader.until(think_end, emit=events.reasoning)
            events.end_reasoning()
        else:
            reader.at = start


class ReadBefore:
    """In place of an OutputParser, where parts come with what they say."""

    def __init__(self) -> None:
        self.has_calls = False

    def take(self, part: Part) -> list[Event]:
        self.has_calls |= any(isinstance(event, CallBegin) for event in part.events)
        return [*part.events]


@dataclass(frozen=True, slots=True)
class Outside:
    """What is read by parsers of vLLM."""

    calls: bool
    reasons: bool
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # those of the chat template
    shows: bool = False  # special tokens


@dataclass(frozen=True, slots=True)
class Dialect:
    tools: ToolFormat | None = None  # None: calls are not told apart from text
    thinks: Tags | None = None  # reasoning comes first, in tags
    outside: Outside | None = None

    @classmethod
    def of(
        cls,
        template: str,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        outside: tuple[str, str] = ("", ""),
    ) -> Dialect:
        """What a chat template implies; either may be set by name instead, or "none". `outside`:
        names of parsers of vLLM that are in place of ours, for calls and for reasoning."""
        if any(outside):
            calls, reasons = outside
            own = "none" if calls else tool_parser, "none" if reasons else reasoning_parser
            return replace(cls.of(template, *own), outside=Outside(bool(calls), bool(reasons)))
        tools = find_format(tool_parser, template)
        is_silent = not knows_tools(template) and not isinstance(tools, Harmony)
        if tool_parser == "auto" and (tools is None or is_silent):
            tools = Hermes()  # the prompt describes these where the template shows no tools
        thinks = REASONING_TAGS.get(reasoning_parser)
        if reasoning_parser == "auto":
            found = (tags for tags in REASONING_TAGS.values() if all(t in template for t in tags))
            thinks = next(found, None)
        return cls(tools, thinks)

    @property
    def has_channels(self) -> bool:
        """Then every output is read by its format, with or without tools."""
        return isinstance(self.tools, Harmony)


@dataclass(frozen=True, slots=True)
class Reading:
    """How the outputs of one request are read."""

    tools: ToolFormat | None = None  # None: without calls
    given: Sequence[Tool] = ()
    thinks: Tags | None = None
    begun: bool = False  # the prompt ended within the reasoning
    calls_first: bool = False  # an answer without calls has a format, where marks are only text
    ended: bool = False  # or after it
    most_calls: int | None = None  # that an answer has; those that follow are left out
    outside: Outside | None = None  # None: all is read by ours

    @classmethod
    def after(
        cls, dialect: Dialect, prompt_end: str, given: Sequence[Tool], *, calls: bool
    ) -> Reading:
        """`prompt_end`: what the template adds after the last message (see
        `cluster.api.text.tokenizer.ChatPrompt`). `calls`: whether any are allowed."""
        opened, closed = map(prompt_end.rfind, dialect.thinks or THINK)
        thinks = dialect.thinks if closed <= opened else None
        wanted = dialect.has_channels or (calls and bool(given))
        tools = dialect.tools if wanted else None
        begun = thinks is not None and opened >= 0
        outside = dialect.outside
        if outside is not None and not (calls and given):
            outside = replace(outside, calls=False) if outside.reasons else None
        return cls(tools, given, thinks, begun, ended=closed > opened, outside=outside)

    @property
    def custom(self) -> set[str]:
        """Names of the tools that take a text."""
        return {tool.name for tool in self.given if tool.custom is not None}

    def new_id(self, seed: str) -> str:
        """Makes the id of a call; one seed always makes one id."""
        return self.tools.new_id(seed) if self.tools else seed

    def parser(self) -> OutputParser | ReadBefore:
        return self._parser() if self.outside is None else ReadBefore()

    def ours(self) -> tuple[OutputParser | None, OutputParser | None]:
        """What ours read before those of vLLM, and after them."""
        assert self.outside is not None
        first = None if self.outside.reasons else replace(self, tools=None, given=())
        later = None if self.outside.calls else replace(self, thinks=None, ended=False)
        before = first._parser() if first is not None and (first.thinks or first.ended) else None
        return before, later._parser() if later is not None and later.tools else None

    def _parser(self) -> OutputParser:
        return OutputParser(
            *(self.tools, self.given),
            thinks=self.thinks,
            begun=self.begun,
            ended=self.ended,
            calls_first=self.calls_first,
            most_calls=self.most_calls,
        )

    @property
    def shows(self) -> bool:
        """Whether all special tokens are read."""
        return self.outside is not None and self.outside.shows

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that are read."""
        return (*(self.tools.markers if self.tools else ()), *self.tags)

    @property
    def tags(self) -> Tags:
        """Around reasoning, if there is any."""
        return self.thinks or THINK
