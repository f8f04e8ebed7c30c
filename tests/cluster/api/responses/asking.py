"""Requests of the responses API that the tests share, and events as they were sent."""

from __future__ import annotations

from typing import Any

import httpx
from openai.types.responses import Response

from tests.cluster.api.conftest import MODEL, Served
from tests.cluster.api.tools.templates import WEATHER_SCHEMA, events_of

PATH = "/v1/responses"
ASK = "Will it rain in Oslo?"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Says how the weather is.",
    "parameters": WEATHER_SCHEMA,
}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Changes a file."}
Event = dict[str, Any]


def ask(served: Served, given: Any = ASK, **changes: Any) -> Response:
    """The whole answer."""
    answer: Response = served.openai().responses.create(model=MODEL, input=given, **changes)
    return answer


def post(served: Served, given: Any = ASK, **changes: Any) -> httpx.Response:
    return served.post({"model": MODEL, "input": given} | changes, PATH)


def refused(served: Served, given: Any = ASK, **changes: Any) -> dict[str, Any]:
    """The error of a request that is wrong."""
    response = post(served, given, **changes)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def stream(served: Served, given: Any = ASK, **changes: Any) -> list[Event]:
    """The events, each with its number."""
    response = post(served, given, stream=True, **changes)
    assert response.status_code == 200, response.text
    events = events_of(response.text)
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    return [data for _, data in events]


def shape(events: list[Event]) -> list[str]:
    """Types, with their items' places, in order; deltas in a row are one."""
    found: list[str] = []
    for event in events:
        name = event["type"].removeprefix("response.")
        if "output_index" in event:
            name += f" {event['output_index']}"
        if not (found and found[-1] == name and name.partition(" ")[0].endswith(".delta")):
            found.append(name)
    return found


def deltas(events: list[Event], kind: str) -> list[str]:
    return [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
