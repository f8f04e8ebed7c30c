"""Tools in chat requests: what clients send, and how a model's chat template gets it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvrelay.cluster.api.output.custom_input import INPUT, arguments_for
from kvrelay.cluster.api.output.tools import InputFormat, Tool

MAX_TOOLS = 512
_NAME = r"^[a-zA-Z0-9_.:/-]{1,128}$"


class RawObject(dict[str, Any]):
    """An object of JSON, which chat templates may look into; `raw` is how it was written. Whoever
    writes it as JSON again writes that, so that a model's words stay the prefix of its next
    turn."""

    raw = ""

    def __str__(self) -> str:
        return self.raw

    def __radd__(self, text: str) -> str:
        """Templates that take arguments for a text put it behind another."""
        return text + self.raw


def arguments_of(text: str) -> Any:
    """What a template is given as the arguments of a call: an object where they are one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, dict):
        return text
    found = RawObject(value)
    found.raw = text
    return found


class Function(BaseModel):
    model_config = ConfigDict(strict=True)

    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(BaseModel):
    """A tool of a request. Unknown keys are kept for the template."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: Function
    takes: InputFormat | None = None  # what a custom tool takes; the model is shown a function

    @model_validator(mode="before")
    @classmethod
    def _is_custom(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("type") != "custom":
            return {key: value for key, value in data.items() if key != "takes"}
        custom = data.get("custom")
        if not isinstance(custom, dict):
            raise ValueError("a tool of type 'custom' has an object 'custom'")
        function, takes = custom_function(custom)
        return {"type": "function", "function": function, "takes": takes}

    def tool(self) -> Tool:
        function = self.function
        strict = bool(function.strict)
        return Tool(function.name, function.parameters or {}, strict, self.takes)

    def for_template(self) -> dict[str, Any]:
        shown = self.function.model_dump(exclude_none=True, exclude={"strict"})
        shown.setdefault("parameters", {"type": "object", "properties": {}})
        return {"type": "function", "function": shown}


def custom_function(tool: Mapping[str, Any]) -> tuple[dict[str, Any], InputFormat]:
    """A custom tool as the function that a model is shown, and what it takes. Raises
    ValueError."""
    form, about = tool.get("format"), tool.get("description")
    takes = InputFormat()
    if form is not None:
        takes = _format_of(form)
    if takes.syntax:
        about = f"{about or ''}\n\nIts grammar:\n{takes.definition}"
    parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    function = {"name": tool.get("name"), "description": about, "parameters": parameters}
    return function, takes


def _format_of(form: Any) -> InputFormat:
    kind = form.get("type") if isinstance(form, dict) else form
    if kind == "text":
        return InputFormat()
    if kind != "grammar":
        raise ValueError(f"'format': type {kind!r:.60} is not known, use 'text' or 'grammar'")
    grammar = form.get("grammar", form)  # chats have it in an object of its own
    syntax, definition = (
        grammar.get(key) if isinstance(grammar, dict) else None for key in ("syntax", "definition")
    )
    if syntax not in ("lark", "regex"):
        raise ValueError(f"'format': 'syntax' is 'lark' or 'regex', got {syntax!r:.60}")
    if not isinstance(definition, str) or not definition:
        raise ValueError(f"'format': 'definition' is a string, got {definition!r:.60}")
    return InputFormat(syntax, definition)


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    arguments: str = ""


class ToolCall(BaseModel):
    """A call in a message of the assistant."""

    model_config = ConfigDict(strict=True)

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _is_custom(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("type") != "custom":
            return data
        custom = data.get("custom")
        name, text = (
            custom.get(key) if isinstance(custom, dict) else None for key in ("name", "input")
        )
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError("a call of type 'custom' has an object 'custom' of 'name' and 'input'")
        function = {"name": name, "arguments": arguments_for(text)}
        return {"id": data.get("id", ""), "function": function}

    def for_template(self) -> dict[str, Any]:
        function = self.function
        arguments = arguments_of(function.arguments or "{}")
        called = {"name": function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": called}


def call_of(call_id: str, name: str, arguments: str) -> ToolCall:
    return ToolCall(id=call_id, function=CalledFunction(name=name, arguments=arguments))


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """Some of the tools: the prompt shows them all, so it stays what a cache has."""

    mode: Literal["auto", "required"]
    names: frozenset[str]


def _choice_of(choice: Any) -> Any:
    """ "auto", "none", "required", the name of a function in a tuple, or AllowedTools."""
    if choice is None or choice in ("auto", "none", "required"):
        return choice
    if isinstance(choice, tuple | AllowedTools):
        return choice
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        return _allowed(choice.get("allowed_tools", choice))
    if kind in ("function", "custom"):
        name = _name_of(choice)
        if name is not None:
            return (name,)
    raise ValueError(
        "expected 'auto', 'none', 'required', {'type': 'function', 'function': {'name': ...}},"
        " likewise of 'custom', or 'allowed_tools'"
    )


def _name_of(choice: Any) -> str | None:
    """A tool's; in the Responses API it is beside the type."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    named = choice.get(kind, choice) if kind in ("function", "custom") else None
    name = named.get("name") if isinstance(named, dict) else None
    return name if isinstance(name, str) else None


def _allowed(given: Any) -> AllowedTools:
    mode, tools = (given.get(key) if isinstance(given, dict) else None for key in ("mode", "tools"))
    if mode not in ("auto", "required"):
        raise ValueError(f"'allowed_tools': 'mode' is 'auto' or 'required', got {mode!r:.60}")
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise ValueError(f"'allowed_tools': 'tools' is a list of 1 to {MAX_TOOLS} tools")
    names = list(map(_name_of, tools))
    if None in names:
        wrong = tools[names.index(None)]
        raise ValueError(
            f"'allowed_tools': a tool is named by its type, 'function' or 'custom', and its name,"
            f" got {wrong!r:.60}"
        )
    return AllowedTools(mode, frozenset(name for name in names if name is not None))


ToolChoice = Annotated[Any, BeforeValidator(_choice_of)]
Tools = Annotated[list[ToolParam], Field(max_length=MAX_TOOLS)]
