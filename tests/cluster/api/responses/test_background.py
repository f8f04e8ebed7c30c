"""Responses that run in the background: completed, cancelled, failed, and how many there may be."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from kvrelay.cluster.api.limiter import ConcurrencyLimiter
from kvrelay.engine.request import Refusal
from kvrelay.router.messages import Failed
from tests.cluster.api.conftest import ANSWER, MODEL, Served, wait_until
from tests.cluster.api.responses.asking import ASK, PATH, Event, ask, post, refused, stream
from tests.cluster.api.tools.templates import events_of, prompt


def begin(served: Served, given: Any = ASK, **changes: Any) -> Response:
    made = ask(served, given, background=True, **changes)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    return made


def ended(served: Served, response_id: str) -> Response:
    """The response, once it runs no more."""
    found: list[Response] = []

    def has_ended() -> bool:
        found[:] = [served.openai().responses.retrieve(response_id)]
        return found[0].status != "in_progress"

    wait_until(has_ended)
    return found[0]


def test_a_response_completes_without_its_client(served: Served) -> None:
    made = begin(served, metadata={"a": "b"})
    done = ended(served, made.id)
    assert (done.status, done.output_text, done.metadata) == ("completed", ANSWER, {"a": "b"})
    assert done.usage is not None
    assert done.usage.output_tokens > 3
    ask(served, "Why?", previous_response_id=made.id)
    assert f"assistant\n{ANSWER}<|im_end|>" in prompt(served)


def test_one_that_is_cut_is_incomplete(served: Served) -> None:
    made = begin(served, max_output_tokens=2)
    assert ended(served, made.id).status == "incomplete"


def test_one_that_is_cancelled_is_cancelled_at_the_router(served: Served) -> None:
    served.router.delay_s = 60
    made = begin(served)
    wait_until(lambda: len(served.router.submits) == 1)
    assert served.openai().responses.retrieve(made.id).status == "in_progress"
    cancelled = served.openai().responses.cancel(made.id)
    assert (cancelled.id, cancelled.status, cancelled.error) == (made.id, "cancelled", None)
    assert served.router.cancels == [served.router.submits[0].request_id]
    assert served.openai().responses.retrieve(made.id).status == "cancelled"
    assert served.openai().responses.cancel(made.id).status == "cancelled"
    error = refused(served, "Why?", previous_response_id=made.id)
    assert error["message"] == f"The response '{made.id}' is cancelled"


def test_one_that_is_running_cannot_be_continued_yet(served: Served) -> None:
    served.router.delay_s = 60
    made = begin(served)
    error = refused(served, "Why?", previous_response_id=made.id)
    assert error["message"] == f"The response '{made.id}' is in_progress"
    served.openai().responses.cancel(made.id)


def test_one_that_has_ended_is_not_cancelled_any_more(served: Served) -> None:
    made = begin(served)
    ended(served, made.id)
    assert served.openai().responses.cancel(made.id).status == "completed"


def test_one_in_the_foreground_cannot_be_cancelled(served: Served) -> None:
    made = ask(served)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        served.openai().responses.cancel(made.id)


def test_one_that_is_deleted_ends_and_stays_away(served: Served) -> None:
    served.router.delay_s = 60
    made = begin(served)
    wait_until(lambda: len(served.router.submits) == 1)
    served.openai().responses.delete(made.id)
    served.wait_idle()
    assert len(served.router.cancels) == 1
    assert served.http.get(f"{PATH}/{made.id}").status_code == 404


def test_one_that_fails_says_why(served: Served) -> None:
    served.router.refuse = Failed("", Refusal.NO_WORKERS, "no worker is up")
    failed = ended(served, begin(served).id)
    assert (failed.status, failed.output) == ("failed", [])
    assert failed.error is not None
    assert failed.error.to_dict() == {"code": "no_workers", "message": "no worker is up"}


def test_one_that_is_wrong_is_refused_and_not_kept(served: Served) -> None:
    error = refused(served, background=True, tool_choice="some")
    assert error["message"].startswith("'tool_choice': ")
    error = refused(served, "word " * 2000, background=True)
    assert error["code"] == "context_length_exceeded"
    response = post(served, background=True, model="no-such-model")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert served.router.submits == []


def test_one_is_refused_as_in_the_foreground(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.ctx.operations, "draining", True)
    response = post(served, background=True)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
    assert response.headers["retry-after"] == "1"
    monkeypatch.undo()
    full = ConcurrencyLimiter(1)
    with full.take():
        monkeypatch.setattr(served.ctx, "live", full)
        assert post(served, background=True).status_code == 429


def test_a_bug_of_the_server_is_a_failure_that_shows_nothing_of_it(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("kvrelay.cluster.api.responses.call.plan_chat", broken)
    with caplog.at_level(logging.CRITICAL):
        failed = post(served, background=True)
    assert (failed.status_code, failed.json()["error"]["message"]) == (500, "Internal error")


def test_the_background_stores(served: Served) -> None:
    error = refused(served, background=True, store=False)
    assert error["message"].startswith("'background': ")
    assert served.router.submits == []


def events_from(served: Served, response_id: str, after: int | None = None) -> list[Event]:
    query = "" if after is None else f"&starting_after={after}"
    response = served.http.get(f"{PATH}/{response_id}?stream=true{query}")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [event for _, event in events_of(response.text)]


def test_a_stream_in_the_background_can_be_read_again_from_any_event(served: Served) -> None:
    events = stream(served, background=True)
    response_id = events[0]["response"]["id"]
    assert events[-1]["type"] == "response.completed"
    assert ended(served, response_id).output_text == ANSWER
    served.wait_idle()
    assert events_from(served, response_id) == events
    assert events_from(served, response_id, after=4) == events[5:]
    assert events_from(served, response_id, after=len(events)) == []


def test_a_stream_goes_on_without_its_first_client(served: Served) -> None:
    served.router.delay_s = 0.05
    body = {"model": MODEL, "input": ASK, "background": True, "stream": True}
    with served.http.stream("POST", PATH, json=body) as response:
        lines = response.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
    response_id = json.loads(first.removeprefix("data: "))["response"]["id"]
    assert served.openai().responses.retrieve(response_id).status == "in_progress"
    events = events_from(served, response_id, after=0)  # waits for those to come
    assert [event["sequence_number"] for event in events] == list(range(1, len(events) + 1))
    assert events[-1]["type"] == "response.completed"
    assert served.router.cancels == []


def test_a_stream_that_fails_is_kept_as_failed(served: Served) -> None:
    served.router.fail_after = 2
    events = stream(served, background=True)
    assert events[-1]["type"] == "response.failed"
    failed = ended(served, events[0]["response"]["id"])
    assert (failed.status, failed.error and failed.error.code) == ("failed", "attempts_exhausted")


def test_a_stream_that_is_cancelled_ends(served: Served) -> None:
    served.router.delay_s = 0.2
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(stream, served, background=True)
        wait_until(lambda: len(served.router.submits) == 1)
        request_id = served.router.submits[0].request_id.partition("-")[0]
        wait_until(lambda: served.http.get(f"{PATH}/resp_{request_id}").status_code == 200)
        cancelled = served.openai().responses.cancel(f"resp_{request_id}")
        reading.result(10)
    assert cancelled.status == "cancelled"


def test_what_has_no_stream_to_be_read_again_says_so(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ask(served)
    response = served.http.get(f"{PATH}/{made.id}?stream=true")
    assert response.status_code == 400
    assert "has no stream" in response.json()["error"]["message"]
    response = served.http.get(f"{PATH}/{made.id}?stream=true&starting_after=x")
    assert response.json()["error"]["param"] == "starting_after"
    monkeypatch.setattr("kvrelay.cluster.api.responses.background.MAX_EVENT_BYTES", 1000)
    response = post(served, background=True, stream=True)
    assert response.text.count("event: error") == 1
    done = ended(served, f"resp_{response.headers['x-request-id']}")
    assert done.output_text == ANSWER


def test_an_address_has_its_share_of_the_background(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three; another address finds the third, and then all are taken."""
    monkeypatch.setattr("kvrelay.cluster.api.responses.routes.MAX_BACKGROUND", 3)
    served.router.delay_s = 60
    running = [begin(served) for _ in range(2)]
    response = post(served, background=True)
    assert response.status_code == 429
    error = response.json()["error"]
    assert error["type"] == "rate_limit_error"
    wanted = "2 responses of this caller run in the background, its share of 3"
    assert error["message"] == wanted
    assert response.headers["retry-after"] == "1"
    asked = {"model": MODEL, "input": ASK, "background": True}
    for host, status in (("127.0.0.2", 200), ("127.0.0.3", 429)):
        transport = httpx.HTTPTransport(local_address=host)
        with httpx.Client(base_url=served.url, transport=transport, timeout=20) as other:
            answer = other.post(PATH, json=asked)
            assert answer.status_code == status
            if status == 429:
                assert "3 responses run in the background, the limit" in answer.text
            else:
                running.append(Response.model_validate(answer.json()))
    for each in running:
        served.openai().responses.cancel(each.id)
    served.openai().responses.cancel(begin(served).id)


def test_one_that_its_server_did_not_finish_has_failed(served: Served) -> None:
    """As after a restart: nobody runs it, and its time is over."""
    made = ask(served, background=True)
    done = ended(served, made.id)
    store = served.ctx.responses
    record = json.loads(store.get("", made.id) or b"")
    record["response"] |= {"status": "in_progress", "output": []}
    store.put("", made.id, json.dumps(record).encode())
    assert served.openai().responses.retrieve(made.id).status == "in_progress"
    record["response"]["created_at"] = done.created_at - 3600
    store.put("", made.id, json.dumps(record).encode())
    lost = served.openai().responses.retrieve(made.id)
    assert lost.status == "failed"
    assert lost.error is not None
    assert lost.error.message == "The server stopped while it ran"
