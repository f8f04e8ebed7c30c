"""Runbooks as pages: every alert has one, in the form that is carried out.

What they do to a real server: `python -m tests.runbooks`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.operations.expressions import alert_rules
from tests.runbooks.book import FOLDER, HOLDS_WITHIN_S, KINDS, Book, Broken, books, read
from tests.runbooks.faults import FAULTS, SERVERS

GOOD = """# X

This runbook says what to do when `KVRelayX` fires.

## Meaning

## Impact

## Diagnosis

<!-- precondition -->
```bash
test -e "$FILE"
```

## Mitigation

<!-- step -->
```bash
rm "$FILE"
```

## Done when

<!-- postcondition -->
```bash
! test -e "$FILE"
```
"""


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    alerts = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in alert_rules()}
    assert alerts == {each.alert: f"docs/runbooks/{name}.md" for name, each in books().items()}


def test_a_runbook_is_carried_out_or_says_why_not() -> None:
    known = books()
    assert {name for name, book in known.items() if not book.not_run} == {*FAULTS}
    assert len(FAULTS) >= 15
    assert {server for server, _ in FAULTS.values()} == {*SERVERS}


@pytest.mark.parametrize("name", books())
def test_commands_are_bash(name: str) -> None:
    for _, commands in books()[name].blocks:
        assert os.system(f"bash -n <<'END' 2>/dev/null\n{commands}\nEND\n") == 0, commands
    assert os.system(f"bash -n {FOLDER}/functions.sh") == 0


def book(folder: Path, text: str) -> Book:
    path = folder / "x.md"
    path.write_text(text)
    return read(path)


def test_a_runbook_that_works_is_carried_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    book(tmp_path, GOOD).run({**os.environ, "FILE": str(tmp_path / "file")})
    assert not (tmp_path / "file").exists()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        monkeypatch.setitem(HOLDS_WITHIN_S, kind, 0.0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("was", ['rm "$FILE"', 'test -e "$FILE"\n```\n\n## Mit'])
def test_a_broken_command_fails_it(tmp_path: Path, was: str) -> None:
    (tmp_path / "file").touch()
    broken = book(tmp_path, GOOD.replace(was, was.replace('"$FILE"', '"$FILE.not"')))
    with pytest.raises(Broken, match="exit code 1"):
        broken.run({**os.environ, "FILE": str(tmp_path / "file")})


@pytest.mark.usefixtures("impatient")
def test_a_step_that_does_not_help_fails_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    idle = book(tmp_path, GOOD.replace('rm "$FILE"', "true"))
    with pytest.raises(Broken, match="postcondition"):
        idle.run({**os.environ, "FILE": str(tmp_path / "file")})


@pytest.mark.parametrize(
    "wrong",
    [
        GOOD.replace("<!-- step -->\n", ""),
        GOOD.replace("## Impact\n", ""),
        GOOD.replace("KVRelayX", "Other"),
        GOOD.replace("<!-- postcondition -->", "<!-- step -->"),
        GOOD.replace("<!-- precondition -->", "<!-- prediction -->"),
    ],
)
def test_another_form_is_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ValueError):
        book(tmp_path, wrong)
