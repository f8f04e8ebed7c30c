"""OpenAI's JSON of an answer: whole objects and the chunks of a stream, for both endpoints."""

from __future__ import annotations

import asyncio
import codecs
import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from kvrelay.cluster.api.errors import ApiError
from kvrelay.cluster.api.openai.logprobs import (
    COMPLETION_LISTS,
    Runs,
    TokenIdNames,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_entries,
)
from kvrelay.cluster.api.openai.parts import Piece, Plan, TokenText
from kvrelay.cluster.api.output.custom_input import CustomInput
from kvrelay.cluster.api.output.events import Arguments, CallBegin, Event, Reasoning, Text

if TYPE_CHECKING:
    from kvrelay.cluster.api.context import ApiContext
    from kvrelay.cluster.api.openai.schema import GenerationRequest
    from kvrelay.cluster.api.output.dialect import Reading

COMMENT = b": alive\n\n"  # a server-sent event that clients skip
DONE = b"data: [DONE]\n\n"
_ENTRIES_AT_ONCE = 256  # log-probabilities of a prompt, encoded in one go


def _escaped(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("kvrelay-json", _escaped)


def ascii_json(content: dict[str, Any]) -> bytes:
    """What stands in it as `msgspec.Raw` is ASCII already. Clients that read an event line by line
    may take U+2028 and the like, which JSON may contain, for the end of one."""
    data = msgspec.json.encode(content)
    return data if data.isascii() else data.decode().encode("ascii", "kvrelay-json")


class Format(ABC):
    """The shape of one endpoint's answers. `usage` is that of `Generation.usage`."""

    done = b""  # ends a stream that has not failed
    names_events = False  # each by its type
    alive = COMMENT  # where a stream that has begun is silent

    def opening(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the events before the first text."""
        return []

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Returns the events of a piece."""
        return []

    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the events after the last piece."""
        return []

    def condensed(self, piece: Piece) -> Piece:
        """What `whole` needs of it; what takes time is done now."""
        return piece

    @abstractmethod
    async def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        """`pieces` of all choices, each choice's in order, condensed."""

    async def settled(self) -> None:
        """Called when the answer is complete, before its end is sent."""
        return

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        """Events that end a stream."""
        return [error.body]

    def refused(self, error: ApiError, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """Likewise, of one that has had no event."""
        return self.failed(error)

    def encode(self, event: dict[str, Any]) -> bytes:
        """Returns a server-sent event."""
        name = f"event: {event['type']}\n".encode() if self.names_events else b""
        return b"%bdata: %b\n\n" % (name, ascii_json(event))


class BlockFormat(Format):
    """A row of blocks (reasoning, texts, calls): each is opened, gets what is new of it, and is
    closed before the next is opened. One choice. What the events look like is the API's."""

    names_events = True

    def __init__(self, plan: Plan) -> None:
        assert plan.reading is not None
        self._parser = plan.reading.parser()
        self._new_call_id = plan.reading.new_id
        self._kind: type[Event] | None = None  # what began the open block
        self._last: Piece | None = None  # the one with a `finish_reason`

    @abstractmethod
    def _open_block(self, event: Text | Reasoning | CallBegin) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _write(self, event: Text | Reasoning | Arguments) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _close_block(self, *, is_last: bool) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _end(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the events after the last block."""

    @abstractmethod
    def _answer(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns all of it, once every block is closed."""

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        return self._read(self.condensed(piece))

    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return [*self._close(is_last=True), *self._end(usage)]

    async def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        self._read(joined(pieces, 0))
        self._close(is_last=True)
        return self._answer(usage)

    def _read(self, piece: Piece) -> list[dict[str, Any]]:
        """piece: condensed."""
        if piece.finish_reason is not None:
            self._last = piece
        made: list[dict[str, Any]] = []
        for event in self._parser.take(piece):
            if isinstance(event, Arguments):
                made += self._write(event)
                continue
            if isinstance(event, CallBegin) or self._kind is not type(event):
                made += [*self._close(), *self._open_block(event)]
                self._kind = type(event)
            if not isinstance(event, CallBegin):
                made += self._write(event)
        return made

    def _close(self, *, is_last: bool = False) -> list[dict[str, Any]]:
        if self._kind is None:
            return []
        self._kind = None
        return self._close_block(is_last=is_last)


@dataclass(slots=True)
class _Answer:
    """What every chunk of one answer repeats."""

    ctx: ApiContext
    plan: Plan
    request: GenerationRequest
    answer_id: str
    created: int = field(default_factory=lambda: int(time.time()))
    names: TokenNames = field(init=False)
    _num_tokens: Counter[int] = field(default_factory=Counter)  # so far, by choice

    def __post_init__(self) -> None:
        own = self.request.return_tokens_as_token_ids
        self.names = TokenIdNames(self.ctx.tokenizer) if own else self.ctx.token_names

    def count(self, piece: Piece) -> None:
        """Before the chunks of `piece` are made."""
        self._num_tokens[piece.index] += len(piece.token_ids)

    def chunk(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        """Returns one of a stream, with the usage so far where that is asked for."""
        envelope = self.envelope(kind, [choice])
        if self.request.continuous_usage:
            num_prompt = len(self.plan.choices[choice["index"]].tokens)
            num_output = self._num_tokens[choice["index"]]
            envelope["usage"] = {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_output,
                "total_tokens": num_prompt + num_output,
            }
        return envelope

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        envelope: dict[str, Any] = {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.ctx.shown_model(self.request.model),
            "system_fingerprint": self.ctx.system_fingerprint,
            "choices": choices,
        }
        if self.request.service_tier is not None:
            envelope["service_tier"] = self.plan.service_class.tier
        if self.plan.include_usage:
            envelope["usage"] = None  # present in every chunk, set in the last
        return envelope

    def closing(self, kind: str, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return [self.envelope(kind, []) | {"usage": usage}] if self.plan.include_usage else []

    def ids(self, piece: Piece) -> dict[str, Any]:
        """Returns the tokens of `piece`, where they are asked for. A whole answer has null else, as
        in vLLM."""
        if not self.request.return_token_ids:
            return {}
        return {"token_ids": list(piece.token_ids)}

    def prompt_ids(self, index: int) -> dict[str, Any]:
        """Returns those of a choice, where they are asked for. As in vLLM, an answer to a chat has
        them beside its choices, a completion in each."""
        if not self.request.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self.plan.choices[index].tokens)}


def joined(pieces: Sequence[Piece], index: int) -> Piece:
    """One choice's pieces as one."""
    mine = [piece for piece in pieces if piece.index == index]
    tokens = tuple(token for piece in mine for token in piece.tokens)
    ids = tuple(token for piece in mine for token in piece.token_ids)
    lists = zip(*(piece.logprobs for piece in mine if piece.logprobs), strict=True)
    return replace(
        mine[-1],
        text="".join(piece.text for piece in mine),
        tokens=tokens,
        token_ids=ids,
        logprobs=tuple(tuple(chain.from_iterable(runs)) for runs in lists),
        embedding=mine[0].embedding,
        prompt_logprobs=mine[0].prompt_logprobs,
        events=tuple(chain.from_iterable(piece.events for piece in mine)),
    )


class _Reader:
    """One choice's text as what it says: deltas of OpenAI's messages."""

    def __init__(self, reading: Reading, choice: str, *, reasoning: bool) -> None:
        """choice: what tells its calls from others'. reasoning: whether it is shown."""
        self._parser = reading.parser()
        self._reading, self._choice, self._reasoning = reading, choice, reasoning
        self._num_calls = 0
        self._custom = reading.custom
        self._input: CustomInput | None = None  # text of the call that is under way

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        events = self._parser.take(piece)
        is_shown = [self._reasoning or not isinstance(event, Reasoning) for event in events]
        deltas: list[dict[str, Any]] = []
        for event in compress(events, is_shown):
            if not isinstance(event, Arguments):
                deltas += self._end_input()
            deltas += self._delta(event)
        return deltas + (self._end_input() if piece.finish_reason is not None else [])

    def finish_reason(self, piece: Piece) -> str | None:
        is_call = piece.finish_reason == "stop" and self._parser.has_calls
        return "tool_calls" if is_call else piece.finish_reason

    def _delta(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case Text(text):
                return [{"content": text}]
            case Reasoning(text):
                return [{"reasoning_content": text, "reasoning": text}]  # as in SGLang and vLLM
            case CallBegin(name, call_id):
                index, self._num_calls = self._num_calls, self._num_calls + 1
                kind = "custom" if name in self._custom else "function"
                self._input = CustomInput() if kind == "custom" else None
                begun = {"name": name, _SAID[kind]: ""}
                call_id = call_id or self._reading.new_id(f"{self._choice}-{index}")
                return [_call_delta(index, kind, begun, id=call_id, type=kind)]
            case Arguments(text) if self._input is not None:
                return self._input_delta(self._input.push(text))
            case Arguments(text):
                return [_call_delta(self._num_calls - 1, "function", {"arguments": text})]

    def _input_delta(self, text: str) -> list[dict[str, Any]]:
        return [_call_delta(self._num_calls - 1, "custom", {"input": text})] if text else []

    def _end_input(self) -> list[dict[str, Any]]:
        ended, self._input = self._input, None
        return [] if ended is None else self._input_delta(ended.finish())


_SAID = {"function": "arguments", "custom": "input"}  # by the type of a call


def _call_delta(index: int, kind: str, called: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **fields, kind: called}]}


def message_of(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that its deltas make together."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    for delta in deltas:
        for key in ("content", "reasoning_content", "reasoning"):
            if key in delta:
                message[key] = (message.get(key) or "") + delta[key]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                calls.append({key: call[key] for key in ("id", "type", call["type"])})
                continue
            kind = calls[-1]["type"]
            calls[-1][kind][_SAID[kind]] += call[kind][_SAID[kind]]
    if message["content"] is None and "tool_calls" not in message:
        message["content"] = ""
    return message


class _WithLogprobs(Format):
    """Its answers may have log-probabilities, encoded as their tokens come."""

    done = DONE
    _answer: _Answer

    def __init__(self, plan: Plan) -> None:
        self._wants_logprobs = plan.choices[0].sampling.logprobs is not None

    @abstractmethod
    def _encoded(self, names: TokenNames, tokens: Sequence[TokenText]) -> tuple[Runs, ...]:
        """Makes the `logprobs` of a condensed piece."""

    def condensed(self, piece: Piece) -> Piece:
        if not piece.tokens:
            return piece
        encoded = self._encoded(self._answer.names, piece.tokens)
        return replace(piece, tokens=(), logprobs=encoded)

    async def _prompt_logprobs(self, piece: Piece) -> dict[str, Any]:
        """What they are called in an answer and its choices; null as in vLLM, where nobody asks."""
        plan = self._answer.plan.choices[piece.index]
        if plan.prompt_logprobs is None:
            return {"prompt_logprobs": None}
        logprobs, tokens = piece.prompt_logprobs, plan.tokens[1:]
        runs = [msgspec.Raw(b"null")]  # the first token follows nothing
        for begin in range(0, len(logprobs), _ENTRIES_AT_ONCE):
            part = slice(begin, begin + _ENTRIES_AT_ONCE)
            runs.append(prompt_entries(self._answer.names, tokens[part], logprobs[part]))
            await asyncio.sleep(0)
        return {"prompt_logprobs": runs}


class ChatFormat(_WithLogprobs):
    """`/v1/chat/completions`."""

    def __init__(
        self, ctx: ApiContext, plan: Plan, request: GenerationRequest, request_id: str
    ) -> None:
        assert plan.reading is not None
        self._answer = _Answer(ctx, plan, request, f"chatcmpl-{request_id}")
        super().__init__(plan)
        reasoning = getattr(request, "include_reasoning", True)
        self._readers = [
            _Reader(plan.reading, f"{request_id}-{choice.index}", reasoning=reasoning)
            for choice in plan.choices
        ]

    def opening(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk(c.index, delta) | self._answer.prompt_ids(c.index)
            for c in self._answer.plan.choices
        ]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        self._answer.count(piece)
        reader = self._readers[piece.index]
        deltas = reader.deltas(piece)
        ids = self._answer.ids(piece)
        if (piece.tokens or ids) and not deltas:
            deltas = [{"content": ""}]  # what its log-probabilities come with
        piece = self.condensed(piece)
        chunks = [
            self._chunk(piece.index, delta, self._logprobs(piece), None, ids)
            if i == 0
            else self._chunk(piece.index, delta)
            for i, delta in enumerate(deltas)
        ]
        if piece.finish_reason is not None:
            why = {"stop_reason": piece.stop_reason}
            chunks.append(self._chunk(piece.index, {}, None, reader.finish_reason(piece), why))
        return chunks

    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return self._answer.closing("chat.completion.chunk", usage)

    async def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        prompt: dict[str, Any] = {}
        for plan in self._answer.plan.choices:
            piece = joined(pieces, plan.index)
            if not choices:
                prompt = await self._prompt_logprobs(piece)
            reader = self._readers[plan.index]
            choice = {
                "index": piece.index,
                "message": message_of(reader.deltas(piece)),
                "logprobs": self._logprobs(piece),
                "finish_reason": reader.finish_reason(piece),
                "stop_reason": piece.stop_reason,
                "token_ids": None,
                **self._answer.ids(piece),
            }
            choices.append(choice)
            await asyncio.sleep(0)
        prompt |= {"prompt_token_ids": None, **self._answer.prompt_ids(0)}
        return self._answer.envelope("chat.completion", choices) | {"usage": usage, **prompt}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Any = None,
        finish: str | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._answer.chunk("chat.completion.chunk", {**choice, **more})

    def _encoded(self, names: TokenNames, tokens: Sequence[TokenText]) -> tuple[Runs, ...]:
        return chat_logprobs(names, tokens)

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        runs = piece.logprobs[0] if piece.logprobs else ()
        return {"content": runs, "refusal": None}


class CompletionFormat(_WithLogprobs):
    """`/v1/completions`."""

    def __init__(
        self, ctx: ApiContext, plan: Plan, request: GenerationRequest, request_id: str
    ) -> None:
        self._answer = _Answer(ctx, plan, request, f"cmpl-{request_id}")
        self._begun: set[int] = set()  # choices that a stream has had something of
        super().__init__(plan)

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        self._answer.count(piece)
        choice = self._choice(self.condensed(piece))
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            choice |= self._answer.prompt_ids(piece.index)
        if not piece.tokens:
            choice["logprobs"] = None  # as in OpenAI's last chunk: there is no token to look at
        return [self._answer.chunk("text_completion", choice)]

    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return self._answer.closing("text_completion", usage)

    async def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for plan in self._answer.plan.choices:
            piece = joined(pieces, plan.index)
            ids = {"token_ids": None, "prompt_token_ids": None}
            ids |= self._answer.prompt_ids(plan.index)
            logprobs = await self._prompt_logprobs(piece)
            choices.append({**ids, **self._choice(piece), **logprobs})
            await asyncio.sleep(0)
        return self._answer.envelope("text_completion", choices) | {"usage": usage}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece) if self._wants_logprobs else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            **self._answer.ids(piece),
        }

    def _encoded(self, names: TokenNames, tokens: Sequence[TokenText]) -> tuple[Runs, ...]:
        return completion_logprobs(names, tokens)

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        lists = piece.logprobs or ((),) * len(COMPLETION_LISTS)
        return dict(zip(COMPLETION_LISTS, lists, strict=True))
