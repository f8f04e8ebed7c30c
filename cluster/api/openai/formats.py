"""OpenAI's JSON of an answer: whole objects and the chunks of a stream, for both endpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.api.context import ApiContext
from cluster.api.openai.generation import Piece, TokenText
from cluster.api.openai.plan import Plan

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this


class Format(Protocol):
    """The shape of one endpoint's answers."""

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first text."""
        ...

    def chunks(self, piece: Piece) -> list[dict[str, Any]]: ...

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]: ...

    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        """`pieces` of all choices, each choice's in order."""
        ...


@dataclass(slots=True)
class _Answer:
    """What every chunk of one answer repeats."""

    ctx: ApiContext
    plan: Plan
    answer_id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        envelope: dict[str, Any] = {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.ctx.model_name,
            "system_fingerprint": self.ctx.system_fingerprint,
            "choices": choices,
        }
        if self.plan.include_usage:
            envelope["usage"] = None  # present in every chunk, set in the last
        return envelope

    def named(self, token: int) -> tuple[str, bytes]:
        """A token as text and as bytes; the text shows U+FFFD where the bytes are not UTF-8."""
        data = self.ctx.tokenizer.token_bytes(token)
        return data.decode("utf-8", errors="replace"), data


def _joined(pieces: Sequence[Piece], index: int) -> Piece:
    """One choice's pieces as one."""
    mine = [piece for piece in pieces if piece.index == index]
    tokens = tuple(token for piece in mine for token in piece.tokens)
    return Piece(index, "".join(p.text for p in mine), tokens, mine[-1].finish_reason)


class ChatFormat:
    """`/v1/chat/completions`."""

    def __init__(self, ctx: ApiContext, plan: Plan, request_id: str) -> None:
        self._answer = _Answer(ctx, plan, f"chatcmpl-{request_id}")
        self._wants_logprobs = plan.choices[0].sampling.logprobs is not None

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(c.index, delta, None, None) for c in self._answer.plan.choices]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        chunks = []
        if piece.text or piece.tokens:
            chunks.append(
                self._chunk(piece.index, {"content": piece.text}, self._logprobs(piece), None)
            )
        if piece.finish_reason is not None:
            chunks.append(self._chunk(piece.index, {}, None, piece.finish_reason))
        return chunks

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._answer.envelope("chat.completion.chunk", []) | {"usage": usage}

    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for plan in self._answer.plan.choices:
            piece = _joined(pieces, plan.index)
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            choice = {
                "index": piece.index,
                "message": message,
                "logprobs": self._logprobs(piece),
                "finish_reason": piece.finish_reason,
            }
            choices.append(choice)
        return self._answer.envelope("chat.completion", choices) | {"usage": usage}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any, finish: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._answer.envelope("chat.completion.chunk", [choice])

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        return {"content": [self._token(token) for token in piece.tokens], "refusal": None}

    def _token(self, token: TokenText) -> dict[str, Any]:
        top = [self._entry(other, logprob) for other, logprob in token.logprobs.top]
        return self._entry(token.token, token.logprobs.logprob) | {"top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._answer.named(token)
        return {"token": text, "logprob": max(logprob, _LOWEST_LOGPROB), "bytes": list(data)}


class CompletionFormat:
    """`/v1/completions`."""

    def __init__(self, ctx: ApiContext, plan: Plan, request_id: str) -> None:
        self._answer = _Answer(ctx, plan, f"cmpl-{request_id}")
        self._wants_logprobs = plan.choices[0].sampling.logprobs is not None

    def opening(self) -> list[dict[str, Any]]:
        echoed = [choice for choice in self._answer.plan.choices if choice.text]
        return [self._chunk(Piece(choice.index, choice.text, (), None)) for choice in echoed]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        return [self._chunk(piece)]

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._answer.envelope("text_completion", []) | {"usage": usage}

    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for plan in self._answer.plan.choices:
            choice = self._choice(_joined(pieces, plan.index))
            choices.append(choice | {"text": plan.text + choice["text"]})
        return self._answer.envelope("text_completion", choices) | {"usage": usage}

    def _chunk(self, piece: Piece) -> dict[str, Any]:
        return self._answer.envelope("text_completion", [self._choice(piece)])

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece) if self._wants_logprobs else None,
            "finish_reason": piece.finish_reason,
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return {
            "tokens": [self._answer.named(token.token)[0] for token in piece.tokens],
            "token_logprobs": [
                max(token.logprobs.logprob, _LOWEST_LOGPROB) for token in piece.tokens
            ],
            "top_logprobs": [self._top(token) for token in piece.tokens],
            "text_offset": [token.offset for token in piece.tokens],
        }

    def _top(self, token: TokenText) -> dict[str, float]:
        """The best tokens and the chosen one; of two with the same text, the better."""
        entries = [*token.logprobs.top, (token.token, token.logprobs.logprob)]
        top: dict[str, float] = {}
        for other, logprob in entries:
            text = self._answer.named(other)[0]
            top[text] = max(logprob, top.get(text, _LOWEST_LOGPROB))
        return top
