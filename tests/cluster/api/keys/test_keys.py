"""Keys that operators make: what they may do, for how long, how often, at every router."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import CliRunner
from websockets.sync.client import connect

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.keys.keys import Keys
from kvrelay.cluster.api.keys.store import FILE, KeyStore
from kvrelay.cluster.api.tenants import Tenants
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.cli.main import main
from kvrelay.cluster.config import TenantEntry
from tests.cluster.api.conftest import AS_OPERATOR, MODEL, OPERATORS_KEY, Served, serve, wait_until
from tests.cluster.api.test_bad_input import error_of

KEYS = "/v1/organization/admin_api_keys"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "Hi", "max_tokens": 5}
ENTRIES = (TenantEntry("red", keys=("red-key",)), TenantEntry("blue", keys=("blue-key",)))
HOLDS_EVERYWHERE_S = 2.0  # as docs/security.md says it


def routers(tokenizer: Tokenizer, path: Path, number: int) -> Iterator[list[Served]]:
    """They share a store of keys."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                serve(
                    tokenizer,
                    ApiSettings(),
                    context={
                        "tenants": Tenants.of(ENTRIES, b"a secret"),
                        "keys": Keys(KeyStore(path)),
                    },
                )
            )
            for _ in range(number)
        ]


@pytest.fixture(scope="module")
def two(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Served]]:
    yield from routers(tokenizer, tmp_path_factory.mktemp("keys") / FILE, 2)


@pytest.fixture
def one(two: list[Served]) -> Served:
    return two[0]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def make(served: Served, **body: Any) -> dict[str, Any]:
    asked = {"name": "a key", "tenant": "red"} | body
    response = served.http.post(KEYS, json=asked, headers=AS_OPERATOR)
    assert response.status_code == 200, response.text
    return dict(response.json())


def revoke(served: Served, key: dict[str, Any]) -> None:
    assert served.http.delete(f"{KEYS}/{key['id']}", headers=AS_OPERATOR).json()["deleted"]


def status(served: Served, key: str, path: str = "/v1/completions") -> int:
    method = "POST" if path == "/v1/completions" else "GET"
    body = BODY if method == "POST" else None
    return served.http.request(method, path, json=body, headers=bearer(key)).status_code


def refused_in_the_end(served: Served, key: str) -> bool:
    """Unless it is not known there within the time that that takes."""
    wait_until(lambda: status(served, key) == 429)
    return True


def test_the_openai_client_makes_lists_and_revokes_keys(one: Served) -> None:
    client = openai.OpenAI(
        base_url=f"{one.url}/v1", api_key="none", admin_api_key=OPERATORS_KEY, max_retries=0
    )
    keys = client.admin.organization.admin_api_keys
    more = {"scopes": ["generate"], "tenant": "blue"}
    made = keys.create(name="by the SDK", expires_in_seconds=3600, extra_body=more)
    assert made.value.startswith("sk-kvrelay-")
    assert status(one, made.value) == 200
    assert one.router.submits[-1].tenant == "blue"
    (found,) = [each for each in keys.list() if each.id == made.id]
    assert made.value not in found.model_dump_json()
    assert found.redacted_value.endswith(made.value[-4:])
    assert found.expires_at == found.created_at + 3600
    wait_until(lambda: keys.retrieve(made.id).last_used_at is not None)
    assert keys.delete(made.id).deleted
    assert status(one, made.value) == 401


def test_its_kv_is_that_of_its_tenant(one: Served) -> None:
    key = make(one)["value"]
    for each in (key, "red-key"):
        assert status(one, each) == 200
    mine, theirs = one.router.submits[-2:]
    assert (mine.scope, mine.tenant) == (theirs.scope, "red")


def test_a_key_does_what_its_scopes_say_and_no_more(one: Served) -> None:
    made = {
        scope: make(one, scopes=[scope], tenant="red" if scope == "generate" else "")["value"]
        for scope in ("generate", "metrics", "operate")
    }
    paths = ("/v1/completions", "/metrics", "/status", "/audit", KEYS)
    got = {scope: [status(one, key, path) for path in paths] for scope, key in made.items()}
    assert got == {
        "generate": [200, 401, 401, 401, 401],
        "metrics": [403, 200, 200, 401, 401],
        "operate": [403, 401, 401, 200, 200],
    }
    both = make(one, scopes=["operate", "metrics"], tenant="")["value"]
    assert [status(one, both, path) for path in paths] == [403, 200, 200, 200, 200]


def test_a_key_makes_no_key_and_no_session_of_the_console(one: Served) -> None:
    """Both would be good for something after it was revoked."""
    operate = bearer(make(one, scopes=["operate"], tenant="")["value"])
    error_of(one.http.post(KEYS, json={"name": "x"}, headers=operate), 401)
    error_of(one.http.delete(f"{KEYS}/key_1", headers=operate), 401)
    error_of(one.http.post("/console/ticket", json={}, headers=operate), 401)
    assert one.http.post("/console/ticket", json={}, headers=AS_OPERATOR).status_code == 200


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ({"name": ""}, "name"),
        ({"name": "x", "scopes": ["all"]}, "expected generate, metrics, operate, got 'all'"),
        ({"name": "x", "scopes": []}, "scopes"),
        ({"name": "x"}, "there are: blue, red"),
        ({"name": "x", "tenant": "green"}, "there is none 'green'; there are: blue, red"),
        ({"name": "x", "tenant": "red", "scopes": ["operate"]}, "scopes operate have none"),
        ({"name": "x", "tenant": "red", "expires_in_seconds": 0}, "expires_in_seconds"),
        ({"name": "x", "tenant": "red", "tokens_per_day": -1}, "tokens_per_day"),
        ({"name": "x", "tenant": "red", "max_budget": 3}, "max_budget"),
    ],
)
def test_what_is_wrong_with_a_key_is_said(one: Served, body: Any, wrong: str) -> None:
    response = one.http.post(KEYS, json=body, headers=AS_OPERATOR)
    assert wrong in error_of(response, 400)["message"]


def test_where_all_may_generate_a_key_for_that_is_refused(tokenizer: Tokenizer) -> None:
    with serve(tokenizer, ApiSettings()) as served:
        response = served.http.post(KEYS, json={"name": "x"})
        assert "set api.key or [[tenant]] first" in error_of(response, 400)["message"]
        made = served.http.post(KEYS, json={"name": "x", "scopes": ["metrics"]}).json()
        assert status(served, made["value"], "/metrics") == 200


def test_an_expired_key_is_refused_and_says_so(one: Served) -> None:
    key = make(one, expires_in_seconds=1)
    assert status(one, key["value"]) == 200
    wait_until(lambda: status(one, key["value"]) == 401)
    response = one.http.post("/v1/completions", json=BODY, headers=bearer(key["value"]))
    message = error_of(response, 401)["message"]
    assert f"The API key {key['id']} has expired at" in message
    assert key["value"] not in message


def test_keys_hold_at_every_router_and_so_does_their_end(two: list[Served]) -> None:
    first, second = two
    key = make(first)
    wait_until(lambda: status(second, key["value"]) == 200, HOLDS_EVERYWHERE_S)
    revoke(first, key)
    assert status(first, key["value"]) == 401
    wait_until(lambda: status(second, key["value"]) == 401, HOLDS_EVERYWHERE_S)


def test_a_stream_ends_well_and_a_websocket_takes_no_more_when_the_key_is_revoked(
    one: Served, tokenizer: Tokenizer
) -> None:
    key = make(one)
    kept = one.router.answer, one.router.delay_s
    try:
        with connect(
            f"{one.url.replace('http', 'ws')}/v1/responses",
            additional_headers=bearer(key["value"]),
        ) as socket:
            said = '{"type": "response.create", "input": "Hi", "max_output_tokens": 16}'
            socket.send(said)
            while "response.completed" not in (text := str(socket.recv(10))):
                assert '"error"' not in text[:40], text
            one.router.answer = lambda submit: tokenizer.encode("word " * 20)
            one.router.delay_s = 0.03
            body = BODY | {"stream": True, "max_tokens": 20}
            headers = bearer(key["value"])
            with one.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                lines = answer.iter_lines()
                next(lines)
                revoke(one, key)
                assert [each for each in lines if each][-1] == "data: [DONE]"
            socket.send(said)
            assert "was revoked" in str(socket.recv(10))
    finally:
        one.router.answer, one.router.delay_s = kept


def test_requests_a_minute_are_counted_over_all_routers(two: list[Served]) -> None:
    first, second = two
    key = make(first, requests_per_minute=8)["value"]
    wait_until(lambda: status(second, key) == 200)  # both have an exchange about it
    assert status(first, key) == 200
    time.sleep(2.5)
    assert [status(first, key) for _ in range(4)] == [200] * 4
    time.sleep(2.5)  # 6 of 8, and less than one is given back meanwhile
    got = [status(second, key) for _ in range(8)]
    assert got.count(200) in (2, 3), got
    response = second.http.post("/v1/completions", json=BODY, headers=bearer(key))
    message = error_of(response, 429)["message"]
    assert re.search(r"8 requests a minute of the key key_\w+, of which 0 are left", message)


def test_a_budget_of_tokens_a_day_is_over_all_routers_and_survives_them(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / FILE
    for first, second in routers(tokenizer, path, 2):
        key = make(first, tokens_per_day=30)["value"]
        assert refused_in_the_end(first, key)
        assert refused_in_the_end(second, key)
        response = second.http.post("/v1/completions", json=BODY, headers=bearer(key))
        error = error_of(response, 429)
        assert "30 tokens a day of the key" in error["message"]
        assert 0 < float(response.headers["retry-after"]) <= 86_400
    for (third,) in routers(tokenizer, path, 1):
        # What others have taken is known a second after the first call.
        assert refused_in_the_end(third, key)


def test_only_the_hash_is_kept(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for (served,) in routers(tokenizer, tmp_path / FILE, 1):
        secret = make(served)["value"]
        assert status(served, secret) == 200
    files = [each.read_bytes() for each in tmp_path.iterdir()]
    assert any(b"a key" in each for each in files)
    assert not any(secret.encode() in each for each in files)
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0
    for (served,) in routers(tokenizer, tmp_path / FILE, 1):
        assert status(served, secret) == 200


def test_the_commands_make_list_and_revoke(one: Served) -> None:
    def run(*words: str, code: int = 0) -> str:
        given = ["keys", *words, "--url", one.url, "--operations-key", OPERATORS_KEY]
        result = CliRunner().invoke(main, given, env={"COLUMNS": "250"})
        assert result.exit_code == code, result.output
        return result.output

    limits = ("--requests-per-minute", "5", "--expires-in", "30d", "--tenant", "red")
    said = run("create", "for the tests", *limits)
    secret, key_id = said.split()[-1], re.findall(r"key_\w+", said)[0]
    assert status(one, secret) == 200
    assert "5 requests/min" in said
    assert "30x' is not a time such as 90m, 12h, 30d" in run(
        "create", "x", "--expires-in", "30x", code=2
    )
    assert key_id in run("list")
    assert "is revoked" in run("revoke", key_id)
    assert status(one, secret) == 401
    assert key_id not in run("list")
    assert "revoked" in run("list", "--all")
    assert "There is no API key 'key_0'" in run("revoke", "key_0", code=1)
    assert "by its id" in run("revoke", secret, code=1)
