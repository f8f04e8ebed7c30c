"""`/tokenize` and `/detokenize`, as in vLLM: what a prompt becomes, and back."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.api.context import ApiContext
from cluster.api.incoming import caller, check_token_ids, read_body
from cluster.api.openai.plan import chat_prompt, unknown_model
from cluster.api.openai.schema import ChatRequest, parse
from cluster.api.parameters import TOKENIZE

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


def token_routes(ctx: ApiContext) -> list[Route]:
    calls = _Tokens(ctx)
    return [
        Route("/tokenize", calls.tokenize, methods=["POST"]),
        Route("/detokenize", calls.detokenize, methods=["POST"]),
    ]


class _Tokens:
    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    async def tokenize(self, http: Request) -> Response:
        ctx = self._ctx
        caller(ctx, http)
        body = await read_body(ctx, http)
        request = parse(TokenizeRequest, body)
        self._check(request.model)
        if request.prompt is not None:
            tokens = await ctx.in_thread(
                len(request.prompt),
                ctx.tokenizer.encode,
                request.prompt,
                add_special_tokens=request.add_special_tokens,
            )
        else:
            chat = parse(ChatRequest, body if request.model else _named(body, ctx.model_name))
            tokens = (await chat_prompt(ctx, chat)).tokens
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": ctx.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }
        if request.return_token_strs:
            pieces = [ctx.tokenizer.token_bytes(token) for token in tokens]
            answer["token_strs"] = [piece.decode(errors="replace") for piece in pieces]
        return JSONResponse(answer)

    async def detokenize(self, http: Request) -> Response:
        ctx = self._ctx
        caller(ctx, http)
        request = parse(DetokenizeRequest, await read_body(ctx, http))
        self._check(request.model)
        check_token_ids(ctx, "tokens", request.tokens)
        decode = ctx.tokenizer.decode
        text = await ctx.in_thread(
            len(request.tokens), decode, request.tokens, skip_special_tokens=False
        )
        return JSONResponse({"prompt": text})

    def _check(self, model: str | None) -> None:
        if model not in (None, self._ctx.model_name, *self._ctx.aliases):
            raise unknown_model(self._ctx, str(model))


def _named(body: bytes, model: str) -> bytes:
    """A chat without a model is one of this server's."""
    return json.dumps({**json.loads(body), "model": model}).encode()
