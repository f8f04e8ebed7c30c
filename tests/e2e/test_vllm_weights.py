"""Weights of vLLM's workers that change while it serves: ten times, under load, and with a worker
killed after it.

As tests.e2e.test_vllm it needs KVRELAY_VLLM_PYTHON. The checkpoint is one that our reader refuses,
whose output layer is its embedding."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.engine.model.checkpoint.version import read_version
from tests.e2e.serving import all_up, status, wait_for, worker_of
from tests.e2e.test_vllm import START_S, assert_clean, client
from tests.e2e.test_vllm import pytestmark as pytestmark
from tests.e2e.test_vllm_models import PROMPTS, checkpoint, serving
from tests.support.weights import scaled

NUM_UPDATES = 10
NUM_LOADING = 4  # callers that ask all the time
MODES = ("recompute", "drain")


def text_of(url: str, prompt: str, max_tokens: int = 32) -> tuple[str, int]:
    """A greedy text, and how many tokens of its prompt were cached."""
    answer = client(url).completions.create(
        model="m",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    usage: Any = answer.usage
    return answer.choices[0].text, usage.prompt_tokens_details.cached_tokens


def texts(url: str) -> tuple[list[str], int]:
    found = [text_of(url, prompt) for prompt in PROMPTS]
    return [text for text, _ in found], sum(cached for _, cached in found)


def fresh(folder: Path, path: Path) -> list[str]:
    with serving(folder, path, 0, "prefix") as served:
        return texts(served.url)[0]


def update(url: str, path: Path, mode: str) -> dict[str, Any]:
    """Returns what the server says of the weights when it is over."""
    before = status(url)["weights"][0]["number"] if status(url)["weights"] else 0
    body = {"path": str(path), "mode": mode}
    asked = httpx.post(f"{url}/v1/weights", json=body, timeout=120, auth=OwnKey())
    assert asked.status_code == 202, asked.text

    def is_over(state: dict[str, Any]) -> bool:
        return any(
            each["number"] > before and each["state"] != "updating" for each in state["weights"]
        )

    wait_for(url, is_over, 300, "not over")
    found: dict[str, Any] = status(url)["weights"][0]
    return found


def keeps_asking(url: str, number: int, ends: threading.Event) -> int:
    """Returns how many answers came; raises where one has failed."""
    count = 0
    while not ends.is_set():
        text, _ = text_of(url, f"Caller {number} asks {count}. " * 20, 48)
        assert text
        count += 1
    return count


def test_ten_updates_under_load(tmp_path: Path) -> None:
    base = checkpoint(tmp_path, "granite")
    versions = [
        base,
        scaled(base, tmp_path / "embedding", 1.5, "embed_tokens"),
        scaled(base, tmp_path / "layer", 3.0, "mlp.down_proj"),
    ]
    expected = [fresh(tmp_path / "fresh", path) for path in versions[1:]]
    ends = threading.Event()
    with (
        serving(tmp_path / "served", base, 0, "prefix") as served,
        ThreadPoolExecutor(NUM_LOADING) as pool,
    ):
        expected.insert(0, texts(served.url)[0])
        assert len({str(each) for each in expected}) == len(versions)
        loading = [pool.submit(keeps_asking, served.url, i, ends) for i in range(NUM_LOADING)]
        try:
            pauses = []
            for number in range(1, NUM_UPDATES + 1):
                which = number % len(versions)
                state = update(served.url, versions[which], MODES[number % 2])
                assert state["state"] == "done", state
                assert state["current"] == read_version(versions[which]).name
                pauses.append(state.get("pause_s", 0.0))
                found, num_cached = texts(served.url)
                assert found == expected[which], number
                assert num_cached == 0 or number >= len(versions) - 1, number
        finally:
            ends.set()
        counts = [each.result(120) for each in loading]
        assert min(counts) > 0
        print(
            f"{sum(counts)} answers under load, 0 failed; no step for {max(pauses):.2f} s at most"
        )
        killed_worker_has_them(served, expected[NUM_UPDATES % len(versions)])
        assert_clean(served.url)


def killed_worker_has_them(served: Served, expected: list[str]) -> None:
    os.kill(worker_of(status(served.url), "decode-0")["pid"], signal.SIGKILL)
    wait_for(served.url, lambda s: worker_of(s, "decode-0")["epoch"] > 1, 60, "no new one")
    wait_for(served.url, all_up, START_S, "not up again")
    assert texts(served.url)[0] == expected
