"""`/v1/models`: the models that a caller may name, in OpenAI's form; where `anthropic-version` is
sent, in Anthropic's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import invalid, unknown_model
from kvrelay.cluster.api.http.route import ApiRoute
from kvrelay.cluster.api.incoming import caller, is_operator, limit_of

PATH = "/v1/models"
VERSION_HEADER = "anthropic-version"
DEFAULT_LIMIT, MAX_LIMIT = 20, 1000  # Anthropic's
Card = dict[str, Any]


def model_list_routes(ctx: ApiContext) -> list[ApiRoute]:
    calls = _ModelList(ctx)
    return [
        ApiRoute("GET", PATH, calls.list, "The models that are served"),  # and HEAD
        ApiRoute("GET", f"{PATH}/{{name:path}}", calls.show, "One of them"),
    ]


class _ModelList:
    def __init__(self, ctx: ApiContext) -> None:
        self._ctx, self._created = ctx, int(time.time())

    async def list(self, http: Request) -> Response:
        cards = [*self._cards(http)]
        if VERSION_HEADER in http.headers:
            return JSONResponse(_page(http, [self._anthropic(each) for each in cards]))
        return JSONResponse({"object": "list", "data": cards})

    async def show(self, http: Request) -> Response:
        name, cards = http.path_params["name"], {each["id"]: each for each in self._cards(http)}
        card = cards.get(name)
        if card is None:
            raise unknown_model(name, cards)
        return JSONResponse(self._anthropic(card) if VERSION_HEADER in http.headers else card)

    def _cards(self, http: Request) -> Iterator[Card]:
        """As in vLLM and SGLang, `root` is the model that a name stands for, and an adapter's
        folder: that is for operators."""
        ctx, tenant = self._ctx, caller(self._ctx, http)
        sees_paths = is_operator(ctx, http)
        for name, (each, registered) in ctx.names_for(tenant).items():
            if registered is None:
                yield self._card(name, each, each.model_name)
            else:
                root = registered.source if sees_paths else name
                yield self._card(name, each, root, each.model_name)

    def _card(self, name: str, model: ApiContext, root: str, parent: str | None = None) -> Card:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvrelay",
            "root": root,
            "parent": parent,
            "max_model_len": model.max_model_len,
        }

    def _anthropic(self, card: Card) -> Card:
        created = datetime.fromtimestamp(self._created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "type": "model",
            "id": card["id"],
            "display_name": card["id"],
            "created_at": created,
            "lifecycle": "active",
            "max_input_tokens": card["max_model_len"],
            "max_tokens": card["max_model_len"],
        }


def _page(http: Request, cards: Sequence[Card]) -> dict[str, Any]:
    """What is asked for by `limit`, `after_id` and `before_id`. Raises `ApiError`."""
    limit = limit_of(http, DEFAULT_LIMIT, MAX_LIMIT)
    names = [each["id"] for each in cards]
    begin, end = 0, len(cards)
    for param in ("after_id", "before_id"):
        name = http.query_params.get(param)
        if name is None:
            continue
        if name not in names:
            raise invalid(f"'{param}': there is no model {name[:100]!r}", param)
        if param == "after_id":
            begin = names.index(name) + 1
        else:
            end = names.index(name)
    left = max(0, end - begin)
    if "before_id" in http.query_params:  # those next to it
        begin = max(begin, end - limit)
    data = cards[begin:end][:limit]
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": left > limit, "first_id": ends[0], "last_id": ends[1]}
