"""One output from its text to its events, and the format that a model's chat template implies."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.cluster.api.output.events import Event, Events, merged
from kvrelay.cluster.api.output.format import THINK, THINK_END, Parsed, ToolFormat
from kvrelay.cluster.api.output.json_calls import Hermes, Llama3, Mistral
from kvrelay.cluster.api.output.marked_calls import DeepSeek, Harmony, Kimi
from kvrelay.cluster.api.output.pythonic import Pythonic
from kvrelay.cluster.api.output.reader import Reader
from kvrelay.cluster.api.output.tools import Tool
from kvrelay.cluster.api.output.xml_calls import Glm, MiniMax, Qwen3Coder

FORMATS: dict[str, type[ToolFormat]] = {
    kind.name: kind
    for kind in (
        *(Hermes, Qwen3Coder, Llama3, Pythonic, Mistral, DeepSeek, Glm, Kimi, MiniMax, Harmony),
    )
}
# What a template that knows a format contains; the first that is found counts.
_SIGNS: tuple[tuple[str, type[ToolFormat]], ...] = (
    ("<|channel|>", Harmony),
    (Kimi.section, Kimi),
    (DeepSeek.begin, DeepSeek),
    (MiniMax.section, MiniMax),
    (Glm.key_begin, Glm),
    (Qwen3Coder.name_begin, Qwen3Coder),
    (Hermes.begin, Hermes),
    (Mistral.begin, Mistral),
    (Pythonic.begin, Pythonic),
    (Llama3.tag, Llama3),
    ('"parameters": dictionary of argument name', Llama3),
)


def find_format(name: str, template: str) -> ToolFormat | None:
    """name: one of FORMATS, "auto" or "none". With "auto", what `template` implies; None: nothing
    that is known."""
    kind = FORMATS.get(name)
    if name == "auto":
        kind = next((kind for sign, kind in _SIGNS if sign in template), None)
    if kind in (Mistral, DeepSeek):
        return kind(template)
    return None if kind is None else kind()


class OutputParser:
    """Owned by one choice. Life: `push` with each part of the text, then `finish`."""

    def __init__(
        self,
        tools: ToolFormat | None = None,
        given: Sequence[Tool] = (),
        *,
        thinks: bool = False,
        begun: bool = False,
        most_calls: int | None = None,
    ) -> None:
        """tools: reads calls; None: there are none. thinks: reasoning comes first, in tags. begun:
        the prompt ended with the first of them. most_calls: that are told; None: all."""
        self._reader = Reader()
        self._events = Events(self._reader, most_calls)
        self._tools, self._given = tools, given
        self._thinks, self._begun = thinks, begun
        self._parsed = self._parse()

    @property
    def has_calls(self) -> bool:
        return self._events.has_calls

    def read(self, text: str, *, is_last: bool) -> list[Event]:
        """What `text` adds, and if nothing follows it, what was held back."""
        events = self.push(text) if text else []
        return merged(events + self.finish()) if is_last else events

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
            yield from self._reasoning()
        if self._tools is not None:
            yield from self._tools.parse(reader, events, self._given)
        yield from reader.all(events.text)

    def _reasoning(self) -> Parsed:
        reader, events = self._reader, self._events
        start = reader.at
        yield from reader.space()
        if (yield from reader.literal(THINK)) or self._begun:
            yield from reader.until(THINK_END, emit=events.reasoning)
            events.end_reasoning()
        else:
            reader.at = start
