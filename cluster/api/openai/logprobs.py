"""Log-probabilities as JSON, token by token.

An answer may have hundreds of thousands of them (20 alternatives of 8,000 tokens in 4 choices).
They are encoded as their tokens come, a few at a time, so that no answer holds up the event loop
when it is put together. What is always the same of a token is encoded once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from kvrelay.cluster.api.openai.parts import TokenText
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.request import TokenLogprobs

_LOWEST = -9999.0  # JSON has no infinity; OpenAI writes this
_MAX_NAMES = 1 << 18

Runs = tuple[msgspec.Raw, ...]
"""Entries of one list in JSON, with commas between those of a run: encoded as a list, they are
joined by commas, and what is encoded already is copied once."""


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
        """An entry of a chat's log-probabilities without its number, which has to follow."""
        entry = self._entries.get(token)
        if entry is None:
            data = msgspec.json.encode(list(self._tokenizer.token_bytes(token)))
            entry = b'{"token":%b,"bytes":%b,"logprob":' % (self.text(token), data)
            if len(self._entries) < _MAX_NAMES:
                self._entries[token] = entry
        return entry


class TokenIdNames(TokenNames):
    """Tokens by their ids, as vLLM's `return_tokens_as_token_ids` asks for them: two that have one
    text are told apart."""

    def text(self, token: int) -> bytes:
        return b'"token_id:%d"' % token


def _number(logprob: float) -> bytes:
    return b"%r" % (logprob if logprob > _LOWEST else _LOWEST)


def chat_logprobs(names: TokenNames, tokens: Sequence[TokenText]) -> tuple[Runs, ...]:
    """Makes the entries of `content`."""
    return (_run([chat_entry(names, token) for token in tokens]),)


def _run(entries: list[bytes]) -> Runs:
    return (msgspec.Raw(b",".join(entries)),)


def chat_entry(names: TokenNames, token: TokenText) -> bytes:
    assert token.logprobs is not None  # a chat's prompt is not echoed
    entry = names.entry
    top = b"},".join([entry(other) + _number(p) for other, p in token.logprobs.top])
    end = b"}" if top else b""
    mine = entry(token.token) + _number(token.logprobs.logprob)
    return b'%b,"top_logprobs":[%b%b]}' % (mine, top, end)


def id_logprobs(tokens: Sequence[TokenText]) -> tuple[Runs, ...]:
    """Makes the entries of `content` where tokens are told by their ids, in vLLM's forms: with a
    number, and before that with a name."""
    return (_run([_id_entry(token) for token in tokens]),)


def _id_entry(token: TokenText) -> bytes:
    assert token.logprobs is not None
    ranked = list(enumerate(token.logprobs.top, 1))
    rank = next((rank for rank, (other, _) in ranked if other == token.token), None)
    top = b",".join([_of_id(other, p, rank) + b"}" for rank, (other, p) in ranked])
    return b'%b,"top_logprobs":[%b]}' % (_of_id(token.token, token.logprobs.logprob, rank), top)


def _of_id(token: int, logprob: float, rank: int | None) -> bytes:
    shown = b"null" if rank is None else b"%d" % rank
    form = b'{"token":"token_id:%d","token_id":%d,"logprob":%b,"rank":%b'
    return form % (token, token, _number(logprob), shown)


def prompt_entries(
    names: TokenNames, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> msgspec.Raw:
    """A run of vLLM's `prompt_logprobs`: an object for each of `tokens`, of its own and the best
    ids. `rank` is null where a token is not among the best."""
    entries = []
    for token, each in zip(tokens, logprobs, strict=True):
        ranks = {other: (rank, p) for rank, (other, p) in enumerate(each.top, 1)}
        shown = {token: ranks.get(token, (None, each.logprob)), **ranks}
        entries.append(
            b"{%b}"
            % b",".join(
                b'"%d":{"logprob":%b,"rank":%b,"decoded_token":%b}'
                % (other, _number(p), b"null" if rank is None else b"%d" % rank, names.text(other))
                for other, (rank, p) in shown.items()
            )
        )
    return msgspec.Raw(b",".join(entries))


COMPLETION_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def completion_logprobs(names: TokenNames, tokens: Sequence[TokenText]) -> tuple[Runs, ...]:
    """Makes the entries of each of COMPLETION_LISTS."""
    return (
        _run([names.text(token.token) for token in tokens]),
        _run([_logprob(token) for token in tokens]),
        _run([_completion_top(names, token) for token in tokens]),
        _run([b"%d" % token.offset for token in tokens]),
    )


def _logprob(token: TokenText) -> bytes:
    return b"null" if token.logprobs is None else _number(token.logprobs.logprob)


def _completion_top(names: TokenNames, token: TokenText) -> bytes:
    """Writes the chosen token, first as in vLLM, and the best; of two with one text, the better."""
    if token.logprobs is None:
        return b"null"
    top: dict[bytes, float] = {}
    for other, logprob in ((token.token, token.logprobs.logprob), *token.logprobs.top):
        text = names.text(other)
        top[text] = max(logprob, top.get(text, _LOWEST))
    return b"{%b}" % b",".join([b"%b:%b" % (text, _number(p)) for text, p in top.items()])
