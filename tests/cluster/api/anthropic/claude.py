"""Anthropic's client, and the requests that the tests share."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx

from tests.cluster.api.conftest import MODEL, Served
from tests.cluster.api.tools.templates import WEATHER_SCHEMA, events_of

ASK: list[Any] = [{"role": "user", "content": "Will it rain in Oslo?"}]
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Says how the weather is.",
    "input_schema": WEATHER_SCHEMA,
}
THINK: Any = {"type": "enabled", "budget_tokens": 1024}


def client(served: Served, key: str = "any") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0, timeout=20)


def ask(served: Served, **changes: Any) -> anthropic.types.Message:
    """The whole answer."""
    arguments: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "messages": ASK}
    answer: anthropic.types.Message = client(served).messages.create(**arguments | changes)
    return answer


def post(served: Served, path: str = "/v1/messages", **changes: Any) -> httpx.Response:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "messages": ASK}
    return served.post(body | changes, path)


def stream(served: Served, **changes: Any) -> list[dict[str, Any]]:
    """Data of the events; each has its type's name."""
    response = post(served, stream=True, **changes)
    assert response.status_code == 200, response.text
    events = events_of(response.text)
    assert all(name == data["type"] for name, data in events)
    return [data for _, data in events]


def shape(events: list[dict[str, Any]]) -> list[str]:
    """Types and indices in order; deltas in a row are one."""
    found: list[str] = []
    for event in events:
        name = event["type"].removeprefix("content_block_")
        if "delta" in event and "index" in event:
            name = event["delta"]["type"]
        if "index" in event:
            name += f" {event['index']}"
        if not found or found[-1] != name:
            found.append(name)
    return found
