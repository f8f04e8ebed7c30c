"""A second real model, served: byte fallback, a BOS, a window in most layers, 262,144 tokens, and
no chat template of its own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks.serving.served import Served
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from tests.cluster.api.text.families import GEMMA
from tests.e2e.prompts import greedy
from tests.e2e.serving import all_up, status, wait_for, wait_until, worker_of

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

MODEL = "gemma3-270m"
STORY = " ".join(f"In the year {1700 + year} keeper {year} saw a whale." for year in range(60))
LLAMAS = "Llamas: 🦙🦙🦙🦙🦙🦙"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Zürich 🦙", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def start(gemma3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Served]:
    folder = tmp_path_factory.mktemp("gemma3")
    settings = {
        "model.name": MODEL,
        "model.dtype": "float32",
        "engine.max_model_len": 4096,
        "router.policy": "round_robin",  # every prompt is handed over
        "sessions.state_dir": str(folder / "state"),
        "tiers.host_gib": 0,
        "tiers.disk_gib": 1.0,
        "tiers.disk_after_s": 0.1,
        "tiers.disk_path": str(folder / "kv"),
    }
    return lambda **more: Served(settings | more)


@pytest.fixture(scope="module")
def server(start: Callable[..., Served]) -> Iterator[Served]:
    with start() as served:
        yield served


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json={"model": MODEL, "temperature": 0, **body}, timeout=300)


def complete(url: str, prompt: str, **body: Any) -> Any:
    answer = post(url, "/v1/completions", prompt=prompt, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(url: str, prompt: str, max_tokens: int, on_chunk: Any = None) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens}
    body |= {"temperature": 0.8, "seed": 5, "stream": True}
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
        chunks = (line[6:] for line in answer.iter_lines() if line.startswith("data: {"))
        for number, chunk in enumerate(map(json.loads, chunks)):
            text += "".join(choice["text"] for choice in chunk["choices"])
            if on_chunk is not None:
                on_chunk(number)
    return text


def test_its_license_is_shown_and_what_it_can_do_is_suggested(server: Served) -> None:
    text = "".join(server.lines)
    assert "license: Gemma is provided under and subject to the Gemma Terms of Use" in text
    assert f"curl {server.url}/v1/completions" in text
    refused = post(server.url, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
    assert refused.status_code == 400
    assert "this model has no chat template" in refused.json()["error"]["message"]


def test_tokens_and_text_are_those_of_transformers(server: Served, gemma3_dir: Path) -> None:
    tokenizer = Tokenizer(gemma3_dir)
    prompts = [STORY, LLAMAS, "The capital of France is", "def fibonacci(n):\n"]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    assert len(ids[0]) > 600, "no more than the window"
    for prompt, tokens in zip(prompts, greedy(gemma3_dir, torch.float32, ids, 16), strict=True):
        (choice,) = complete(server.url, prompt, max_tokens=16, return_token_ids=True)["choices"]
        assert choice["token_ids"] == tokens
        assert choice["text"] == tokenizer.decode(tokens)


def test_a_stream_goes_on_when_its_worker_is_killed(server: Served) -> None:
    undisturbed = streamed(server.url, STORY, 60)
    before = worker_of(status(server.url), "decode-0")

    def disturb(number: int) -> None:
        if number == 5:
            os.kill(before["pid"], signal.SIGKILL)

    assert streamed(server.url, STORY, 60, disturb) == undisturbed

    def is_replaced(state: dict[str, Any]) -> bool:
        return bool(worker_of(state, "decode-0")["epoch"] > before["epoch"] and all_up(state))

    wait_for(server.url, is_replaced, 180, "decode-0 is not replaced")


def test_after_a_restart_with_a_chat_template(server: Served, start: Callable[..., Served]) -> None:
    """KV comes from disk, and chats, calls and schemas come in whole characters."""
    expected = complete(server.url, STORY, max_tokens=16)

    def is_on_disk() -> bool:
        return bool(worker_of(status(server.url), "decode-0")["num_disk_blocks"] * 16 > 500)

    wait_until(is_on_disk, 60, "its KV is not on disk")
    server.stop()
    changed = {"model.chat_template": GEMMA, "router.policy": "prefix"}  # it asks where KV is
    with start(**changed) as again:
        found = complete(again.url, STORY, max_tokens=16)
        assert found["choices"] == expected["choices"]
        details = found["usage"]["prompt_tokens_details"]
        assert details["cached_tokens_by_source"].get("disk", 0) > 500, details
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is the weather in Zürich 🦙?"},
        ]
        chat = {"messages": messages, "max_tokens": 80}
        called = post(
            again.url, "/v1/chat/completions", tools=[TOOL], tool_choice="required", **chat
        ).json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(called[0]["function"]["arguments"])["city"] in ("Zürich 🦙", "Oslo")
        schema = {"properties": {"a": {"const": "é🦙日本"}}, "required": ["a"]}
        schema |= {"type": "object", "additionalProperties": False}
        asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        said = post(again.url, "/v1/chat/completions", response_format=asked, **chat).json()
        assert json.loads(said["choices"][0]["message"]["content"])["a"] == "é🦙日本"
        tokens = post(again.url, "/tokenize", messages=messages).json()["tokens"]
        counted = post(again.url, "/v1/messages/count_tokens", messages=messages[1:])
        usage = post(again.url, "/v1/messages", **chat).json()["usage"]
        told = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert told == len(tokens) > counted.json()["input_tokens"]
        assert tokens.count(2) == 1, "one BOS"
