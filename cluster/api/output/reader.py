"""Reads an output that is still coming.

A format's parser is a generator: it asks a `Reader` for what comes next by `yield from`, and is
resumed when there is more. So the same code reads a whole output and any stream of its parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Read = Generator[None, None, T]
"""Yields while it needs more of the output; returns what was read."""

_SPACE = " \t\r\n"
Emit = Callable[[str], None]
"""Called with what was read, up to the reader's place."""


def ignore(_: str) -> None:
    pass


def is_json(text: str) -> bool:
    """Whether it is a value of JSON, which has no NaN and no infinity."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def without_surrogates(text: str) -> str:
    """Halves of characters joined, and U+FFFD for one alone: it cannot be sent."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Reader:
    """Invariant: `text[:at]` has been read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False  # no more will come

    @property
    def rest(self) -> str:
        return self.text[self.at :]

    def until(self, *markers: str, emit: Emit = ignore) -> Read[str | None]:
        """Read past the first of `markers`; what comes before it is emitted as soon as it cannot
        be the beginning of one. None: the output ended without."""
        longest = max(map(len, markers))
        while True:
            found = [(i, -len(m), m) for m in markers if (i := self.text.find(m, self.at)) >= 0]
            if found:
                place, _, marker = min(found)
                self._emit(place - self.at, emit)
                self.at = place + len(marker)
                return marker
            end = len(self.text)
            if not self.ended:
                end -= _held(self.text[max(self.at, end - longest + 1) :], markers)
            self._emit(end - self.at, emit)
            if self.ended:
                return None
            yield

    def up_to(self, *markers: str) -> Read[None]:
        """Skip what comes before the first of `markers`, or to the end."""
        marker = yield from self.until(*markers)
        self.at -= len(marker or "")

    def all(self, emit: Emit) -> Read[None]:
        """Emit whatever comes, to the end."""
        while True:
            self._emit(len(self.text) - self.at, emit)
            if self.ended:
                return
            yield

    def literal(self, text: str) -> Read[bool]:
        """Read `text` if it comes next."""
        while True:
            rest = self.text[self.at : self.at + len(text)]
            if rest == text:
                self.at += len(text)
                return True
            if self.ended or not text.startswith(rest):
                return False
            yield

    def space(self) -> Read[None]:
        """Read white space."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _SPACE:
                self.at += 1
            if self.at < len(self.text) or self.ended:
                return
            yield

    def peek(self) -> Read[str]:
        """The next character; empty at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def json_string(self) -> Read[str | None]:
        """A string, without its escapes. None: it is none, or it did not end."""
        if not (yield from self.literal('"')):
            return None
        begin = self.at - 1
        if not (yield from self._to_end_of_string(ignore)):
            return None
        try:
            text: str = json.loads(self.text[begin : self.at], strict=False)
        except ValueError:
            return None
        return without_surrogates(text)

    def json_value(self, emit: Emit = ignore) -> Read[bool]:
        """Any value, emitted as it is written. False: it is none, or it did not end."""
        first = yield from self.peek()
        if first == '"':
            self._emit(1, emit)
            return (yield from self._to_end_of_string(emit))
        if first not in ("{", "["):
            return (yield from self._scalar(emit))
        depth = 0
        while True:
            char = yield from self.peek()
            if not char or char == "<":  # of a marker: the model forgot a bracket
                return False
            self._emit(1, emit)
            if char == '"':
                if not (yield from self._to_end_of_string(emit)):
                    return False
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
                if depth == 0:
                    return True

    def _scalar(self, emit: Emit) -> Read[bool]:
        begin = self.at
        while True:
            char = yield from self.peek()
            if not char or char in ",]}" or char in _SPACE or char in "<`":
                break
            self.at += 1
        if not is_json(self.text[begin : self.at]):
            return False
        emit(self.text[begin : self.at])
        return True

    def _to_end_of_string(self, emit: Emit) -> Read[bool]:
        while True:
            char = yield from self.peek()
            if not char:
                return False
            if char == "\\":
                while len(self.text) < self.at + 2 and not self.ended:
                    yield
                self._emit(2, emit)
                continue
            self._emit(1, emit)
            if char == '"':
                return True

    def _emit(self, count: int, emit: Emit) -> None:
        begin, self.at = self.at, min(self.at + count, len(self.text))
        emit(self.text[begin : self.at])


def _held(end: str, markers: tuple[str, ...]) -> int:
    """Characters at the end with which a marker may begin."""
    for length in range(len(end), 0, -1):
        if any(marker.startswith(end[-length:]) for marker in markers):
            return length
    return 0
