"""Workers that are killed or cut off, clients that go away, bytes that change: on the real thing.

One server for the whole file; after each test nothing may be left over in any pool.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Any

import httpx
import pytest

from benchmarks.serving.served import Served
from tests.e2e.connections import cut, num_connections
from tests.e2e.serving import (
    MODEL,
    all_up,
    is_idle,
    status,
    stream,
    wait_for,
    wait_until,
    worker_of,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served({"router.policy": "round_robin"}) as served:  # every prompt is handed over
        yield served


@pytest.fixture
def url(server: Served) -> Iterator[str]:
    wait_for(server.url, all_up, 60, "workers are not back")
    yield server.url
    # The statistics of a worker are a quarter of a second old at most.
    wait_for(server.url, is_idle, 1.5, "something is left over")


STORY_FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "story",
        "schema": {
            "type": "object",
            "properties": {"title": {"type": "string"}, "text": {"type": "string"}},
            "required": ["title", "text"],
            "additionalProperties": False,
        },
    },
}


def kill(url: str, name: str, how: signal.Signals = signal.SIGKILL) -> None:
    os.kill(worker_of(status(url), name)["pid"], how)


def wait_until_replaced(url: str, before: dict[str, Any]) -> dict[str, Any]:
    """A stream that goes on elsewhere may end before the controller knows of the death: until then
    the worker that was killed is shown as up. Gives the new one."""

    def is_replaced(state: dict[str, Any]) -> bool:
        now = worker_of(state, before["worker"])
        return bool(now["epoch"] > before["epoch"] and now["state"] == "up")

    wait_for(url, is_replaced, 60, f"{before['worker']} is not replaced")
    wait_for(url, all_up, 10, "it gets no requests")
    return worker_of(status(url), before["worker"])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9, "seed": 7, "max_tokens": 60},
        {"temperature": 0.9, "seed": 7, "max_tokens": 90, "response_format": STORY_FORMAT},
    ],
    ids=["sampled", "as JSON"],
)
def test_a_worker_whose_connections_break_goes_on_with_its_stream(
    url: str, options: dict[str, Any]
) -> None:
    undisturbed = stream(url, options)
    before, num_cut = worker_of(status(url), "decode-0"), []

    def disturb(number: int) -> None:
        if number in (3, 8, 13):  # a chunk has several tokens: 60 come in 20 or so
            # Chunks may follow within milliseconds, while the last ones are being made anew.
            wait_until(lambda: num_connections(before["pid"]) >= 2, 5, "no connections")
            num_cut.append(cut(before["pid"]))

    assert stream(url, options, disturb) == undisturbed
    assert len(num_cut) == 3
    assert all(num >= 2 for num in num_cut)
    after = worker_of(status(url), "decode-0")
    assert [after[name] for name in ("pid", "epoch", "restarts")] == [
        before[name] for name in ("pid", "epoch", "restarts")
    ]
    assert status(url)["wire"]["reconnected"] > 0
    wait_for(url, all_up, 10, "a worker was lost")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"temperature": 0, "max_tokens": 60}, marks=pytest.mark.long),
        {"temperature": 0.9, "seed": 7, "max_tokens": 60},
        {"temperature": 0.9, "seed": 7, "max_tokens": 90, "response_format": STORY_FORMAT},
    ],
    ids=["greedy", "sampled", "as JSON"],
)
def test_stream_goes_on_when_the_decode_worker_is_killed(url: str, options: dict[str, Any]) -> None:
    undisturbed = stream(url, options)
    before = worker_of(status(url), "decode-0")

    def disturb(number: int) -> None:
        if number == 5:
            kill(url, "decode-0")

    assert stream(url, options, disturb) == undisturbed
    wait_until_replaced(url, before)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9, "seed": 7, "max_tokens": 90},
        {"temperature": 0.9, "seed": 7, "max_tokens": 90, "response_format": STORY_FORMAT},
    ],
    ids=["sampled", "as JSON"],
)
def test_stream_goes_on_when_the_worker_that_took_it_over_is_killed_too(
    url: str, options: dict[str, Any]
) -> None:
    """Before the first one is back: for a while there is none."""
    undisturbed = stream(url, options)
    before = {name: worker_of(status(url), name) for name in ("decode-0", "prefill-0")}

    def disturb(number: int) -> None:
        if number in (5, 9):
            kill(url, "decode-0" if number == 5 else "prefill-0")

    assert stream(url, options, disturb) == undisturbed
    for worker in before.values():
        wait_until_replaced(url, worker)


def test_a_stopped_worker_is_left_by_its_streams_and_then_replaced(url: str) -> None:
    """Its process is there, and answers nothing."""
    options = {"temperature": 0, "max_tokens": 300}
    undisturbed = stream(url, options)
    before = worker_of(status(url), "decode-0")
    times: list[float] = []

    def disturb(number: int) -> None:
        times.append(time.monotonic())
        if number == 20:
            kill(url, "decode-0", signal.SIGSTOP)

    assert stream(url, options, disturb) == undisturbed
    silence_s = max(b - a for a, b in pairwise(times))
    assert 2.5 < silence_s < 15.0, "probes alone take 20 s"
    assert "has said nothing for" in wait_until_replaced(url, before)["last_error"]


def test_a_stream_does_not_notice_that_the_controller_is_killed(url: str) -> None:
    options = {"temperature": 0, "max_tokens": 60}
    undisturbed = stream(url, options)
    wait_for(url, all_up, 10, "workers are not up")
    before = status(url)

    def disturb(number: int) -> None:
        if number == 5:
            os.kill(before["controller"]["pid"], signal.SIGKILL)

    assert stream(url, options, disturb) == undisturbed

    def is_back(state: dict[str, Any]) -> bool:
        later = state["controller"]["epoch"] > before["controller"]["epoch"]
        return bool(later and state["controller"]["has_ray"] and all_up(state))

    wait_for(url, is_back, 60, "there is no new controller")
    lives = [[(w["pid"], w["epoch"]) for w in s["workers"]] for s in (before, status(url))]
    assert sorted(lives[0]) == sorted(lives[1])


def test_request_is_answered_when_the_prefill_worker_is_killed(url: str) -> None:
    words = " ".join(str(number) for number in range(450))
    body = {"model": MODEL, "prompt": words, "max_tokens": 8, "temperature": 0}
    before = worker_of(status(url), "prefill-0")
    timer = threading.Timer(0.5, kill, (url, "prefill-0"))
    timer.start()
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    timer.join()
    assert answer.status_code == 200, answer.text
    wait_until_replaced(url, before)
    again = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert again.json()["choices"] == answer.json()["choices"]


async def one_request(client: httpx.AsyncClient, rng: Random, number: int) -> bool:
    """Send one; a third of them is cut off at a random moment. True if it was answered."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{number}: {'word ' * rng.randrange(60)}"}],
        "max_tokens": rng.randrange(1, 24),
        "stream": number % 2 == 0,
    }
    cut_after_s = rng.uniform(0, 4) if number % 3 == 0 else 200.0
    try:
        async with asyncio.timeout(cut_after_s):
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return True
    except TimeoutError:
        return False


@pytest.mark.long
def test_a_hundred_requests_a_third_of_them_cut_off_leave_nothing(url: str) -> None:
    async def run() -> int:
        rng = Random(11)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=200, limits=limits) as client:
            tasks = []
            for number in range(100):
                tasks.append(asyncio.create_task(one_request(client, rng, number)))
                await asyncio.sleep(rng.uniform(0, 0.06))
            return sum(await asyncio.gather(*tasks))

    assert asyncio.run(run()) >= 66
