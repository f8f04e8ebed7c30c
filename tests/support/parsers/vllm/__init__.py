"""A stand-in for vLLM's parsers, for `decode_worker.vllm.parse` in a process of its own.

Names of modules, classes, methods and fields are those of vLLM 0.32; the dialect is made up:
`((thought))text[[name {"an": "argument"}]]`. A text that says RAISE raises; the first that says END
ends the process, of all that see the file that STAND_IN_ONCE names; SLEEP waits for ever.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

NAMES = ["brackets", "stand_in"]


class Registered:
    @staticmethod
    def list_registered() -> list[str]:
        return NAMES


class Request(SimpleNamespace):
    def __init__(self, **asked: Any) -> None:
        super().__init__(**{"tools": None, "skip_special_tokens": True, **asked})


def _misbehave(text: str) -> None:
    if "RAISE" in text:
        raise RuntimeError("a parser's fault")
    if "SLEEP" in text:
        time.sleep(3600)
    once = Path(os.environ["STAND_IN_ONCE"])
    if "ENDS" in text or ("END" in text and not once.exists()):
        once.touch()
        os._exit(3)


class Parser:
    calls = reasons = False

    def __init__(self, tokenizer: Any, tools: Any, **kwargs: Any) -> None:
        self._kind = "text"
        self._held, self._num_calls, self._name, self._begun = "", 0, "", False
        self._seen = ""

    def adjust_request(self, request: Any) -> Any:
        request.skip_special_tokens = not request.tools
        return request

    def set_prompt_token_ids(self, ids: list[int]) -> None:
        assert ids

    def parse(
        self,
        text: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Any = (),
    ) -> Any:
        delta = self.parse_delta(text, [], request, [], finished=True)
        calls: list[Any] = []
        for call in delta.tool_calls:
            if call.function.name:
                calls.append(SimpleNamespace(id=call.id, name=call.function.name, arguments=""))
            calls[-1].arguments += call.function.arguments or ""
        return delta.reasoning or None, delta.content or None, calls

    def parse_delta(
        self,
        text: str,
        ids: list[int],
        request: Any,
        prompt_token_ids: Any = None,
        *,
        finished: bool,
    ) -> Any:
        self._seen += text
        _misbehave(self._seen)
        delta = SimpleNamespace(reasoning="", content="", tool_calls=[])
        for char in text:
            self._take(char, delta)
        if finished and self._held:
            self._emit(self._held, delta)
        return delta

    def _take(self, char: str, delta: Any) -> None:
        pair = self._held + char
        marks = {"text": "[[", "reasoning": "))", "name": " ", "arguments": "]]"}
        if not self._begun and self.reasons and "((".startswith(pair):
            self._held = pair if pair == "(" else ""
            if pair == "((":
                self._begun, self._kind = True, "reasoning"
            return
        self._begun = True
        mark = marks[self._kind]
        if self._kind == "text" and not self.calls:
            self._held = ""
            self._emit(pair, delta)
        elif pair.endswith(mark):
            self._emit(pair[: -len(mark)], delta)
            self._held = ""
            self._turn(delta)
        elif len(mark) > 1 and char == mark[0]:
            self._held = char
            self._emit(pair[:-1], delta)
        else:
            self._held = ""
            self._emit(pair, delta)

    def _turn(self, delta: Any) -> None:
        after = {"text": "name", "reasoning": "text", "name": "arguments", "arguments": "text"}
        if self._kind == "name":
            self._call(delta, f"stand-in-{self._num_calls}", name=self._name)
            self._num_calls += 1
            self._name = ""
        self._kind = after[self._kind]

    def _emit(self, text: str, delta: Any) -> None:
        if self._kind == "name":
            self._name += text
        elif self._kind == "arguments" and text:
            self._num_calls -= 1
            self._call(delta, None, arguments=text)
            self._num_calls += 1
        elif self._kind == "text":
            delta.content += text
        else:
            delta.reasoning += text

    def _call(self, delta: Any, call_id: str | None, **said: str) -> None:
        function = SimpleNamespace(**{"name": None, "arguments": None, **said})
        delta.tool_calls.append(
            SimpleNamespace(index=self._num_calls, id=call_id, function=function)
        )


class ParserManager:
    @staticmethod
    def get_parser(
        tool_parser_name: str | None,
        reasoning_parser_name: str | None,
        enable_auto_tools: bool,
        tokenizer: Any,
    ) -> Any:
        if not tool_parser_name and not reasoning_parser_name:
            return None
        own = {"calls": bool(tool_parser_name), "reasons": bool(reasoning_parser_name)}
        return type("Composed", (Parser,), own)


def _add(name: str, **members: Any) -> None:
    module = sys.modules[f"vllm.{name}"] = ModuleType(f"vllm.{name}")
    vars(module).update(members)


_add("reasoning", ReasoningParserManager=Registered)
_add("tool_parsers", ToolParserManager=Registered)
_add("tokenizers", get_tokenizer=lambda model, **_: Path(model).stat() and "tokenizer")
_add("parser", ParserManager=ParserManager)
for part in ("entrypoints", "entrypoints.openai", "entrypoints.openai.chat_completion"):
    _add(part)
_add("entrypoints.openai.chat_completion.protocol", ChatCompletionRequest=Request)
