"""What an output is made of, in order, as it becomes certain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.cluster.api.output.reader import Reader

Tags = tuple[str, str]
"""Around reasoning: what begins it, and what ends it."""
THINK: Tags = ("<think>", "</think>")  # most families'
CHANNEL: Tags = ("<|channel>", "<channel|>")  # Gemma 4's, whose name comes first: "thought"
REASONING_TAGS: dict[str, Tags] = {  # by the name of their parser
    "think": THINK,
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "gemma4": CHANNEL,
}
ALL_TAGS = frozenset(tag for tags in REASONING_TAGS.values() for tag in tags)
Span = tuple[int, int]
"""`[begin, end)`, in characters of the output."""


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    spans: tuple[Span, ...] = field(default=(), compare=False)  # where it was read, in order


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a tool; its arguments follow."""

    name: str
    call_id: str | None = None  # where the format has ids of its own


@dataclass(frozen=True, slots=True)
class Arguments:
    """A part of the JSON of the call that began last."""

    text: str


Event = Text | Reasoning | CallBegin | Arguments


class Events:
    """Collects events. White space around calls and after reasoning belongs to the format, not to
    the text, so it is held back until it is known what follows."""

    def __init__(self, reader: Reader, most_calls: int | None = None) -> None:
        """reader: has read what is emitted, and nothing after it. most_calls: that are shown."""
        self.has_calls = False
        self._calls_left = most_calls
        self._is_shown = True  # the call that began last
        self._reader = reader
        self._new: list[Event] = []
        self._space: list[Text] = []  # at the end of the text so far
        self._strips = False  # white space that comes next is left out
        self._reasoning_space = ""
        self._has_reasoning = False

    def text(self, text: str) -> None:
        if self._strips:
            text = text.lstrip()
        if not text:
            return
        self._strips = False
        stripped = text.rstrip()
        space = text[len(stripped) :]
        end = self._reader.at
        if stripped:
            self._new += [*self._space, self._placed(stripped, end - len(space))]
            self._space = []
        if space:
            self._space.append(self._placed(space, end))

    def reasoning(self, text: str) -> None:
        text = self._reasoning_space + text
        if not self._has_reasoning:
            text = text.lstrip()
        stripped = text.rstrip()
        self._reasoning_space = text[len(stripped) :]
        if stripped:
            self._has_reasoning = True
            self._new.append(Reasoning(stripped))

    def end_reasoning(self) -> None:
        self._strips, self._has_reasoning, self._reasoning_space = True, False, ""

    def call(self, name: str, call_id: str | None = None) -> None:
        self._is_shown = self._calls_left != 0
        self._space, self._strips, self.has_calls = [], True, self.has_calls or self._is_shown
        if self._calls_left:
            self._calls_left -= 1
        if self._is_shown:
            self._new.append(CallBegin(name, call_id))

    def arguments(self, text: str) -> None:
        if text and self._is_shown:
            self._new.append(Arguments(text))

    def finish(self) -> None:
        """Says that nothing follows."""
        if self._space and not self.has_calls:
            self._new += self._space
        self._space = []

    def take(self) -> list[Event]:
        new, self._new = self._new, []
        return merged(new)

    def _placed(self, text: str, end: int) -> Text:
        """Read up to `end`; what a format puts between texts was read nowhere."""
        begin = max(0, end - len(text))
        is_read = self._reader.text[begin:end] == text
        return Text(text, ((begin, end),) if is_read else ())


def merged(events: list[Event]) -> list[Event]:
    """With neighbours of one kind joined."""
    joined: list[Event] = []
    for kind, group in groupby(events, type):
        if kind is CallBegin:
            joined += group
            continue
        parts = [each for each in group if not isinstance(each, CallBegin)]
        text = "".join(part.text for part in parts)
        if kind is Text:
            joined.append(Text(text, _spans([part for part in parts if isinstance(part, Text)])))
        else:
            joined.append(kind(text))
    return joined


def _spans(texts: Sequence[Text]) -> tuple[Span, ...]:
    """Those that meet are one."""
    spans: list[Span] = []
    for begin, end in (span for text in texts for span in text.spans):
        if spans and spans[-1][1] == begin:
            begin = spans.pop()[0]
        spans.append((begin, end))
    return tuple(spans)
