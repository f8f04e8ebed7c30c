"""Which log-probabilities belong to the text of a response: not those of its reasoning, not those
of its calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvrelay.cluster.api.openai.logprobs import Runs
from kvrelay.cluster.api.openai.parts import TokenText
from kvrelay.cluster.api.output.events import Span


class TextLogprobs:
    """Sorts tokens by what was read in them. Owned by a format.

    Life: `add` the tokens of a piece, then `take` those of each text that was read, in order. A
    token belongs to a text if the two share a character, and to the first of several. One that only
    begins a character belongs where the character does. So each is taken once at most, and it does
    not matter in how many parts a text comes.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, bytes]] = deque()  # where its text begins, and its entry

    def add(self, tokens: Sequence[TokenText], entries: Runs) -> None:
        """entries: as JSON, one of each token."""
        places = (token.offset for token in tokens)
        self._waiting.extend(zip(places, entries, strict=True))

    def take(self, spans: Sequence[Span]) -> list[bytes]:
        """Entries of the tokens of a text that was read at `spans`. All that begin before the end
        of it have been added: a piece's tokens come no later than its text."""
        waiting, entries = self._waiting, []
        for begin, end in spans:
            while len(waiting) > 1 and waiting[0][0] < begin and waiting[1][0] <= begin:
                waiting.popleft()  # it ends where the next one begins
            while waiting and waiting[0][0] < end:
                entries.append(waiting.popleft()[1])
        return entries
