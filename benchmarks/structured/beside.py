"""What schemas that are refused cost the streams beside them: the times between their tokens.

Phases follow each other in turn: quiet; the schemas, one after the other; and, since whoever sends
a megabyte shares the cores here, bodies of the same sizes that are refused before a schema is read
in them (a model that is not served)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import httpx
from openai import AsyncOpenAI

from benchmarks.serving.first_light import MODEL
from kvrelay.lab.bench.load import percentile

STREAMS, MAX_TOKENS = 2, 6000
PHASE_S, ROUNDS = 6.0, 3
PAUSE_S = 0.05  # between two requests
PHASES = ("quiet", "schemas", "bodies")


def bad_schemas() -> dict[str, Any]:
    """By name; each is refused."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(150):
        deep = {"type": "object", "properties": {"a": deep}}
    return {
        "1 MB of enum": {"enum": [f"value {number:06} {'x' * 20}" for number in range(30_000)]},
        "recursion without end": {"$ref": "#"},
        "5,000 properties": {
            "type": "object",
            "properties": {f"p{number}": {"type": "string"} for number in range(5000)},
        },
        "150 levels": deep,
        "oneOf of 300": {"oneOf": [{"type": "string", "minLength": n} for n in range(300)]},
        "a pattern that is none": {"type": "string", "pattern": "((((a+)+)+)+("},
        "an expression of exponential size": {"type": "string", "pattern": "(a?){900}{900}{900}b"},
    }


def bodies() -> list[dict[str, bytes]]:
    """With the schemas and 10,000 tools; and the same for a model that is not served."""
    message = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    functions = [{"name": f"f{number}", "parameters": parameters} for number in range(10_000)]
    tools = [{"type": "function", "function": function} for function in functions]
    asked: dict[str, dict[str, Any]] = {"10,000 tools": {"tools": tools, "tool_choice": "required"}}
    for name, schema in bad_schemas().items():
        named = {"name": "x", "schema": schema}
        asked[name] = {"response_format": {"type": "json_schema", "json_schema": named}}
    return [
        {name: json.dumps({**message, **each, **other}).encode() for name, each in asked.items()}
        for other in ({}, {"model": "another"})
    ]


async def measure(url: str) -> dict[str, Any]:
    """Milliseconds between tokens in each phase, and how each schema was answered."""
    between: dict[str, list[float]] = {phase: [] for phase in PHASES}
    answers: dict[str, str] = {}
    slowest: dict[str, float] = {}
    phase = ""

    async def stream(client: AsyncOpenAI, number: int) -> None:
        options: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
        while True:
            chunks = await client.completions.create(
                model=MODEL, prompt=f"{number}.", max_tokens=MAX_TOKENS, stream=True, **options
            )
            last = 0.0
            async for _ in chunks:
                now = time.perf_counter()
                if phase and last:
                    between[phase].append((now - last) * 1e3)
                last = now

    async def send(http: httpx.AsyncClient, of: Mapping[str, bytes], until: float) -> None:
        while time.perf_counter() < until:
            for name, body in of.items():
                began = time.perf_counter()
                as_json = {"content-type": "application/json"}
                answer = await http.post("/v1/chat/completions", content=body, headers=as_json)
                slowest[name] = max(slowest.get(name, 0.0), time.perf_counter() - began)
                if of is schemas:
                    said = answer.json().get("error", {}).get("message", "served")
                    answers[name] = f"{answer.status_code}: {said[:60]}"
                await asyncio.sleep(PAUSE_S)

    schemas, others = bodies()
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        streams = [asyncio.create_task(stream(client, number)) for number in range(STREAMS)]
        await asyncio.sleep(PHASE_S)
        for _ in range(ROUNDS):
            for phase in PHASES:
                until = time.perf_counter() + PHASE_S
                if phase != "quiet":
                    await send(http, schemas if phase == "schemas" else others, until)
                await asyncio.sleep(max(0.0, until - time.perf_counter()))
            phase = ""
        for task in streams:
            assert not task.done(), task.exception()
            task.cancel()
    return {
        "ms": {
            name: {f"p{each}": percentile(times, each) for each in (50, 90, 99, 100)}
            for name, times in between.items()
        },
        "answers": answers,
        "slowest_s": slowest,
    }
