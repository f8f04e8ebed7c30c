"""The access log: a line for each request, with what an operator asks about it, and no secret."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.tenants import Tenants
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.config import TenantEntry
from kvrelay.engine.logs import REQUEST, LineFormatter, LogSection
from tests.cluster.api.conftest import AS_OPERATOR, MODEL, Served, serve, wait_until

KEY = "a-key-that-nobody-may-read"
QUESTION = "Where did I put my golden locket?"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
HEADERS = {"authorization": f"Bearer {KEY}", "x-request-id": "mine-1"}


class Lines(logging.Handler):
    """What is logged, as JSON."""

    def __init__(self, section: LogSection) -> None:
        super().__init__()
        self.setFormatter(LineFormatter("router-0", json=True, prompts=section.prompts))
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))

    def next(self) -> dict[str, Any]:
        """The answer may be there before its line is."""
        wait_until(lambda: bool(self.texts))
        found: dict[str, Any] = json.loads(self.texts.pop(0))
        return found


@pytest.fixture
def logged(tokenizer: Tokenizer) -> Callable[[LogSection], Any]:
    @contextmanager
    def served(section: LogSection) -> Iterator[tuple[Served, Lines]]:
        lines, log = Lines(section), logging.getLogger("kvrelay")
        level = log.level
        log.addHandler(lines)
        log.setLevel(logging.INFO)
        tenants = Tenants.of([TenantEntry("red", keys=(KEY,))], b"s" * 16)
        context = {"log": section, "tenants": tenants}
        try:
            with serve(tokenizer, ApiSettings(), context=context) as server:
                yield server, lines
        finally:
            log.removeHandler(lines)
            log.setLevel(level)

    return served


def test_a_request_is_a_line_with_its_ids_its_tenant_and_its_tokens(
    logged: Callable[[LogSection], Any],
) -> None:
    with logged(LogSection(access=True)) as (server, lines):
        server.router.num_cached_tokens = 3
        answer = server.http.post("/v1/chat/completions", json=CHAT, headers=HEADERS)
        assert answer.headers["x-request-id"] == "mine-1"
        line = lines.next()
        for streamed in (True, False):
            body = {**CHAT, "stream": streamed}
            server.http.post("/v1/chat/completions", json=body, headers=HEADERS)
            assert lines.next()["outcome"] == "stop"
        server.http.get("/health")
        server.http.get("/metrics", headers=AS_OPERATOR)
        server.http.get("/v1/models?key=x", headers=HEADERS)
        assert lines.next()["path"] == "/v1/models"
        assert not lines.texts
    usage = answer.json()["usage"]
    assert line["client_request_id"] == "mine-1"
    assert line["request_id"] in answer.json()["id"]
    wanted = {
        "process": "router-0",
        "logger": "kvrelay.access",
        "level": "info",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "tenant": "red",
        "outcome": "stop",
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": 3,
        "completion_tokens": usage["completion_tokens"],
    }
    assert {name: line.get(name) for name in wanted} == wanted
    assert 0 < line["ttft_ms"] <= line["ms"]
    assert "prompt" not in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "changes", "headers", "status", "outcome"),
    [
        ("/v1/chat/completions", {"model": "other"}, HEADERS, 404, "model_not_found"),
        ("/v1/chat/completions", {}, {}, 401, "invalid_api_key"),
        ("/v1/chat/completions", {}, {"x-api-key": "sk-wrong-key"}, 401, "invalid_api_key"),
        ("/v1/sessions/x/fork", {}, {}, 401, "invalid_api_key"),
        ("/v1/nowhere", {}, HEADERS, 404, None),
    ],
)
def test_a_refusal_is_a_line_with_its_reason(
    path: str,
    changes: dict[str, Any],
    headers: dict[str, str],
    status: int,
    outcome: str | None,
    logged: Callable[[LogSection], Any],
) -> None:
    with logged(LogSection(access=True)) as (server, lines):
        answer = server.http.post(path, json={**CHAT, **changes}, headers=headers)
        text = lines.texts[0] if lines.texts else ""
        line = lines.next()
        assert not lines.texts
    assert answer.status_code == line["status"] == status
    assert line.get("outcome") == outcome
    assert answer.headers["x-request-id"] in (line["request_id"], line.get("client_request_id"))
    for secret in (KEY, "sk-wrong-key", QUESTION):
        assert secret not in text


def test_prompts_are_in_it_only_where_that_is_asked_for(
    logged: Callable[[LogSection], Any],
) -> None:
    for section in (LogSection(), LogSection(access=True), LogSection(prompts=True)):
        with logged(section) as (server, lines):
            server.http.post("/v1/chat/completions", json=CHAT, headers=HEADERS)
            server.wait_idle()
            if section.access or section.prompts:
                line = lines.next()
                assert (QUESTION in line.get("prompt", "")) is section.prompts
            assert not lines.texts


def test_a_bug_is_logged_with_the_request_and_without_what_it_has(
    logged: Callable[[LogSection], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise RuntimeError(QUESTION)

    with logged(LogSection()) as (server, lines):
        monkeypatch.setattr(server.ctx.operations, "status", broken)
        server.http.get("/status", headers={"x-request-id": "mine-2", **AS_OPERATOR})
        line = lines.next()
    assert line["client_request_id"] == "mine-2"
    assert "in broken" in line["exception"]
    assert "RuntimeError" in line["exception"]
    assert QUESTION not in json.dumps(line)


def test_what_the_router_does_later_has_no_name_of_an_old_request(
    logged: Callable[[LogSection], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its timers and tasks go on in the context that they were begun in."""
    seen: list[str] = []
    with logged(LogSection()) as (server, _):
        deliver = server.client._deliver

        def watched(to: str, message: Any) -> None:
            assert REQUEST.get()
            deliver(to, message)

        monkeypatch.setattr(server.client, "_deliver", watched)
        answer = server.router.answer
        monkeypatch.setattr(
            server.router, "answer", lambda submit: [seen.append(REQUEST.get()), answer(submit)][1]
        )
        server.http.post("/v1/chat/completions", json=CHAT, headers=HEADERS)
    assert seen == [""]
