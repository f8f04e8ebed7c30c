"""What is for operators: on the server's machine, or with a key of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from kvrelay.cluster.api.app import create_app
from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.tenants import Tenants, with_operations_key
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.cli.audit import audit
from kvrelay.cluster.cli.client import status
from kvrelay.cluster.cli.role import role
from kvrelay.cluster.config import Config, ConfigError, TenantEntry, build_config
from kvrelay.engine.stats import Role
from tests.cluster.api.conftest import Served, serve

KEY = "a-key-of-operators"
CALLS = [
    ("GET", "/status"),
    ("GET", "/metrics"),
    ("GET", "/audit"),
    ("POST", "/workers/decode-0/role"),
]


def server(tokenizer: Tokenizer, operations_key: str = "") -> Any:
    tenants = Tenants((TenantEntry("red", keys=("red-key",)),), b"a secret")
    context = {"tenants": tenants, "set_role": lambda worker, role: Role.BOTH}
    return serve(tokenizer, ApiSettings(operations_key=operations_key), context=context)


@pytest.fixture(scope="module")
def keyless(tokenizer: Tokenizer) -> Iterator[Served]:
    with server(tokenizer) as served:
        yield served


@pytest.fixture(scope="module")
def keyed(tokenizer: Tokenizer) -> Iterator[Served]:
    with server(tokenizer, operations_key=KEY) as served:
        yield served


def ask(
    served: Served, method: str, path: str, client: str = "127.0.0.1", **headers: str
) -> httpx.Response:
    """As it would come from `client` to the server at 10.0.0.5."""

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(served.ctx), client=(client, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.5") as http:
            body = {"role": "both"} if method == "POST" else None
            return await http.request(method, path, json=body, headers=headers)

    return asyncio.run(call())


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_without_a_key_operators_are_on_the_machine_of_the_server(
    keyless: Served, method: str, path: str
) -> None:
    for client in ("192.0.2.7", "2001:db8::7", "", "localhost.example"):
        for headers in ({}, {"authorization": "Bearer red-key"}):
            response = ask(keyless, method, path, client, **headers)
            assert response.status_code == 403
            assert "api.operations_key" in response.json()["error"]["message"]
    for client in ("127.0.0.1", "::1", "10.0.0.5"):
        assert ask(keyless, method, path, client).status_code == 200


@pytest.mark.parametrize("name", ["forwarded", "x-forwarded-for", "x-real-ip", "via"])
def test_a_proxy_on_the_machine_of_the_server_makes_no_operators(
    keyless: Served, name: str
) -> None:
    for method, path in CALLS:
        assert ask(keyless, method, path, **{name: "127.0.0.1"}).status_code == 403
    assert keyless.http.get("/status", headers={name: "127.0.0.1"}).status_code == 403


@pytest.mark.parametrize("name", ["kvrelay", "inference.example:8000", "192.0.2.7", "a b"])
def test_a_call_that_names_another_host_comes_from_elsewhere(keyless: Served, name: str) -> None:
    """By a proxy that says nothing of itself, or from a page whose name has been bound anew."""
    for method, path in CALLS:
        assert ask(keyless, method, path, host=name).status_code == 403
    for own in ("localhost:8000", "127.0.0.1:8000", "[::1]:8000", "10.0.0.5:80"):
        assert ask(keyless, "GET", "/status", host=own).status_code == 200


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_with_a_key_it_is_the_key_that_counts(keyed: Served, method: str, path: str) -> None:
    for wrong in ("", "Bearer", "Bearer red-key", f"Bearer {KEY}x", f"Basic {KEY}"):
        headers = {"authorization": wrong} if wrong else {}
        response = ask(keyed, method, path, **headers)
        assert response.status_code == 401
        assert KEY not in response.text
    right = {"authorization": f"Bearer {KEY}"}
    assert ask(keyed, method, path, "192.0.2.7", **right).status_code == 200


def test_health_is_for_load_balancers(keyed: Served, keyless: Served) -> None:
    for served in (keyed, keyless):
        for path in ("/health", "/ping", "/version"):
            assert ask(served, "GET", path, "192.0.2.7").status_code == 200


def test_an_operators_key_generates_nothing(keyed: Served) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    assert keyed.http.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize(
    ("command", "arguments"), [(status, []), (audit, []), (role, ["decode-0", "decode"])]
)
def test_the_commands_send_the_key(
    keyed: Served, command: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--url", keyed.url, *arguments]
    monkeypatch.delenv("KVRELAY_OPERATIONS_KEY", raising=False)
    refused = CliRunner().invoke(command, arguments)
    assert refused.exit_code == 1
    assert "api.operations_key" in refused.output
    by_option = CliRunner().invoke(command, [*arguments, "--operations-key", KEY])
    assert by_option.exit_code == 0, by_option.output
    monkeypatch.setenv("KVRELAY_OPERATIONS_KEY", KEY)
    assert CliRunner().invoke(command, arguments).exit_code == 0


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_OPERATIONS_KEY", KEY)
    assert with_operations_key(Config()).api.operations_key == KEY
    own = build_config({"api": {"operations_key": "0123456789abcdef"}}, "here")
    assert with_operations_key(own).api.operations_key == "0123456789abcdef"
    monkeypatch.setenv("KVRELAY_OPERATIONS_KEY", "short-secret")
    with pytest.raises(ConfigError, match="16 characters") as caught:
        with_operations_key(Config())
    assert "short-secret" not in str(caught.value)
    monkeypatch.delenv("KVRELAY_OPERATIONS_KEY")
    assert with_operations_key(Config()).api.operations_key == ""
