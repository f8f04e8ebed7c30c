"""What `/v1/responses` accepts, and the chat that its items mean."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvrelay.cluster.api.errors import ApiError, invalid, renamed
from kvrelay.cluster.api.openai.pictures import UNREAD
from kvrelay.cluster.api.openai.schema import (
    UNREAD_KINDS,
    ChatRequest,
    Message,
    Sampled,
    build,
    or_default,
)
from kvrelay.cluster.api.openai.tools import (
    MAX_TOOLS,
    Function,
    ToolCall,
    ToolParam,
    call_of,
    custom_function,
)
from kvrelay.cluster.api.output.custom_input import arguments_for
from kvrelay.cluster.api.output.tools import InputFormat
from kvrelay.cluster.api.parameters import COMPACT, REASONING, RESPONSES, TEXT_OPTIONS, Fields

# Tools that OpenAI runs itself. Clients offer them to every model; here none can be called.
RUN_ELSEWHERE = ("web_search", "image_generation", "file_search", "code_interpreter")
# Values of `include`.
ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
SUMMARY = "Summary of the conversation so far:\n\n"  # before a compaction's text
UNREADABLE = "[Earlier turns were compacted by another server and cannot be read here.]"
ROLES = ("user", "assistant", "system", "developer")
CHAT_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
}
# Fields that chats have too, and that are read here. Any other is passed on as it is.
_OWN = {"tools", "tool_choice", "top_logprobs", "metadata"}


def _items_of(given: Any) -> Any:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise ValueError("expected a string or a list of items")
    return given


def _id_of(given: Any) -> Any:
    """A conversation is named by its id, or by an object with it."""
    return given.get("id") if isinstance(given, dict) else given


class Reasoning(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    effort: str | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> Reasoning:
        REASONING.check(self.model_extra)
        return self


class TextOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> TextOptions:
        TEXT_OPTIONS.check(self.model_extra)
        return self


class CompactRequest(Sampled):
    """Body of `/v1/responses/compact`: what a summary is made from, and how."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    fields_besides: ClassVar[Fields] = COMPACT

    model: str
    input: Annotated[list[dict[str, Any]], BeforeValidator(_items_of)] = Field(default_factory=list)
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    previous_response_id: str | None = None
    conversation: Annotated[str | None, BeforeValidator(_id_of)] = None
    reasoning: Reasoning | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    priority: int | None = None
    seed: int | None = None
    # The following are checked as those of a chat.
    cache_salt: Any = None
    kv: Any = None
    weight_version: Any = None
    logit_bias: Any = None
    skip_special_tokens: Any = None
    chat_template_kwargs: Any = None

    @model_validator(mode="after")
    def _is_supported(self) -> CompactRequest:
        self.fields_besides.check(self.model_extra)
        return self


class ResponsesRequest(CompactRequest):
    fields_besides: ClassVar[Fields] = RESPONSES

    model: Annotated[str, or_default("")] = ""  # "": the one that is served
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    store: bool | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    user: str | None = None
    background: bool | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    # The following are checked as those of a chat.
    stop: Any = None
    ignore_eos: Any = None
    include_stop_str_in_output: Any = None
    structured_outputs: Any = None

    @property
    def is_kept(self) -> bool:
        return self.store is not False


class ResponsesChat(ChatRequest):
    """The chat that a request means, and what its answer repeats."""

    asked: ResponsesRequest
    spaces: dict[str, list[str]]  # name of a tool -> its namespace, and its name there
    max_tool_calls: int | None = None


def as_chat(
    request: ResponsesRequest, history: list[dict[str, Any]], session: str | None
) -> ResponsesChat:
    """history: items before those of the request. Raises `ApiError` (400)."""
    messages = _messages([*history, *request.input], -len(history))
    if request.instructions:
        messages.insert(0, Message(role="system", content=request.instructions))
    if not messages:
        raise invalid("'input': there is nothing to answer", param="input")
    tools, spaces = _tools(request.tools or [])
    shared = ResponsesRequest.model_fields.keys() & ResponsesChat.model_fields.keys() - _OWN
    chat: dict[str, Any] = {name: getattr(request, name) for name in shared}
    chat = {name: value for name, value in chat.items() if value is not None} | {
        "messages": messages,
        "prompt_cache_key": request.prompt_cache_key or session,
        "asked": request,
        "spaces": spaces,
    }
    if request.max_output_tokens is not None:
        chat["max_completion_tokens"] = request.max_output_tokens
    if LOGPROBS in (request.include or ()):
        chat["logprobs"], chat["top_logprobs"] = True, request.top_logprobs or 0
    if request.reasoning is not None and request.reasoning.effort is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    if tools:
        chat["tools"] = tools
    chat["tool_choice"] = _choice(request.tool_choice)
    if request.text is not None and request.text.format is not None:
        chat["response_format"] = _format(request.text.format)
    with renamed(CHAT_NAMES):
        return build(ResponsesChat, chat)


def _messages(items: list[dict[str, Any]], first: int) -> list[Message]:
    """Items as messages: what the assistant said in a row is one. `first`: the place of the first
    item in the request's input; those before it are of earlier requests."""
    messages: list[Message] = []
    texts: list[str] = []  # what the assistant says in one turn: texts, thoughts, calls
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    is_said = False

    def end_turn() -> None:
        nonlocal is_said
        if is_said:
            messages.append(
                Message(
                    role="assistant",
                    content="".join(texts),
                    tool_calls=[*calls] or None,
                    reasoning_content="\n".join(thoughts) if thoughts else None,
                )
            )
        is_said = False
        for each in (texts, thoughts, calls):
            each.clear()

    for i, item in enumerate(items, first):
        kind: Any = item.get("type") or "message"
        match kind:
            case "message" if item.get("role") == "assistant":
                is_said = True
                texts.append(_text(item.get("content"), i))
            case "message":
                end_turn()
                role, content = item.get("role"), _content(item.get("content"), i)
                if role not in ROLES:
                    raise _bad(i, f"'role' is one of {', '.join(ROLES)}, got {role!r:.60}")
                messages.append(Message.model_validate({"role": role, "content": content}))
            case "reasoning":
                is_said = True
                thoughts.append(_reasoning(item))
            case "function_call" | "custom_tool_call":
                is_said = True
                calls.append(_call(item, kind, i))
            case "function_call_output" | "custom_tool_call_output":
                end_turn()
                output = _content(item.get("output"), i)
                messages.append(_result(_string(item, "call_id", i), output))
            case "compaction" | "compaction_summary":
                end_turn()
                messages.append(Message(role="user", content=_summary(item)))
            case str() if kind.endswith("_call_output"):  # such as a shell's
                end_turn()
                call_id = _string(item, "call_id" if "call_id" in item else "id", i)
                messages.append(_result(call_id, _as_text(item.get("output"))))
            case str() if kind.endswith("_call"):
                if isinstance(item.get("call_id"), str):  # its client runs it
                    is_said = True
                    calls.append(_client_call(kind, item))
                # Others ran at their maker; what came of them is in what the assistant said.
            case "mcp_list_tools" | "mcp_approval_request" | "mcp_approval_response":
                pass
            case _:
                raise _bad(i, f"items of type {kind!r:.60} are not supported")
    end_turn()
    return messages


def _call(item: dict[str, Any], kind: str, i: int) -> ToolCall:
    if kind == "custom_tool_call":
        arguments = arguments_for(_string(item, "input", i))
    else:
        arguments = _string(item, "arguments", i)
    name = _spaced(item.get("namespace"), _string(item, "name", i))
    return call_of(_string(item, "call_id", i), name, arguments)


def _result(call_id: str, output: str | list[dict[str, Any]]) -> Message:
    about = {"role": "tool", "tool_call_id": call_id, "content": output}
    return Message.model_validate(about)


def _client_call(kind: str, item: dict[str, Any]) -> ToolCall:
    """A call of a tool that a client runs and that is no function, such as a shell."""
    about: Any = item.get("action") or item.get("operation") or item.get("arguments") or {}
    return call_of(item["call_id"], kind.removesuffix("_call"), _as_text(about))


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _summary(item: dict[str, Any]) -> str:
    """Returns the text of a compaction."""
    text = _decoded(item)
    return text if text.startswith(SUMMARY) else UNREADABLE


def encoded(text: str) -> str:
    """As `encrypted_content`: it is for this server to read again, and is no secret."""
    return base64.b64encode(text.encode()).decode()


def _decoded(item: dict[str, Any]) -> str:
    try:
        return base64.b64decode(item.get("encrypted_content") or "", validate=True).decode()
    except (ValueError, TypeError):  # it is not of this server
        return ""


def is_reference(item: dict[str, Any]) -> bool:
    """Whether it only names an item that is kept."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)


def check_items(items: list[dict[str, Any]]) -> None:
    """That a request could be asked with them. Raises `ApiError`."""
    _messages(items, 0)


def check_outputs(history: list[dict[str, Any]], items: list[dict[str, Any]]) -> None:
    """Each output among `items`, which continue `history`, is one of a call. Raises `ApiError`."""
    calls = {item.get("call_id") for item in history}
    for i, item in enumerate(items):
        call_id = item.get("call_id")
        if str(item.get("type")).endswith("_call_output"):
            if call_id is not None and call_id not in calls:
                raise _bad(i, f"there is no call with id {call_id!r:.80} before its output")
        else:
            calls.add(call_id)


def _string(item: dict[str, Any], key: str, index: int) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _bad(index, f"'{key}' is a string, got {value!r:.60}")
    return value


def _text(content: Any, index: int) -> str:
    """Of what the assistant said."""
    found = _content(content, index)
    if isinstance(found, str):
        return found
    return "\n".join(part.get("text") or UNREAD.format(part["type"]) for part in found)


def _content(content: Any, index: int) -> str | list[dict[str, Any]]:
    """As of a chat's message. Images stay parts of it."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _bad(index, "content is a string or a list of parts")
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in UNREAD_KINDS:
            is_image = kind == "input_image"
            parts.append(part if is_image else {"type": "text", "text": UNREAD.format(kind)})
            continue
        if kind not in ("input_text", "output_text", "text", "refusal"):
            raise _bad(index, f"this model reads text, no part of type {kind!r:.60}")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise _bad(index, f"a part of type {kind!r} has a string 'text'")
        parts.append({"type": "text", "text": text})
    return parts


def _reasoning(item: dict[str, Any]) -> str:
    for key in ("content", "summary"):
        parts = item.get(key)
        if isinstance(parts, list) and parts:
            return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
    return _decoded(item)


def _bad(index: int, message: str) -> ApiError:
    return invalid(f"'input[{index}]': {message}", param="input")


def _spaced(namespace: Any, name: str) -> str:
    """What the model calls a tool."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def _in_spaces(given: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The place of each tool, the tool, and its namespace. Raises `ApiError`."""
    for i, tool in enumerate(given):
        place, inside = f"tools[{i}]", tool.get("tools")
        if tool.get("type") != "namespace":
            yield place, tool, ""
            continue
        if not isinstance(inside, list) or not all(isinstance(each, dict) for each in inside):
            raise invalid(f"'{place}': a namespace has a list of 'tools'", "tools")
        for j, each in enumerate(inside):
            yield f"{place}.tools[{j}]", each, str(tool.get("name", ""))


def _tools(given: list[dict[str, Any]]) -> tuple[list[ToolParam], dict[str, list[str]]]:
    """Those that a chat has, and which are in a namespace."""
    tools: list[ToolParam] = []
    spaces: dict[str, list[str]] = {}
    for place, tool, space in _in_spaces(given):
        kind = tool.get("type")
        if _runs_elsewhere(tool):
            continue
        if kind not in ("function", "custom"):
            raise invalid(f"'{place}': tools of type {kind!r:.60} are not run here", "tools")
        takes: InputFormat | None = None
        if kind == "custom":
            try:
                function, takes = custom_function(tool)
            except ValueError as error:
                raise invalid(f"'{place}': {error}", "tools") from None
        else:
            names = ("name", "description", "strict")
            function = {k: tool[k] for k in names if tool.get(k) is not None}
            function["parameters"] = tool.get("parameters") or {}
        if space and isinstance(tool.get("name"), str):
            function["name"] = _spaced(space, tool["name"])
            spaces[function["name"]] = [space, tool["name"]]
        built = build(Function, function, place)
        tools.append(ToolParam.model_construct(type="function", function=built, takes=takes))
    return tools, spaces


def _choice(choice: Any) -> Any:
    """With the names that the model has for tools; those that are not offered to it are left
    out."""
    if not isinstance(choice, dict):
        return choice
    if isinstance(choice.get("name"), str):
        name = _spaced(choice.get("namespace"), choice["name"])
        return {"type": "function", "function": {"name": name}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_choice(tool) for tool in choice["tools"] if not _runs_elsewhere(tool)]
        return choice | {"tools": tools}
    return choice


def _runs_elsewhere(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind.startswith(RUN_ELSEWHERE)


def _format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
