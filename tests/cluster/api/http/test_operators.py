"""What is for operators: on the server's machine, or with a key of their own."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from kvrelay.cluster.api import incoming
from kvrelay.cluster.api.app import create_app
from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.tenants import (
    API_KEY_FILE,
    Tenants,
    load_tenants,
    made_operations_key,
    with_keys,
)
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.cli.client import status
from kvrelay.cluster.cli.operate import audit, role
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


def server(tokenizer: Tokenizer, **settings: Any) -> Any:
    tenants = Tenants.of((TenantEntry("red", keys=("red-key",)),), b"a secret")
    context = {"tenants": tenants, "set_role": lambda worker, role: Role.BOTH}
    return serve(tokenizer, ApiSettings(**settings), context=context)


@pytest.fixture(scope="module")
def keyless(tokenizer: Tokenizer) -> Iterator[Served]:
    """Nobody has set a key: one was made."""
    with server(tokenizer, operations_key=KEY, operators_are_here=True) as served:
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
    keyless: Served, method: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "user_of", lambda client, server: os.getuid())
    for client in ("192.0.2.7", "2001:db8::7", "", "localhost.example"):
        for headers in ({}, {"authorization": "Bearer red-key"}):
            response = ask(keyless, method, path, client, **headers)
            assert response.status_code == 403
            assert "api.operations_key" in response.json()["error"]["message"]
    for client in ("127.0.0.1", "::1", "10.0.0.5"):
        assert ask(keyless, method, path, client).status_code == 200
    right = {"authorization": f"Bearer {KEY}"}
    assert ask(keyless, method, path, "192.0.2.7", **right).status_code == 200


@pytest.mark.parametrize(("user", "status_code"), [(0, 200), (1, 403), (None, 403)])
def test_another_user_of_the_machine_may_be_a_proxy(
    keyless: Served, user: int | None, status_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nginx forwards by default: from here, to 127.0.0.1, without a word of whom it serves."""
    monkeypatch.setattr(incoming, "user_of", lambda client, server: user)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    for method, path in CALLS:
        assert ask(keyless, method, path).status_code == status_code


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
)
def test_the_kernel_knows_whose_a_connection_is(host: str, family: socket.AddressFamily) -> None:
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as client,
    ):
        mine, server = client.getsockname()[:2], client.getpeername()[:2]
        assert incoming.user_of(mine, server) == os.getuid()
        assert incoming.user_of((host, 1), server) is None
        assert incoming.user_of(None, server) is None


@pytest.mark.parametrize("name", ["forwarded", "x-forwarded-for", "x-real-ip", "via"])
def test_a_proxy_on_the_machine_of_the_server_makes_no_operators(
    keyless: Served, name: str
) -> None:
    for method, path in CALLS:
        assert ask(keyless, method, path, **{name: "127.0.0.1"}).status_code == 403
    assert keyless.http.get("/status", headers={name: "127.0.0.1"}).status_code == 403


@pytest.mark.parametrize("name", ["kvrelay", "inference.example:8000", "192.0.2.7", "a b"])
def test_a_call_that_names_another_host_comes_from_elsewhere(
    keyless: Served, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a proxy that says nothing of itself, or from a page whose name has been bound anew."""
    for method, path in CALLS:
        assert ask(keyless, method, path, host=name).status_code == 403
    monkeypatch.setattr(incoming, "user_of", lambda client, server: os.getuid())
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
    assert with_keys(Config()).api.operations_key == KEY
    own = build_config({"api": {"operations_key": "0123456789abcdef"}}, "here")
    assert with_keys(own).api.operations_key == "0123456789abcdef"
    monkeypatch.setenv("KVRELAY_OPERATIONS_KEY", "short-secret")
    with pytest.raises(ConfigError, match="16 characters") as caught:
        with_keys(Config())
    assert "short-secret" not in str(caught.value)
    monkeypatch.delenv("KVRELAY_OPERATIONS_KEY")
    assert with_keys(Config()).api.operations_key == ""


def test_without_one_a_key_of_operators_is_made_and_kept(tmp_path: Path) -> None:
    config = build_config({"sessions": {"state_dir": str(tmp_path / "state")}}, "here")
    key = made_operations_key(config)
    assert len(key) >= 32
    assert made_operations_key(config) == key
    (file,) = (tmp_path / "state").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def keys_at(tmp_path: Path, tables: dict[str, Any]) -> tuple[Config, list[Path]]:
    made: list[Path] = []
    tables = tables | {"sessions": {"state_dir": str(tmp_path / "state")}}
    return with_keys(build_config(tables, "here"), made.append), made


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.0.2.7", "inference.example"])
def test_at_an_address_that_others_reach_there_is_a_key(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVRELAY_API_KEY", raising=False)
    config, made = keys_at(tmp_path, {"api": {"host": host}})
    assert made == [tmp_path / "state" / API_KEY_FILE]
    assert made[0].read_text().strip() == config.api.key
    assert made[0].stat().st_mode & 0o777 == 0o600
    tenants = load_tenants(config)
    assert tenants.find("another") is tenants.find(None) is None
    tenant = tenants.find(config.api.key)
    assert tenant is not None
    again, made = keys_at(tmp_path, {"api": {"host": host}})
    assert (again.api.key, made) == (config.api.key, [])
    insecure, _ = keys_at(tmp_path, {"api": {"host": host, "insecure": True}})
    assert load_tenants(insecure).find(None) is not None


@pytest.mark.parametrize("insecure", [False, True])
def test_without_keys_another_user_sees_no_sessions_and_lists(
    tokenizer: Tokenizer, insecure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who runs a proxy that lets everybody in, for one; the answers of others are listed there."""
    lists = ("/requests", "/v1/chat/completions")
    with serve(tokenizer, ApiSettings(insecure=insecure)) as served:
        assert {served.http.get(path).status_code for path in lists} == {200}
        monkeypatch.setattr("kvrelay.cluster.api.incoming.user_of", lambda *_: 65534)
        answers = {path: served.http.get(path) for path in lists}
        codes = {answer.status_code for answer in answers.values()}
        assert codes == ({200} if insecure else {403})
        if not insecure:
            assert "set api.key" in answers["/requests"].json()["error"]["message"]
            assert served.http.get("/v1/sessions").status_code == 403
            assert served.http.delete("/v1/sessions/one").status_code == 403
        assert served.http.get("/v1/models").status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_on_the_machine_itself_a_key_is_asked_for_only_where_one_is_set(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVRELAY_API_KEY", raising=False)
    config, _ = keys_at(tmp_path, {"api": {"host": host}})
    assert not load_tenants(config).key_required
    assert not (tmp_path / "state").exists()
    monkeypatch.setenv("KVRELAY_API_KEY", "0123456789abcdef")
    config, _ = keys_at(tmp_path, {"api": {"host": host}})
    assert load_tenants(config).key_required


def test_tenants_have_keys_of_their_own(tmp_path: Path) -> None:
    tenant = [{"name": "red", "keys": ["red-key"]}]
    config, made = keys_at(tmp_path, {"api": {"host": "0.0.0.0"}, "tenant": tenant})
    assert (config.api.key, made) == ("", [])
    assert load_tenants(config).names() == ["red"]
