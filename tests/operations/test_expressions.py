"""Alerts and dashboards: each expression parses, and reads what a served router has.

With Prometheus on this machine, it also gives data there; see `tests.operations.__main__`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.serving.served import Served
from tests.operations.__main__ import check_rules
from tests.operations.expressions import Expression, alert_rules, expressions, missing, selectors
from tests.operations.prometheus import binary
from tests.operations.served import full_server, scrape, use
from tests.structure import ROOT

RULES = {rule["alert"]: rule for rule in alert_rules()}
MAX_FOR_S = 10  # so that an alert fires within 30 s, scraped every 5 s


def test_alerts_have_names_severities_and_runbooks() -> None:
    assert len(RULES) == len(alert_rules()) >= 15
    for name, rule in RULES.items():
        assert re.fullmatch(r"KVRelay([A-Z][a-z]+)+", name)
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        kebab = re.sub(r"(?<!^)(?=[A-Z])", "-", name.removeprefix("KVRelay")).lower()
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{kebab}.md"
        assert int(rule.get("for", "0s").removesuffix("s")) <= MAX_FOR_S


@pytest.mark.parametrize("each", expressions(), ids=lambda each: each.place)
def test_expressions_are_promql(each: Expression) -> None:
    assert selectors(each.text)
    assert selectors(each.unfiltered)


@pytest.mark.skipif(binary("promtool") is None, reason="needs Debian's package prometheus")
def test_alerts_fire_and_clear_when_they_should() -> None:
    assert check_rules()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with full_server(tmp_path_factory.mktemp("served")) as served:
        use(served)
        yield served


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_expressions_read_what_a_served_router_has(served: Served) -> None:
    samples = scrape(served)
    lacking = {
        f"{each.place}: {each.text}": lines
        for each in expressions()
        if (lines := missing(each.text, samples))
    }
    assert not lacking


@pytest.mark.long
@pytest.mark.e2e
def test_runbooks_name_metrics_that_there_are(served: Served) -> None:
    names = {sample.name for sample in scrape(served)}
    for path in (ROOT / "docs/runbooks").glob("*.md"):
        found = set(re.findall(r"\bkvrelay_[a-z_]+[a-z]\b", path.read_text(encoding="utf-8")))
        known = {n for n in found if any(name.startswith(n) for name in names)}
        assert found == known, Path(path).name
