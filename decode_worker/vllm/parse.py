"""vLLM's parsers of tool calls and of reasoning, in a process of the environment that has it.

Life: it says `Ready`, which tells the names that there are where one is unknown; then for each
`Ask`, what parts of an output add, one `Answer`, until the API closes the socket. Frames are lines
of JSON. A stream's parser is made where its `Ask` has `opened`, and forgotten at its end. A call
that takes longer than CALL_S ends the process: the API starts another, and repeats what it knows.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any, Literal

import msgspec
from msgspec import Struct

CALL_S = 20.0  # a question may take so long
Kind = Literal["text", "reasoning", "call", "arguments"]
Said = tuple[Kind, str, str]
"""What it is, its text (of a call the tool's name), and the id that the parser gives a call."""


class Part(Struct):
    """A token, since parsers of vLLM lose what comes with it in one part; or what is around it."""

    text: str
    ids: tuple[int, ...]


class Opened(Struct):
    """What a stream's parser is made of."""

    tools: list[dict[str, Any]]  # as in a chat; empty: calls are not read
    reasons: bool
    prompt: list[int]
    kwargs: dict[str, Any]  # the chat template has these
    is_whole: bool  # all of the output comes at once
    before: list[Part]  # that had their answer of another process


class Ask(Struct):
    number: int
    key: str  # names the stream
    parts: list[Part] | None = None  # None: it is forgotten, without an answer
    is_last: bool = False
    opened: Opened | None = None


class Answer(Struct):
    number: int
    said: list[Said] = []
    error: str = ""  # what the parser has raised


class Ready(Struct):
    """Whether parsers read special tokens: without calls, and with."""

    shows: tuple[bool, bool] = (False, False)
    error: str = ""


class Parsers:
    """Makes a parser of vLLM for each stream. Raises what vLLM raises, ValueError for a name that
    it does not know."""

    def __init__(self, model: str, tool: str, reasoning: str, options: Mapping[str, Any]) -> None:
        """`tool`, `reasoning`: names, as vLLM has them; "": none. `options`: of its tokenizer."""
        from vllm.reasoning import ReasoningParserManager
        from vllm.tokenizers import get_tokenizer
        from vllm.tool_parsers import ToolParserManager

        _check("tool_parser", tool, ToolParserManager.list_registered())
        _check("reasoning_parser", reasoning, ReasoningParserManager.list_registered())
        self._names = tool, reasoning
        self._tokenizer = get_tokenizer(model, **options)
        both = product((True, False), repeat=2)
        self._classes = {each: self._class(*each) for each in both}

    def _class(self, calls: bool, reasons: bool) -> Any:
        from vllm.parser import ParserManager

        tool, reasoning = self._names
        return ParserManager.get_parser(
            tool_parser_name=tool if calls and tool else None,
            reasoning_parser_name=reasoning if reasons and reasoning else None,
            enable_auto_tools=calls,
            tokenizer=self._tokenizer,
        )

    def shows(self) -> tuple[bool, bool]:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        opened = (Opened(tools, True, [], {}, False, []) for tools in ([], [tool]))
        without, beside = (Stream(self, each).shows for each in opened)
        return without, beside

    def of(self, opened: Opened) -> tuple[Any, Any]:
        """A parser, and the request that it reads for."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        asked: dict[str, Any] = {"messages": [], "model": ""}
        if opened.tools:
            asked |= {"tools": opened.tools, "tool_choice": "auto"}
        request = ChatCompletionRequest(**asked)
        made = self._classes[bool(opened.tools), opened.reasons]
        if made is None:
            return None, request
        kwargs = {"chat_template_kwargs": opened.kwargs, "model_config": None}
        parser = made(self._tokenizer, request.tools, **kwargs)
        return parser, parser.adjust_request(request)


def _check(setting: str, name: str, known: Iterable[str]) -> None:
    if name and name not in known:
        raise ValueError(f"api.{setting} = '{name}': vLLM has {', '.join(sorted(known))}")


class Stream:
    """One output, as its parser reads it."""

    def __init__(self, parsers: Parsers, opened: Opened) -> None:
        self._parsers, self._opened = parsers, opened
        self._parser, self._request = parsers.of(opened)
        self._num_calls, self._text, self._ids = 0, "", list[int]()
        self.read(opened.before, is_last=False)

    @property
    def shows(self) -> bool:
        return not self._request.skip_special_tokens

    def read(self, parts: list[Part], *, is_last: bool) -> list[Said]:
        self._text += "".join(part.text for part in parts)
        self._ids += [token for part in parts for token in part.ids]
        if self._parser is None:
            return _texts("text", "".join(part.text for part in parts))
        if self._opened.is_whole:
            return self._whole(self._parser) if is_last else []
        if is_last:
            parts = [*parts, Part("", ())]
        last = len(parts) - 1 if is_last else -1
        said = [each for i, part in enumerate(parts) for each in self._part(part, i == last)]
        return said + (self._left_out() if is_last and not self._num_calls else [])

    def _left_out(self) -> list[Said]:
        """Calls that a parser finds in the whole output, and that it has not found in its parts:
        some of vLLM 0.32 find none."""
        if not self._opened.tools:
            return []
        said = self._whole(self._parsers.of(self._opened)[0])
        return [each for each in said if each[0] in ("call", "arguments")]

    def _whole(self, parser: Any) -> list[Said]:
        parser.set_prompt_token_ids(self._opened.prompt)
        reasoning, content, calls = parser.parse(
            *(self._text, self._request),
            enable_auto_tools=True,
            model_output_token_ids=self._ids,
        )
        said = [*_texts("reasoning", reasoning), *_texts("text", content)]
        for call in calls or ():
            said += [("call", call.name, call.id or ""), ("arguments", call.arguments, "")]
        return said

    def _part(self, part: Part, is_last: bool) -> list[Said]:
        delta = self._parser.parse_delta(
            *(part.text, list(part.ids), self._request),
            prompt_token_ids=self._opened.prompt,
            finished=is_last,
        )
        if delta is None:
            return []
        said = [*_texts("reasoning", delta.reasoning), *_texts("text", delta.content)]
        for call in delta.tool_calls or ():
            function = call.function
            if function is not None and function.name:
                self._num_calls += 1
                said.append(("call", function.name, call.id or ""))
            if function is not None and function.arguments:
                if call.index != self._num_calls - 1:
                    raise ValueError(f"arguments of call {call.index} after others have begun")
                said.append(("arguments", function.arguments, ""))
        return said


def _texts(kind: Kind, text: str | None) -> list[Said]:
    return [(kind, text, "")] if text else []


def answer_to(parsers: Parsers, streams: dict[str, Stream], ask: Ask) -> Answer | None:
    """`streams` has them by their keys. Returns None where none is expected."""
    try:
        if ask.opened is not None:
            streams[ask.key] = Stream(parsers, ask.opened)
        if ask.parts is None:
            streams.pop(ask.key, None)
            return None
        answer = Answer(ask.number, streams[ask.key].read(ask.parts, is_last=ask.is_last))
    except Exception as error:  # what the code of a parser raises, by what a model has written
        answer = Answer(ask.number, error=f"{type(error).__name__}: {error}"[:500])
    if ask.is_last or answer.error:
        streams.pop(ask.key, None)
    return answer


def main(descriptor: str, model: str, tool: str, reasoning: str, options: str) -> None:
    """`descriptor`: of a socket; what vLLM writes to the standard output is for people."""
    decoder, streams = msgspec.json.Decoder(Ask), dict[str, Stream]()
    with socket.socket(fileno=int(descriptor)) as connection, connection.makefile("rwb") as file:

        def write(answer: Struct) -> None:
            file.write(msgspec.json.encode(answer) + b"\n")
            file.flush()

        try:
            parsers = Parsers(model, tool, reasoning, msgspec.json.decode(options))
            ready = Ready(parsers.shows())
        except Exception as error:
            write(Ready(error=str(error) or type(error).__name__))
            return
        write(ready)
        for line in file:
            signal.setitimer(signal.ITIMER_REAL, CALL_S)  # it ends the process
            answer = answer_to(parsers, streams, decoder.decode(line))
            signal.setitimer(signal.ITIMER_REAL, 0)
            if answer is not None:
                write(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
