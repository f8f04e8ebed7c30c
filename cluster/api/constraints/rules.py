"""A grammar while it is made: its rules, and marks in them that are single tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.cluster.api.output.events import THINK, Tags

TEXT = r"/(.|\n)*/"

AddedId = Callable[[str], int | None]
"""Id of the added token of that name; None: there is none."""


@dataclass(slots=True)
class Rules:
    """A Lark grammar while it is made."""

    added_id: AddedId
    markers: Sequence[str] = ()  # that may be added tokens
    tags: Tags = THINK  # around reasoning
    rules: list[str] = field(default_factory=list)

    def add(self, name: str, body: str, options: str = "") -> str:
        self.rules.append(f"{name}{options}: {body}")
        return name

    def quote(self, text: str) -> str:
        """`text` as terms: markers that are one token by its id, since models write that one,
        whether it has text or is special; the rest as strings."""
        ids = {marker: self.added_id(marker) for marker in self.markers if marker in text}
        single = [re.escape(marker) for marker, token in ids.items() if token is not None]
        single.sort(key=len, reverse=True)
        parts = re.split(f"({'|'.join(single)})", text) if single else [text]
        terms = [
            f"<[{ids[part]}]>" if ids.get(part) is not None else json.dumps(part)
            for part in parts
            if part
        ]
        return " ".join(terms)

    def text_until(self, name: str, end: str) -> str:
        """A rule for free text up to and with `end`. Where that begins with a token, the token ends
        the text: masks take a hundredth of the time that they take by its characters."""
        terms = self.quote(end)
        if terms.startswith("<["):
            return self.add(name, f"TEXT {terms}")
        return self.add(name, f"{TEXT} {json.dumps(end)}", "[lazy]")

    def made(self, start: str) -> str:
        lines = ["%llguidance {}", f"start: {start}", *self.rules, f"TEXT: {TEXT}"]
        return "\n".join(lines) + "\n"
