"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvrelay.cluster.api.anthropic.format import MessageFormat, error_body
from kvrelay.cluster.api.anthropic.schema import (
    CHAT_NAMES,
    CountRequest,
    MessagesChat,
    as_chat,
    read_messages,
    read_request,
)
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, renamed
from kvrelay.cluster.api.incoming import held_body, utility_call
from kvrelay.cluster.api.openai.parts import Plan
from kvrelay.cluster.api.openai.plan import chat_prompt, plan_chat
from kvrelay.cluster.api.openai.respond import GenerateEndpoint, error_response
from kvrelay.cluster.api.output.format import THINK_END
from kvrelay.cluster.api.tenants import Tenant
from kvrelay.engine.kv.tier import Retention

MESSAGES = "/v1/messages"


def refuse(error: ApiError) -> JSONResponse:
    return error_response(error, error_body(error))


def message_routes(ctx: ApiContext) -> list[Route]:
    messages = GenerateEndpoint(ctx, "messages", read_messages, _plan, MessageFormat, refuse)
    count = partial(_count, ctx)
    return [
        Route(MESSAGES, messages, methods=["POST"]),
        Route(f"{MESSAGES}/count_tokens", count, methods=["POST"]),
    ]


async def _plan(ctx: ApiContext, request: MessagesChat, tenant: Tenant) -> Plan:
    if ctx.tokenizer.token_id(THINK_END) is None:  # nothing that could end the reasoning
        request = request.model_copy(update={"thinking_budget": None})
    with renamed(CHAT_NAMES):
        plan = await plan_chat(ctx, request, tenant)
    if request.keep_s is None:
        return plan
    return replace(plan, retention=Retention(max(request.keep_s, ctx.retention_s)))


async def _count(ctx: ApiContext, http: Request) -> Response:
    try:
        with utility_call(ctx, http):
            async with held_body(ctx, http) as body:
                request = await ctx.in_thread(len(body), read_request, CountRequest, body)
                chat = await ctx.in_thread(len(body), as_chat, request)
                prompt = await chat_prompt(ctx, chat)
    except ClientDisconnect:  # the client is gone
        return Response(status_code=400)
    return JSONResponse({"input_tokens": len(prompt.tokens)})
