"""Tools in chat requests: what clients send, and how a model's chat template gets it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvrelay.cluster.api.output.tools import Tool

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

    def tool(self) -> Tool:
        function = self.function
        return Tool(function.name, function.parameters or {}, bool(function.strict))

    def for_template(self) -> dict[str, Any]:
        shown = self.function.model_dump(exclude_none=True, exclude={"strict"})
        shown.setdefault("parameters", {"type": "object", "properties": {}})
        return {"type": "function", "function": shown}


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

    def for_template(self) -> dict[str, Any]:
        function = self.function
        arguments = arguments_of(function.arguments or "{}")
        called = {"name": function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": called}


def call_of(call_id: str, name: str, arguments: str) -> ToolCall:
    return ToolCall(id=call_id, function=CalledFunction(name=name, arguments=arguments))


def _choice_of(choice: Any) -> Any:
    """ "auto", "none", "required", or the name of a function in a tuple."""
    if choice is None or choice in ("auto", "none", "required"):
        return choice
    if isinstance(choice, tuple):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        named = choice.get("function")
        name = named.get("name") if isinstance(named, dict) else None
        if isinstance(name, str):
            return (name,)
    raise ValueError(
        "expected 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}"
    )


ToolChoice = Annotated[Any, BeforeValidator(_choice_of)]
Tools = Annotated[list[ToolParam], Field(max_length=MAX_TOOLS)]
