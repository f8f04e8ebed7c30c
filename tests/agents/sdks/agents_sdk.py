"""OpenAI's Agents SDK calls one custom tool: `agents_sdk.py URL TOOL NUMBER`.

Each call that its runner hands to the tool is a line of JSON with its input. It runs outside this
repository's environment, by the SDK's own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from typing import Any

from agents import (
    Agent,
    CustomTool,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

DELTA = "response.custom_tool_call_input.delta"


async def main(url: str, tool: dict[str, Any], number: int) -> None:
    set_tracing_disabled(True)
    inputs: list[str] = []

    async def invoke(_: Any, text: str) -> str:
        inputs.append(text)
        return "done"

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)
    made = CustomTool(tool["name"], tool["description"], invoke, format=tool["format"])
    for i in range(number):
        inputs.clear()
        parts: list[str] | None = None
        agent = Agent(
            name="caller",
            instructions="Call the tool.",
            model=OpenAIResponsesModel(model=tool["model"], openai_client=client),
            tools=[made],
            model_settings=ModelSettings(
                tool_choice="required",
                parallel_tool_calls=False,
                max_tokens=tool["max_tokens"],
                extra_body={"seed": i},
            ),
        )
        with suppress(MaxTurnsExceeded):  # one turn is a call; nobody asks what came of it
            if i % 2:
                await Runner.run(agent, tool["task"], max_turns=1)
            else:
                streamed = Runner.run_streamed(agent, tool["task"], max_turns=1)
                parts = []
                async for event in streamed.stream_events():
                    data = getattr(event, "data", None)
                    if getattr(data, "type", "") == DELTA:
                        parts.append(data.delta)
        print(json.dumps({"input": inputs[0] if inputs else None, "parts": parts}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])))
