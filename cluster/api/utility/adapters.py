"""The calls about adapters: `/v1/adapters`, and vLLM's two routes. What changes them is for
operators only."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from kvrelay.cluster.api.adapters import read_named
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, invalid
from kvrelay.cluster.api.http.route import ApiRoute
from kvrelay.cluster.api.incoming import caller, check_operator, read_body
from kvrelay.cluster.api.openai.schema import parse
from kvrelay.engine.adapters import Adapter, AdapterError

_Name = Annotated[str, Field(pattern=r"^[^\s/]\S{0,254}$")]
_Path = Annotated[str, Field(min_length=1, max_length=4096)]


class AdapterRequest(BaseModel):
    """What the body of POST /v1/adapters has."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: _Name
    path: _Path


class LoadRequest(BaseModel):
    """What the body has where vLLM's route is called."""

    model_config = ConfigDict(strict=True, extra="ignore")

    lora_name: _Name
    lora_path: _Path
    load_inplace: bool = False


class UnloadRequest(BaseModel):
    """What the body has where vLLM's route is called."""

    model_config = ConfigDict(strict=True, extra="ignore")

    lora_name: str


def adapter_routes(ctx: ApiContext) -> list[ApiRoute]:
    calls = _AdapterCalls(ctx)
    return [
        ApiRoute(
            "GET", "/v1/adapters", calls.listed, "Adapters that requests may name as their model"
        ),
        ApiRoute("POST", "/v1/adapters", calls.add, "Register an adapter", AdapterRequest),
        ApiRoute("DELETE", "/v1/adapters/{name}", calls.remove, "Forget it"),
        ApiRoute(
            "POST",
            "/v1/load_lora_adapter",
            calls.load,
            "Register an adapter, as in vLLM",
            LoadRequest,
        ),
        ApiRoute(
            "POST", "/v1/unload_lora_adapter", calls.unload, "Forget it, as in vLLM", UnloadRequest
        ),
    ]


class _AdapterCalls:
    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    async def listed(self, http: Request) -> Response:
        caller(self._ctx, http)
        found = self._ctx.adapters.all().items()
        return JSONResponse({"object": "list", "data": [_shown(*each) for each in found]})

    async def add(self, http: Request) -> Response:
        check_operator(self._ctx, http)
        request = parse(AdapterRequest, await read_body(self._ctx, http))
        return JSONResponse(_shown(request.name, await self._add(request.name, request.path)))

    async def load(self, http: Request) -> Response:
        check_operator(self._ctx, http)
        request = parse(LoadRequest, await read_body(self._ctx, http))
        name = request.lora_name
        if self._ctx.adapters.find(name) is not None and not request.load_inplace:
            raise invalid(
                f"'lora_name': {name!r} is loaded already; send load_inplace = true to replace it",
                "lora_name",
            )
        await self._add(name, request.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def remove(self, http: Request) -> Response:
        check_operator(self._ctx, http)
        name = http.path_params["name"]
        await self._remove(name)
        return JSONResponse({"id": name, "object": "adapter", "deleted": True})

    async def unload(self, http: Request) -> Response:
        check_operator(self._ctx, http)
        name = parse(UnloadRequest, await read_body(self._ctx, http)).lora_name
        await self._remove(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _add(self, name: str, path: str) -> Adapter:
        """Reads and registers an adapter. Raises `ApiError`."""
        ctx = self._ctx
        if name in (ctx.model_name, *ctx.aliases):
            raise invalid(f"'name': {name!r} is the name of the model itself", "name")
        try:
            adapter = await asyncio.to_thread(read_named, path)
            await asyncio.to_thread(ctx.adapters.add, name, adapter)
        except AdapterError as error:
            raise invalid(f"'path': {error}", "path") from None
        except OSError as error:
            raise _unwritten(error) from error
        return adapter

    async def _remove(self, name: str) -> None:
        """Forgets a name, if it is there. Raises `ApiError`."""
        try:
            was_there = await asyncio.to_thread(self._ctx.adapters.remove, name)
        except OSError as error:
            raise _unwritten(error) from error
        if not was_there:
            known = ", ".join(map(repr, list(self._ctx.adapters.all())[:20])) or "none"
            raise ApiError(
                404,
                f"There is no adapter {name[:200]!r}; registered: {known}",
                param="name",
                code="adapter_not_found",
            )


def _unwritten(error: OSError) -> ApiError:
    why = f"The adapter cannot be kept in the state directory: {error.strerror}"
    return ApiError(503, why, type="server_error")


def _shown(name: str, adapter: Adapter) -> dict[str, Any]:
    digest = adapter.digest.hex()
    return {"id": name, "object": "adapter", "path": adapter.source, "digest": digest}
