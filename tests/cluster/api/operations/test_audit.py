"""`kvrelay audit`, and the answer that it shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from kvrelay.cluster.cli.operate import audit
from tests.cluster.api.conftest import AUDIT, Served


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "80")

    def invoke(served: Served, *arguments: str) -> Any:
        return CliRunner().invoke(audit, ["--url", served.url, *arguments])

    return invoke


def found(**changes: Any) -> dict[str, Any]:
    return AUDIT | changes


def test_the_server_answers_audits(served: Served) -> None:
    assert served.http.get("/audit").json() == AUDIT


def test_a_clean_cluster_is_shown_tier_by_tier(served: Served, run: Any) -> None:
    result = run(served)
    assert result.exit_code == 0, result.output
    assert "nothing is left over" in result.output
    rows = [line for line in result.output.splitlines() if "device" in line or "host" in line]
    assert [row.replace("│", " ").split() for row in rows] == [
        ["decode-0", "device", "100", "0", "30", "70", "0", "0"],
        ["host", "400", "0", "31", "369"],
    ]
    assert "disk" not in result.output


def test_what_is_left_over_is_named_and_exits_with_1(served: Served, run: Any) -> None:
    served.audits += [found(clean=False, left=["decode-0: 2 blocks are in use"])] * 2
    result = run(served, "--wait-s", "0")
    assert result.exit_code == 1
    assert "decode-0: 2 blocks are in use" in result.output
    as_json = run(served, "--wait-s", "0", "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.output)["left"] == ["decode-0: 2 blocks are in use"]


def test_what_settles_meanwhile_is_not_left_over(served: Served, run: Any) -> None:
    served.audits += [found(clean=False, left=["decode-0: a move is under way"])] * 2
    result = run(served, "--wait-s", "30")
    assert result.exit_code == 0, result.output
    assert "under way" not in result.output


def test_what_live_requests_hold_is_not_left_over(served: Served, run: Any) -> None:
    served.audits.append(found(live=3, left=["decode-0: 2 blocks are in use"]))
    result = run(served)
    assert result.exit_code == 0
    assert "3 requests are live" in result.output
    assert "2 blocks are in use" not in result.output


def test_a_worker_that_hangs_is_wrong_even_under_load(served: Served, run: Any) -> None:
    served.audits.append(found(clean=False, live=3, wrong=["decode-0 did not answer"]))
    result = run(served, "--wait-s", "0")
    assert result.exit_code == 1
    assert "decode-0 did not answer" in result.output
