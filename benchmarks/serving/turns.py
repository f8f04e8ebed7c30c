"""A conversation of 40 turns as agents have it, over each API: how much of each prompt was cached?

`python -m benchmarks.serving.turns`: a long system prompt with tools, and in each turn a call and
its result. Nothing is scripted: a random model with a long context is held to the tool's schema.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import click
import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.serving.served import Served
from tests.agents.agents import MODEL
from tests.support.random_model import make_model

SYSTEM_WORDS, RESULT_WORDS = 12_000, 120  # agents begin with 5,000 to 20,000 tokens
WORDS = [
    "file",
    "line",
    "function",
    "return",
    "import",
    "value",
    "test",
    "error",
    "path",
    "class",
    "list",
    "name",
    "open",
    "read",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"enum": ["README.md", "main.py", "setup.cfg", "notes.txt"]},
        "first_line": {"type": "integer", "minimum": 1, "maximum": 500},
    },
    "required": ["path", "first_line"],
    "additionalProperties": False,
}
ABOUT = "Read a file of the project from a line on."
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Turn:
    num_prompt: int
    num_cached: int


Talk = Iterator[Turn]


def texts(seed: int, count: int, words: int) -> list[str]:
    rng = Random(seed)
    return [" ".join(rng.choices(WORDS, k=words)) for _ in range(count)]


def chat(http: httpx.Client, seed: int, turns: int) -> Talk:
    (system,), results = texts(seed, 1, SYSTEM_WORDS), texts(seed + 1, turns, RESULT_WORDS)
    function = {"name": "read", "description": ABOUT, "parameters": SCHEMA, "strict": True}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Find the bug."},
    ]
    for result in results:
        answer = _post(
            http,
            "/v1/chat/completions",
            messages=messages,
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=100,
        )
        message, usage = answer["choices"][0]["message"], answer["usage"]
        call = message["tool_calls"][0]
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]
        yield Turn(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def messages(http: httpx.Client, seed: int, turns: int) -> Talk:
    (system,), results = texts(seed, 1, SYSTEM_WORDS), texts(seed + 1, turns, RESULT_WORDS)
    said: list[dict[str, Any]] = [{"role": "user", "content": "Find the bug."}]
    for result in results:
        answer = _post(
            http,
            "/v1/messages",
            system=[{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}],
            messages=said,
            tools=[{"name": "read", "description": ABOUT, "input_schema": SCHEMA, "strict": True}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            max_tokens=100,
        )
        usage, content = answer["usage"], answer["content"]
        done = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": result}
        said += [{"role": "assistant", "content": content}, {"role": "user", "content": [done]}]
        cached = usage["cache_read_input_tokens"]
        new = usage["cache_creation_input_tokens"] + usage["input_tokens"]
        yield Turn(cached + new, cached)


def responses(http: httpx.Client, seed: int, turns: int) -> Talk:
    (system,), results = texts(seed, 1, SYSTEM_WORDS), texts(seed + 1, turns, RESULT_WORDS)
    tool = {"type": "function", "name": "read", "description": ABOUT, "strict": True}
    given: Any = "Find the bug."
    previous = None
    for result in results:
        answer = _post(
            http,
            "/v1/responses",
            instructions=system,
            input=given,
            previous_response_id=previous,
            tools=[{**tool, "parameters": SCHEMA}],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=100,
        )
        usage, call, previous = answer["usage"], answer["output"][-1], answer["id"]
        given = [{"type": "function_call_output", "call_id": call["call_id"], "output": result}]
        yield Turn(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])


def completions(http: httpx.Client, seed: int, turns: int) -> Talk:
    (system,), results = texts(seed, 1, SYSTEM_WORDS), texts(seed + 1, turns, RESULT_WORDS)
    text = f"{system}\n\nFind the bug.\n"
    for result in results:
        answer = _post(http, "/v1/completions", prompt=text, guided_json=SCHEMA, max_tokens=100)
        usage = answer["usage"]
        text += f"{answer['choices'][0]['text']}\n{result}\n"
        yield Turn(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


APIS: dict[str, Callable[[httpx.Client, int, int], Talk]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
}


def _post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json={"model": MODEL, **body})
    if answer.status_code != 200:
        raise click.ClickException(f"{path}: {answer.text[:500]}")
    found: dict[str, Any] = answer.json()
    return found


@click.command()
@click.option("--turns", type=click.IntRange(2), default=40, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results.")
def main(turns: int, json_path: Path | None) -> None:
    """How much of an agent's prompts is cached, as each API reports it."""
    console = Console()
    table = Table("API", "prompt of the last turn", "cached of later turns", "computed a turn")
    found = {}
    with tempfile.TemporaryDirectory(prefix="kvrelay-model-") as place:
        model = make_model(Path(place) / MODEL)
        settings = {"model.name": str(model), "model.served_name": MODEL}
        with (
            Served(settings) as served,
            httpx.Client(base_url=served.url, timeout=TIMEOUT_S) as http,
        ):
            for number, (path, talk) in enumerate(APIS.items()):
                steps = talk(http, 10 * number, turns)
                seen = list(track(steps, path, total=turns, console=console, transient=True))
                later = seen[1:]
                cached = sum(turn.num_cached for turn in later)
                share = cached / sum(turn.num_prompt for turn in later)
                new = sum(turn.num_prompt for turn in later) - cached
                found[path] = {"cached": share, "prompt_tokens": later[-1].num_prompt}
                table.add_row(
                    path, f"{later[-1].num_prompt:,}", f"{share:.2%}", f"{new / len(later):.0f}"
                )
    console.print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
