"""`/tokenize`, `/detokenize`, `/tokenizer_info`, as in vLLM: what a prompt becomes, and back."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.http.route import ApiRoute
from kvrelay.cluster.api.incoming import check_token_ids, held_body, utility_call
from kvrelay.cluster.api.openai.plan import CHARS_PER_TOKEN, chat_prompt, text_tokens
from kvrelay.cluster.api.openai.schema import ChatRequest, parse
from kvrelay.cluster.api.parameters import TOKENIZE

TokenIds = Annotated[list[int], Field(max_length=1_000_000)]


class TokenizeRequest(BaseModel):
    """A text, or a chat with what its template may need."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either 'prompt' or 'messages'")
        TOKENIZE.check(self.model_extra)
        return self


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True)

    model: str | None = None
    tokens: TokenIds


def token_routes(ctx: ApiContext) -> list[ApiRoute]:
    calls = _Tokens(ctx)
    return [
        ApiRoute(
            "POST", "/tokenize", calls.tokenize, "The tokens of a text or a chat", TokenizeRequest
        ),
        ApiRoute("POST", "/detokenize", calls.detokenize, "The text of tokens", DetokenizeRequest),
        ApiRoute(
            "GET", "/tokenizer_info", calls.info, "Special tokens and chat template of the model"
        ),
    ]


class _Tokens:
    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    async def tokenize(self, http: Request) -> Response:
        ctx = self._ctx
        with utility_call(ctx, http) as tenant:
            async with held_body(ctx, http) as body:
                request = await ctx.in_json_thread(len(body), parse, TokenizeRequest, body)
                ctx = ctx.chosen(request.model, tenant)
                if request.prompt is not None:
                    special = request.add_special_tokens
                    tokens = await text_tokens(
                        ctx, request.prompt, "prompt", add_special_tokens=special
                    )
                else:
                    named = None if request.model else ctx.model_name
                    chat = await ctx.in_thread(len(body), _chat, body, named)
                    prompt = await chat_prompt(ctx, chat, tenant)
                    tokens = [*prompt.shown] or prompt.tokens
            return await ctx.in_thread(
                CHARS_PER_TOKEN * len(tokens), _answer, ctx, tokens, request.return_token_strs
            )

    async def detokenize(self, http: Request) -> Response:
        ctx = self._ctx
        with utility_call(ctx, http) as tenant:
            async with held_body(ctx, http) as body:
                request = await ctx.in_json_thread(len(body), parse, DetokenizeRequest, body)
            ctx = ctx.chosen(request.model, tenant)
            return await ctx.in_thread(CHARS_PER_TOKEN * len(request.tokens), _text, ctx, request)

    async def info(self, http: Request) -> Response:
        """Enough for clients that count tokens and make prompts without the model's files."""
        with utility_call(self._ctx, http) as tenant:
            ctx = self._ctx.chosen(http.query_params.get("model"), tenant)
            template = ctx.tokenizer.chat_template
            source = template.source if template else None
            return JSONResponse({**ctx.tokenizer.info, "chat_template": source})


def _answer(ctx: ApiContext, tokens: list[int], return_token_strs: bool) -> Response:
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": ctx.max_model_len,
        "tokens": tokens,
        "token_strs": None,
    }
    if return_token_strs:
        answer["token_strs"] = list(map(ctx.tokenizer.token_str, tokens))
    return JSONResponse(answer)


def _text(ctx: ApiContext, request: DetokenizeRequest) -> Response:
    """Raises `ApiError`."""
    check_token_ids(ctx, "tokens", request.tokens)
    text = ctx.tokenizer.decode(request.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": text})


def _chat(body: bytes, model: str | None) -> ChatRequest:
    """model: of a chat that names none. Raises `ApiError`."""
    if model is not None:
        body = json.dumps({**json.loads(body), "model": model}).encode()
    return parse(ChatRequest, body)
