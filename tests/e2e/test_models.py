"""Two real models behind one port: each call, kill, change and restart is of one of them. Where
Gemma is not there, the default model serves under two names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.engine.model.checkpoint.resolve import resolve_model
from kvrelay.engine.model.errors import ModelError
from tests.e2e.serving import (
    KVRELAY,
    STORY,
    all_up,
    is_idle,
    status,
    wait_for,
    worker_of,
)
from tests.operations.served import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

CHAT, ALIAS, OTHER = "chat", "gpt-4o-mini", "other"
PROMPTS = [f"In the year {1700 + i} a keeper of a lighthouse saw" for i in range(25)]
NUM_REQUESTS, NUM_TOKENS = 1000, 3


def has_gemma() -> bool:
    try:
        resolve_model("gemma3-270m", progress=lambda _: None)
    except ModelError:
        return False
    return True


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    other = "gemma3-270m" if has_gemma() else "smollm2-135m"
    common = {
        "model.dtype": "float32",
        "engine.max_model_len": 512,
        "engine.num_blocks": 128,
        "router.policy": "round_robin",  # every prompt is handed over
        "sessions.state_dir": str(folder / "state"),
        "tiers.host_gib": 0,
    }
    models = [
        {"name": CHAT, "checkpoint": "smollm2-135m", "aliases": [ALIAS]},
        {"name": OTHER, "checkpoint": other},
    ]
    return common | {"models": models} | more


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(settings(tmp_path_factory.mktemp("models"))) as served:
        yield served


def complete(url: str, model: str, prompt: str, max_tokens: int = NUM_TOKENS) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert said["model"] == (CHAT if model == ALIAS else model)
    return str(said["choices"][0]["text"])


def model_of(worker: dict[str, Any]) -> str:
    return str(worker["model"])


def test_both_are_there_and_each_has_its_workers(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == [CHAT, ALIAS, OTHER]
    state = status(server.url)
    workers = {worker["worker"]: (model_of(worker), worker["role"]) for worker in state["workers"]}
    assert workers == {
        "prefill-chat-0": (CHAT, "prefill"),
        "decode-chat-0": (CHAT, "decode"),
        "prefill-other-0": (OTHER, "prefill"),
        "decode-other-0": (OTHER, "decode"),
    }
    assert [(each["model"], each["num_up"]) for each in state["models"]] == [(CHAT, 2), (OTHER, 2)]
    for name, num_up in {"": 4, CHAT: 2, ALIAS: 2, OTHER: 2}.items():
        health = httpx.get(f"{server.url}/health/ready", params={"model": name} if name else {})
        assert health.json() == {"workers_up": num_up, "workers": num_up, "status": "ready"}


def test_libraries_find_each_by_its_name(server: Served) -> None:
    asked: Any = [{"role": "user", "content": "What is the capital of France?"}]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    made = client.chat.completions.create(model=ALIAS, messages=asked, max_tokens=20, temperature=0)
    assert "Paris" in str(made.choices[0].message.content)
    text = client.completions.create(model=OTHER, prompt="Paris is", max_tokens=4, temperature=0)
    assert (text.model, text.usage and text.usage.completion_tokens) == (OTHER, 4)
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    message = claude.messages.create(model=CHAT, messages=asked, max_tokens=20)
    assert message.model == CHAT
    with pytest.raises(openai.NotFoundError, match=f"has '{CHAT}', '{ALIAS}', '{OTHER}'"):
        client.completions.create(model="gpt-5", prompt="Paris is")


def test_of_a_thousand_mixed_requests_none_is_on_the_wrong_model(server: Served) -> None:
    names = (CHAT, OTHER)
    alone = {(name, each): complete(server.url, name, each) for name in names for each in PROMPTS}
    before = {each["model"]: each["output_tokens"] for each in status(server.url)["models"]}

    def ask(number: int) -> tuple[tuple[str, str], str]:
        name, prompt = names[number % 2], PROMPTS[number // 2 % len(PROMPTS)]
        return (name, prompt), complete(server.url, name, prompt)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(NUM_REQUESTS)))
    assert len(answers) == NUM_REQUESTS
    assert [(key, said) for key, said in answers if said != alone[key]] == []
    wait_for(server.url, is_idle, 60, "it is not idle")
    after = {each["model"]: each["output_tokens"] for each in status(server.url)["models"]}
    for name in names:  # tokens of one that ends early are fewer
        assert 0 < after[name] - before[name] <= NUM_REQUESTS // 2 * NUM_TOKENS
    explained = httpx.get(f"{server.url}/requests?limit=500", timeout=60, auth=OwnKey()).json()[
        "data"
    ]
    for each in explained[::10]:
        shown = httpx.get(
            f"{server.url}/requests/{each['id']}/explanation", timeout=60, auth=OwnKey()
        ).json()
        for attempt in shown["attempts"]:
            assert f"-{shown['model']}-" in attempt["decode"], shown
            assert f"-{shown['model']}-" in (attempt["prefill"] or attempt["decode"])


def streamed(url: str, model: str, on_chunk: Callable[[int], None] = lambda _: None) -> str:
    body = {"model": model, "prompt": STORY, "max_tokens": 64, "temperature": 0.8, "seed": 5}
    body |= {"stream": True, "ignore_eos": True}
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
        chunks = (line[6:] for line in answer.iter_lines() if line.startswith("data: {"))
        for number, chunk in enumerate(map(json.loads, chunks)):
            text += "".join(choice["text"] for choice in chunk["choices"])
            on_chunk(number)
    return text


@pytest.mark.parametrize("killed", [CHAT, OTHER])
def test_a_kill_of_ones_worker_is_not_seen_by_the_other(server: Served, killed: str) -> None:
    (other,) = {CHAT, OTHER} - {killed}
    wait_for(server.url, all_up, 180, "not all are up")
    expected = {name: streamed(server.url, name) for name in (killed, other)}
    victim = worker_of(status(server.url), f"decode-{killed}-0")
    survivors = {w["worker"]: w["epoch"] for w in status(server.url)["workers"]}
    del survivors[victim["worker"]]
    with ThreadPoolExecutor(1) as pool:
        beside: list[Future[str]] = []

        def disturb(number: int) -> None:
            if number == 3:
                beside.append(pool.submit(streamed, server.url, other))
            if number == 6:
                os.kill(victim["pid"], signal.SIGKILL)

        said = {killed: streamed(server.url, killed, disturb), other: beside[0].result()}
    assert said == expected

    def is_replaced(state: dict[str, Any]) -> bool:
        return bool(worker_of(state, victim["worker"])["epoch"] > victim["epoch"] and all_up(state))

    wait_for(server.url, is_replaced, 180, f"{victim['worker']} is not replaced")
    state = status(server.url)
    assert {name: worker_of(state, name)["epoch"] for name in survivors} == survivors
    assert model_of(worker_of(state, victim["worker"])) == killed


def change_role(served: Served, worker: str, role: str) -> httpx.Response:
    path = f"{served.url}/workers/{worker}/role"
    return httpx.post(path, json={"role": role}, timeout=30, auth=OwnKey())


def test_a_role_changes_for_one_and_prompts_stay_with_their_model(server: Served) -> None:
    expected = {name: complete(server.url, name, STORY, 16) for name in (CHAT, OTHER)}
    worker = "prefill-other-0"
    changed = change_role(server, worker, "decode")
    assert changed.status_code == 200, changed.text
    roles = {"prefill-chat-0": "prefill", worker: "decode"}

    def is_changed(state: dict[str, Any]) -> bool:
        return all(worker_of(state, name)["role"] == role for name, role in roles.items())

    wait_for(server.url, is_changed, 30, "the role has not changed")
    for _ in range(3):
        assert {name: complete(server.url, name, STORY, 16) for name in expected} == expected
    change_role(server, worker, "prefill")


def test_a_router_that_dies_comes_back_with_both(server: Served) -> None:
    expected = {name: complete(server.url, name, STORY, 16) for name in (CHAT, OTHER)}
    (router,) = status(server.url)["routers"]
    os.kill(router["pid"], signal.SIGKILL)

    def is_back(_: Any = None) -> bool:
        try:
            state = status(server.url)
        except httpx.HTTPError:
            return False
        up = {each["model"]: each["num_up"] for each in state["models"]}
        return state["routers"][0].get("pid") not in (None, router["pid"]) and up == {
            CHAT: 2,
            OTHER: 2,
        }

    deadline = threading.Event()
    for _ in range(240):
        if is_back():
            break
        deadline.wait(0.5)
    assert is_back(), status(server.url)
    assert {name: complete(server.url, name, STORY, 16) for name in expected} == expected


def test_metrics_know_both(server: Served) -> None:
    text = httpx.get(f"{server.url}/metrics", timeout=30, auth=OwnKey()).text
    for name in (CHAT, OTHER):
        assert f'kvrelay_model_workers_up{{model="{name}"}} 2.0' in text
        assert f'vllm:num_requests_running{{model_name="{name}"}} ' in text


def test_one_is_added_and_removed_while_another_serves(tmp_path: Path) -> None:
    """Also across a restart, which reads what was added."""
    chat = {"name": CHAT, "checkpoint": "smollm2-135m", "prefill": 0}
    port = str(free_port())
    with Served(settings(tmp_path, models=[chat]), "--port", port) as served:
        url = served.url
        expected = complete(url, CHAT, STORY, 16)
        (before,) = status(url)["workers"]
        with Busy(url) as busy:
            kvrelay("models", "add", OTHER, "smollm2-135m", "--prefill", "0", "--url", url)
            assert complete(url, OTHER, STORY, 16) == expected
            assert worker_of(status(url), "decode-chat-0")["epoch"] == before["epoch"]
            kvrelay("restart", "--url", url)
            assert complete(url, OTHER, STORY, 16) == expected
            kvrelay("models", "remove", OTHER, "--url", url)
        assert busy.said
        assert set(busy.said) == {expected}
        body = {"model": OTHER, "prompt": "a"}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 404
        assert [worker["worker"] for worker in status(url)["workers"]] == ["decode-chat-0"]


def kvrelay(*words: str) -> None:
    done = subprocess.run([*KVRELAY, *words], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr


class Busy:
    """Asks one model, again and again, from `with` to its end."""

    def __init__(self, url: str) -> None:
        self.said: list[str] = []
        self._url, self._ended = url, threading.Event()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Busy:
        self._asking = self._pool.submit(self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._asking.result()

    def _ask(self) -> None:
        while not self._ended.wait(0.1):
            self.said.append(complete(self._url, CHAT, STORY, 16))
