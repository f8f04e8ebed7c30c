"""Objects that the served model makes for schemas of a corpus: whole and streamed, greedy and
drawn; and again while workers die, byte for byte the same."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
from openai import APIStatusError, AsyncOpenAI

from benchmarks.serving.first_light import MODEL
from kvrelay.cluster.cli.own_key import OwnKey

MAX_TOKENS = 400
AT_ONCE = 4
KILL_EVERY_S = 4.0


@dataclass(frozen=True, slots=True)
class Made:
    text: str
    finish: str
    refused: str = ""


async def make(client: AsyncOpenAI, schema: dict[str, Any], number: int) -> Made:
    """One object; every other one is streamed, and every other pair drawn at temperature 1."""
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Make up an example, as short as can be."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "max_tokens": MAX_TOKENS,
        "temperature": number // 2 % 2,
        "seed": number,
    }
    try:
        if number % 2 == 0:
            answer = await client.chat.completions.create(**options)
            return Made(answer.choices[0].message.content or "", answer.choices[0].finish_reason)
        text, finish = "", ""
        async for chunk in await client.chat.completions.create(**options, stream=True):
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
        return Made(text, finish)
    except APIStatusError as error:
        return Made("", "", f"{error.status_code}: {error.message[:100]}")


async def make_all(url: str, schemas: Sequence[dict[str, Any]]) -> list[Made]:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> Made:
        async with turn:
            return await make(client, schemas[number], number)

    return await asyncio.gather(*(one(number) for number in range(len(schemas))))


async def kill_workers(url: str) -> int:
    """Until it is cancelled: one after the other, when all are up. Returns how many."""
    count = 0
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30, auth=OwnKey()) as http:
            while True:
                await asyncio.sleep(KILL_EVERY_S)
                workers = (await http.get("/status")).json()["workers"]
                if all(worker["state"] == "up" for worker in workers):
                    os.kill(workers[count % len(workers)]["pid"], signal.SIGKILL)
                    count += 1
    except asyncio.CancelledError:
        return count


def judged(schemas: Sequence[dict[str, Any]], made: Sequence[Made]) -> dict[str, Any]:
    found: Counter[str] = Counter()
    for schema, each in zip(schemas, made, strict=True):
        if each.refused:
            found["refused"] += 1
        elif each.finish == "length":
            found["cut_short"] += 1
        else:
            checker = jsonschema.validators.validator_for(schema)(schema)
            found["valid" if checker.is_valid(json.loads(each.text)) else "invalid"] += 1
    return {key: found[key] for key in ("valid", "invalid", "cut_short", "refused")}


async def disturbed(url: str, schemas: Sequence[dict[str, Any]]) -> tuple[list[Made], int]:
    """Generates them while workers die; and counts how many did."""
    killing = asyncio.create_task(kill_workers(url))
    made = await make_all(url, schemas)
    killing.cancel()
    return made, await killing
