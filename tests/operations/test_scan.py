"""A stranger can use nothing of a server that is started as the pages say."""

from __future__ import annotations

import re

import pytest

from tests.chaos.network import what_is_missing
from tests.operations.scan import PAGE, RECIPES, routes, scan_recipe


def test_the_page_has_a_row_for_each_recipe() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert {*re.findall(r"^\* \*\*([a-z ]+)\*\*\. API", text, re.MULTILINE)} == {*RECIPES}
    table = text[text.index("<!-- scan -->") :]
    assert {*re.findall(r"^\| ([a-z ]+) \| (?!who)", table, re.MULTILINE)} >= {*RECIPES}
    assert "OPEN" not in table


def test_routes_for_operators_are_among_those_that_are_tried() -> None:
    tried = {path for _, path in routes()}
    assert {"/status", "/metrics", "/drain", "/restart", "/requests", "/console/events"} <= tried
    assert ("POST", "/v1/chat/completions") in routes()


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing())
@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_that_a_stranger_could_use(recipe: str) -> None:
    found = scan_recipe(recipe)
    assert found.wrong == []
    assert found.listening
