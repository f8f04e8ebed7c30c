"""Message batches as Anthropic's SDK knows them, over the real application."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from kvrelay.cluster.api.batches.messages import JsonText, requests_of
from kvrelay.cluster.api.batches.store import BatchStore
from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from tests.cluster.api.conftest import ANSWER, MODEL, OPERATORS_KEY, Served, serve, wait_until


@pytest.fixture
def running(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Served]:
    settings = ApiSettings(max_body_bytes=64 * 1024, max_file_bytes=256 * 1024)
    with serve(tokenizer, settings, context={"batches": BatchStore(tmp_path)}) as served:
        yield served


@pytest.fixture
def client(running: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=running.url, api_key=OPERATORS_KEY, max_retries=0, timeout=20
    )


def request(name: str, **params: Any) -> Any:
    asked = {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}]}
    return {"custom_id": name, "params": asked | params}


def ended(client: anthropic.Anthropic, name: str) -> Any:
    batches = client.messages.batches
    wait_until(lambda: batches.retrieve(name).processing_status == "ended", 60)
    return batches.retrieve(name)


def test_requests_are_answered_each_once(running: Served, client: anthropic.Anthropic) -> None:
    batches = client.messages.batches
    asked = [request(f"r{i}") for i in range(30)] + [request("bad", max_tokens=-1)]
    made = batches.create(requests=asked)
    assert (made.processing_status, made.request_counts.processing) == ("in_progress", 31)
    done = ended(client, made.id)
    assert done.request_counts.to_dict() == {
        "processing": 0,
        "succeeded": 30,
        "errored": 1,
        "canceled": 0,
        "expired": 0,
    }
    results = [*batches.results(made.id)]
    assert [each.custom_id for each in results] == [*(f"r{i}" for i in range(30)), "bad"]
    for each in results[:30]:
        assert each.result.type == "succeeded"
        assert each.result.message.content[0].text == ANSWER  # type: ignore[union-attr]
        assert each.result.message.usage.service_tier == "batch"
    assert results[30].result.type == "errored"
    assert "max_tokens" in results[30].result.error.error.message
    assert results[30].result.error.error.type == "invalid_request_error"
    assert {submit.priority for submit in running.router.submits} == {50}
    assert len({submit.sampling.seed for submit in running.router.submits}) == 30
    second = ended(client, batches.create(requests=[request("a")]).id)
    assert [each.id for each in batches.list()] == [second.id, made.id]
    assert [each.id for each in batches.list(limit=1)] == [second.id, made.id]
    assert [each.id for each in batches.list(before_id=made.id).data] == [second.id]
    with pytest.raises(anthropic.BadRequestError, match="'before_id': there is no batch"):
        batches.list(before_id="batch_no")
    assert batches.delete(made.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        batches.retrieve(made.id)
    assert [*running.openai().files.list()] != []
    batches.delete(second.id)
    assert [*running.openai().files.list()] == []


def test_what_is_canceled_says_so(running: Served, client: anthropic.Anthropic) -> None:
    slow, batches = running.ctx.tokenizer.encode(" word") * 400, client.messages.batches
    running.router.delay_s = 0.1
    running.router.answer = lambda submit: slow
    made = batches.create(requests=[request(f"r{i}", max_tokens=400) for i in range(6)])
    wait_until(lambda: len(running.router.submits) >= 2)
    with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
        batches.delete(made.id)
    with pytest.raises(anthropic.AnthropicError, match="results_url"):
        batches.results(made.id)
    assert batches.cancel(made.id).processing_status == "canceling"
    done = ended(client, made.id)
    assert done.request_counts.canceled == 6
    assert {each.result.type for each in batches.results(made.id)} == {"canceled"}
    with pytest.raises(anthropic.BadRequestError, match="has ended"):
        batches.cancel(made.id)


WRONG: list[tuple[Any, str]] = [
    ({"requests": [request("a"), request("a")]}, "requests.1: custom_id 'a' was on"),
    ({"requests": [request("a"), request("b", model="x")]}, "requests.1: "),
    ({"requests": [request("a", stream=True)]}, "requests.0: 'stream'"),
    ({"requests": [request("a"), {"custom_id": "b"}]}, "expected an object with 'custom_id'"),
    ({"requests": [request("a", filler="x" * 70_000)]}, "requests.0: "),
    ({"requests": []}, "empty"),
    (b'\xef\xbb\xbf{"requests": []}', "empty"),
    (b'{"requests": [{"custom_id": "a\\ud800", "params": {}}]}', "requests.0: 'utf-8' codec"),
    ({"request": []}, "'request' is there; expected 'requests'"),
    ([], "expected {"),
    (b'{"requests": [{', "not JSON"),
    (b'{"requests": [1}', "expected {, got '1'"),
    ({"requests": [request("a")], "more": 1}, "expected }, got ','"),
    (b'{"requests": [' + b'{"a":' * 20_000, "requests.0: "),
    (b'{"requests": ["\xff"]}', "utf-8"),
]


def test_a_wrong_body_is_refused_and_nothing_is_kept(running: Served) -> None:
    for body, why in WRONG:
        answer = running.post(body, "/v1/messages/batches")
        assert (answer.status_code, answer.json()["type"]) == (400, "error")
        assert why in answer.json()["error"]["message"]
        assert list(running.ctx.batches.path("x").parent.iterdir()) == []
    assert running.router.submits == []


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_values_are_read_wherever_the_text_is_cut(step: int) -> None:
    class Slow(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            return super().read(step)

    values = [{"a": [1, "]},{"]}, {"b": 'ü\\"'}, {"c": -1.5e3, "d": None}, {}]
    text = json.dumps({"requests": values}, indent=1)
    assert [*requests_of(JsonText(Slow(text), 1000))] == values
