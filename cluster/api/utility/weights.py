"""The calls about weights that change while the server serves: `/v1/weights`, and vLLM's `/pause`,
`/resume` and `/is_paused`, all for operators only; and what an answer says of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, invalid
from kvrelay.cluster.api.http.route import ApiRoute
from kvrelay.cluster.api.incoming import check_operator, read_body
from kvrelay.cluster.api.openai.schema import parse
from kvrelay.cluster.api.operator import give
from kvrelay.cluster.orders import PauseModel, UpdateModel
from kvrelay.engine.weights import (
    NO_VERSION,
    PauseMode,
    SharedTensor,
    SharedWeights,
    UpdateMode,
    WeightVersion,
)


class SharedTensorRow(BaseModel):
    """A tensor in the shared memory that a body of POST /v1/weights names."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=400)]
    dtype: str  # as torch names it: "bfloat16"
    shape: Annotated[list[int], Field(max_length=8)]
    offset: int = Field(ge=0, lt=1 << 62)  # bytes from the begin of the region
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # BLAKE2b, 32 bytes, of its bytes


class SharedMemory(BaseModel):
    """A region of POSIX shared memory, of the same name on each machine."""

    model_config = ConfigDict(strict=True, extra="forbid")

    region: str
    tensors: list[SharedTensorRow]

    def weights(self) -> SharedWeights:
        rows = (
            SharedTensor(t.name, t.dtype, tuple(t.shape), t.offset, bytes.fromhex(t.digest))
            for t in self.tensors
        )
        return SharedWeights(self.region, tuple(rows))


class WeightsRequest(BaseModel):
    """What the body of POST /v1/weights has."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str = ""  # "": the one that is served, or the first
    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    memory: SharedMemory | None = None
    name: Annotated[str, Field(pattern=r"^\S{1,64}$")] | None = None
    mode: str = str(UpdateMode.RECOMPUTE)
    back: bool = False

    @model_validator(mode="after")
    def _is_one_or_the_other(self) -> WeightsRequest:
        if self.back + (self.path is not None) + (self.memory is not None) != 1:
            raise ValueError(
                "expected 'path', a folder of weights, or 'memory', a region that has them, or"
                " 'back': true"
            )
        return self


def usage_of_weights(by_choice: Mapping[int, tuple[tuple[int, str], ...]]) -> dict[str, Any]:
    """Which version answered; and where it has changed on the way, from which token on."""
    changes = [
        {"choice": choice, "index": at, "weight_version": name}
        for choice, ranges in by_choice.items()
        for at, name in ranges
    ]
    if not changes:
        return {}
    names = {change["weight_version"] for change in changes}
    found: dict[str, Any] = {"weight_version": changes[-1]["weight_version"]}
    return found if len(names) == 1 else found | {"weight_versions": changes}


def weight_routes(ctx: ApiContext) -> list[ApiRoute]:
    calls = _WeightCalls(ctx)
    return [
        ApiRoute("GET", "/v1/weights", calls.shown, "Versions of the weights"),
        ApiRoute(
            "POST",
            "/v1/weights",
            calls.update,
            "Load other weights into the workers",
            WeightsRequest,
        ),
        ApiRoute("POST", "/pause", calls.pause, "Generate nothing for a while, as in vLLM"),
        ApiRoute("POST", "/resume", calls.resume, "Go on"),
        ApiRoute("GET", "/is_paused", calls.is_paused, "Whether a model is paused"),
    ]


class _WeightCalls:
    def __init__(self, ctx: ApiContext) -> None:
        self._ctx = ctx

    async def shown(self, http: Request) -> Response:
        check_operator(self._ctx, http)
        data = [msgspec.to_builtins(each) for each in self._ctx.operations.status().weights]
        return JSONResponse({"object": "list", "data": data})

    async def update(self, http: Request) -> Response:
        check_operator(self._ctx, http)
        asked = parse(WeightsRequest, await read_body(self._ctx, http))
        ctx = self._model(asked.model)
        mode = _one_of(UpdateMode, asked.mode, "mode")
        memory = asked.memory.weights() if asked.memory else None
        version = WeightVersion(asked.name or "", path=asked.path or "", memory=memory)
        order = UpdateModel(ctx.name, NO_VERSION, version, mode, asked.back)
        known = await give(ctx.operations, order, "memory" if memory else "path")
        named = {} if asked.back else known  # back to which ones, the controller knows
        return JSONResponse({"model": ctx.model_name, "mode": str(mode), **named}, 202)

    async def pause(self, http: Request) -> Response:
        return await self._pause(http, http.query_params.get("mode", str(PauseMode.KEEP)))

    async def resume(self, http: Request) -> Response:
        return await self._pause(http, None)

    async def _pause(self, http: Request, mode: str | None) -> Response:
        check_operator(self._ctx, http)
        ctx = self._model(http.query_params.get("model", ""))
        wanted = None if mode is None else _one_of(PauseMode, mode, "mode")
        await give(ctx.operations, PauseModel(ctx.name, wanted))
        return JSONResponse({"status": "resumed" if mode is None else "paused"})

    async def is_paused(self, http: Request) -> Response:
        check_operator(self._ctx, http)
        is_paused = any(each.paused for each in self._ctx.operations.status().weights)
        return JSONResponse({"is_paused": is_paused})

    def _model(self, name: str) -> ApiContext:
        ctx = self._ctx if not name else self._ctx.models.get(name)
        if ctx is None:
            known = ", ".join(self._ctx.models)
            raise ApiError(404, f"There is no model {name[:200]!r}; there are: {known}")
        return ctx


def _one_of(kind: Any, value: str, param: str) -> Any:
    known = [str(each) for each in kind]
    if value not in known:
        raise invalid(f"{param!r}: expected one of {known}, got {value[:40]!r}", param=param)
    return kind(value)
