"""`kvrelay update`, by what the server says of the weights."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from click.testing import CliRunner

from kvrelay.cluster.cli import weights as command

AFTER = {"number": 2, "state": "done", "current": "v1", "pause_s": 0.01}
CASES = {
    "back": ([AFTER], 0, "has the weights v1"),  # fields that say nothing are left out
    "refused": ([{**AFTER, "refused": {"number": 2, "name": "", "why": "no"}}], 1, "refused: no"),
    "refused before": ([{**AFTER, "refused": {"number": 1, "name": "", "why": "no"}}], 0, "v1"),
    "of another": ([{**AFTER, "refused": {"number": 2, "name": "x", "why": "no"}}], 0, "v1"),
    "stopped": ([{**AFTER, "state": "stopped", "why": "decode-0: no"}], 1, "stays as it was"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_update_ends_with_what_came_of_it(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    after, code, text = CASES[case]
    shown = iter([[{"number": 1, "state": "done", "current": "v2"}], after])
    answers: dict[str, Any] = {"model": "m", "number": 2}
    monkeypatch.setattr(command, "connected", lambda *_: nullcontext(None))
    monkeypatch.setattr(command, "ask_json", lambda *_, **__: answers)
    monkeypatch.setattr(command, "get_json", lambda *_: {"data": next(shown)})
    found = CliRunner().invoke(command.update, ["m", "--back"], catch_exceptions=False)
    assert found.exit_code == code, found.output
    assert text in found.output
