"""Answers with very many log-probabilities: the event loop serves others while they are made."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.host import settle_memory
from kvrelay.router.messages import Submit
from tests.cluster.api.conftest import MODEL, Served, serve

NUM_TOKENS = 3000
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"top_logprobs": 20},
    "/v1/completions": {"prompt": "Hi", "logprobs": 5},
}
RESPONSE: dict[str, Any] = {
    "input": "Hi",
    "top_logprobs": 20,
    "include": ["message.output_text.logprobs"],
}


class Heartbeat:
    """Turns of the server's loop: how much time of its thread each of them takes."""

    def __init__(self) -> None:
        self.turns: list[float] = []
        self.task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        if self.task is None:
            self.task = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            self.turns.append(time.thread_time() - began)


@pytest.fixture
def long(tokenizer: Tokenizer) -> Iterator[tuple[Served, Heartbeat]]:
    thresholds = gc.get_threshold()
    settle_memory()  # as a server does
    with serve(tokenizer, ApiSettings()) as served:
        served.ctx.max_model_len = 2 * NUM_TOKENS
        heartbeat = Heartbeat()
        tokens = [300 + i * 7 % 40_000 for i in range(NUM_TOKENS)]

        def answer(submit: Submit) -> list[int]:
            heartbeat.begin()
            return tokens

        served.router.answer = answer
        served.router.per_output = 60
        yield served, heartbeat
    gc.set_threshold(*thresholds)


@pytest.mark.slow
@pytest.mark.parametrize("path", [*ASKED, "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_no_turn_of_the_loop_has_much_of_the_work(
    long: tuple[Served, Heartbeat], path: str, stream: bool
) -> None:
    served, heartbeat = long
    body = {"model": MODEL, "n": 2, "max_tokens": NUM_TOKENS, "stream": stream}
    body |= ASKED.get(path, RESPONSE)
    response = served.post(body, path)
    assert response.status_code == 200
    assert len(response.content) > 2 * NUM_TOKENS * 100
    turns = sorted(heartbeat.turns)
    # The longest may have been a garbage collection; work in one piece would be most of all.
    assert turns[-1] < 0.5 * sum(turns), turns[-3:]
    assert sum(turns[-4:-1]) < 0.15 * sum(turns), turns[-4:]


@pytest.mark.slow
def test_what_came_in_pieces_is_the_same_whole_and_streamed(
    long: tuple[Served, Heartbeat],
) -> None:
    served, _ = long
    for path, asked in ASKED.items():
        body = {"model": MODEL, "max_tokens": NUM_TOKENS} | asked
        whole = served.post(body, path).json()["choices"][0]["logprobs"]
        parts = [
            json.loads(line.removeprefix("data: "))["choices"][0]["logprobs"]
            for line in served.post(body | {"stream": True}, path).text.split("\n\n")[:-2]
        ]
        assert len(parts) > 10
        for key, values in whole.items():
            if values is not None:
                assert len(values) == NUM_TOKENS
                assert values == [v for part in parts if part for v in part[key]]
