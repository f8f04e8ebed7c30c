"""Images in messages of three APIs: what the router gets, and what is refused in which words. The
model reads images here, and its template knows them; what they are to it, the scripted router
says."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.openai.pictures import MARK, MAX_IMAGES, has_vision
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.images import FIRST_STAND_IN, Image
from kvrelay.router.messages import Submit
from tests.cluster.api.conftest import Served, serve

PLACE = "<file_sep>"  # what the template writes for an image
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}" + PLACE + "{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONE, TWO = b"\x89PNG one", b"\x89PNG two"


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def in_chat(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data)}}


def in_message(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": url(data).partition(",")[2]}
    return {"type": "image", "source": source}


@pytest.fixture(scope="module")
def files() -> Iterator[str]:
    """A host that has images, and one that sends elsewhere."""

    class Files(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/one.png" else 302)
            self.send_header("location", "/one.png")
            self.end_headers()
            self.wfile.write(ONE)

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def seeing(smollm2_dir: Path) -> Iterator[Served]:
    tokenizer = Tokenizer(smollm2_dir, chat_template=TEMPLATE)
    settings = ApiSettings(image_hosts="127.0.0.1", request_timeout_s=20)
    with serve(tokenizer, settings, context={"reads_images": True}) as running:
        running.router.image_mark = tokenizer.token_id(PLACE)
        yield running


def post(served: Served, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}{path}", json=body, timeout=30)


def chat(served: Served, *content: Any, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": [*content]}]
    return post(served, "/v1/chat/completions", messages=messages, max_tokens=4, **body)


def said(served: Served, tokenizer: Tokenizer) -> tuple[str, list[bytes], list[int]]:
    """What the last request asks with: its text as vLLM gets it, the images, and its numbers from
    the first image on."""
    submit: Submit = served.router.submits[-1]
    assert submit.images is not None
    text = tokenizer.decode(submit.images.tokens, skip_special_tokens=False)
    stand_ins = [token for token in submit.tokens if token >= FIRST_STAND_IN]
    return text, [each.data for each in submit.images.each], stand_ins


TEXT = {"type": "text", "text": "See:"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [TEXT, in_chat(ONE), in_chat(TWO)]}]},
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 4,
                "messages": [{"role": "user", "content": [TEXT, in_message(ONE), in_message(TWO)]}],
            },
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "See:"},
                            {"type": "input_image", "image_url": url(ONE)},
                            {"type": "input_image", "image_url": url(TWO)},
                        ],
                    }
                ]
            },
        ),
    ],
    ids=["chat", "message", "response"],
)
def test_images_reach_the_model_in_their_order(
    seeing: Served, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    answer = post(seeing, path, **body)
    assert answer.status_code == 200, answer.text
    text, images, stand_ins = said(seeing, tokenizer)
    assert f"user\nSee:{PLACE}{PLACE}<|im_end|>" in text
    assert images == [ONE, TWO]
    assert stand_ins == [*Image.of(ONE).stand_ins(4), *Image.of(TWO).stand_ins(4)]
    usage = answer.json()["usage"]
    num_prompt = usage.get("prompt_tokens") or usage["input_tokens"]
    assert num_prompt == len(seeing.router.submits[-1].tokens)


def test_images_that_tools_return_reach_the_model(seeing: Served, tokenizer: Tokenizer) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [in_message(ONE)]}
    call = {"type": "tool_use", "id": "a", "name": "shot", "input": {}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    tools = [{"name": "shot", "input_schema": {"type": "object"}}]
    answer = post(seeing, "/v1/messages", messages=messages, tools=tools, max_tokens=4)
    assert answer.status_code == 200, answer.text
    text, images, _ = said(seeing, tokenizer)
    assert f"<tool_response>\n{PLACE}\n</tool_response><|im_end|>\n<|im_start|>user\nAnd?" in text
    assert images == [ONE]


def test_texts_cannot_write_an_image(seeing: Served, tokenizer: Tokenizer) -> None:
    texts = [{"type": "text", "text": f"{PLACE} {MARK}"}, in_chat(ONE)]
    assert chat(seeing, *texts).status_code == 200
    text, images, stand_ins = said(seeing, tokenizer)
    marks = seeing.router.submits[-1].images
    assert marks is not None
    assert marks.tokens.count(seeing.router.image_mark) == 1  # beside the characters of its name
    assert (images, len(stand_ins)) == ([ONE], 4)
    assert text.count(PLACE) == 2


def test_tokens_are_counted_and_shown_as_the_model_reads_them(seeing: Served) -> None:
    messages = [{"role": "user", "content": [in_chat(ONE)]}]
    found = post(seeing, "/tokenize", messages=messages).json()["tokens"]
    assert found.count(seeing.router.image_mark) == 4
    assert max(found) < FIRST_STAND_IN
    messages = [{"role": "user", "content": [in_message(ONE)]}]
    counted = post(seeing, "/v1/messages/count_tokens", messages=messages).json()
    assert counted["input_tokens"] == len(found)


def test_images_come_from_hosts_that_are_named(seeing: Served, files: str) -> None:
    def one(from_url: str) -> httpx.Response:
        return chat(seeing, {"type": "image_url", "image_url": {"url": from_url}})

    assert one(f"{files}/one.png").status_code == 200
    submitted = seeing.router.submits[-1].images
    assert submitted is not None
    assert [each.data for each in submitted.each] == [ONE]
    for bad, why in {
        f"{files}/moved.png": "127.0.0.1 answers 302",
        f"{files.replace('127.0.0.1', 'localhost')}/one.png": "fetches no images from 'localhost'",
        "http://127.0.0.1:1/one.png": "127.0.0.1 cannot be read from",
        "file:///etc/passwd": "expected a data URL",
        "http://[::1/one.png": "expected a data URL",
    }.items():
        refused = one(bad)
        assert refused.status_code == 400
        assert why in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "image_url"}, "part 0: an image_url has an 'image_url': a data URL"),
        ({"type": "image_url", "image_url": {"url": 5}}, "part 0: an image_url has an 'image_url'"),
        ({"type": "image_url", "image_url": "data:,x"}, "a data URL begins with 'data:image/png;b"),
        ({"type": "image_url", "image_url": "data:a;base64,?"}, "what follows 'base64,' is not"),
        ({"type": "image_url", "image_url": "data:a;base64,"}, "has 1 to 20971520 bytes, got 0"),
    ],
)
def test_what_is_no_image_is_refused_in_words(
    seeing: Served, part: dict[str, Any], why: str
) -> None:
    refused = chat(seeing, part)
    assert refused.status_code == 400
    assert why in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [{"prompt_logprobs": 1}, {"return_token_ids": True}, {"truncate_prompt_tokens": 5}]
)
def test_what_does_not_go_with_images_is_refused(seeing: Served, body: dict[str, Any]) -> None:
    refused = chat(seeing, in_chat(ONE), **body)
    assert refused.status_code == 400
    [name] = body
    assert refused.json()["error"]["message"].startswith(f"'{name}' is not supported where")


def test_images_are_bounded_in_number(seeing: Served) -> None:
    refused = chat(seeing, *[in_chat(ONE)] * (MAX_IMAGES + 1))
    assert refused.status_code == 400
    assert f"{MAX_IMAGES + 1} images are more than {MAX_IMAGES}" in refused.text


def test_a_model_of_text_refuses_a_users_and_is_told_of_others(served: Served) -> None:
    refused = chat(served, in_chat(ONE))
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        400,
        "'messages': this model reads text, no part of type 'image_url'",
    )
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "tool", "tool_call_id": "a", "content": [in_message(ONE)]},
    ]
    answer = post(served, "/v1/chat/completions", messages=messages, max_tokens=4)
    assert answer.status_code == 200
    assert served.router.submits[-1].images is None


def test_which_checkpoints_read_images(tmp_path: Path, smollm2_dir: Path) -> None:
    assert not has_vision(smollm2_dir)
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    assert has_vision(tmp_path)
    (tmp_path / "config.json").write_text("[")
    assert not has_vision(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert has_vision(tmp_path)
