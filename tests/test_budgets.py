"""Rooms have a budget of lines of code: growth is paid for, or said."""

from __future__ import annotations

import tokenize
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.structure import ROOT

BUDGETS: dict[str, int] = tomllib.loads((ROOT / "tests/budgets.toml").read_text())["lines"]
SLACK = 0.02  # part of its budget, that a room may lack
_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_NOT_CODE |= {tokenize.ENDMARKER, tokenize.ENCODING}
_BEFORE_DOCSTRING = {tokenize.ENCODING, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


@cache
def code_lines(path: Path) -> int:
    """Lines with code on them: comments, docstrings and blank lines are none."""
    lines: set[int] = set()
    before = tokenize.ENCODING
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.STRING and before in _BEFORE_DOCSTRING:
                before = tokenize.NEWLINE
            elif token.type not in (tokenize.COMMENT, tokenize.NL):
                before = token.type
                if token.type not in _NOT_CODE:
                    lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def room_of(path: Path) -> str:
    """The deepest folder that has a budget of its own."""
    above = (parent.as_posix() for parent in path.relative_to(ROOT).parents)
    return next((each for each in above if each in BUDGETS), "")


@cache
def counted() -> dict[str, int]:
    found = dict.fromkeys(BUDGETS, 0)
    for top in sorted({room.split("/")[0] for room in BUDGETS}):
        for path in sorted((ROOT / top).rglob("*.py")):
            found[room_of(path)] += code_lines(path)
    return found


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_keeps_to_its_budget(room: str) -> None:
    lines, budget = counted()[room], BUDGETS[room]
    assert lines <= budget, f"{room} has {lines} lines of code, {budget} in tests/budgets.toml"
    assert lines >= budget * (1 - SLACK), f"{room} has {lines} lines: lower its budget to that"


def test_what_is_code_is_told_from_what_is_not(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(
        '"""About."""\n\nx = 1  # one\n\n\ndef f() -> str:\n    """Says."""\n    # why\n'
        '    return """a\n    b"""\n'
    )
    assert code_lines(path) == 4
