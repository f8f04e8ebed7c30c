"""`/v1/embeddings`: the hidden states of a text as one vector of length 1."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from cluster.api.context import ApiContext
from cluster.api.errors import ApiError, invalid
from cluster.api.openai.formats import Format
from cluster.api.openai.parts import ChoicePlan, Piece, Plan
from cluster.api.openai.plan import (
    check_model,
    keep_of,
    priority_of,
    prompt_tokens,
    room_after,
    salt_of,
    truncated,
)
from cluster.api.openai.schema import ModelRequest, or_default, prompts_of
from cluster.api.parameters import EMBEDDING
from cluster.api.tenants import Tenant
from engine.kv.block_hash import CacheScope
from engine.request import Pooling, SamplingParams

MAX_INPUTS = 2048  # OpenAI's


def _inputs_of(given: Any) -> list[str | list[int]]:
    return prompts_of(given, MAX_INPUTS)


class PooledRequest(ModelRequest):
    """What asks for vectors of texts. `pooling` is an extension: the mean over a text's tokens, or
    the last."""

    pooling: Literal["mean", "last"] | None = None
    add_special_tokens: Annotated[bool, or_default(True)] = True

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        raise NotImplementedError

    def param_of(self, place: int) -> str:
        """The field that has the text at `place` of `prompts`."""
        raise NotImplementedError

    def most_tokens(self, place: int) -> int:
        """How many of that text's first tokens count; 0: all."""
        return 0


class EmbeddingRequest(PooledRequest):
    """Body of the call."""

    input: Annotated[list[Any], BeforeValidator(_inputs_of)]
    encoding_format: Annotated[Literal["float", "base64"], or_default("float")] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> EmbeddingRequest:
        EMBEDDING.check(self.model_extra)
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        return self.input

    def param_of(self, place: int) -> str:
        return "input"


async def plan_embeddings(ctx: ApiContext, request: PooledRequest, tenant: Tenant) -> Plan:
    """One silent choice for each text. Raises `ApiError`."""
    check_model(ctx, request)
    pooling = Pooling(request.pooling or ctx.tokenizer.pooling)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)
    scope, special = CacheScope(salt_of(request, tenant)), request.add_special_tokens
    texts: list[ChoicePlan] = []
    keep = keep_of(ctx, request, 1)
    for place, text in enumerate(request.prompts):
        param, most = request.param_of(place), request.most_tokens(place)
        if most and isinstance(text, str):
            text = await ctx.in_thread(len(text), ctx.tokenizer.beginning, text, most)
        whole = await prompt_tokens(
            ctx, text, param, keep, add_special_tokens=special, is_prompt=False
        )
        tokens = tuple(truncated(whole, keep))
        room_after(ctx, tokens, param)
        texts.append(ChoicePlan(place, place, tokens, sampling, is_silent=True, scope=scope))
    priority = priority_of(request, tenant)
    return Plan(tuple(texts), (), None, False, False, tenant, priority, retention=None)


class PooledFormat(Format):
    """Answers that are made of the vectors of all texts at once."""

    def __init__(self, ctx: ApiContext, plan: Plan) -> None:
        self._ctx, self._num_texts = ctx, len(plan.choices)

    def opening(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return []

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        return []

    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return []

    def _vectors(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        """In the order of the texts, as the model gave them. Raises `ApiError`."""
        found = {piece.index: piece.embedding for piece in pieces if piece.embedding}
        if len(found) != self._num_texts:
            raise ApiError(500, "The model gave no embedding", type="server_error")
        return [np.frombuffer(found[index], np.float32) for index in range(self._num_texts)]


def unit(vector: np.ndarray) -> np.ndarray:
    """With length 1, or all zeros."""
    length = float(np.linalg.norm(vector))
    return vector / length if length > 0 else vector


class EmbeddingFormat(PooledFormat):
    def __init__(
        self, ctx: ApiContext, plan: Plan, request: EmbeddingRequest, request_id: str
    ) -> None:
        super().__init__(ctx, plan)
        self._request = request
        self._entries: list[bytes] = []  # of the answer's data, as JSON

    async def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        for index, vector in enumerate(self._vectors(pieces)):
            entry = {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
            self._entries.append(json.dumps(entry, separators=(",", ":")).encode())
            await asyncio.sleep(0)  # thousands of vectors of thousands of numbers take seconds
        counts = {key: usage[key] for key in ("prompt_tokens", "total_tokens")}
        return {
            "object": "list",
            "data": [],
            "model": self._ctx.model_name,
            "usage": counts,
        }

    def encode_whole(self, content: dict[str, Any]) -> list[bytes]:
        before, brackets, after = super().encode_whole(content)[0].partition(b"[]")
        entries = [part for entry in self._entries for part in (b",", entry)][1:]
        return [before + brackets[:1], *entries, brackets[1:] + after]

    def _encoded(self, vector: np.ndarray) -> str | list[float]:
        wanted = self._request.dimensions
        if wanted is not None and wanted > len(vector):
            raise invalid(
                f"'dimensions': {wanted} is more than the {len(vector)} of this model",
                param="dimensions",
            )
        vector = unit(vector[:wanted]).astype("<f4")
        if self._request.encoding_format == "base64":
            return b64encode(vector.tobytes()).decode()
        return [float(value) for value in vector]
