"""Images through vLLM, the real one, over tiny random checkpoints of Gemma 3's form and of
Qwen2.5-VL's, whose positions depend on the sizes of images.

As `test_vllm`; vLLM's processors need a torchvision that fits its torch."""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from tests.e2e.serving import all_up, is_idle, wait_for
from tests.e2e.test_vllm import START_S
from tests.support import tiny_vision
from tests.support.vllm_settings import small
from tests.worker.test_vllm_images import png

PYTHON = os.environ.get("KVRELAY_VLLM_PYTHON", "")
_SEES = "import vllm, torchvision; torchvision.ops.nms"
HAS_PROCESSORS = (
    bool(PYTHON) and subprocess.run([PYTHON, "-c", _SEES], capture_output=True).returncode == 0
)
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not HAS_PROCESSORS, reason="KVRELAY_VLLM_PYTHON: no vLLM with torchvision"),
]
BEFORE, AFTER = "You look at pictures. " * 4, "Say what you see, and say it well. " * 8


def serving(folder: Path, model: Path) -> Served:
    engine = {"runs": "vllm", "python": PYTHON, "block_size": 32}
    entry = {"name": "seeing", "checkpoint": str(model), "prefill": 1, "decode": 1}
    settings = small(folder, START_S) | {
        "engine.num_blocks": 128,
    }
    eager = engine | {"arguments": {"enforce_eager": True}}
    return Served(settings | {"models": [entry | {"engine": eager}]})


@pytest.fixture(scope="module", params=tiny_vision.FORMS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.make(tmp_path_factory.mktemp("seeing"), request.param)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("images"), model) as served:
        wait_for(served.url, all_up, START_S, "not up")
        yield served


def picture(number: int) -> str:
    data = base64.b64encode(png(number * 5077, 60, 60)).decode()
    return f"data:image/png;base64,{data}"


def ask(url: str, number: int, **more: Any) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
    content: Any = [
        {"type": "text", "text": BEFORE},
        {"type": "image_url", "image_url": {"url": picture(number)}},
        {"type": "text", "text": AFTER},
    ]
    messages: Any = [{"role": "user", "content": content}]
    about: Any = {"model": "seeing", "temperature": 0, "max_tokens": 24, "logprobs": True}
    return client.chat.completions.create(messages=messages, **about, **more)


def found(answer: Any) -> tuple[str, list[float]]:
    """The text, and how likely it was: what an image changes, for a model of noise."""
    choice = answer.choices[0]
    return choice.message.content, [each.logprob for each in choice.logprobs.content]


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def assert_clean(url: str) -> None:
    wait_for(url, is_idle, 60.0, "not idle")
    audit = httpx.get(f"{url}/audit", timeout=30, auth=OwnKey()).json()
    assert audit["clean"], audit


def test_two_images_share_no_block_and_one_is_found_again(server: Served) -> None:
    num_before = len(BEFORE) // 32 * 32  # a token a character, and what the template begins with
    first = {number: ask(server.url, number) for number in range(6)}
    assert all(cached(each) <= num_before for each in first.values())
    assert len({str(found(each)[1]) for each in first.values()}) == len(first)
    for number, answer in first.items():
        again = ask(server.url, number)
        assert cached(again) >= answer.usage.prompt_tokens - 64
        assert found(again)[0] == found(answer)[0]
        assert found(again)[1] == pytest.approx(found(answer)[1], abs=1e-3)
    assert_clean(server.url)


@pytest.mark.parametrize("name", ["decode-seeing-0", "prefill-seeing-0"])
def test_a_worker_that_dies_with_an_image(server: Served, name: str) -> None:
    wait_for(server.url, all_up, START_S, "not up")
    expected = found(ask(server.url, 50))[0]
    [worker] = [
        process
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [""])[0] == PYTHON
        and any(f"/{name}/" in word for word in process.info["cmdline"])
    ]
    text = ""
    for number, chunk in enumerate(ask(server.url, 50, stream=True)):
        text += chunk.choices[0].delta.content or ""
        if number == 5:
            worker.kill()
    assert text == expected
    wait_for(server.url, all_up, START_S, "not up again")
    assert_clean(server.url)


def test_an_image_is_found_on_disk_after_a_restart(model: Path, tmp_path: Path) -> None:
    answers = []
    for _ in range(2):
        with serving(tmp_path, model) as served:
            wait_for(served.url, all_up, START_S, "not up")
            answers.append(ask(served.url, 3, extra_body={"prompt_cache_key": "looks"}))
            num_blocks = answers[0].usage.prompt_tokens // 32

            def has_all(status: dict[str, Any], least: int = num_blocks) -> bool:
                return sum(each["num_disk_blocks"] for each in status["workers"]) >= least

            wait_for(served.url, has_all, 60.0, "not on disk")
            assert_clean(served.url)
    first, again = answers
    assert cached(again) >= first.usage.prompt_tokens - 64
    assert found(again)[0] == found(first)[0]
