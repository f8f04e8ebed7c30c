"""docs/kubernetes.md: its values are taken, and what its commands name is in the chart."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.structure import ROOT

pytest.importorskip("helm_python")

from tests.operations.test_chart import VALUES, of_kind, render

PAGE = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    (values,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return render({**yaml.safe_load(values), "nameOverride": "llm"})


def test_what_commands_name_is_made(documents: list[dict[str, Any]]) -> None:
    made = {(each["kind"].lower(), each["metadata"]["name"]) for each in documents}
    named = {*re.findall(r"(deployment|service)/([a-z-]+)", PAGE)}
    assert named == {("deployment", "llm-api"), ("service", "llm")}
    assert named <= made
    (secret,) = of_kind(documents, "Secret")
    assert re.findall(r"get secret (\S+) -o jsonpath='{\.data\.(\S+)}'", PAGE) == [
        (secret["metadata"]["name"], "api-key")
    ]
    assert "api-key" in secret["data"]
    (claim,) = of_kind(documents, "PersistentVolumeClaim")
    (redis,) = of_kind(documents, "StatefulSet")
    templates = [each["metadata"]["name"] for each in redis["spec"]["volumeClaimTemplates"]]
    claims = [claim["metadata"]["name"], *(f"{t}-{redis['metadata']['name']}-0" for t in templates)]
    assert f"delete pvc {' '.join(claims)} " in PAGE


def test_the_image_is_the_one_that_is_pushed(documents: list[dict[str, Any]]) -> None:
    (pushed,) = re.findall(r"podman push (\S+)", PAGE)
    assert f"image: {pushed}\n" in yaml.safe_dump_all(documents)


def test_values_to_choose_exist() -> None:
    rows = re.findall(r"^\| `([\w.*]+)` \|", PAGE, re.MULTILINE)
    assert len(rows) > 10
    group = VALUES["ray"]["workerGroups"][0]
    for row in rows:
        found: Any = VALUES
        for part in row.split("."):
            if found is VALUES and part in group:
                found = group
            if part == "*" or found is VALUES["config"]:
                break  # settings of the server, which the chart does not list
            assert part in found, row
            found = found[part]
