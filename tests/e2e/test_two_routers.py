"""Two routers before one pool of workers, and Redis behind them: either may go away."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from tests.cluster.state.conftest import running as running
from tests.cluster.state.stores import Server
from tests.e2e.serving import MODEL, is_idle, status, urls_of, wait_for

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def served(running: Server) -> Iterator[Served]:
    settings = {"cluster.routers": 2, "cluster.prefill": 0, "engine.num_blocks": 256}
    settings |= {"state.url": running.url}
    with Served(settings) as served:
        yield served


def ask(url: str, text: str, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": text, "max_tokens": 4, "temperature": 0, **more}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def tokens_of(url: str, num_tokens: int, on_chunk: Any = None) -> int:
    """Counts a stream's, as they come."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": num_tokens, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    counted = 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        for number, line in enumerate(response.iter_lines()):
            if on_chunk is not None:
                on_chunk(number)
            if line.startswith("data: {") and (usage := json.loads(line[6:]).get("usage")):
                counted = usage["completion_tokens"]
    return counted


def router_entry(url: str) -> dict[str, Any]:
    """What the first router says of the second."""
    (entry,) = [r for r in status(url)["routers"] if r["router"] == "router-1"]
    return entry


def test_both_answer_alike_and_find_what_the_other_has_computed(served: Served) -> None:
    first, second = urls_of(served)
    text = " ".join(str(number) for number in range(100))
    one = ask(first, text, prompt_cache_key="talk")
    assert one["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    two = ask(second, text)
    assert two["usage"]["prompt_tokens_details"]["cached_tokens"] >= 100
    assert two["choices"][0]["text"] == one["choices"][0]["text"]
    wait_for(second, lambda state: state["sessions"], 10, "the other's session is not known")
    shown = httpx.get(f"{second}/v1/sessions/talk", auth=OwnKey()).json()
    assert (shown["state"], shown["num_turns"]) == ("idle", 1)
    assert httpx.get(f"{second}/health").json()["status"] == "ok"


def test_each_router_is_shown_with_its_api_its_load_and_its_store(served: Served) -> None:
    first, second = urls_of(served)

    def says(_: Any) -> bool:
        found = router_entry(first)
        return (found["num_live"], found["num_queued"], found["store_up"]) == (0, 0, True)

    wait_for(first, says, 10, "the second router's load is not shown")
    shown = [(r["router"], r["state"], r["url"]) for r in status(first)["routers"]]
    assert shown == [("router-0", "up", first), ("router-1", "up", second)]
    own = router_entry(second)
    assert (own["router"], own["url"], own["store_up"]) == ("router-1", second, True)


def test_a_router_that_is_killed_takes_nothing_of_the_other_with_it_and_comes_back(
    served: Served,
) -> None:
    first, second = urls_of(served)
    before = router_entry(first)
    lost = threading.Thread(target=cut_off, args=(second,))
    lost.start()

    def disturb(number: int) -> None:
        if number == 10:
            os.kill(before["pid"], signal.SIGKILL)

    assert tokens_of(first, 60, disturb) == 60
    lost.join()
    wait_for(first, is_idle, 10, "the lost router's request is still being served")
    wait_for(first, lambda _: router_entry(first)["epoch"] == 2, 60, "it was not started again")
    wait_for(first, lambda _: router_entry(first)["state"] == "up", 60, "it is not back")
    wait_for(second, lambda state: state["workers"], 10, "it knows of no worker")
    text = " ".join(str(number) for number in range(100))
    again = ask(second, text)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 100
    assert status(second)["sessions"] == {"idle": 1}


def cut_off(url: str) -> None:
    with pytest.raises(httpx.HTTPError):
        tokens_of(url, 2000)


def test_without_the_store_both_go_on_and_it_is_told_everything_when_it_is_back(
    served: Served, running: Server
) -> None:
    first, second = urls_of(served)
    running.kill()
    wait_for(first, lambda state: not state["state"]["up"], 10, "it was not missed")
    for url in (first, second):
        ask(url, "The capital of France is", prompt_cache_key=f"of {url}")
    running.start()
    for url in (first, second):
        wait_for(url, lambda state: state["state"]["up"], 10, "it was not used again")
        wait_for(url, lambda state: state["sessions"] == {"idle": 3}, 10, "sessions are missing")


def test_it_stops_and_nothing_is_left(served: Served, tmp_path: Path) -> None:
    assert served.stop() == 0
    assert "Traceback" not in "".join(served.lines)
