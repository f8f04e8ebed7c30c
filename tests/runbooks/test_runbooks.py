"""Runbooks as pages: every alert has one, in the form that is carried out.

What they do to a real server: `python -m tests.runbooks`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.operations.expressions import alert_rules
from tests.runbooks.book import FOLDER, Book, books, clues
from tests.runbooks.faults import FAULTS, SERVERS


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    alerts = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in alert_rules()}
    assert alerts == {each.alert: f"docs/runbooks/{name}.md" for name, each in books().items()}


def test_a_runbook_is_carried_out_or_says_why_not() -> None:
    known = books()
    assert {name for name, book in known.items() if not book.not_run} == {*FAULTS}
    assert len(FAULTS) >= 15
    assert {server for server, _ in FAULTS.values()} == {*SERVERS}


def test_ten_faults_and_more_are_named_by_log_alert_runbook_and_doctor() -> None:
    known = clues()
    assert len(known) >= 10
    assert {*known} <= {*FAULTS}


def test_nothing_is_mended_before_the_fault_has_been_looked_at(tmp_path: Path) -> None:
    done = tmp_path / "done"
    kinds = ("precondition", "diagnosis", "step", "step", "postcondition")
    book = Book("any", "KVRelayAny", tuple((k, f"echo {k} >> {done}\n") for k in kinds), "")
    seen: list[str] = []
    book.run(os.environ, before_steps=lambda: seen.append(done.read_text()))
    assert seen == ["precondition\ndiagnosis\n"]
    assert done.read_text().split() == [*kinds]


@pytest.mark.parametrize("name", books())
def test_commands_are_bash(name: str) -> None:
    for _, commands in books()[name].blocks:
        assert os.system(f"bash -n <<'END' 2>/dev/null\n{commands}\nEND\n") == 0, commands
    assert os.system(f"bash -n {FOLDER}/functions.sh") == 0
