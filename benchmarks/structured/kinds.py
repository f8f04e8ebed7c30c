"""Objects and tool calls by each kind of KV (`kv` of a request): whether what is read of a context
in part, or in four bits, costs an output its form.

Questions come in groups with a long context of their own: text for the schemas, and for calls the
tools of the group, of which a request names one. Each context is asked for once beforehand, and
device memory is too small for all: so a question reads it from where its kind is kept, approximate
KV from host memory in four bits. Contexts are longer than what Quest reads in any case."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import jsonschema
from openai import APIStatusError, AsyncOpenAI

from benchmarks.engine.fp8 import prose
from kvrelay.engine.kv.scope import KVKind

MAX_TOKENS, AT_ONCE, IN_GROUP = 160, 3, 6
CONTEXT_CHARS = 6000  # about 1,500 tokens
SETTINGS = {
    "model.dtype": "float32",  # so that an answer does not depend on what else is in a step
    "engine.quest_budget": 0.25,
    "cluster.prefill": 0,
    "tiers.host_gib": 1.0,
    "tiers.packed_gib": 1.0,
}


@dataclass(slots=True)
class Outcome:
    """What requests of one kind made of one sort of output."""

    texts: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)  # prompt tokens, by where they were

    def facts(self, exact: Outcome) -> dict[str, Any]:
        names = ("valid", "invalid", "cut_short", "refused")
        same = sum(a == b for a, b in zip(self.texts, exact.texts, strict=True))
        return {name: self.counts[name] for name in names} | {
            "as_exact": same,
            "tokens_by_source": dict(self.sources),
        }


def questions_of(schemas: Sequence[Any], *, are_tools: bool) -> list[dict[str, Any]]:
    """The bodies, one of each group after the other, so that a context is not asked for twice in a
    row."""
    text, bodies = prose(), list[tuple[int, int, dict[str, Any]]]()
    for number, schema in enumerate(schemas):
        group, place = divmod(number, IN_GROUP)
        first = group * IN_GROUP
        if are_tools:
            functions = [
                {"name": f"tool_{first + i}", "parameters": each}
                for i, each in enumerate(schemas[first : first + IN_GROUP])
            ]
            body = {
                "messages": [{"role": "user", "content": "Call the tool with an example."}],
                "tools": [{"type": "function", "function": each} for each in functions],
                "tool_choice": {"type": "function", "function": {"name": f"tool_{number}"}},
            }
        else:
            said = text[group * CONTEXT_CHARS % (len(text) - CONTEXT_CHARS) :][:CONTEXT_CHARS]
            named = {"name": "x", "schema": schema}
            body = {
                "messages": [
                    {"role": "system", "content": said},
                    {"role": "user", "content": "Make up an example, as short as can be."},
                ],
                "response_format": {"type": "json_schema", "json_schema": named},
            }
        bodies.append((place, group, body))
    return [body for _, _, body in sorted(bodies, key=lambda each: each[:2])]


def _schema(body: dict[str, Any]) -> Any:
    if "tools" not in body:
        return body["response_format"]["json_schema"]["schema"]
    asked = body["tool_choice"]["function"]["name"]
    functions = [each["function"] for each in body["tools"]]
    return next(each["parameters"] for each in functions if each["name"] == asked)


def judged(body: dict[str, Any], choice: Any) -> tuple[str, str]:
    """What was made, and what it is."""
    calls = choice.message.tool_calls or []
    text = calls[0].function.arguments if calls else choice.message.content or ""
    if choice.finish_reason == "length":
        return text, "cut_short"
    if "tools" in body and [call.function.name for call in calls] != [
        body["tool_choice"]["function"]["name"]
    ]:
        return text, "invalid"
    schema = _schema(body)
    checker = jsonschema.validators.validator_for(schema)(schema)
    try:
        return text, "valid" if checker.is_valid(json.loads(text)) else "invalid"
    except json.JSONDecodeError:
        return text, "invalid"


async def _ask(client: AsyncOpenAI, model: str, kv: str, bodies: Sequence[Any]) -> Outcome:
    outcome, turn = Outcome(), asyncio.Semaphore(AT_ONCE)
    settings: dict[str, Any] = {"model": model, "temperature": 0.0, "extra_body": {"kv": kv}}

    async def one(body: dict[str, Any], max_tokens: int) -> tuple[str, str, Any]:
        async with turn:
            try:
                done = await client.chat.completions.create(
                    **body, **settings, max_tokens=max_tokens
                )
            except APIStatusError as error:
                return f"{error.status_code}: {error.message[:200]}", "refused", None
            return *judged(body, done.choices[0]), done.usage

    first = bodies[: -(-len(bodies) // IN_GROUP)]
    await asyncio.gather(*(one(body, 1) for body in first))
    for text, what, usage in await asyncio.gather(*(one(body, MAX_TOKENS) for body in bodies)):
        outcome.texts.append(text)
        outcome.counts[what] += 1
        if usage is not None:
            details = usage.prompt_tokens_details.model_dump()
            outcome.sources.update(details["cached_tokens_by_source"])
            outcome.sources["computed"] += usage.prompt_tokens - details["cached_tokens"]
    return outcome


async def by_kind(
    url: str, model: str, schemas: Sequence[Any], sorts: Sequence[str]
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Facts of each sort of output and kind of KV, as they come."""
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
    for what in sorts:
        bodies = questions_of(schemas, are_tools=what == "calls")
        outcomes: dict[str, Outcome] = {}
        for kv in get_args(KVKind):
            outcomes[kv] = await _ask(client, model, kv, bodies)
            yield f"{what}, {kv}", outcomes[kv].facts(outcomes["exact"])
