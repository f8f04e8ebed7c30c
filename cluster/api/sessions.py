"""`/v1/sessions`: what a tenant can see of its sessions, and do with them.

Each call is one command to the router; the reply becomes JSON, a refusal OpenAI's error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, invalid, overloaded, session_refused
from kvrelay.cluster.api.http.route import ApiRoute, Body
from kvrelay.cluster.api.incoming import limit_of, owner, read_body
from kvrelay.cluster.api.limiter import LimitReached
from kvrelay.cluster.api.metrics import CANCELLED, CLIENT_GONE
from kvrelay.cluster.api.openai.schema import MAX_SESSION_CHARS, ForkRequest, parse
from kvrelay.engine.kv.tier import ANNOUNCED_TIERS, Tier
from kvrelay.router.messages import SessionInfo, SessionOp, SessionReply

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
ACTIONS = {
    SessionOp.PARK: "Move its KV to a lower tier",
    SessionOp.RESUME: "Bring its KV back",
    SessionOp.PIN: "Keep its KV",
    SessionOp.UNPIN: "Keep its KV no longer",
}


def session_routes(ctx: ApiContext) -> list[ApiRoute]:
    """Names of sessions may have slashes: an action is the last part of a POST's path."""
    calls = SessionCalls(ctx)

    def route(
        method: str,
        path: str,
        call: Callable[[Request], Awaitable[Response]],
        summary: str,
        body: Body | None = None,
    ) -> ApiRoute:
        return ApiRoute(method, f"/v1/sessions{path}", _counted(ctx, call), summary, body)

    return [
        route("GET", "", calls.list, "Conversations whose KV is kept"),
        route("GET", "/{id:path}", calls.show, "One of them"),
        route("DELETE", "/{id:path}", calls.close, "Forget it"),
        route(
            "POST",
            "/{id:path}/fork",
            calls.fork,
            "Another session from the same KV",
            ForkRequest,
        ),
        *(
            route("POST", f"/{{id:path}}/{op}", calls.action(op), summary)
            for op, summary in ACTIONS.items()
        ),
    ]


def _counted(
    ctx: ApiContext, call: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    async def counted(http: Request) -> Response:
        metrics = ctx.metrics.of("")
        try:
            response = await call(http)  # its refusals are counted where they are answered
        except ClientDisconnect:  # the client is gone
            metrics.count("sessions", CANCELLED, CLIENT_GONE)
            return Response(status_code=400)
        metrics.count("sessions", "ok", response.status_code)
        return response

    return counted


class SessionCalls:
    """Owned by the application. Its calls that wait for the router have a place of
    `ctx.commands` each."""

    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    async def list(self, http: Request) -> Response:
        limit = limit_of(http, DEFAULT_LIMIT, MAX_LIMIT)
        after = http.query_params.get("after", "")
        reply = await self._ask(http, SessionOp.LIST, after, limit=limit)
        data = [session_json(info) for info in reply.sessions]
        return JSONResponse({"object": "list", "data": data, "has_more": reply.has_more})

    async def show(self, http: Request) -> Response:
        reply = await self._ask(http, SessionOp.SHOW, _name(http))
        return JSONResponse(session_json(reply.sessions[0]))

    async def close(self, http: Request) -> Response:
        name = _name(http)
        reply = await self._ask(http, SessionOp.CLOSE, name)
        answer = {"id": name, "object": "session.deleted", "deleted": True}
        return JSONResponse(answer | {"blocks_done": reply.done})

    async def fork(self, http: Request) -> Response:
        owner(self._ctx, http)  # before its body is looked at
        fork = parse(ForkRequest, await read_body(self._ctx, http))
        reply = await self._ask(http, SessionOp.FORK, _name(http), fork.id)
        return JSONResponse(session_json(reply.sessions[0]))

    def action(self, op: SessionOp) -> Callable[[Request], Awaitable[Response]]:
        async def act(http: Request) -> Response:
            reply = await self._ask(http, op, _name(http))
            return JSONResponse(session_json(reply.sessions[0]) | {"blocks_done": reply.done})

        return act

    async def _ask(
        self,
        http: Request,
        op: SessionOp,
        session: str,
        argument: str = "",
        limit: int = DEFAULT_LIMIT,
    ) -> SessionReply:
        """Raises `ApiError`."""
        ctx = self._ctx
        tenant = owner(ctx, http)
        timeout_s = ctx.settings.session_timeout_s
        try:
            with ctx.commands.take():
                model = ctx.chosen(http.query_params.get("model"), tenant)
                reply = await model.client.command(
                    op,
                    tenant.name,
                    session,
                    argument,
                    limit=limit,
                    limits=tenant.share.sessions,
                    timeout_s=timeout_s,
                )
        except LimitReached as taken:
            raise overloaded(str(taken), taken.retry_after_s) from None
        except TimeoutError:
            raise ApiError(
                504,
                f"The router did not answer within {timeout_s:g} s",
                type="timeout_error",
                code="deadline_exceeded",
            ) from None
        if reply.refusal is not None:
            raise session_refused(reply)
        return reply


def _name(http: Request) -> str:
    name: str = http.path_params["id"]
    if not 1 <= len(name) <= MAX_SESSION_CHARS:
        raise invalid(
            f"A session's id has 1 to {MAX_SESSION_CHARS} characters, this one has {len(name)}",
            param="id",
        )
    return name


def session_json(info: SessionInfo) -> dict[str, Any]:
    """A session for clients. Blocks are KV blocks; one may be in several tiers."""

    def by_tier(counts: dict[Tier, int]) -> dict[str, int]:
        return {str(tier): counts.get(tier, 0) for tier in ANNOUNCED_TIERS}

    best = info.holders[0].num_blocks if info.holders else {}
    return {
        "id": info.session,
        "object": "session",
        "state": str(info.state),
        "pinned": info.pinned,
        "num_turns": info.num_turns,
        "num_tokens": info.num_tokens,
        "num_blocks": info.num_blocks,
        "blocks": by_tier(best),
        "workers": [
            {"worker": holder.worker, "blocks": by_tier(holder.num_blocks)}
            for holder in info.holders
        ],
        "last_worker": info.worker,
        "age_s": round(info.age_s, 3),
        "last_used_s": round(info.last_used_s, 3),
        "retention_s": info.retention.keep_s,
        "to_disk": info.retention.to_disk,
    }
