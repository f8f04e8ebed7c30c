"""A server that drains or restarts: what it says, and what it does not take any more."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.cli.operate import drain, restart
from kvrelay.cluster.orders import ControllerAway, Order, Service, ServiceRequest
from tests.cluster.api.conftest import MODEL, Served, serve

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


class Operated:
    """What the server was asked, and how it is."""

    def __init__(self) -> None:
        self.operations: Any = SimpleNamespace()
        self.orders: list[Service] = []

    async def order(self, order: Order) -> dict[str, Any]:
        if not isinstance(order, ServiceRequest):
            raise ControllerAway
        self.orders.append(order.service)
        return {}


@pytest.fixture(scope="module")
def operated() -> Operated:
    return Operated()


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer, operated: Operated) -> Iterator[Served]:
    with serve(tokenizer, ApiSettings(), context={"order": operated.order}) as running:
        operated.operations = running.ctx.operations
        yield running


@pytest.fixture(autouse=True)
def as_new(operated: Operated) -> None:
    operated.operations.draining = False
    operated.orders.clear()


def test_ready_is_not_live(server: Served, operated: Operated) -> None:
    assert server.http.get("/health/ready").json()["status"] == "ready"
    operated.operations.draining = True
    ready = server.http.get("/health/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "draining")
    assert server.http.get("/health/live").status_code == 200


def test_a_model_may_be_asked_for_by_its_name(server: Served) -> None:
    assert server.http.get("/health/ready", params={"model": MODEL}).json()["status"] == "ready"
    for path in ("/health", "/health/ready"):
        other = server.http.get(path, params={"model": "gpt-5"})
        said = "no model of this server is called 'gpt-5'"
        assert (other.status_code, other.json()["error"]["message"]) == (404, said)


def test_a_server_without_workers_is_not_ready(server: Served) -> None:
    server.health[:] = [False, {"workers_up": 0}]
    ready = server.http.get("/health/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "unavailable", "workers_up": 0})
    server.health[:] = [True, {}]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_a_draining_server_takes_no_new_request(
    server: Served, operated: Operated, path: str
) -> None:
    operated.operations.draining = True
    answer = server.post(ASK | {"prompt": "Hi", "max_tokens": 3}, path)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "takes no new requests" in answer.text
    operated.operations.draining = False
    assert server.post(ASK).status_code == 200


def test_operators_begin_a_drain_and_a_restart(server: Served, operated: Operated) -> None:
    for service in Service:
        answer = server.http.post(f"/{service}")
        assert (answer.status_code, answer.json()) == (202, {"begun": str(service)})
    assert operated.orders == list(Service)


def test_the_command_drains(server: Served, operated: Operated) -> None:
    result = CliRunner().invoke(drain, ["--url", server.url])
    assert (result.exit_code, operated.orders) == (0, [Service.DRAIN]), result.output
    assert "takes no new requests" in result.output


def test_the_command_waits_for_the_restart_and_says_if_it_is_not_over(
    server: Served, operated: Operated
) -> None:
    waiting = CliRunner().invoke(restart, ["--url", server.url, "--wait-s", "0"])
    assert (waiting.exit_code, operated.orders) == (1, [Service.RESTART])
    assert "not over after 0 s" in waiting.output


def test_without_a_controller_what_only_it_can_do_is_refused_for_now(server: Served) -> None:
    answer = server.http.post("/workers/decode-0/role", json={"role": "both"})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "controller_away"
    assert answer.headers["retry-after"] == "2"


@pytest.mark.parametrize("path", ["/drain", "/restart", "/rollback", "/status"])
def test_a_page_of_another_site_operates_nothing(
    server: Served, operated: Operated, path: str
) -> None:
    method = "GET" if path == "/status" else "POST"
    answer = server.http.request(method, path, headers={"sec-fetch-site": "cross-site"})
    assert (answer.status_code, operated.orders) == (403, [])
    assert "Pages of another site" in answer.json()["error"]["message"]
