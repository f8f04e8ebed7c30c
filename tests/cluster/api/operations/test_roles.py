"""`POST /workers/{worker}/role`, and `kvrelay role`, which asks for it and waits until it is so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.cli.operate import role
from kvrelay.cluster.orders import SetRole, UnknownWorker
from kvrelay.cluster.status import ClusterStatus
from kvrelay.engine.stats import Role
from tests.cluster.api.conftest import STATUS, Served, cluster_status, serve

UNHEARD = {Role.DECODE: Role.PREFILL, Role.PREFILL: Role.BOTH, Role.BOTH: Role.DECODE}


class Workers:
    """What a deployment says of its workers; `told` are the changes that it was asked for."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.told: list[tuple[str, Role]] = []
        self.roles = {"decode-0": Role.DECODE, "prefill-0": Role.PREFILL}
        self.num_decoding = {"decode-0": [3], "prefill-0": [0]}  # in one status after the other
        self.is_heard = True  # by the router, whose status is shown

    async def order(self, order: SetRole) -> dict[str, Any]:
        if order.worker not in self.roles:
            there = ", ".join(sorted(self.roles)) or "none"
            raise UnknownWorker(f"There is no worker {order.worker!r}; there are: {there}")
        self.told.append((order.worker, order.role))
        was, self.roles[order.worker] = self.roles[order.worker], order.role
        return {"was": was}

    def status(self) -> ClusterStatus:
        workers = []
        for worker, wanted in self.roles.items():
            counts = self.num_decoding[worker]
            count = counts.pop(0) if len(counts) > 1 else counts[0]
            shown = wanted if self.is_heard else UNHEARD[wanted]
            entry = {"worker": worker, "role": shown, "state": "up", "num_decoding": count}
            workers.append(entry)
        return cluster_status(STATUS | {"workers": workers})


@pytest.fixture(scope="module")
def both(tokenizer: Tokenizer) -> Iterator[tuple[Served, Workers]]:
    workers = Workers()
    with serve(tokenizer, ApiSettings(), context={"order": workers.order}) as served:
        served.ctx.operations.status = workers.status
        yield served, workers


@pytest.fixture
def server(both: tuple[Served, Workers]) -> Served:
    return both[0]


@pytest.fixture
def workers(both: tuple[Served, Workers]) -> Workers:
    """As new for each test."""
    both[1].reset()
    return both[1]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "120")

    def invoke(served: Served, *arguments: str) -> Any:
        return CliRunner().invoke(role, ["--url", served.url, *arguments])

    return invoke


def change(served: Served, worker: str, body: Any) -> httpx.Response:
    return served.post(body, f"/workers/{worker}/role")


@pytest.mark.parametrize("wanted", list(Role))
def test_a_change_is_answered_with_the_role_before(
    server: Served, workers: Workers, wanted: Role
) -> None:
    response = change(server, "decode-0", {"role": str(wanted)})
    assert response.status_code == 200
    assert response.json() == {"worker": "decode-0", "role": str(wanted), "was": "decode"}
    assert workers.told == [("decode-0", wanted)]
    assert change(server, "decode-0", {"role": "decode"}).json()["was"] == str(wanted)


def test_a_worker_that_there_is_not_is_answered_with_those_that_there_are(
    server: Served, workers: Workers
) -> None:
    response = change(server, "decode-7", {"role": "prefill"})
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert message == "There is no worker 'decode-7'; there are: decode-0, prefill-0"
    workers.roles.clear()
    message = change(server, "decode-0", {"role": "prefill"}).json()["error"]["message"]
    assert message == "There is no worker 'decode-0'; there are: none"
    assert workers.told == []


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (
            {"role": "router"},
            "role",
            "'role': expected one of ['prefill', 'decode', 'both'], got 'router'",
        ),
        ({"role": "DECODE"}, "role", "got 'DECODE'"),
        ({"role": ""}, "role", "got ''"),
        ({"role": 3}, "role", "got 3"),
        ({"role": None}, "role", "got None"),
        ({}, "role", "'role' is missing"),
        ([], None, "Input should be an object"),
        (b"", None, "The body is not valid JSON"),
        (b"prefill", None, "The body is not valid JSON"),
    ],
)
def test_what_is_no_role_is_refused_and_changes_nothing(
    server: Served, workers: Workers, body: Any, param: str | None, says: str
) -> None:
    response = change(server, "decode-0", body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]
    assert workers.told == []


def test_the_command_waits_until_what_decodes_there_has_moved(
    server: Served, workers: Workers, run: Any
) -> None:
    workers.num_decoding["decode-0"] = [3, 3, 1, 0]
    result = run(server, "decode-0", "prefill")
    assert result.exit_code == 0, result.output
    (line,) = result.output.splitlines()
    assert line.startswith("decode-0: prefill (was decode), after ")
    assert workers.told == [("decode-0", Role.PREFILL)]
    assert workers.num_decoding["decode-0"] == [0]


def test_the_command_says_what_found_no_room_elsewhere(
    server: Served, workers: Workers, run: Any
) -> None:
    result = run(server, "decode-0", "prefill", "--wait-s", "0.2")
    assert result.exit_code == 0, result.output
    first, second = result.output.splitlines()
    assert first.startswith("decode-0: prefill (was decode), after ")
    assert second == "3 requests found no room elsewhere, and finish there"


@pytest.mark.parametrize("wanted", [Role.DECODE, Role.BOTH])
def test_what_may_go_on_decoding_is_not_waited_for(
    server: Served, workers: Workers, run: Any, wanted: Role
) -> None:
    result = run(server, "decode-0", str(wanted), "--wait-s", "60")
    assert result.exit_code == 0, result.output
    was = "was that already" if wanted is Role.DECODE else "was decode"
    (line,) = result.output.splitlines()
    assert line.startswith(f"decode-0: {wanted} ({was}), after ")


def test_a_router_that_does_not_hear_of_it_is_an_error(
    server: Served, workers: Workers, run: Any
) -> None:
    workers.is_heard = False
    result = run(server, "decode-0", "both", "--wait-s", "0.2")
    assert result.exit_code == 1
    assert "the router does not know of it after 0." in result.output


def test_the_command_says_what_was_wrong_with_it(
    server: Served, workers: Workers, run: Any
) -> None:
    unknown = run(server, "decode-7", "prefill")
    assert unknown.exit_code == 1
    assert "There is no worker 'decode-7'; there are: decode-0, prefill-0" in unknown.output
    odd = run(server, "a/b c?", "prefill")
    assert odd.exit_code == 1
    assert "Error: " in odd.output
    no_role = run(server, "decode-0", "router")
    assert no_role.exit_code == 2
    assert "'prefill', 'decode', 'both'" in no_role.output
    assert workers.told == []
