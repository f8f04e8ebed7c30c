"""What is for operators: who has their key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

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
from kvrelay.engine.settings import OPERATIONS_KEY_FILE
from kvrelay.router.messages import SessionReply
from tests.cluster.api.conftest import Served, found_by_commands, serve
from tests.cluster.api.http.unauthenticated import attack

KEY = "ab" * 32
CALLS = [
    ("GET", "/status"),
    ("GET", "/metrics"),
    ("GET", "/audit"),
    ("POST", "/workers/decode-0/role"),
]


def server(tokenizer: Tokenizer, **settings: Any) -> Any:
    tenants = Tenants.of((TenantEntry("red", keys=("red-key",)),), b"a secret")
    context = {"tenants": tenants}
    return serve(tokenizer, ApiSettings(**settings), context=context)


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


class Orders(list[Any]):
    """What a server was asked to do, by whoever came through."""

    async def take(self, order: Any) -> dict[str, Any]:
        self.append(order)
        return {}


def test_who_has_no_key_operates_nothing_however_its_sockets_end(tokenizer: Tokenizer) -> None:
    """Where a call comes from does not count: neither its address nor its user."""
    orders = Orders()
    with serve(tokenizer, ApiSettings(), context={"order": orders.take}) as served:
        assert attack(served.port, 1) == []
        assert served.http.get("/status").status_code == 200  # all calls before it are over
        assert orders == []
        assert served.http.post("/drain").status_code == 202
        assert len(orders) == 1


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_with_a_key_it_is_the_key_that_counts(keyed: Served, method: str, path: str) -> None:
    for wrong in ("", "Bearer", "Bearer red-key", f"Bearer {KEY}x", f"Basic {KEY}"):
        headers = {"authorization": wrong} if wrong else {}
        response = ask(keyed, method, path, **headers)
        assert response.status_code == 401
        assert KEY not in response.text
    right = {"authorization": f"Bearer {KEY}"}
    assert ask(keyed, method, path, "192.0.2.7", **right).status_code == 200


def test_health_is_for_load_balancers(keyed: Served) -> None:
    for path in ("/health", "/ping", "/version"):
        assert ask(keyed, "GET", path, "192.0.2.7").status_code == 200


def test_an_operators_key_generates_nothing(keyed: Served) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    answer = keyed.http.get("/v1/models", headers=headers)
    assert answer.status_code == 401
    assert "key of operators" in answer.json()["error"]["message"]


def test_a_command_finds_the_key_of_a_server_of_its_own_user(
    keyed: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By any name of the address at which that listens, and at no other."""
    monkeypatch.delenv("KVRELAY_OPERATIONS_KEY", raising=False)
    for key, host, is_found in (
        (KEY, "127.0.0.1", True),
        (KEY, "localhost", True),
        ("0" * 64, "127.0.0.1", False),  # another start's
    ):
        with found_by_commands(keyed.port, key) as state:
            result = CliRunner().invoke(status, ["--url", f"http://{host}:{keyed.port}"])
            assert (result.exit_code == 0) == is_found, result.output
            (state / OPERATIONS_KEY_FILE).chmod(0o644)  # anybody may have read it
            result = CliRunner().invoke(status, ["--url", keyed.url])
            assert result.exit_code == 1
            assert "no server that this user has started here" in " ".join(result.output.split())


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
def test_without_keys_sessions_and_lists_are_for_operators(
    tokenizer: Tokenizer, insecure: bool
) -> None:
    lists = ("/requests", "/v1/files", "/v1/batches", "/v1/sessions")
    with serve(tokenizer, ApiSettings(insecure=insecure)) as served:
        served.router.answer_command = lambda command: SessionReply(command.command_id)
        assert {served.http.get(path).status_code for path in lists} == {200}
        with httpx.Client(base_url=served.url) as others:
            answers = {path: others.get(path) for path in lists}
            codes = {answer.status_code for answer in answers.values()}
            assert codes == ({200} if insecure else {401})
            if not insecure:
                assert "set api.key" in answers["/requests"].json()["error"]["message"]
                assert others.delete("/v1/sessions/one").status_code == 401
            assert others.get("/v1/models").status_code == 200


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
