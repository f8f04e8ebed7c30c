"""The calls about adapters: `/v1/adapters`, and vLLM's two routes. What changes them is for
operators only."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from kvrelay.cluster.api.adapters import Registered, model_of
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import MAX_NAMES, ApiError, invalid
from kvrelay.cluster.api.http.route import ApiRoute
from kvrelay.cluster.api.incoming import caller, check_operator, is_operator, read_body
from kvrelay.cluster.api.openai.schema import parse
from kvrelay.engine.adapters import AdapterError

_Name = Annotated[str, Field(pattern=r"^[^\s/]\S{0,254}$")]
_Path = Annotated[str, Field(min_length=1, max_length=4096)]


class AdapterRequest(BaseModel):
    """What the body of POST /v1/adapters has."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: _Name
    path: _Path
    model: str = ""  # that it was made for
    tenants: tuple[str, ...] = Field((), strict=False)  # who may use it; empty: as the model


class LoadRequest(BaseModel):
    """What the body has where vLLM's route is called."""

    model_config = ConfigDict(strict=True, extra="ignore")

    lora_name: _Name
    lora_path: _Path
    load_inplace: bool = False
    base_model_name: str = ""  # as in vLLM's --lora-modules


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
        ApiRoute("DELETE", "/v1/adapters/{name:path}", calls.remove, "Forget it"),
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
        """All of them for operators; for tenants those that they may use, without paths."""
        if is_operator(self._ctx, http):
            found = await asyncio.to_thread(self._ctx.adapters.every)
            shown = [_shown(*each) for each in found.items()]
        else:
            own = self._ctx.adapters_for(caller(self._ctx, http))
            shown = [
                {"id": name, "object": "adapter", "model": model.model_name}
                for name, (model, _) in own.items()
            ]
        return JSONResponse({"object": "list", "data": shown})

    async def add(self, http: Request) -> Response:
        check_operator(self._ctx, http)
        request = parse(AdapterRequest, await read_body(self._ctx, http))
        for name in request.tenants:
            if self._ctx.tenants.named(name) is None or not self._ctx.tenants.key_required:
                known = ", ".join(self._ctx.tenants.names()) or "none"
                raise invalid(f"'tenants': there is no tenant {name!r}; there are: {known}")
        given = request.name, request.path, request.model
        return JSONResponse(_shown(request.name, await self._add(*given, request.tenants)))

    async def load(self, http: Request) -> Response:
        check_operator(self._ctx, http)
        request = parse(LoadRequest, await read_body(self._ctx, http))
        name = request.lora_name
        self._check_free(name, "lora_name")
        before = self._ctx.adapters.find(name)
        if before is not None and not request.load_inplace:
            raise invalid(
                f"'lora_name': {name!r} is loaded already; send load_inplace = true to replace it",
                "lora_name",
            )
        tenants = () if before is None else before.tenants
        await self._add(name, request.lora_path, request.base_model_name, tenants)
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

    def _check_free(self, name: str, field: str = "name") -> None:
        """Raises `ApiError` where a model has the name."""
        if who := self._ctx.who_has(name):
            raise invalid(f"'{field}': {name!r} is {who} already: take another name", field)

    async def _add(
        self, name: str, path: str, model: str = "", tenants: tuple[str, ...] = ()
    ) -> Registered:
        """Reads, checks and registers an adapter. Raises `ApiError`."""
        ctx = self._ctx
        self._check_free(name)
        bases = {each.model_name: each.adapter_base for each in ctx.all}
        checkpoints = {each: base.checkpoint for each, base in bases.items()}
        try:
            chosen = await asyncio.to_thread(model_of, path, model, checkpoints)
            new = await asyncio.to_thread(bases[chosen].read, path, chosen, tenants)
            self._check_free(name)  # that took seconds
            await asyncio.to_thread(ctx.adapters.add, name, new)
        except AdapterError as error:
            raise invalid(f"'path': {path}: {error}", "path") from None
        except OSError as error:
            raise _unwritten(error) from error
        return new

    async def _remove(self, name: str) -> None:
        """Forgets a name, if it is there. Raises `ApiError`."""
        try:
            was_there = await asyncio.to_thread(self._ctx.adapters.remove, name)
        except OSError as error:
            raise _unwritten(error) from error
        if not was_there:
            known = ", ".join(map(repr, list(self._ctx.adapters.every())[:MAX_NAMES])) or "none"
            raise ApiError(
                404,
                f"There is no adapter {name[:200]!r}; registered: {known}",
                param="name",
                code="adapter_not_found",
            )


def _unwritten(error: OSError) -> ApiError:
    why = f"The adapter cannot be kept in the state directory: {error.strerror}"
    return ApiError(503, why, type="server_error")


def _shown(name: str, adapter: Registered) -> dict[str, Any]:
    """Returns an adapter as operators see it."""
    return {
        "id": name,
        "object": "adapter",
        "path": adapter.source,
        "digest": adapter.digest.hex(),
        "model": adapter.model,
        "tenants": list(adapter.tenants),
    }
