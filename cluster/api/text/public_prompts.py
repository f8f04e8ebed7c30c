"""Public prompts: beginnings of prompts that an operator has declared, whose KV all tenants share.

A text becomes tokens in two ways: as the system message of a chat, and as the beginning of a
completion. Of each, only those tokens count that are the same whatever follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.api.text.chat_template import TemplateError
from cluster.api.text.tokenizer import Tokenizer

_FOLLOWERS = ("a", " b", "\n", ".")


class PublicPrompts:
    """Immutable; the prefixes are sorted, the longest first."""

    def __init__(self, prefixes: Iterable[Sequence[int]] = ()) -> None:
        found = {tuple(prefix) for prefix in prefixes}
        self._prefixes = sorted((prefix for prefix in found if prefix), key=len, reverse=True)

    @classmethod
    def of_texts(cls, tokenizer: Tokenizer, texts: Iterable[str]) -> PublicPrompts:
        """Slow for long texts."""
        prefixes: list[Sequence[int]] = []
        for text in texts:
            prefixes.append(_common([tokenizer.encode(text + more) for more in _FOLLOWERS]))
            try:
                prefixes.append(_common([_chat(tokenizer, text, user) for user in ("a", "b")]))
            except TemplateError:
                continue  # the model has no chats with a system message
        return cls(prefixes)

    def num_public_tokens(self, tokens: tuple[int, ...]) -> int:
        """Length of the longest declared beginning that `tokens` has."""
        for prefix in self._prefixes:
            if tokens[: len(prefix)] == prefix:
                return len(prefix)
        return 0


def _chat(tokenizer: Tokenizer, system: str, user: str) -> list[int]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return tokenizer.apply_chat_template(messages)


def _common(sequences: Sequence[Sequence[int]]) -> Sequence[int]:
    """Their longest common beginning."""
    first = sequences[0]
    length = min(map(len, sequences))
    for other in sequences[1:]:
        length = next((i for i in range(length) if first[i] != other[i]), length)
    return first[:length]
