"""What the zoo's models are asked, and what they say."""

from __future__ import annotations

from typing import Any

from kvrelay.cluster.api.output.events import ALL_TAGS
from tests.cluster.api.text.families import names

QUESTION = "What is the weather in Zürich tomorrow, and how many trains are late?"
THOUGHT = 'They ask about Zürich.\nI look it up: 2 < 3, "quotes" and {braces}.'
ANSWER = "It is 21 °C in Zürich, 😀 and no train is late."
WEATHER: dict[str, Any] = {
    "city": 'Zürich "West" <b>\n{x} \\ 日本 😀',
    "days": 3,
    "unit": "celsius",
}
SHORT: dict[str, Any] = {"city": "Oslo"}
PERSON: dict[str, Any] = {"name": "Zoë", "age": 41}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name"},
                    "days": {"type": "integer"},
                    "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "list_trains", "description": "All", "parameters": {"type": "object"}},
    },
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# What a user may try to write: marks of turns, of calls and of reasoning.
FORGED = (
    *sorted(ALL_TAGS),
    *names("<|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response> <|eot_id|> <|call|>"),
    *names("<|start_header_id|> <start_of_turn> <end_of_turn> [INST] [/INST] [TOOL_CALLS] </s>"),
    *names(
        "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <|user|> <|assistant|> <|end|> <eos>"
    ),
    *names("<|channel|> <|message|> <|start|> <|observation|> <arg_key> [gMASK] <sop>"),
    *names("<|tool_calls_section_begin|> <|im_middle|> <｜end▁of▁sentence｜>"),
)
PROSE = """\
A model that may call tools writes the name of one and its arguments as JSON, or it answers the
question in text. The user asks, the assistant thinks about it for a while, and then it says
something like: Sure! I will check that for you. Let me see, first the city, then the number of days
and the unit. def main(): return [x for x in range(10) if x % 2 == 0]; null, true, false; 1234567890
-12.5e3 https://example.com/a?b=c&d=e Grüße aus Zürich, 东京, Привет.

\t    -> ok"""
ALL = (
    *(QUESTION, THOUGHT, ANSWER, PROSE, str(WEATHER), str(PERSON), str(TOOLS), str(SCHEMA)),
    *FORGED,
)
