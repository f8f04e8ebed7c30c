"""Tokens to text, one at a time, as they come.

For each token `Detokenizer.push` gives the text that can be sent for good. Held back is what may
still change: an incomplete UTF-8 character, and the beginning of what may become a stop string.
`finish` gives the rest. Once a stop string is complete, the text ends exactly before it, or behind
it where that is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
# A character has at most four bytes. More tokens than this without one: they are not UTF-8.
_MAX_HELD_TOKENS = 8
_NUM_CONTEXT_TOKENS = 6


class Decoder(Protocol):
    """What is needed of `cluster.api.text.tokenizer.Tokenizer`."""

    def decode(self, tokens: Sequence[int]) -> str: ...

    def is_special(self, token: int) -> bool: ...


def _is_cut(text: str) -> bool:
    return text.startswith(_REPLACEMENT) or text.endswith(_REPLACEMENT)


class Detokenizer:
    """Text of one choice.

    Invariant: the texts returned so far, joined, are a prefix of the final text, and
    `num_released` is their length. Owned by one choice.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        stop: Sequence[str] = (),
        includes_stop: bool = False,
        context: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """`includes_stop`: the text ends behind the stop string, not before it.
        `context`: tokens that the text continues, for tokenizers that join words by space.
        Stop strings that begin within the first `min_tokens` tokens do not count."""
        self._decoder = decoder
        self._stop = tuple(stop)
        self._includes_stop = includes_stop
        self._longest_stop = max(map(len, self._stop), default=0)
        self._min_tokens = min_tokens
        # Tokens [0, _read) were turned into text; the ones before give the decoder its context.
        tail = context[-_NUM_CONTEXT_TOKENS:]
        self._window = [token for token in tail if not decoder.is_special(token)]
        # Where a character is cut, a decoder of byte tokens gives up all the bytes around it too.
        while self._window and _is_cut(decoder.decode(self._window)):
            del self._window[0]
        self._read = len(self._window)
        self._held = ""  # decoded, but it may become a stop string
        self.num_tokens = 0
        self.num_decoded = 0  # characters
        self.num_released = 0  # characters
        self.stopped = False
        self.stopped_by: str | None = None  # the stop string

    def push(self, token: int) -> str:
        """Take one token; return the text that is certain now."""
        assert not self.stopped
        self.num_tokens += 1
        if not self._decoder.is_special(token):
            self._window.append(token)
        return self._release(self._decode(final=False), final=False)

    def finish(self) -> str:
        """No token will follow: return what was held back."""
        return self._release(self._decode(final=True), final=True)

    def _decode(self, final: bool) -> str:
        if self._read == len(self._window):
            return ""
        known = self._decoder.decode(self._window[: self._read])
        text = self._decoder.decode(self._window)
        is_certain = len(text) > len(known) and not text.endswith(_REPLACEMENT)
        num_held = len(self._window) - self._read
        if not is_certain and not final and num_held < _MAX_HELD_TOKENS:
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return text[len(known) :]

    def _release(self, new: str, final: bool) -> str:
        """Append `new` to what is held; let go of what cannot become a stop string."""
        self.num_decoded += len(new)
        self._held += new
        num_safe = len(self._held)
        if self._stop and self.num_tokens > self._min_tokens:
            starts = [(at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
            if starts:
                self.stopped = True
                num_safe, self.stopped_by = min(starts)
                num_safe += len(self.stopped_by) if self._includes_stop else 0
            elif not final:
                num_safe -= self._num_possible()
        text, self._held = self._held[:num_safe], self._held[num_safe:]
        self.num_released += len(text)
        return text

    def _num_possible(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        for length in range(min(self._longest_stop - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
