"""Log-probabilities as JSON, token by token.

An answer may have hundreds of thousands of them (20 alternatives of 8,000 tokens in 4 choices).
They are encoded as their tokens come, a few at a time, so that no answer holds up the event loop
when it is put together. What is always the same of a token is encoded once.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from kvrelay.cluster.api.openai.parts import TokenText
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.request import TokenLogprobs

_LOWEST = -9999.0  # JSON has no infinity; OpenAI writes this
_MAX_NAMES = 1 << 18

Runs = tuple[bytes, ...]
"""Entries of one list in JSON, with commas between those of a run."""


class TokenNames:
    """Tokens as JSON. Owned by the API's context. Invariant: at most `_MAX_NAMES` are cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, bytes] = {}
        self._entries: dict[int, bytes] = {}

    def text(self, token: int) -> bytes:
        """A string, which shows U+FFFD where the token's bytes are not UTF-8."""
        text = self._texts.get(token)
        if text is None:
            data = self._tokenizer.token_bytes(token)
            text = json.dumps(data.decode("utf-8", errors="replace")).encode()
            if len(self._texts) < _MAX_NAMES:
                self._texts[token] = text
        return text

    def entry(self, token: int) -> bytes:
        """Of a chat's log-probabilities: all but the number, which has to follow."""
        entry = self._entries.get(token)
        if entry is None:
            data = list(self._tokenizer.token_bytes(token))
            entry = b'{"token":%b,"bytes":%b,"logprob":' % (self.text(token), _dump(data))
            if len(self._entries) < _MAX_NAMES:
                self._entries[token] = entry
        return entry


class TokenIdNames(TokenNames):
    """Tokens by their ids, as vLLM's `return_tokens_as_token_ids` asks for them: two that have one
    text are told apart."""

    def text(self, token: int) -> bytes:
        return b'"token_id:%d"' % token


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _number(logprob: float) -> bytes:
    return b"%r" % (logprob if logprob > _LOWEST else _LOWEST)


def chat_logprobs(names: TokenNames, tokens: Sequence[TokenText]) -> tuple[Runs, ...]:
    """The entries of `content`."""
    return ((b",".join([chat_entry(names, token) for token in tokens]),),)


def chat_entry(names: TokenNames, token: TokenText) -> bytes:
    assert token.logprobs is not None  # a chat's prompt is not echoed
    entry = names.entry
    top = b"},".join([entry(other) + _number(p) for other, p in token.logprobs.top])
    end = b"}" if top else b""
    mine = entry(token.token) + _number(token.logprobs.logprob)
    return b'%b,"top_logprobs":[%b%b]}' % (mine, top, end)


def prompt_entries(
    names: TokenNames, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> bytes:
    """Entries of vLLM's `prompt_logprobs`: an object for each of `tokens`, of its own and the best
    ids. `rank` is null where a token is not among the best."""
    entries = []
    for token, each in zip(tokens, logprobs, strict=True):
        ranks = {other: (rank, p) for rank, (other, p) in enumerate(each.top, 1)}
        told = {token: ranks.get(token, (None, each.logprob)), **ranks}
        entries.append(
            b"{%b}"
            % b",".join(
                b'"%d":{"logprob":%b,"rank":%b,"decoded_token":%b}'
                % (other, _number(p), _dump(rank), names.text(other))
                for other, (rank, p) in told.items()
            )
        )
    return b",".join(entries)


COMPLETION_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def completion_logprobs(names: TokenNames, tokens: Sequence[TokenText]) -> tuple[Runs, ...]:
    """The entries of each of COMPLETION_LISTS."""
    return (
        (b",".join([names.text(token.token) for token in tokens]),),
        (b",".join([_logprob(token) for token in tokens]),),
        (b",".join([_completion_top(names, token) for token in tokens]),),
        (b",".join([b"%d" % token.offset for token in tokens]),),
    )


def _logprob(token: TokenText) -> bytes:
    return b"null" if token.logprobs is None else _number(token.logprobs.logprob)


def _completion_top(names: TokenNames, token: TokenText) -> bytes:
    """The chosen token, first as in vLLM, and the best; of two with the same text, the better."""
    if token.logprobs is None:
        return b"null"
    top: dict[bytes, float] = {}
    for other, logprob in ((token.token, token.logprobs.logprob), *token.logprobs.top):
        text = names.text(other)
        top[text] = max(logprob, top.get(text, _LOWEST))
    return b"{%b}" % b",".join([b"%b:%b" % (text, _number(p)) for text, p in top.items()])


class EncodedLists:
    """Lists whose entries are encoded already. Until the JSON around a list is made, a text that is
    found nowhere else stands for it. Owned by a format."""

    def __init__(self) -> None:
        self._marker = secrets.token_hex(16)
        self._found = re.compile(rb'"%b(\d+)"' % self._marker.encode())
        self._numbers = itertools.count()
        self._lists: dict[int, Runs] = {}
        self._lasting: dict[int, Runs] = {}

    def value(self, runs: Runs, *, lasts: bool = False) -> str:
        """What stands for the list in what is encoded: once, or if it `lasts`, any number of
        times."""
        number = next(self._numbers)
        (self._lasting if lasts else self._lists)[number] = runs
        return f"{self._marker}{number}"

    def encode(self, content: dict[str, Any], *, ascii: bool) -> list[bytes]:
        """Parts of the JSON of `content`, not copied together: they may have many megabytes."""
        text = json.dumps(content, ensure_ascii=ascii, separators=(",", ":")).encode()
        first, *others = self._found.split(text)
        parts = [first]
        for number, rest in zip(others[::2], others[1::2], strict=True):
            parts.append(b"[")
            key = int(number)
            runs = self._lasting[key] if key in self._lasting else self._lists.pop(key)
            for i, run in enumerate(runs):
                parts += [b",", run] if i else [run]
            parts += [b"]", rest]
        return parts
