"""`/v1/embeddings`: the hidden states of a text as one vector of length 1; `/v1/score` and
`/v1/rerank`: how near texts are to each other, by these vectors.

No model served here has a classification head (a cross-encoder), so a score is the cosine of the
angle between two vectors, as in vLLM with a model for embeddings.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import ApiError, invalid
from kvrelay.cluster.api.openai.formats import Format
from kvrelay.cluster.api.openai.parts import ChoicePlan, Piece, Plan
from kvrelay.cluster.api.openai.plan import (
    keep_of,
    priority_of,
    prompt_tokens,
    room_after,
    salt_of,
    truncated,
)
from kvrelay.cluster.api.openai.schema import Flag, ModelRequest, or_default, prompts_of
from kvrelay.cluster.api.parameters import EMBEDDING, RERANK, SCORE
from kvrelay.cluster.api.tenants import Tenant
from kvrelay.engine.kv.scope import CacheScope
from kvrelay.engine.request import Pooling, RequestSpec, SamplingParams, needing

MAX_INPUTS = 2048  # OpenAI's


def _inputs_of(given: Any) -> list[str | list[int]]:
    return prompts_of(given, MAX_INPUTS)


class PooledRequest(ModelRequest):
    """What asks for vectors of texts. `pooling` is an extension: the mean over a text's tokens, the
    last, or the first (`cls`)."""

    pooling: Literal["mean", "last", "cls"] | None = None
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
    pooling = Pooling(request.pooling or ctx.tokenizer.pooling)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)
    of = needing(ctx.need_of(request.model), CacheScope(salt_of(ctx, request, tenant)))
    priority, special = priority_of(request, tenant), request.add_special_tokens
    spec = RequestSpec("", sampling, priority=priority, **of)
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
        texts.append(ChoicePlan(place, place, tokens, spec, is_silent=True))
    about = tenant, spec.service_class
    return Plan(tuple(texts), (), None, False, False, *about, weights=request.pinned_to)


class PooledFormat(Format):
    """Answers that are made of the vectors of all texts at once."""

    def __init__(self, ctx: ApiContext, plan: Plan) -> None:
        self._ctx, self._num_texts = ctx, len(plan.choices)

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

    async def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        entries: list[msgspec.Raw] = []
        for index, vector in enumerate(self._vectors(pieces)):
            entry = {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
            entries.append(msgspec.Raw(msgspec.json.encode(entry)))
            await asyncio.sleep(0)  # thousands of vectors of thousands of numbers take seconds
        counts = {key: usage[key] for key in ("prompt_tokens", "total_tokens")}
        return {
            "object": "list",
            "data": entries,
            "model": self._ctx.shown_model(self._request.model),
            "usage": counts,
        }

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


# The two lists of a body of `/v1/score`, by their names.
_PAIRS = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)


def _text_of(given: Any) -> str:
    """A string, or as Jina's and Cohere's clients write one, an object with `text`."""
    text = given.get("text") if isinstance(given, dict) else given
    if not isinstance(text, str):
        raise ValueError("expected a string, or an object with a string 'text': only text is read")
    return text


def _texts_of(given: Any) -> list[str]:
    texts = given if isinstance(given, list) else [given]
    if not 0 < len(texts) < MAX_INPUTS:
        raise ValueError(f"expected 1 to {MAX_INPUTS - 1} texts, got {len(texts)}")
    return [_text_of(text) for text in texts]


_Texts = Annotated[list[str], BeforeValidator(_texts_of)]
_Most = Annotated[int, Field(ge=0), or_default(0)]


class ScoringRequest(PooledRequest):
    """What both endpoints share. Each text keeps its first tokens only, where a `max_tokens_per`
    says so (0: all)."""

    max_tokens_per_query: _Most = 0
    max_tokens_per_doc: _Most = 0

    @property
    def num_queries(self) -> int:
        """The texts before the documents."""
        return 1

    def most_tokens(self, place: int) -> int:
        is_query = place < self.num_queries
        return self.max_tokens_per_query if is_query else self.max_tokens_per_doc


class ScoreRequest(ScoringRequest):
    """Body of `/v1/score`: one text and many, or as many of each."""

    text_1: _Texts | None = None
    text_2: _Texts | None = None
    queries: _Texts | None = None
    documents: _Texts | None = None
    items: _Texts | None = None
    data_1: _Texts | None = None
    data_2: _Texts | None = None

    @model_validator(mode="after")
    def _is_possible(self) -> ScoreRequest:
        SCORE.check(self.model_extra)
        given = {name for pair in _PAIRS for name in pair if getattr(self, name) is not None}
        if given not in map(set, _PAIRS):
            pairs = ", ".join(f"'{first}' and '{second}'" for first, second in _PAIRS)
            raise ValueError(f"expected one of these pairs of fields: {pairs}")
        firsts, seconds = self._texts
        if len(firsts) not in (1, len(seconds)):
            first, second = self._names
            raise ValueError(
                f"'{first}': {len(firsts)} texts cannot be paired with the {len(seconds)} of "
                f"'{second}': expected one, or as many"
            )
        if len(firsts) + len(seconds) > MAX_INPUTS:
            raise ValueError(f"expected at most {MAX_INPUTS} texts together")
        return self

    @property
    def _names(self) -> tuple[str, str]:
        return next(pair for pair in _PAIRS if all(getattr(self, name) for name in pair))

    @property
    def _texts(self) -> tuple[list[str], list[str]]:
        first, second = self._names
        return getattr(self, first), getattr(self, second)

    @property
    def prompts(self) -> list[str | list[int]]:
        firsts, seconds = self._texts
        return [*firsts, *seconds]

    @property
    def num_queries(self) -> int:
        return len(self._texts[0])

    def param_of(self, place: int) -> str:
        return self._names[place >= self.num_queries]


class RerankRequest(ScoringRequest):
    """Body of `/v1/rerank`, as Jina and Cohere have it. `top_n`: 0 for all."""

    query: Annotated[str, BeforeValidator(_text_of)]
    documents: _Texts
    top_n: Annotated[int, Field(ge=0), or_default(0)] = 0
    return_documents: Annotated[Flag, or_default(True)] = True

    @model_validator(mode="after")
    def _is_supported(self) -> RerankRequest:
        RERANK.check(self.model_extra)
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        return [self.query, *self.documents]

    def param_of(self, place: int) -> str:
        return "documents" if place else "query"


Request = TypeVar("Request", bound=ScoringRequest)


class _ScoredFormat(PooledFormat, Generic[Request]):
    def __init__(self, ctx: ApiContext, plan: Plan, request: Request, request_id: str) -> None:
        super().__init__(ctx, plan)
        self._request, self._id = request, f"score-{request_id}"

    def _scores(self, pieces: Sequence[Piece]) -> list[float]:
        """Of each document, with the only query or its own."""
        vectors = [unit(vector) for vector in self._vectors(pieces)]
        num = self._request.num_queries
        queries, documents = vectors[:num], vectors[num:]
        queries = queries * len(documents) if num == 1 else queries
        return [float(a @ b) for a, b in zip(queries, documents, strict=True)]


class ScoreFormat(_ScoredFormat[ScoreRequest]):
    async def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "list",
            "created": int(time.time()),
            "model": self._ctx.shown_model(self._request.model),
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(self._scores(pieces))
            ],
            "usage": {
                "prompt_tokens": usage["prompt_tokens"],
                "total_tokens": usage["total_tokens"],
                "completion_tokens": 0,
            },
        }


class RerankFormat(_ScoredFormat[RerankRequest]):
    async def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        request = self._request
        scores = self._scores(pieces)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])
        results: list[dict[str, Any]] = []
        for index in best[: request.top_n or None]:
            results.append({"index": index, "relevance_score": scores[index]})
            if request.return_documents:
                results[-1]["document"] = {"text": request.documents[index]}
        counts = {key: usage[key] for key in ("prompt_tokens", "total_tokens")}
        return {
            "id": self._id,
            "model": self._ctx.shown_model(self._request.model),
            "results": results,
            "usage": counts,
        }
