"""What `/v1/messages` accepts, and the chat that it means.

Two things keep a conversation's prefix the same from turn to turn: a system block that only names
the client's version and the bill is left out, and the arguments of a call, which come as an object,
are written as the model writes them.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)

from kvrelay.cluster.api.errors import ApiError, invalid, renamed
from kvrelay.cluster.api.openai.schema import (
    UNREAD_KINDS,
    ChatRequest,
    Flag,
    Message,
    build,
    or_default,
    parse,
)
from kvrelay.cluster.api.openai.tools import MAX_TOOLS, Function, ToolCall, ToolParam, call_of
from kvrelay.cluster.api.parameters import MESSAGES, OUTPUT_CONFIG

BILLING = "x-anthropic-billing-header:"
TTL_S = {"5m": 300.0, "1h": 3600.0}
MAX_STOP_SEQUENCES = 64
MAX_STOP_SEQUENCE_CHARS = 1024
CHAT_NAMES = {
    "response_format": "output_format",
    "thinking_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
}
_EFFORTS = {"max": "high"}
_StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_SEQUENCE_CHARS)]


class Block(BaseModel):
    """A block of content. Which fields it needs depends on its type."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None
    thinking: str | None = None
    cache_control: dict[str, Any] | None = None


_Content = list[Block] | str  # in this order, so that what is wrong with a block is said


class Turn(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Literal["user", "assistant", "system"]
    content: _Content


class ToolDefinition(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_the_clients(self) -> ToolDefinition:
        if self.type not in (None, "custom"):
            raise ValueError(f"tool '{self.name}': tools of type {self.type!r} are not run here")
        return self


class OutputConfig(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    effort: str | None = None
    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> OutputConfig:
        OUTPUT_CONFIG.check(self.model_extra)
        return self


class MessagesRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: Annotated[str, or_default("")] = ""  # "": the one that is served
    messages: Annotated[list[Turn], Field(min_length=1), FailFast()]
    max_tokens: Annotated[int, Field(ge=1)]
    system: _Content | None = None
    stop_sequences: Annotated[list[_StopSequence], Field(max_length=MAX_STOP_SEQUENCES)] | None = (
        None
    )
    stream: Flag = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: int | None = None  # not Anthropic's: for answers that can be repeated
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> MessagesRequest:
        MESSAGES.check(self.model_extra)
        return self


class CountRequest(MessagesRequest):
    """Body of `/v1/messages/count_tokens`, which generates nothing."""

    max_tokens: int = 1


Asked = TypeVar("Asked", bound=MessagesRequest)


class MessagesChat(ChatRequest):
    """The chat that a request means. `keep_s`: what its `cache_control` asks for; None: it has
    none."""

    keep_s: float | None = None


def read_messages(body: bytes) -> MessagesChat:
    """Raises `ApiError` (400)."""
    return as_chat(read_request(MessagesRequest, body))


def read_request(kind: type[Asked], body: bytes) -> Asked:
    """Raises `ApiError` (400)."""
    try:
        return parse(kind, body)
    except ApiError as error:  # the alternative of a union is no place that a client knows
        raise invalid(error.message.replace(".list[Block]", "")) from None


def as_chat(request: MessagesRequest) -> MessagesChat:
    """Raises `ApiError` (400)."""
    chat: dict[str, Any] = {
        "model": request.model,
        "messages": _messages(request),
        "max_tokens": request.max_tokens,
        "stream": request.stream,
        "keep_s": _keep_s(request),
        "continue_final_message": request.messages[-1].role == "assistant",
    }
    for name in ("temperature", "top_p", "top_k", "seed"):
        if getattr(request, name) is not None:
            chat[name] = getattr(request, name)
    if request.service_tier == "standard_only":
        chat["service_tier"] = "default"
    if request.tools:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    chat |= _choice(request.tool_choice)
    kind = (request.thinking or {}).get("type", "disabled")
    chat["chat_template_kwargs"] = {"enable_thinking": kind != "disabled"}
    if kind == "enabled":
        chat["thinking_budget"] = (request.thinking or {}).get("budget_tokens")
    config = request.output_config or OutputConfig()
    if config.effort is not None:
        chat["reasoning_effort"] = _EFFORTS.get(config.effort, config.effort)
    form = request.output_format or config.format
    if form is not None:
        schema = {"name": "output", "schema": _schema(form)}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    with renamed(CHAT_NAMES):
        made = build(MessagesChat, chat)
    made.stop = list(request.stop_sequences or [])
    return made


def _messages(request: MessagesRequest) -> list[Message]:
    messages: list[Message] = []
    system = request.system
    if isinstance(system, list):
        texts = [_text(block, f"system[{j}]") for j, block in enumerate(system)]
        system = "\n\n".join(text for text in texts if not text.startswith(BILLING))
    if system:
        messages.append(Message(role="system", content=system))
    for i, turn in enumerate(request.messages):
        if isinstance(turn.content, str):
            messages.append(Message(role=turn.role, content=turn.content))
        elif turn.role == "assistant":
            messages.append(_said(turn.content, f"messages[{i}]"))
        else:
            messages += _asked(turn, f"messages[{i}]")
    return messages


def _said(blocks: list[Block], where: str) -> Message:
    """Returns a turn of the assistant."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for j, block in enumerate(blocks):
        place = f"{where}.content[{j}]"
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                if block.name is None or block.id is None:
                    raise invalid(f"'{place}': a tool_use has 'id', 'name' and 'input'")
                arguments = json.dumps(block.input or {}, ensure_ascii=False)
                calls.append(call_of(block.id, block.name, arguments))
            case _:
                texts.append(_text(block, place))
    return Message(
        role="assistant",
        content="".join(texts),
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) if thoughts else None,
    )


def _asked(turn: Turn, where: str) -> list[Message]:
    """Returns a turn of the user: results of tools are messages of their own."""
    assert isinstance(turn.content, list)
    messages: list[Message] = []
    parts: list[dict[str, Any]] = []

    def end_parts() -> None:
        if parts:
            messages.append(_message(where, role=turn.role, content=[*parts]))
            parts.clear()

    for j, block in enumerate(turn.content):
        place = f"{where}.content[{j}]"
        if block.type == "image":
            parts.append({"type": "image", **(block.model_extra or {})})
            continue
        if block.type != "tool_result":
            parts.append(_text_part(_text(block, place)))
            continue
        end_parts()
        if block.tool_use_id is None:
            raise invalid(f"'{place}': a tool_result has a 'tool_use_id'")
        content = _result(block.content, place)
        is_text = bool(content) and content[0]["type"] == "text"
        said = content[0]["text"] if is_text else ""
        if block.is_error and not said.lower().startswith("error"):
            content = [_text_part(f"Error: {said}".rstrip()), *content[is_text:]]
        messages.append(
            _message(place, role="tool", tool_call_id=block.tool_use_id, content=content)
        )
    end_parts()
    return messages or [Message(role=turn.role, content="")]


def _message(where: str, **fields: Any) -> Message:
    """Raises `ApiError`, about the content."""
    try:
        return Message.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]["msg"]
        raise invalid(f"'{where}': {first.removeprefix('Value error, ')}") from None


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _result(content: Any, where: str) -> list[dict[str, Any]]:
    """Returns parts of a message."""
    if content is None or isinstance(content, str):
        return [_text_part(content or "")]
    if not isinstance(content, list):
        raise invalid(f"'{where}': the content of a tool_result is a string or a list")
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_reference":  # to a tool that the client has found for the model
            parts.append(_text_part(str(part.get("tool_name", ""))))
        elif kind in UNREAD_KINDS or (kind == "text" and isinstance(part.get("text"), str)):
            parts.append(part)
        else:
            raise _not_text(str(kind), where)
    return parts


def _text(block: Block, where: str) -> str:
    if block.type != "text" or block.text is None:
        raise _not_text(block.type, where)
    return block.text


def _not_text(kind: str, where: str) -> ApiError:
    return invalid(f"'{where}': this model reads text, no content of type '{kind[:40]}'")


def _schema(form: Any) -> dict[str, Any]:
    is_known = isinstance(form, dict) and form.get("type") == "json_schema"
    schema = form.get("schema") if is_known else None
    if not isinstance(schema, dict):
        raise invalid(
            f"'output_format': expected type json_schema with an object 'schema', got {form!r:.80}"
        )
    return schema


def _tool(tool: ToolDefinition, place: str) -> ToolParam:
    fields = {
        "name": tool.name,
        "description": tool.description or None,
        "parameters": tool.input_schema or {},
        "strict": tool.strict or None,
    }
    return ToolParam(type="function", function=build(Function, fields, place))


def _choice(choice: dict[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = choice.get("type")
    known: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
    if isinstance(choice.get("name"), str):
        known["tool"] = {"type": "function", "function": {"name": choice["name"]}}
    if not isinstance(kind, str) or kind not in known:
        raise invalid(
            f"'tool_choice': expected type auto, any, tool (with 'name') or none, got {kind!r:.60}",
            param="tool_choice",
        )
    parallel = choice.get("disable_parallel_tool_use") is not True
    return {"tool_choice": known[kind], "parallel_tool_calls": parallel}


def _keep_s(request: MessagesRequest) -> float | None:
    """The longest time to live that a `cache_control` names."""
    marks = [request.cache_control, *(tool.cache_control for tool in request.tools or ())]
    marks += [block.cache_control for block in request.system or () if isinstance(block, Block)]
    for turn in request.messages:
        if isinstance(turn.content, list):
            marks += [block.cache_control for block in turn.content]
    found = []
    for mark in marks:
        if mark is not None:
            ttl = mark.get("ttl", "5m")
            if not isinstance(ttl, str) or ttl not in TTL_S:
                raise invalid(f"'cache_control': 'ttl' is '5m' or '1h', got {ttl!r:.40}")
            found.append(TTL_S[ttl])
    return max(found, default=None)
