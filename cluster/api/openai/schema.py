"""What `/v1/chat/completions` and `/v1/completions` accept: OpenAI's parameters and ranges.

A body is read by pydantic in strict mode: a number in quotes is an error, not a number. Which of
the fields that are not here are refused is said in `cluster.api.parameters`. Errors become
`ApiError`s that name the field, its value and what would be right.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PrivateAttr,
    ValidationError,
    create_model,
    model_validator,
)

from kvrelay.cluster.api.constraints.grammar import KINDS
from kvrelay.cluster.api.errors import ApiError, invalid
from kvrelay.cluster.api.openai.pictures import (
    IMAGE_KINDS,
    UNREAD,
    Picture,
    is_image,
    shown,
    take_pictures,
    unread,
    url_of,
)
from kvrelay.cluster.api.openai.tools import AllowedTools, ToolCall, ToolChoice, Tools
from kvrelay.cluster.api.parameters import CHAT, COMPLETION, Fields
from kvrelay.engine.kv.scope import KVKind
from kvrelay.engine.request import NUMBERS, SamplingParams
from kvrelay.router.config import MAX_PRIORITY

# vLLM's, SGLang's and llama.cpp's fields that say what an output matches -> kind.
_OWN_FIELDS = {
    **{f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")},
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """`kind`, `value` and `options` are those of `grammar_of`; `param` is what asked for it."""

    param: str
    kind: str
    value: Any
    options: Mapping[str, Any]


def _format_of(form: Any) -> list[Constraint]:
    """Returns what a `response_format` asks for. Raises ValueError."""
    if form is None:
        return []
    kind = form.get("type") if isinstance(form, dict) else form
    match kind:
        case "text":
            return []
        case "json_object":
            return [Constraint("response_format", kind, True, {})]
        case "json_schema":
            named = form.get("json_schema")
            schema = named.get("schema", True) if isinstance(named, dict) else None
            if schema is None:
                raise ValueError("'response_format': 'json_schema' is an object with a 'schema'")
            return [Constraint("response_format", "json", schema, {})]
        case "structural_tag":
            return [Constraint("response_format", kind, form, {})]
    raise ValueError(
        f"'response_format': type {kind!r:.60} is not known, use 'text', 'json_object',"
        " 'json_schema' or 'structural_tag'"
    )


def constraint_of(request: GenerationRequest) -> Constraint | None:
    """Raises ValueError."""
    options = request.structured_outputs or {}
    if options.get("disable_additional_properties"):
        name = "disable_additional_properties"
        raise ValueError(f"'structured_outputs': '{name}' is not supported; say it in the schema")
    found = [
        Constraint("structured_outputs", kind, options[kind], options)
        for kind in KINDS
        if options.get(kind) not in (None, False)
    ]
    spaced = {"whitespace_pattern": request.guided_whitespace_pattern}
    for name, kind in _OWN_FIELDS.items():
        if getattr(request, name) is not None:
            found.append(Constraint(name, kind, getattr(request, name), spaced))
    found += _format_of(request.response_format)
    if len(found) > 1:
        names = " and ".join(f"{each.kind} ({each.param})" for each in found)
        raise ValueError(f"'{found[0].param}': an output matches one thing, got {names}")
    if options and not found:
        raise ValueError(f"'structured_outputs': expected one of {', '.join(KINDS)}")
    return found[0] if found else None


MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_BIASES = 1024
MAX_CHOICES = 128
MAX_SESSION_CHARS = 256
MAX_SALT_CHARS = 1024
MAX_BAD_WORDS = 128
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 5  # a prompt may have 100,000 tokens
MAX_SCORED_TOKENS = 600_000  # a prompt that gives them: they come in one frame of 64 MiB
# What chat templates are given by other fields, or not at all.
_NO_OPTIONS = (
    *("messages", "tools", "documents", "chat_template", "tokenize"),
    *("add_generation_prompt", "continue_final_message"),
)
# Parsing holds the interpreter lock, and a body of nothing but brackets takes seconds for each MiB.
# Brackets inside strings count too: no prompt that fits a context has that many.
MAX_BRACKETS = 100_000

# Kinds of parts that are not read: something that says so stands for them, where they are not
# refused. (Images are read by some models.)
UNREAD_KINDS = (*IMAGE_KINDS, "document", "file", "input_file")


def _text_of(content: Any) -> str:
    """Content is a string, null (of a message that only calls tools), or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("expected a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if is_image(part):
            url_of(part, f"part {i}: ")
        if kind not in ("text", "refusal"):
            raise ValueError(f"part {i} has type {kind!r}; only parts of type 'text' are supported")
        text = part.get(kind)
        if not isinstance(text, str):
            raise ValueError(f"part {i} has no string '{kind}'")
        texts.append(text)
    return "\n".join(texts)


def readable(part: Any) -> Any:
    """A part of a tool's result. Tools decide what they return, and a result stays in the history:
    refusing an image would refuse every later turn too."""
    kind = part.get("type") if isinstance(part, dict) else None
    return {"type": "text", "text": UNREAD.format(kind)} if kind in UNREAD_KINDS else part


def _prediction_of(given: Any) -> str:
    if given is None:
        return ""
    if not isinstance(given, dict) or given.get("type") != "content":
        raise ValueError("expected an object of type 'content'")
    return _text_of(given.get("content"))


def _stops_of(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise ValueError("expected a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"expected at most {MAX_STOPS} stop strings, got {len(stops)}")
    for text in stops:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARS} characters, got {len(text)}")
    return stops


def _biases_of(biases: Any) -> dict[int, float]:
    if biases is None:
        return {}
    if not isinstance(biases, dict) or len(biases) > MAX_BIASES:
        raise ValueError(f"expected an object of token id to bias, at most {MAX_BIASES} of them")
    found: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ValueError(f"key {key[:40]!r} is not a token id")
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_number or not -100 <= bias <= 100:
            raise ValueError(f"bias of token {key} has to be between -100 and 100, got {bias!r}")
        found[int(key)] = float(bias)
    return found


def _words_of(words: Any) -> list[str]:
    if words is None:
        return []
    if not isinstance(words, list) or len(words) > MAX_BAD_WORDS:
        raise ValueError(f"expected a list of at most {MAX_BAD_WORDS} strings")
    for word in words:
        if not isinstance(word, str) or not word.strip() or len(word) > MAX_STOP_CHARS:
            raise ValueError(
                f"a bad word is a string of 1 to {MAX_STOP_CHARS} characters, not only white space,"
                f" got {word!r:.60}"
            )
    return words


def _options_of(options: Any) -> Any:
    for name in options if isinstance(options, dict) else ():
        if name in _NO_OPTIONS:
            raise ValueError(f"{name!r} is no option of a template; it is a field of the request")
    return options


def prompts_of(prompt: Any, most: int = MAX_CHOICES) -> list[str | list[int]]:
    """A string, strings, token ids, or lists of token ids: always a list of prompts."""
    what = "expected a string, a list of strings, a list of token ids or a list of such lists"
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise ValueError(what)
    if not prompt:
        raise ValueError("the list of prompts is empty")
    if type(prompt[0]) is int and all(type(item) is int for item in prompt):
        return [prompt]
    if len(prompt) > most:
        raise ValueError(f"expected at most {most} prompts, got {len(prompt)}")
    for item in prompt:
        is_ids = isinstance(item, list) and item and all(type(token) is int for token in item)
        if not isinstance(item, str) and not is_ids:
            raise ValueError(what)
    return prompt


def or_default(default: Any) -> BeforeValidator:
    """Takes null for the default value."""
    return BeforeValidator(lambda value: default if value is None else value)


_TokenIds = Annotated[list[int], Field(max_length=128), FailFast()]
_ChosenIds = Annotated[list[int], Field(min_length=1, max_length=MAX_BIASES)]
_LogprobIds = Annotated[list[int], Field(min_length=1, max_length=128)]
Flag = Annotated[bool, or_default(False)]
_Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
ServiceTier = Literal["auto", "default", "flex", "priority", "scale", "batch"]
Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=16),
]
_SessionName = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_CHARS)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: Flag = False
    continuous_usage_stats: Flag = False  # vLLM's: each chunk has it, if any has, as it is so far


class Message(BaseModel):
    """One turn. `content` is always text here, whatever its form was; images are beside it."""

    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text_of)] = ""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name for it
    _pictures: tuple[Picture, ...] = PrivateAttr(())  # for each, `content` has a mark

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return self._pictures

    @model_validator(mode="before")
    @classmethod
    def _content_is_there(cls, data: Any) -> Any:
        is_empty = isinstance(data, dict) and data.get("content") is None
        if is_empty and data.get("role") != "assistant":
            raise ValueError("a message needs 'content': a string or a list of text parts")
        if isinstance(data, dict) and data.get("role") == "tool":
            content = data["content"]
            if isinstance(content, list):
                return data | {"content": [readable(part) for part in content]}
        return data

    @model_validator(mode="wrap")
    @classmethod
    def _keeps_pictures(cls, data: Any, handler: Callable[[Any], Message]) -> Message:
        if not isinstance(data, dict):
            return handler(data)
        content, pictures = take_pictures(data.get("content"), data.get("role"))
        made = handler(data | {"content": content} if pictures else data)
        if pictures:
            made._pictures = pictures
        return made

    def for_template(self, *, shows_images: bool) -> dict[str, Any]:
        """As chat templates know it: they have no developer, and no keys without a value."""
        role = "system" if self.role == "developer" else self.role
        content: Any = self.content
        if self._pictures:
            content = shown(content) if shows_images else unread(content, self._pictures)
        message: dict[str, Any] = {"role": role, "content": content}
        thought = self.reasoning if self.reasoning_content is None else self.reasoning_content
        given = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": thought}
        message |= {key: value for key, value in given.items() if value is not None}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class ModelRequest(BaseModel):
    """What is asked of a model."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: Annotated[str, or_default("")] = ""  # "": the one that is served
    user: str | None = None
    priority: _Priority | None = None  # lower goes first, as in vLLM
    service_tier: ServiceTier | None = None  # a name for a range of priorities
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    kv: KVKind | None = None  # what its KV may be; None: as the tenant has
    # by whose weights alone it is answered; None: by any
    weight_version: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None  # -1: to what fits
    truncation_side: Literal["left", "right"] | None = None

    @model_validator(mode="after")
    def _is_left_some_prompt(self) -> ModelRequest:
        if self.truncate_prompt_tokens == 0:
            raise ValueError("'truncate_prompt_tokens': expected 1 or more, or -1, got 0")
        return self

    @property
    def pinned_to(self) -> str:
        """Whose weights it wants; "": anybody's."""
        return self.weight_version or ""


if TYPE_CHECKING:
    Sampled = BaseModel
else:  # the numbers of `SamplingParams`, within their bounds; None: as the model's makers say
    _HINTS = get_type_hints(SamplingParams)
    Sampled = create_model(
        "Sampled",
        **{
            name: (Annotated[_HINTS[name], Field(ge=number.least, le=number.most)] | None, None)
            for name, number in NUMBERS.items()
        },
    )


class GenerationRequest(ModelRequest, Sampled):
    """What both endpoints share that generate."""

    fields: ClassVar[Fields]

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), or_default(1)] = 1
    stop: Annotated[list[str], BeforeValidator(_stops_of)] = []
    stop_token_ids: Annotated[_TokenIds, or_default([])] = []
    ignore_eos: Flag = False
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases_of)] = {}
    bad_words: Annotated[list[str], BeforeValidator(_words_of)] = []
    allowed_token_ids: _ChosenIds | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_PROMPT_LOGPROBS)] | None = None
    logprob_token_ids: _LogprobIds | None = None
    return_tokens_as_token_ids: Flag = False
    include_stop_str_in_output: Flag = False
    no_stop_trim: Flag = False  # SGLang's name for it
    skip_special_tokens: Annotated[bool, or_default(True)] = True
    stream: Flag = False
    stream_options: StreamOptions | None = None
    prompt_cache_key: _SessionName | None = None  # names the session that this is a turn of
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    return_token_ids: Flag = False
    metadata: dict[str, Any] | None = None
    response_format: Any = None
    structured_outputs: dict[str, Any] | None = None  # this and the next are vLLM's
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: str | dict[str, Any] | None = None  # SGLang's is a text, llama.cpp's an object
    regex: str | None = None  # this and the next are SGLang's
    ebnf: str | None = None
    grammar: str | None = None  # llama.cpp's

    @model_validator(mode="after")
    def _is_supported(self) -> GenerationRequest:
        self.fields.check(self.model_extra)
        self.constraint()
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("'prompt_logprobs' is only allowed where 'stream' is false")
        logprobs = getattr(self, "logprobs", None)
        if self.logprob_token_ids and (logprobs is None or logprobs is False):
            raise ValueError("'logprob_token_ids' is only allowed where 'logprobs' is asked for")
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' is only allowed where 'stream' is true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    @property
    def includes_stop(self) -> bool:
        """Whether what ends the text is part of it."""
        return self.include_stop_str_in_output or self.no_stop_trim

    def constraint(self) -> Constraint | None:
        """What the output has to match. Raises ValueError."""
        return constraint_of(self)


class ChatRequest(GenerationRequest):
    fields = CHAT

    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Annotated[bool, or_default(True)] = True
    reasoning_effort: str | None = None
    include_reasoning: Annotated[bool, or_default(True)] = True
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_options_of)] | None = None
    add_generation_prompt: bool | None = None  # None: unless the last message goes on
    add_special_tokens: Flag = False  # vLLM's: those of a text, before what the template makes
    # Tokens of reasoning; the second name is vLLM's, where -1 is no bound.
    thinking_budget: Annotated[int, Field(ge=0)] | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    prediction: Annotated[str, BeforeValidator(_prediction_of)] = ""
    continue_final_message: Flag = False  # vLLM's: the answer goes on where that ends
    echo: Flag = False  # vLLM's: a last message of the assistant begins the answer
    modalities: list[str] | None = None

    @model_validator(mode="after")
    def _is_text_only(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"'tools': two tools are called {twice!r}")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise ValueError("'tool_choice' is only allowed where there are 'tools'")
        wanted = self.tool_choice
        wanted = wanted.names if isinstance(wanted, AllowedTools) else wanted
        wanted = () if wanted is None or isinstance(wanted, str) else wanted
        if unknown := sorted(set(wanted).difference(names)):
            raise ValueError(f"'tool_choice': there is no tool {unknown[0]!r:.60}")
        if self.modalities not in (None, [], ["text"]):
            raise ValueError(
                f"'modalities': {self.modalities!r:.60} is not supported, use ['text']"
            )
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("'continue_final_message' needs a last message of the assistant")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "'add_generation_prompt': true begins an answer, where"
                " 'continue_final_message' goes on with one: leave out either"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("'top_logprobs' is only allowed where 'logprobs' is true")
        return self


class CompletionRequest(GenerationRequest):
    fields = COMPLETION

    prompt: Annotated[list[Any], BeforeValidator(prompts_of)]
    echo: Flag = False
    suffix: str | None = None
    add_special_tokens: Annotated[bool, or_default(True)] = True
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        return self.prompt

    @model_validator(mode="after")
    def _is_possible(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(f"'best_of': {self.best_of} is not supported, only the value of 'n'")
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise ValueError(
                f"'n': {len(self.prompt)} prompts times {self.n} choices are more than "
                f"{MAX_CHOICES} completions"
            )
        return self


class MetadataRequest(BaseModel):
    """Body of what changes the metadata of an object that is kept."""

    model_config = ConfigDict(strict=True)

    metadata: Metadata


class ForkRequest(BaseModel):
    """Body of POST /v1/sessions/{id}/fork."""

    model_config = ConfigDict(strict=True)

    id: _SessionName


Request = TypeVar("Request", bound=BaseModel)


def parse(kind: type[Request], body: bytes) -> Request:
    """Raises `ApiError` (400)."""
    check_brackets(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None


def check_brackets(body: bytes) -> None:
    """They cost far more than other bytes. Raises `ApiError` (400)."""
    num_brackets = body.count(b"[") + body.count(b"{")
    if num_brackets > MAX_BRACKETS:
        raise invalid(f"The body has {num_brackets} brackets, more than {MAX_BRACKETS}")


def build(kind: type[Request], fields: Mapping[str, Any], place: str = "") -> Request:
    """Makes it of what has been read already. place: where a client wrote it, for errors. Raises
    `ApiError` (400)."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _explain(error, place) from None


def _explain(error: ValidationError, place: str = "") -> ApiError:
    """Says the first thing that is wrong, in a sentence."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = place
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return invalid(f"The body is not valid JSON: {message.removeprefix('Invalid JSON: ')}")
    if not param:
        quoted = message.split("'")
        return invalid(message, param=quoted[1] if message.startswith("'") else None)
    if first["type"] == "missing":
        return invalid(f"'{param}' is missing", param=param)
    got = "" if ", got " in message else f", got {reprlib.repr(first['input'])}"
    return invalid(f"'{param}': {message}{got}", param=param)
