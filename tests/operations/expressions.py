"""The expressions of alerts and dashboards: read from their files, and what they ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser
import yaml
from prometheus_client.samples import Sample

from tests.structure import ROOT

ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
DASHBOARDS = ROOT / "deploy/grafana"
# Labels that Prometheus adds to what it scrapes, or a cluster with a name to what it shows.
OF_PROMETHEUS = ("instance", "job", "namespace", "cluster")
_COMPARISON = re.compile(r" (==|!=|>=|<=|>|<) (?!bool)")


@dataclass(frozen=True, slots=True)
class Expression:
    place: str  # "alert NAME", or "dashboard: panel"
    text: str

    @property
    def unfiltered(self) -> str:
        """Rewrites it so that a comparison gives 0 or 1 for each series instead of leaving some
        out."""
        return _COMPARISON.sub(r" \1 bool ", self.text)


@dataclass(frozen=True, slots=True)
class Selector:
    """Series that an expression reads. `labels`: that it groups them by."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]  # label, operator, value
    labels: frozenset[str]

    def takes(self, sample: Sample) -> bool:
        return sample.name == self.name and all(
            self._fits(sample.labels.get(label, ""), operator, value)
            for label, operator, value in self.matchers
        )

    @staticmethod
    def _fits(found: str, operator: str, value: str) -> bool:
        same = re.fullmatch(value, found) is not None if "~" in operator else found == value
        return same is not operator.startswith("!")


def alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[Expression]:
    found = [Expression(f"alert {rule['alert']}", rule["expr"]) for rule in alert_rules()]
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                text = target["expr"].replace("$__rate_interval", "1m")
                found.append(Expression(f"{path.stem}: {panel['title']}", text))
    return found


def selectors(text: str) -> list[Selector]:
    """Raises ValueError where `text` is no PromQL."""
    return list(_walk(promql_parser.parse(text), frozenset()))


def _walk(node: Any, labels: frozenset[str]) -> Iterator[Selector]:
    if isinstance(node, promql_parser.VectorSelector):
        operators = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}
        yield Selector(
            node.name,
            tuple(
                (each.name, operators[str(each.op).rpartition(".")[2]], each.value)
                for each in node.matchers.matchers
                if each.name not in OF_PROMETHEUS
            ),
            labels - set(OF_PROMETHEUS),
        )
        return
    if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
        # What an outer aggregation groups by is still there after this one.
        labels = labels | set(node.modifier.labels)
    children = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector")]
    for child in (*children, *(getattr(node, "args", None) or ())):
        if child is not None:
            yield from _walk(child, labels)


def missing(text: str, samples: Iterable[Sample]) -> list[str]:
    """What `text` reads and `samples`, of a scrape, do not have; a line each."""
    known = list(samples)
    lines = []
    for selector in selectors(text):
        if selector.name == "up":  # Prometheus's own
            continue
        taken = [sample for sample in known if selector.takes(sample)]
        if not taken:
            lines.append(f"no series fits {selector.name} {selector.matchers}")
        for label in selector.labels:
            if taken and not any(label in sample.labels for sample in taken):
                lines.append(f"{selector.name} has no label {label}")
    return lines
