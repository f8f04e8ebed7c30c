"""The Helm chart, rendered and checked against schemas; there is no cluster."""

from __future__ import annotations

import copy
import re
import tomllib
from typing import Any

import jsonschema
import pytest
import yaml

from kvrelay.cluster.config import load_config
from tests.operations.custom_resources import SPECS, pods_of
from tests.operations.expressions import alert_rules
from tests.structure import ROOT

helm = pytest.importorskip("helm_python")
kubernetes = pytest.importorskip("kubernetes_validate")

CHART = ROOT / "deploy/helm/kvrelay"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
VERSIONS = ("1.28", "1.37")
FULL = {
    "nameOverride": "llm",
    "api": {
        "service": {"type": "LoadBalancer", "annotations": {"a/b": "c"}},
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "k", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "extraEnv": [{"name": "UCX_TLS", "value": "rc,sm,self,tcp"}],
    },
    "image": {"tag": "9", "pullSecrets": ["registry"]},
    "modelCache": {"existingClaim": "models"},
    "redis": {"storageClass": "fast"},
    "networkPolicy": {"apiFrom": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]},
    "monitoring": {
        "podMonitor": True,
        "rules": True,
        "dashboards": True,
        "labels": {"release": "prometheus"},
        "runbookBaseUrl": "https://example.test/kvrelay/",
    },
}
GROUP = VALUES["ray"]["workerGroups"][0]
TWO_GROUPS = [{**GROUP, "ipcLock": True}, {**GROUP, "name": "cpu", "nodeSelector": {"a": "b"}}]
FULL["ray"] = {"workerGroups": TWO_GROUPS}
BARE = {
    "secrets": {"existing": "mine"},
    "redis": {"enabled": False},
    "ray": {"autoscaler": {"enabled": False}},
    "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
}
CASES = {"defaults": {}, "full": FULL, "bare": BARE}


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(copy.deepcopy(values), name="release", namespace="models")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in documents if each["kind"] == kind]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", VERSIONS)
def test_documents_are_valid(case: str, version: str) -> None:
    documents = render(CASES[case])
    names = [(each["kind"], each["metadata"]["name"]) for each in documents]
    assert len(set(names)) == len(names)
    for document in documents:
        spec = SPECS.get(f"{document['apiVersion']} {document['kind']}")
        if spec is not None:
            jsonschema.validate(document["spec"], spec)
        else:
            kubernetes.validate(document, version, strict=True)
        for pod in pods_of(document):
            kubernetes.validate(pod, version, strict=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"api": {"ports": 80}},
        {"api": {"port": "8000"}},
        {"ray": {"workerGroups": []}},
        {"ray": {"workerGroups": [{**GROUP, "replicas": -1}]}},
        {"redis": {"image": "valkey"}},
        {"monitoring": {"interval": "soon"}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError):
        render(wrong)


def test_the_chart_has_no_errors_or_warnings() -> None:
    messages = helm.lint(CHART, {}, strict=True)["messages"]
    assert [each for each in messages if each["severity"] > 1] == []


@pytest.mark.parametrize("case", CASES)
def test_what_is_referred_to_is_there(case: str) -> None:
    documents = render(CASES[case])
    text = yaml.safe_dump_all(documents)
    secrets = {each["metadata"]["name"] for each in of_kind(documents, "Secret")} or {"mine"}
    keys = re.findall(r"secretKeyRef:\n +key: (\S+)\n +name: (\S+)", text)
    assert keys
    assert {name for _, name in keys} == secrets
    for secret in of_kind(documents, "Secret"):
        assert {key for key, _ in keys} <= {*secret["data"]}
    maps = {each["metadata"]["name"] for each in of_kind(documents, "ConfigMap")}
    assert set(re.findall(r"configMap:\n +name: (\S+)", text)) <= maps
    pods = [pod for document in documents for pod in pods_of(document)]
    for document in documents:
        for selector in (document.get("spec", {}).get(n) for n in ("selector", "podSelector")):
            wanted = (selector or {}).get("matchLabels", selector or {})
            labels = [pod["metadata"]["labels"] for pod in pods]
            assert any(wanted.items() <= each.items() for each in labels), document["metadata"]
    for pod in pods:
        volumes = {each["name"] for each in pod["spec"].get("volumes", [])} | {"data"}
        for container in pod["spec"]["containers"]:
            assert {each["name"] for each in container.get("volumeMounts", [])} <= volumes


@pytest.mark.parametrize("case", CASES)
def test_pods_are_confined(case: str) -> None:
    for document in render(CASES[case]):
        for pod in pods_of(document):
            assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
            for container in pod["spec"]["containers"]:
                security = container["securityContext"]
                assert security["allowPrivilegeEscalation"] is False
                assert security["capabilities"]["drop"] == ["ALL"]
                assert container["resources"]["limits"]["memory"]


def test_the_api_has_probes_and_more_time_to_end_than_it_drains() -> None:
    (deployment,) = of_kind(render({"api": {"drainSeconds": 90}}), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    paths = {k: v["httpGet"]["path"] for k, v in container.items() if k.endswith("Probe")}
    live, ready = "/health/live", "/health/ready"
    assert paths == {"startupProbe": live, "livenessProbe": live, "readinessProbe": ready}
    assert pod["terminationGracePeriodSeconds"] > 90


def test_rules_and_dashboards_are_those_of_the_repository() -> None:
    documents = render(FULL)
    (rules,) = of_kind(documents, "PrometheusRule")
    found = rules["spec"]["groups"][0]["rules"]
    assert [each["expr"] for each in found] == [each["expr"] for each in alert_rules()]
    prefix = "https://example.test/kvrelay/docs/runbooks/"
    assert all(each["annotations"]["runbook_url"].startswith(prefix) for each in found)
    boards = next(d for d in documents if d["metadata"]["name"] == "llm-dashboards")
    for path in (ROOT / "deploy/grafana").glob("*.json"):
        assert boards["data"][path.name].strip() == path.read_text(encoding="utf-8").strip()
    (monitor,) = of_kind(documents, "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_defaults_fit_the_program(tmp_path: Any) -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"\nray=={VALUES['ray']['version']}\n" in constraints
    assert tomllib.loads(VALUES["config"])["cluster"]
    (tmp_path / "kvrelay.toml").write_text(VALUES["config"])
    config = load_config(tmp_path / "kvrelay.toml", {})
    assert config.cluster.prefill == 1
