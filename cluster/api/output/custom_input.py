"""The input of a custom tool, a text, out of the JSON object that a model writes it in."""

from __future__ import annotations

import json
import re
from typing import Any

from kvrelay.cluster.api.output.reader import without_surrogates

INPUT = "input"  # the one parameter of a custom tool, as the model sees it
_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# What of a string's inside can be read: the first half of a pair waits for the second.
_WHOLE = re.compile(
    r"""(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}
    |\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})+""",
    re.VERBOSE,
)


class CustomInput:
    """Reads one call. Life: `push` with each part of the arguments, then `finish`; what they return
    together is the input. A model that is not held to anything may have written something else:
    then it is its words as they are."""

    def __init__(self) -> None:
        self._text = ""  # all that the model has written
        self._at: int | None = None  # up to there it has been read; None: it has not begun
        self._read: list[str] = []

    def push(self, text: str) -> str:
        self._text += text
        if self._at is None and (begin := _BEGIN.match(self._text)):
            self._at = begin.end()
        if self._at is None or (found := _WHOLE.match(self._text, self._at)) is None:
            return ""
        self._at = found.end()
        return self._add(_string(found[0]))

    def finish(self) -> str:
        """Returns what is left to be read."""
        sent = "".join(self._read)
        try:
            value: Any = json.loads(self._text, strict=False)
        except (ValueError, RecursionError):
            return "" if self._at is not None else self._add(self._text)
        given = value.get(INPUT) if isinstance(value, dict) else None
        whole = without_surrogates(given) if isinstance(given, str) else self._text
        return self._add(whole[len(sent) :]) if whole.startswith(sent) else ""

    def _add(self, text: str) -> str:
        self._read.append(text)
        return text


def _string(inside: str) -> str:
    try:
        text: str = json.loads(f'"{inside}"', strict=False)
    except ValueError:  # an escape that JSON does not have
        return inside
    return without_surrogates(text)


def arguments_for(text: str) -> str:
    """As the model writes it."""
    return json.dumps({INPUT: text}, ensure_ascii=False)
