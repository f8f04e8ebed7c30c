"""Tokens in and tokens out, as in vLLM: `/inference/v1/generate`, and the `render` routes, which
make its requests of chats and completions without generating anything.

A request is a completion whose prompt is tokens; its answer has their ids in place of a text. What
a rendered request says of sampling is all that the chat would be sampled by, so that its answer has
the same tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import invalid, renamed
from kvrelay.cluster.api.http.route import ApiRoute
from kvrelay.cluster.api.incoming import held_body, utility_call
from kvrelay.cluster.api.openai.formats import DONE, Format, joined
from kvrelay.cluster.api.openai.logprobs import Runs, id_logprobs, prompt_entries
from kvrelay.cluster.api.openai.parts import Piece, Plan
from kvrelay.cluster.api.openai.plan import plan_chat, plan_completion
from kvrelay.cluster.api.openai.respond import GenerateEndpoint
from kvrelay.cluster.api.openai.schema import (
    MAX_TOP_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
    build,
    parse,
)
from kvrelay.cluster.api.tenants import Tenant
from kvrelay.engine.request import DEFAULTS, NUMBERS

PATH = "/inference/v1/generate"
RENDER = ("/v1/chat/completions/render", "/v1/completions/render")
_AS_LONG_AS_FITS = 2**31
# Fields of a body, and of its `sampling_params`, with the only values that are obeyed.
_ONLY: dict[str, tuple[Any, ...]] = {
    "features": (),
    "content_parts": ([],),
    "output_mode": ("tokens",),
    "flat_logprobs": (False,),
    "prompt_logprob_token_ids": ([],),
    "trace_decode_token_ids": ([],),
    "extra_args": ({},),
    "skip_reading_prefix_cache": (False,),
}
_NAMES = {"prompt": "token_ids"}
Asked = TypeVar("Asked", ChatRequest, CompletionRequest)


class TokensBody(BaseModel):
    """Body of `/inference/v1/generate`. Whatever it has more is looked at as a completion's."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    token_ids: Annotated[list[int], Field(min_length=1), FailFast()]
    sampling_params: dict[str, Any]
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    features: Any = None

    @model_validator(mode="after")
    def _is_supported(self) -> TokensBody:
        given = {**self.sampling_params, **(self.model_extra or {}), "features": self.features}
        for name, only in _ONLY.items():
            value = given.get(name)
            if value is not None and value not in only:
                raise ValueError(f"'{name}': {value!r:.60} is not supported; leave it out")
        return self

    def completion(self) -> TokensRequest:
        """Reads the body as a completion's. Raises `ApiError` (400)."""
        given = self.model_dump(exclude={"token_ids", "sampling_params", "features"})
        # What is not said is vLLM's default, not what the model's makers recommend.
        default = {name: getattr(DEFAULTS, name) for name in NUMBERS}
        said = {**self.sampling_params, **given}
        fields = default | {key: value for key, value in said.items() if value is not None}
        own = {"prompt": self.token_ids, "return_token_ids": True}
        return build(TokensRequest, fields | own)


class TokensRequest(CompletionRequest):
    """The completion that a body means."""

    request_id: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] = _AS_LONG_AS_FITS
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


async def plan_tokens(ctx: ApiContext, request: TokensRequest, tenant: Tenant) -> Plan:
    """Plans the completion, with errors about the body's fields. Raises `ApiError`."""
    with renamed(_NAMES):
        return await plan_completion(ctx, request, tenant)


class TokensFormat(Format):
    """Answers of `/inference/v1/generate`: token ids in place of texts."""

    done = DONE

    def __init__(
        self, ctx: ApiContext, plan: Plan, request: TokensRequest, request_id: str
    ) -> None:
        self._ctx, self._plan, self._request = ctx, plan, request
        self._name = f"generate-tokens-{request.request_id or request_id}"
        self._num_tokens = [0] * len(plan.choices)

    def condensed(self, piece: Piece) -> Piece:
        if not piece.tokens:
            return piece
        return replace(piece, tokens=(), logprobs=id_logprobs(piece.tokens))

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        self._num_tokens[piece.index] += len(piece.token_ids)
        chunk: dict[str, Any] = {
            "request_id": self._name,
            "choices": [self._choice(self.condensed(piece))],
        }
        if self._request.continuous_usage:
            chunk["usage"] = self._usage_of(piece.index)
        return [chunk]

    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        if not self._plan.include_usage:
            return []
        return [{"request_id": self._name, "choices": [], "usage": usage}]

    async def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        first = joined(pieces, 0)
        for plan in self._plan.choices:
            choices.append(self._choice(joined(pieces, plan.index)))
            await asyncio.sleep(0)
        plan = self._plan.choices[0]
        prompt: list[msgspec.Raw] | None = None
        if plan.prompt_logprobs is not None:
            names = self._ctx.token_names
            entries = prompt_entries(names, plan.tokens[1:], first.prompt_logprobs)
            prompt = [msgspec.Raw(b"null"), entries]
        return {
            "request_id": self._name,
            "model": self._ctx.shown_model(self._request.model),
            "created": int(time.time()),
            "output_mode": "tokens",
            "choices": choices,
            "usage": usage,
            "prompt_logprobs": prompt,
            "kv_transfer_params": None,
        }

    def _usage_of(self, index: int) -> dict[str, int]:
        num_prompt, num = len(self._plan.choices[index].tokens), self._num_tokens[index]
        names = "prompt_tokens", "completion_tokens", "total_tokens"
        return dict(zip(names, (num_prompt, num, num_prompt + num), strict=True))

    def _choice(self, piece: Piece) -> dict[str, Any]:
        logprobs: dict[str, Runs] | None = None
        if self._request.logprobs is not None:
            logprobs = {"content": piece.logprobs[0] if piece.logprobs else ()}
        return {
            "index": piece.index,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "token_ids": list(piece.token_ids),
        }


def token_call_routes(ctx: ApiContext) -> list[ApiRoute]:
    def read(body: bytes) -> TokensRequest:
        with renamed(_NAMES):
            return parse(TokensBody, body).completion()

    generate = GenerateEndpoint(ctx, "generate", read, plan_tokens, TokensFormat)
    render = _Render(ctx)
    chat, completion = RENDER
    return [
        ApiRoute("POST", PATH, generate, "Continue tokens", TokensBody),
        ApiRoute("POST", chat, render.chat, "A chat as tokens", ChatRequest),
        ApiRoute("POST", completion, render.completion, "Texts as tokens", CompletionRequest),
    ]


class _Render:
    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    async def chat(self, http: Request) -> Response:
        request, plan = await self._planned(http, ChatRequest, plan_chat)
        if plan.choices[0].sampling.reasoning is not None:
            raise invalid("'thinking_budget': a bound of reasoning is not told in tokens")
        name = f"chatcmpl-{http.scope['state']['request_id']}"
        return JSONResponse(_rendered(request, plan, 0, name))

    async def completion(self, http: Request) -> Response:
        request, plan = await self._planned(http, CompletionRequest, plan_completion)
        name = f"cmpl-{http.scope['state']['request_id']}"
        made = [
            _rendered(request, plan, i * request.n, f"{name}-{i}")
            for i in range(len(plan.choices) // request.n)
        ]
        return JSONResponse(made)

    async def _planned(
        self,
        http: Request,
        kind: type[Asked],
        plan: Callable[[ApiContext, Asked, Tenant], Awaitable[Plan]],
    ) -> tuple[Asked, Plan]:
        """The request in the body, and how it would be carried out. Raises `ApiError`."""
        with utility_call(self._ctx, http) as tenant:
            async with held_body(self._ctx, http) as body:
                request = await self._ctx.in_json_thread(len(body), parse, kind, body)
                ctx = self._ctx.chosen(request.model, tenant)
                return request, await plan(ctx, request, tenant)


def _rendered(request: GenerationRequest, plan: Plan, index: int, name: str) -> dict[str, Any]:
    """The request of `/inference/v1/generate` for a prompt, by its first choice."""
    choice = plan.choices[index]
    sampling = choice.sampling
    about: dict[str, Any] = {field: getattr(sampling, field) for field in NUMBERS}
    about |= {
        "n": request.n,
        "seed": request.seed,
        "max_tokens": sampling.max_tokens,
        "stop": request.stop,
        "stop_token_ids": request.stop_token_ids,
        "ignore_eos": request.ignore_eos,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": request.prompt_logprobs,
        "logprob_token_ids": request.logprob_token_ids,
        "logit_bias": {str(token): bias for token, bias in request.logit_bias.items()},
        "allowed_token_ids": request.allowed_token_ids,
        "bad_words": request.bad_words,
        "include_stop_str_in_output": request.includes_stop,
        "skip_special_tokens": request.skip_special_tokens,
        "structured_outputs": {"grammar": sampling.grammar} if sampling.grammar else None,
    }
    options = request.stream_options
    return {
        "request_id": name,
        "token_ids": list(choice.tokens),
        "token_offsets": None,
        "features": None,
        "sampling_params": {key: value for key, value in about.items() if value is not None},
        "model": request.model or None,
        "stream": request.stream,
        "stream_options": options.model_dump() if options and request.stream else None,
        "cache_salt": request.cache_salt,
        "priority": request.priority or 0,
        "kv_transfer_params": None,
    }
