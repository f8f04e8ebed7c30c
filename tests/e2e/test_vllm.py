"""vLLM behind our API, the real one: two workers of it that decode and one for prompts, beside one
of ours.

KVRELAY_VLLM_PYTHON is the interpreter of an environment that has it (docs/engines.md)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from tests.e2e.serving import all_up, is_idle, wait_for
from tests.support.vllm_settings import small

PYTHON = os.environ.get("KVRELAY_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="KVRELAY_VLLM_PYTHON names no interpreter with vLLM"),
]
WORDS = ("fox", "king", "ship", "tree", "robot", "river", "mouse", "cloud")
START_S = 900.0
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


def serving(folder: Path, models: tuple[str, ...], **workers: int) -> Served:
    vllm = {"runs": "vllm", "python": PYTHON, "block_size": 32}
    eager = {"arguments": {"enforce_eager": True}}
    common = {"checkpoint": "smollm2-135m"}
    settings = small(folder, START_S, host_gib=0.5)
    every = {
        "vllm": {"name": "vllm", "engine": vllm | eager, **common, **workers},
        "own": {"name": "own", "prefill": 0, "decode": 1, **common},
    }
    return Served(settings | {"models": [every[name] for name in models]})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("vllm")
    with serving(folder, ("vllm", "own"), prefill=1, decode=2) as served:
        yield served


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)


def tell(url: str, model: str, on_chunk: Callable[[], None] = lambda: None) -> list[str]:
    """Streams a story about each of WORDS, all at once."""

    def one(word: str) -> str:
        text = ""
        for chunk in client(url).chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"Tell me a story about a {word}."}],
            temperature=0,
            max_tokens=100,
            stream=True,
        ):
            text += chunk.choices[0].delta.content or ""
            on_chunk()
        return text

    with ThreadPoolExecutor(len(WORDS)) as threads:
        return list(threads.map(one, WORDS))


def has_on_disk(num_blocks: int, status: dict[str, Any]) -> bool:
    return sum(worker["num_disk_blocks"] for worker in status["workers"]) >= num_blocks


def assert_clean(url: str) -> None:
    wait_for(url, is_idle, 60.0, "not idle")
    audit = httpx.get(f"{url}/audit", timeout=30, auth=OwnKey()).json()
    assert audit["clean"], audit


@pytest.mark.parametrize("name", ["decode-vllm-0", "prefill-vllm-0"])
def test_streams_outlive_a_worker_of_vllm(server: Served, name: str) -> None:
    wait_for(server.url, all_up, START_S, "not up")
    expected = tell(server.url, "vllm")
    assert tell(server.url, "own") == expected
    [worker] = [
        process
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [""])[0] == PYTHON
        and any(f"/{name}/" in word for word in process.info["cmdline"])
    ]
    counted, lock = [0], threading.Lock()

    def kill_in_the_middle() -> None:
        with lock:
            counted[0] += 1
            if counted[0] == 12 * len(WORDS):
                worker.kill()

    assert tell(server.url, "vllm", kill_in_the_middle) == expected
    assert not worker.is_running()
    wait_for(server.url, all_up, START_S, "not up again")
    assert_clean(server.url)


def test_a_session_goes_on_from_disk_after_a_restart(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Once there was a town by the sea. " * 60}]
    about: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "model": "vllm"}
    answers = []
    for _ in range(2):
        with serving(tmp_path, ("vllm",), prefill=0, decode=1) as served:
            chat: Any = client(served.url).chat.completions
            answers.append(chat.create(messages=turns, prompt_cache_key="town", **about))
            wait_for(served.url, is_idle, 60.0, "not idle")
            num_blocks = answers[0].usage.prompt_tokens // 32
            wait_for(served.url, partial(has_on_disk, num_blocks), 60.0, "not on disk")
            assert_clean(served.url)
    first, again = answers
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens >= num_blocks * 32


def test_tools_schemas_and_turns_that_come_back(server: Served) -> None:
    wait_for(server.url, all_up, START_S, "not up")
    chat: Any = client(server.url).chat.completions
    question = {"role": "user", "content": "What is the capital of France?"}
    about = {"model": "vllm", "temperature": 0, "max_tokens": 40}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}
    answer = chat.create(messages=[question], response_format=form, **about)
    assert answer.choices[0].message.content == '{"city": "Paris"}'
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    answer = chat.create(messages=[question], tools=[tool], tool_choice="required", **about)
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"
    banned = chat.create(messages=[question], extra_body={"bad_words": ["Paris"]}, **about)
    assert "Paris" not in banned.choices[0].message.content
    turns = [{"role": "user", "content": "Once there was a town by the sea. " * 40}]
    before = 0
    for _ in range(3):
        answer = chat.create(messages=turns, **about)
        assert answer.usage.prompt_tokens_details.cached_tokens >= before // 32 * 32
        before = answer.usage.prompt_tokens
        turns += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": "And then?"},
        ]
    assert_clean(server.url)
