"""Images served by our own engine, over a tiny random checkpoint of Qwen3-VL: in a stream whose
workers die, found again, and refused in words."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from tests.e2e.serving import all_up, is_idle, samples, status, wait_for, worker_of
from tests.support import tiny_qwen_vl
from tests.support.tiny_qwen_vl import picture

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
MODEL = "seeing"
LARGE = 1792  # pixels of a side


def settings_of(folder: Path) -> dict[str, object]:
    tiny_qwen_vl.make(folder)
    return {
        "model.name": str(folder),
        "model.served_name": MODEL,
        "model.dtype": "float32",
        "engine.num_blocks": 512,
        "sessions.state_dir": str(folder / "state"),
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = settings_of(tmp_path_factory.mktemp(MODEL))
    settings["router.policy"] = "round_robin"  # every prompt is handed over
    with Served(settings) as served:
        yield served


def settings_of_large(folder: Path) -> dict[str, object]:
    """Images may be of several thousand tokens, which take seconds to encode."""
    settings = settings_of(folder)
    for name, part, key in (
        ("preprocessor_config.json", "size", "longest_edge"),
        ("config.json", "text_config", "max_position_embeddings"),
    ):
        file = folder / name
        content = json.loads(file.read_text())
        content[part][key] = {"longest_edge": LARGE**2}.get(key, 4096)
        file.write_text(json.dumps(content))
    return settings


def asking(url: str, *images: bytes, text: str = "What is it?", **more: Any) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    content: list[Any] = [{"type": "text", "text": text}]
    for data in images:
        encoded = base64.b64encode(data).decode()
        content.append(
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
        )
    given: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 200}
    given |= {"extra_body": {"ignore_eos": True}} | more
    messages: Any = [{"role": "user", "content": content}]
    return client.chat.completions.create(messages=messages, **given)


def said(answer: Any) -> str:
    text: str = answer.choices[0].message.content
    return text


def images_of(url: str, request_id: str) -> dict[str, int]:
    answer = httpx.get(f"{url}/requests/{request_id}/explanation", timeout=10, auth=OwnKey())
    found: dict[str, int] = answer.json()["images"]
    return found


def encoded_by_worker(url: str) -> dict[str, float]:
    metrics = httpx.get(f"{url}/metrics", timeout=10, auth=OwnKey()).text
    events = samples(metrics, "kvrelay_worker_events_total")
    return {
        labels["worker"]: value for labels, value in events if labels["event"] == "images_encoded"
    }


def test_texts_depend_on_images_of_which_each_is_encoded_once(server: Served) -> None:
    one, two = picture(1), picture(2, 200, 90)
    answers = [asking(server.url, *images) for images in ((one,), (two,), (two, one), ())]
    assert len({said(answer) for answer in answers}) == 4
    counted = [answer.usage.prompt_tokens for answer in answers]
    assert counted[0] - counted[3] == 6 + 2  # two rows of three, and what is around them
    assert images_of(server.url, answers[2].id) == {"encoded": 0, "found": 2}
    again = asking(server.url, one, text="Say what this is, please.")
    assert images_of(server.url, again.id) == {"encoded": 0, "found": 1}
    assert encoded_by_worker(server.url) == {"prefill-0": 2}, "the decode worker has KV alone"


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_streams_go_on_when_a_worker_is_killed(server: Served, name: str) -> None:
    wait_for(server.url, all_up, 120, "not up")
    images = picture(7), picture(8, 100, 300)
    undisturbed = said(asking(server.url, *images))
    text, pid = "", worker_of(status(server.url), name)["pid"]
    for number, chunk in enumerate(asking(server.url, *images, stream=True)):
        text += chunk.choices[0].delta.content or ""
        if number == 5:
            os.kill(pid, signal.SIGKILL)
    assert text == undisturbed
    assert said(asking(server.url, *images)) == undisturbed

    def is_replaced(state: dict[str, Any]) -> bool:
        return bool(worker_of(state, name)["pid"] != pid and all_up(state))

    wait_for(server.url, is_replaced, 120, f"{name} is not replaced")
    wait_for(server.url, is_idle, 60, "not idle")
    audit = httpx.get(f"{server.url}/audit", timeout=30, auth=OwnKey()).json()
    assert audit["clean"], audit


def test_who_is_killed_while_it_encodes_fails_no_request(tmp_path: Path) -> None:
    settings = settings_of_large(tmp_path) | {"router.policy": "round_robin"}
    large, texts = picture(12, LARGE, LARGE), ("What is it?", "And what is that?")
    with Served(settings) as served, ThreadPoolExecutor(4) as pool:
        url = served.url
        undisturbed = [said(asking(url, text=text)) for text in texts]

        def is_begun(_: dict[str, Any]) -> bool:
            return encoded_by_worker(url) == {"prefill-0": 1}

        pid = worker_of(status(url), "prefill-0")["pid"]
        seeing = pool.submit(asking, url, large, max_tokens=20)
        wait_for(url, is_begun, 60, "not encoded")
        assert not seeing.done()
        others = [pool.submit(asking, url, text=text) for text in texts]
        os.kill(pid, signal.SIGKILL)
        answer = seeing.result()
        assert [said(each.result()) for each in others] == undisturbed
        encoded = encoded_by_worker(url)["decode-0"]
        assert encoded == 1, "the worker had encoded it, and was killed too late"
        wait_for(url, all_up, 120, "not up")
        assert said(asking(url, large, max_tokens=20)) == said(answer)
        wait_for(url, is_idle, 60, "not idle")
        audit = httpx.get(f"{url}/audit", timeout=30, auth=OwnKey()).json()
        assert audit["clean"], audit


@pytest.mark.parametrize(
    ("image", "told"),
    [
        (b"no image", "image 0, of 8 bytes, cannot be read; PNG, JPEG, WebP and GIF can"),
        (picture(9)[:-900], "cannot be read"),
        (picture(9, 2, 500), "one side is 250 times as long as the other, at most 200 is read"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(server: Served, image: bytes, told: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        asking(server.url, image)
    assert told in str(error.value)


def test_an_image_in_several_sessions_is_encoded_by_one_of_several_workers(tmp_path: Path) -> None:
    settings = settings_of(tmp_path) | {"cluster.prefill": 2}
    large = picture(5, 448, 448)
    with Served(settings) as served:
        texts = set()
        for number in range(6):
            given: Any = {"prompt_cache_key": f"session-{number}"}
            text = f"{number} is my session: what is it?"
            answer = asking(served.url, large, text=text, extra_body=given)
            texts.add(said(answer))
            assert images_of(served.url, answer.id) == {
                "encoded": int(number == 0),
                "found": int(number > 0),
            }
            time.sleep(0.5)  # a worker's statistics come to the routers
        assert sum(encoded_by_worker(served.url).values()) == 1
