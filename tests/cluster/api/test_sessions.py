"""Sessions over HTTP: which session a request is a turn of, and what `/v1/sessions` does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.engine.kv.tier import Retention, Tier
from kvrelay.router.messages import (
    SessionCommand,
    SessionHolder,
    SessionInfo,
    SessionOp,
    SessionRefusal,
    SessionReply,
    SessionState,
)
from tests.cluster.api.conftest import MODEL, Served, serve, wait_until
from tests.cluster.api.test_bad_input import error_of

ASK: list[Any] = [{"role": "user", "content": "Hi"}]
BODY = {"model": MODEL, "messages": ASK}
ACTIONS = ("park", "resume", "pin", "unpin")


def info(name: str, state: SessionState = SessionState.IDLE) -> SessionInfo:
    return SessionInfo(
        session=name,
        tenant="",
        state=state,
        num_tokens=100,
        num_blocks=6,
        num_turns=2,
        pinned=False,
        retention=Retention(600.0, to_disk=False),
        age_s=9.5,
        last_used_s=1.25,
        worker="decode-0",
        holders=(
            SessionHolder("decode-0", {Tier.DEVICE: 6, Tier.HOST: 4}),
            SessionHolder("prefill-0", {Tier.DEVICE: 6}),
        ),
    )


def shown(name: str, state: str = "idle") -> dict[str, Any]:
    """`info` as JSON."""
    return {
        "id": name,
        "object": "session",
        "state": state,
        "pinned": False,
        "num_turns": 2,
        "num_tokens": 100,
        "num_blocks": 6,
        "blocks": {"device": 6, "host": 4, "disk": 0},
        "workers": [
            {"worker": "decode-0", "blocks": {"device": 6, "host": 4, "disk": 0}},
            {"worker": "prefill-0", "blocks": {"device": 6, "host": 0, "disk": 0}},
        ],
        "last_worker": "decode-0",
        "age_s": 9.5,
        "last_used_s": 1.25,
        "retention_s": 600.0,
        "to_disk": False,
    }


@pytest.fixture
def served_sessions(served: Served) -> Iterator[Served]:
    """A router that does whatever it is asked."""

    def answer(command: SessionCommand) -> SessionReply:
        name = command.argument if command.op is SessionOp.FORK else command.session
        sessions = () if command.op is SessionOp.CLOSE else (info(name),)
        return SessionReply(command.command_id, sessions=sessions, done={"decode-0": 6})

    served.router.answer_command = answer
    yield served
    assert served.ctx.commands.num_taken == 0
    assert served.client._replies == {}


def test_prompt_cache_key_names_the_session(served: Served) -> None:
    for path, body in (
        ("/v1/chat/completions", BODY),
        ("/v1/completions", {"model": MODEL, "prompt": "Hi"}),
    ):
        served.post(body | {"prompt_cache_key": "my chat/1"}, path)
        assert served.router.submits[-1].session == "my chat/1"
        for body_without in (body, body | {"prompt_cache_key": None, "user": "somebody"}):
            served.post(body_without, path)
            assert served.router.submits[-1].session is None


def test_the_openai_client_can_name_it(served: Served) -> None:
    client = served.openai()
    client.chat.completions.create(
        model=MODEL, messages=ASK, prompt_cache_key="s", prompt_cache_retention="24h"
    )
    (submit,) = served.router.submits
    assert (submit.session, submit.retention) == ("s", Retention(86_400.0, to_disk=True))


TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
CLAUDE = {"name": "ls", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("header", "path", "body"),
    [
        ("X-Claude-Code-Session-Id", "/v1/messages", {"max_tokens": 9, "tools": [CLAUDE]}),
        ("x-session-affinity", "/v1/chat/completions", {"tools": [TOOL]}),
        ("session-id", "/v1/chat/completions", {"tools": [TOOL]}),
    ],
)
def test_agents_name_their_session_in_a_header(
    served: Served, header: str, path: str, body: dict[str, Any]
) -> None:
    def asked(name: str, **more: Any) -> tuple[str | None, bool]:
        with httpx.Client(base_url=served.url, timeout=30) as client:
            answer = client.post(path, json=BODY | body | more, headers={header: name})
        assert answer.status_code == 200, answer.text
        submit = served.router.submits[-1]
        return submit.session, submit.has_branches

    assert asked("4c987ec8-b7e1") == ("4c987ec8-b7e1", True)
    assert asked("a name\twith what is not in names") == (None, False)
    assert asked("x" * 129) == (None, False)
    assert asked("4c987ec8-b7e1", tools=[]) == (None, False)  # a title, a summary
    if path != "/v1/messages":
        assert asked("4c987ec8-b7e1", prompt_cache_key="own") == ("own", False)


def test_qwen_code_has_a_session_by_what_it_begins_with(served: Served) -> None:
    about = [{"role": "user", "content": "today is"}, {"role": "assistant", "content": "Got it."}]
    more = [{"role": "assistant", "content": "no"}, {"role": "user", "content": "on"}]

    def asked(messages: list[dict[str, str]], agent: str = "QwenCode/0.15.10 (linux; x64)") -> Any:
        body = {"model": MODEL, "max_tokens": 1, "tools": [TOOL], "messages": messages}
        with httpx.Client(base_url=served.url, timeout=30) as client:
            answer = client.post("/v1/chat/completions", json=body, headers={"user-agent": agent})
        assert answer.status_code == 200, answer.text
        submit = served.router.submits[-1]
        return submit.session, submit.has_branches, submit.has_twins

    name, *flags = asked([*about, {"role": "user", "content": "hi"}])
    assert name.startswith("qwen-code-")
    assert flags == [True, True]
    assert asked([*about, {"role": "user", "content": "hi"}, *more]) == (name, True, True)
    assert asked([*about, {"role": "user", "content": "ho"}])[0] != name
    assert asked(about) == (None, False, False)
    assert asked([*about, {"role": "user", "content": "hi"}], "curl/8") == (None, False, False)


def test_several_chats_of_one_call_are_no_turns_of_an_agent(served: Served) -> None:
    body = {"model": MODEL, "messages": [ASK, ASK], "tools": [TOOL]}
    with httpx.Client(base_url=served.url, timeout=30) as client:
        path = "/v1/chat/completions/batch"
        answer = client.post(path, json=body, headers={"session-id": "a"})
    assert answer.status_code == 200, answer.text
    assert [submit.session for submit in served.router.submits] == [None, None]


def test_without_names_of_headers_there_are_no_sessions_by_them(tokenizer: Tokenizer) -> None:
    with serve(tokenizer, ApiSettings(session_headers="")) as served:
        with httpx.Client(base_url=served.url, timeout=30) as client:
            client.post(
                "/v1/chat/completions", json=BODY | {"tools": [TOOL]}, headers={"session-id": "a"}
            )
        assert served.router.submits[-1].session is None


def test_only_the_first_choice_is_the_sessions_turn(served: Served) -> None:
    served.post(BODY | {"prompt_cache_key": "s", "n": 3})
    assert sorted((s.session or "") for s in served.router.submits) == ["", "", "s"]
    first = next(s for s in served.router.submits if s.session)
    assert first.request_id.endswith("-0")
    served.router.submits.clear()
    body = {"model": MODEL, "prompt": ["one", "two"], "prompt_cache_key": "s"}
    served.post(body, "/v1/completions")
    assert sorted((s.session or "") for s in served.router.submits) == ["", "s"]


@pytest.mark.parametrize(
    ("given", "retention"),
    [
        (None, None),
        ("24h", Retention(86_400.0, to_disk=True)),
        ("in_memory", Retention(600.0, to_disk=False)),
        ("in-memory", Retention(600.0, to_disk=False)),
    ],
)
def test_retention_of_a_request(
    served: Served, given: str | None, retention: Retention | None
) -> None:
    served.post(BODY | {"prompt_cache_retention": given})
    assert served.router.submits[0].retention == retention


def test_in_memory_is_no_longer_than_the_servers_own(served: Served) -> None:
    served.ctx.retention_s, kept = 60.0, served.ctx.retention_s
    try:
        served.post(BODY | {"prompt_cache_retention": "in_memory"})
    finally:
        served.ctx.retention_s = kept
    assert served.router.submits[0].retention == Retention(60.0, to_disk=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt_cache_key": ""}, "'prompt_cache_key': String should have at least 1 char"),
        ({"prompt_cache_key": "x" * 257}, "'prompt_cache_key': String should have at most 256"),
        ({"prompt_cache_key": 5}, "'prompt_cache_key': Input should be a valid string, got 5"),
        ({"prompt_cache_retention": "1h"}, "'prompt_cache_retention': Input should be 'in_memory'"),
    ],
)
def test_wrong_names_and_retentions_are_a_400(
    served: Served, change: dict[str, Any], said: str
) -> None:
    error = error_of(served.post(BODY | change), 400)
    assert error["param"] == next(iter(change))
    assert error["message"].startswith(said)
    assert served.router.submits == []


def test_usage_says_where_cached_tokens_came_from(served: Served) -> None:
    served.router.num_cached_tokens = 24
    served.router.cached_by_source = {"device": 16, "host": 8, "disk": 0}
    answer = served.openai().chat.completions.create(model=MODEL, messages=ASK, n=2)
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == 24
    assert details.model_extra == {"cached_tokens_by_source": {"device": 16, "host": 8}}
    chunks = list(
        served.openai().chat.completions.create(
            model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details == details


def test_list_and_show(served_sessions: Served) -> None:
    served = served_sessions
    served.router.answer_command = lambda command: SessionReply(
        command.command_id,
        sessions=(info("a"), info("b", SessionState.PARKED)),
        has_more=True,
    )
    answer = served.http.get("/v1/sessions", params={"limit": 2, "after": "0"}).json()
    assert answer == {"object": "list", "data": [shown("a"), shown("b", "parked")]} | {
        "has_more": True
    }
    served.http.get("/v1/sessions")
    asked = [(c.op, c.session, c.limit, c.tenant) for c in served.router.commands]
    assert asked == [(SessionOp.LIST, "0", 2, ""), (SessionOp.LIST, "", 20, "")]


@pytest.mark.parametrize("name", ["plain", "with space", "a/b", "a/park", "ä?&#%", "x" * 256])
def test_every_name_can_be_shown_acted_on_and_closed(served_sessions: Served, name: str) -> None:
    served = served_sessions
    path = f"/v1/sessions/{quote(name, safe='')}"
    assert served.http.get(path).json() == shown(name)
    for op in ACTIONS:
        answer = served.http.post(f"{path}/{op}").json()
        assert answer == shown(name) | {"blocks_done": {"decode-0": 6}}
    assert served.http.post(f"{path}/fork", json={"id": "new"}).json() == shown("new")
    assert served.http.delete(path).json() == {
        "id": name,
        "object": "session.deleted",
        "deleted": True,
        "blocks_done": {"decode-0": 6},
    }
    asked = [(str(c.op), c.session, c.argument) for c in served.router.commands]
    assert asked == [
        ("show", name, ""),
        *((op, name, "") for op in ACTIONS),
        ("fork", name, "new"),
        ("close", name, ""),
    ]


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (SessionRefusal.UNKNOWN, 404),
        (SessionRefusal.CONFLICT, 409),
        (SessionRefusal.DEADLINE, 504),
        (SessionRefusal.BUSY, 429),
        (SessionRefusal.LIMIT, 403),
    ],
)
def test_what_the_router_refuses_keeps_its_reason(
    served_sessions: Served, refusal: SessionRefusal, status: int
) -> None:
    served = served_sessions
    served.router.answer_command = lambda c: SessionReply(c.command_id, refusal, "because")
    for response in (
        served.http.get("/v1/sessions/s"),
        served.http.post("/v1/sessions/s/park"),
        served.http.delete("/v1/sessions/s"),
    ):
        error = error_of(response, status)
        assert (error["code"], error["message"]) == (refusal.value, "because")
    assert len(SessionRefusal) == 5


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"{}", "id"),
        (b'{"id": 5}', "id"),
        (b'{"id": ""}', "id"),
        (b'{"id": "' + b"x" * 257 + b'"}', "id"),
    ],
)
def test_a_fork_needs_a_name(served_sessions: Served, body: bytes, param: str | None) -> None:
    served = served_sessions
    error = error_of(served.http.post("/v1/sessions/s/fork", content=body), 400)
    assert error["param"] == param
    assert served.router.commands == []


def test_wrong_limits_names_paths_and_methods(served_sessions: Served) -> None:
    served = served_sessions
    for limit in ("0", "101", "-1", "two", "1.5", ""):
        error = error_of(served.http.get("/v1/sessions", params={"limit": limit}), 400)
        assert (error["param"], repr(limit) in error["message"]) == ("limit", True)
    assert "has 257" in error_of(served.http.get("/v1/sessions/" + "x" * 257), 400)["message"]
    error_of(served.http.post("/v1/sessions/s/explode"), 405)
    error_of(served.http.put("/v1/sessions/s"), 405)
    assert served.router.commands == []


def test_a_router_that_does_not_answer_is_a_504(tokenizer: Tokenizer) -> None:
    limits = ApiSettings(session_timeout_s=0.2, max_session_commands=1)
    with serve(tokenizer, limits) as served:
        error = error_of(served.http.get("/v1/sessions/s"), 504)
        assert error["code"] == "deadline_exceeded"
        late = SessionReply(served.router.commands[0].command_id)
        assert served.client.receive(0.0, late) == []  # is dropped


def test_commands_that_wait_are_bounded(tokenizer: Tokenizer) -> None:
    limits = ApiSettings(session_timeout_s=20.0, max_session_commands=1)
    with serve(tokenizer, limits) as served:
        found: list[int] = []
        url = f"{served.url}/v1/sessions/s"
        first = threading.Thread(
            target=lambda: found.append(served.http.get(url).status_code), daemon=True
        )
        first.start()
        wait_until(lambda: len(served.router.commands) == 1)
        assert error_of(served.http.get(url), 429)["code"] == "queue_full"
        reply = SessionReply(served.router.commands[0].command_id, sessions=(info("s"),))
        served.ctx.client._replies[reply.command_id].get_loop().call_soon_threadsafe(
            served.router.reply, reply
        )
        first.join(20)
        assert found == [200]
