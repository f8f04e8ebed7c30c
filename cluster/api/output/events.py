"""What an output is made of, in order, as it becomes certain."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Text:
    text: str


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

    def __init__(self) -> None:
        self.has_calls = False
        self._new: list[Event] = []
        self._space = ""  # at the end of the text so far
        self._strips = False  # white space that comes next is left out
        self._reasoning_space = ""
        self._has_reasoning = False

    def text(self, text: str) -> None:
        if self._strips:
            text = text.lstrip()
        if not text:
            return
        self._strips = False
        text, self._space = self._space + text, ""
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        if stripped:
            self._new.append(Text(stripped))

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
        self._space, self._strips, self.has_calls = "", True, True
        self._new.append(CallBegin(name, call_id))

    def arguments(self, text: str) -> None:
        if text:
            self._new.append(Arguments(text))

    def finish(self) -> None:
        """Nothing follows."""
        if self._space and not self.has_calls:
            self._new.append(Text(self._space))
        self._space = ""

    def take(self) -> list[Event]:
        new, self._new = self._new, []
        return merged(new)


def merged(events: list[Event]) -> list[Event]:
    """With neighbours of one kind joined."""
    joined: list[Event] = []
    for kind, group in groupby(events, type):
        if kind is CallBegin:
            joined += group
        else:
            texts = [each.text for each in group if not isinstance(each, CallBegin)]
            joined.append(kind("".join(texts)))
    return joined
