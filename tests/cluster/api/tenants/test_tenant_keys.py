"""Tenants: keys decide who calls, and nothing else decides whose KV may be shared."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import httpx
import openai
import pytest

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.tenants import Tenants
from kvrelay.cluster.api.text.tokenizer import PublicPrompts, Tokenizer
from kvrelay.cluster.config import TenantEntry
from kvrelay.engine.config import EngineSection
from kvrelay.engine.kv.block_hash import hash_blocks
from kvrelay.engine.kv.scope import CacheScope
from kvrelay.router.messages import SessionReply, Submit
from tests.cluster.api.conftest import AS_OPERATOR, MODEL, Served, serve
from tests.cluster.api.test_bad_input import error_of

BLOCK = 4
PUBLIC = "You are a helpful assistant that answers in one short sentence, and never swears."
ENTRIES = (
    TenantEntry("red", keys=("red-key", "second-red-key")),
    TenantEntry("blue", key_hashes=(sha256(b"blue-key").hexdigest().upper(),)),
)
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def guarded(tokenizer: Tokenizer) -> Iterator[Served]:
    context = {
        "tenants": Tenants.of(ENTRIES, b"a secret"),
        "public_prompts": PublicPrompts.of_texts(tokenizer, [PUBLIC, "Short and public."]),
    }
    with serve(tokenizer, ApiSettings(), context=context) as served:
        yield served


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def submitted(served: Served, key: str, body: Any = BODY, path: str = "chat/completions") -> Submit:
    """What the router gets of such a call."""
    response = served.http.post(f"/v1/{path}", json=body, headers=bearer(key))
    assert response.status_code == 200, response.text
    return served.router.submits[-1]


def names(submit: Submit) -> list[bytes]:
    return hash_blocks(b"model", submit.scope, submit.tokens, BLOCK)


CALLS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("GET", "/v1/sessions"),
    ("GET", "/v1/sessions/s"),
    ("DELETE", "/v1/sessions/s"),
    ("POST", "/v1/sessions/s/park"),
    ("POST", "/v1/sessions/s/fork"),
]


@pytest.mark.parametrize(("method", "path"), CALLS)
@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer wrong", "red-key", "Basic red-key"]
)
def test_without_a_key_of_this_server_every_call_is_a_401(
    guarded: Served, method: str, path: str, authorization: str | None
) -> None:
    num_before = len(guarded.router.submits)
    headers = {} if authorization is None else {"authorization": authorization}
    response = guarded.http.request(method, path, headers=headers)
    error = error_of(response, 401)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert "wrong" not in response.text
    assert "red" not in response.text
    assert len(guarded.router.submits) == num_before
    assert guarded.router.commands == []


def test_a_key_that_is_no_text_is_a_401(guarded: Served) -> None:
    raw = {"authorization": b"Bearer \xff\xfe\xe4"}
    error_of(httpx.post(f"{guarded.url}/v1/completions", headers=raw, content=b"{}"), 401)  # type: ignore[arg-type]


def test_the_openai_client_is_told_in_its_own_way(guarded: Served) -> None:
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="nobody", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="not one of this server's"):
        client.models.list()
    good = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="blue-key", max_retries=0)
    assert good.models.list().data[0].id == MODEL


def test_operations_need_no_key_of_a_tenant(guarded: Served) -> None:
    assert guarded.http.get("/health").status_code == 200
    for path in ("/metrics", "/status"):
        assert guarded.http.get(path, headers=AS_OPERATOR).status_code == 200
        assert guarded.http.get(path, headers=bearer("red-key")).status_code == 401


def test_tenants_have_scopes_of_their_own_which_a_restart_does_not_change(guarded: Served) -> None:
    red, again = submitted(guarded, "red-key"), submitted(guarded, "second-red-key")
    blue = submitted(guarded, "blue-key")
    assert (red.tenant, blue.tenant) == ("red", "blue")
    assert red.tokens == blue.tokens
    assert red.scope == again.scope
    assert set(names(red)).isdisjoint(names(blue))
    later = Tenants.of(reversed(ENTRIES), b"a secret")
    for key, submit in (("red-key", red), ("blue-key", blue)):
        tenant = later.find(key)
        assert tenant is not None
        assert tenant.salt == submit.scope.salt
    other_server = Tenants.of(ENTRIES, b"another secret").find("red-key")
    assert other_server is not None
    assert other_server.salt != red.scope.salt


def test_nothing_in_a_body_changes_the_scope(guarded: Served) -> None:
    wanted = submitted(guarded, "red-key").scope
    for change in (
        {"user": "blue"},
        {"prompt_cache_key": "blue"},
        {"salt": "x", "tenant": "blue", "scope": {"salt": ""}},
        {"metadata": {"tenant": "blue"}, "safety_identifier": "blue"},
        {"prompt_cache_retention": "24h"},
    ):
        found = submitted(guarded, "red-key", BODY | change)
        assert (found.scope, found.tenant) == (wanted, "red")


def test_a_cache_salt_divides_the_cache_of_its_tenant_and_opens_no_other(guarded: Served) -> None:
    blue = guarded.ctx.tenants.find("blue-key")
    assert blue is not None
    salts = ["x", "y", "blue", blue.salt.hex(), blue.salt.decode("latin-1")]
    mine = [submitted(guarded, "red-key", BODY | {"cache_salt": salt}) for salt in salts]
    theirs = [submitted(guarded, "blue-key", BODY | {"cache_salt": salt}) for salt in salts]
    plain = [submitted(guarded, "red-key"), submitted(guarded, "blue-key")]
    assert len({submit.scope.salt for submit in (*mine, *theirs, *plain)}) == 2 * len(salts) + 2
    again = submitted(guarded, "red-key", BODY | {"cache_salt": "x"})
    assert again.scope == mine[0].scope
    assert set(names(mine[0])).isdisjoint(names(mine[1]))
    for path, body in (
        ("completions", {"model": MODEL, "prompt": "Hello", "cache_salt": "x"}),
        ("embeddings", {"model": MODEL, "input": "Hello", "cache_salt": "x"}),
        ("responses", {"model": MODEL, "input": "Hello", "cache_salt": "x"}),
    ):
        assert submitted(guarded, "red-key", body, path).scope.salt == mine[0].scope.salt


def test_approximate_kv_is_asked_for_by_a_request_or_by_its_tenant_and_has_its_own_names(
    guarded: Served,
) -> None:
    exact = submitted(guarded, "red-key")
    body = BODY | {"kv": "approximate"}
    asked = submitted(guarded, "red-key", body)
    assert (exact.scope.is_approximate, asked.scope.is_approximate) == (False, True)
    assert set(names(exact)).isdisjoint(names(asked))
    assert names(submitted(guarded, "red-key", body)) == names(asked)
    assert set(names(submitted(guarded, "blue-key", body))).isdisjoint(names(asked))
    salted = submitted(guarded, "red-key", body | {"cache_salt": "x"})
    assert salted.scope.is_approximate
    assert set(names(salted)).isdisjoint(names(asked))
    assert submitted(guarded, "red-key", BODY | {"kv": "exact"}).scope == exact.scope
    again = {"model": MODEL, "input": "Hello", "kv": "approximate"}
    assert submitted(guarded, "red-key", again, "responses").scope.is_approximate
    wrong = guarded.http.post(
        "/v1/chat/completions", json=BODY | {"kv": "int4"}, headers=bearer("red-key")
    )
    assert "'exact', 'approximate' or 'quest', got 'int4'" in error_of(wrong, 400)["message"]


def test_a_tenants_kv_is_as_its_entry_says(guarded: Served) -> None:
    entry = TenantEntry("green", keys=("green-key",), kv="approximate")
    guarded.ctx.tenants.update(Tenants.of([*ENTRIES, entry], b"a secret"))
    try:
        assert submitted(guarded, "green-key").scope.is_approximate
        assert not submitted(guarded, "green-key", BODY | {"kv": "exact"}).scope.is_approximate
        assert not submitted(guarded, "red-key").scope.is_approximate
    finally:
        guarded.ctx.tenants.update(Tenants.of(ENTRIES, b"a secret"))


def test_quest_is_for_servers_that_have_it(guarded: Served) -> None:
    body = BODY | {"kv": "quest"}
    refused = guarded.http.post("/v1/chat/completions", json=body, headers=bearer("red-key"))
    assert "engine.quest_budget, which is 0 here" in error_of(refused, 400)["message"]
    guarded.ctx.quest_mark = EngineSection(quest_budget=0.25).quest_mark
    try:
        asked = submitted(guarded, "red-key", body)
        assert (asked.scope.kv, submitted(guarded, "red-key").scope.kv) == ("quest", "exact")
        assert set(names(asked)).isdisjoint(names(submitted(guarded, "red-key")))
        assert set(names(asked)).isdisjoint(
            names(submitted(guarded, "red-key", BODY | {"kv": "approximate"}))
        )
    finally:
        guarded.ctx.quest_mark = b""


def test_usage_says_that_kv_may_be_approximate(guarded: Served) -> None:
    def details(path: str, body: dict[str, object], key: str = "red-key") -> dict[str, object]:
        answer = guarded.http.post(f"/v1/{path}", json=body, headers=bearer(key))
        usage: dict[str, dict[str, object]] = answer.json()["usage"]
        return usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage

    for path, body in (
        ("chat/completions", BODY),
        ("completions", {"model": MODEL, "prompt": "Hello"}),
        ("responses", {"model": MODEL, "input": "Hello"}),
    ):
        assert "kv" not in details(path, body)
        assert details(path, body | {"kv": "approximate"})["kv"] == "approximate", path


def test_without_tenants_everybody_is_the_same_and_any_key_will_do(served: Served) -> None:
    for headers in ({}, bearer("anything"), {"authorization": "Basic x"}):
        served.http.post("/v1/chat/completions", json=BODY, headers=headers)
        submit = served.router.submits[-1]
        assert (submit.scope, submit.tenant) == (CacheScope(), "")


def chat(system: str, user: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return BODY | {"messages": messages}


def test_a_public_system_prompt_is_shared_and_what_follows_is_not(guarded: Served) -> None:
    red = submitted(guarded, "red-key", chat(PUBLIC, "What is my secret?"))
    blue = submitted(guarded, "blue-key", chat(PUBLIC, "What is my secret?"))
    num_public = red.scope.num_public_tokens
    assert red.tokens == blue.tokens
    assert BLOCK < num_public < len(red.tokens)
    num_shared = num_public // BLOCK
    assert names(red)[:num_shared] == names(blue)[:num_shared]
    assert set(names(red)[num_shared:]).isdisjoint(names(blue)[num_shared:])
    assert len(names(red)) > num_shared


def test_a_public_text_is_shared_as_the_beginning_of_a_completion(
    guarded: Served, tokenizer: Tokenizer
) -> None:
    for rest in (" What now?", "\n\nWhat now?", "What now?"):
        body = {"model": MODEL, "prompt": PUBLIC + rest}
        submit = submitted(guarded, "red-key", body, "completions")
        num_public = submit.scope.num_public_tokens
        assert num_public >= len(tokenizer.encode(PUBLIC)) - 1
        assert PUBLIC.startswith(tokenizer.decode(submit.tokens[:num_public]))


def test_what_is_nearly_public_is_not(guarded: Served) -> None:
    for system in (PUBLIC[:-1] + "!", PUBLIC.replace("short", "long"), f"Hi. {PUBLIC}"):
        submit = submitted(guarded, "red-key", chat(system, "Hi"))
        assert submit.scope.num_public_tokens == 0
    assert submitted(guarded, "red-key").scope.num_public_tokens == 0


def test_the_longest_of_several_public_prompts_counts() -> None:
    public = PublicPrompts([(1, 2), (1, 2, 3, 4), (9,), (), (1, 2)])
    found = [public.num_public_tokens(t) for t in ((1, 2, 3, 4, 5), (1, 2, 3), (1,), (9,), (8, 9))]
    assert found == [4, 2, 0, 1, 0]


def test_commands_are_for_the_callers_own_sessions(guarded: Served) -> None:
    guarded.router.answer_command = lambda command: SessionReply(command.command_id)
    try:
        for key in ("red-key", "blue-key"):
            guarded.http.get("/v1/sessions?tenant=other", headers=bearer(key))
        assert [command.tenant for command in guarded.router.commands] == ["red", "blue"]
    finally:
        guarded.router.commands.clear()
        guarded.router.answer_command = lambda command: None
