"""The stand-in does what Kubernetes would: shown on small pods, so that what it plays counts."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos.network import what_is_missing
from tests.operations.kubernetes.cluster import Cluster
from tests.operations.kubernetes.kuberay import pod_template
from tests.operations.kubernetes.pod import Image
from tests.operations.test_chart import VALUES, of_kind, render

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(what_is_missing() != "", reason=f"needs {what_is_missing()}"),
]

# Says what it finds, by path; it drains for half a second.
SERVER = """
import http.server, os, signal, sys, threading, time, pathlib
def end(*_):
    pathlib.Path("/shared/ended").write_text("by SIGTERM")
    threading.Thread(target=lambda: (time.sleep(0.5), os._exit(0))).start()
signal.signal(signal.SIGTERM, end)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/exit":
            os._exit(3)
        there = self.path == "/" or pathlib.Path(self.path).exists()
        self.send_response(200 if there else 503)
        self.end_headers()
        told = [os.environ["TOLD"], os.environ["HOSTNAME"], str(os.getuid()), str(os.getpid())]
        text = " ".join(told) if self.path == "/" else ""
        text = pathlib.Path(self.path).read_text() if there and not text else text
        self.wfile.write(text.encode())
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
"""
SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
LABELS = {"app.kubernetes.io/component": "web"}


def documents(
    told: str = "one", replicas: int = 1, strategy: str = "Recreate", pre_stop_s: float = 0.0
) -> Any:
    ready = {"httpGet": {"path": "/shared/ready", "port": "http"}, "periodSeconds": 1}
    live = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1}
    mounts = [{"name": "shared", "mountPath": "/shared"}, {"name": "set", "mountPath": "/etc/set"}]
    key = {"valueFrom": {"secretKeyRef": {"name": "hidden", "key": "word"}}}
    common = {"securityContext": SECURITY, "volumeMounts": mounts, "resources": {}}
    main = {
        "name": "web",
        "command": ["serve"],
        "env": [{"name": "WORD", **key}, {"name": "TOLD", "value": f"{told}-$(WORD)"}],
        "ports": [{"name": "http", "containerPort": 8000}],
        "startupProbe": live,
        "readinessProbe": ready,
        "livenessProbe": live,
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(pre_stop_s)]}}},
        **common,
    }
    script = "echo yes > /shared/ready"
    before = {"name": "before", "command": ["sh", "-c"], "args": [script], **common}
    beside = {
        "name": "beside",
        "command": ["sh", "-c", "exec sleep 600"],
        "restartPolicy": "Always",
        "startupProbe": {"exec": {"command": ["test", "-f", "/shared/ready"]}},
        **common,
    }
    pod = {
        "initContainers": [before, beside],
        "containers": [main],
        "securityContext": {"runAsUser": 10001},
        "terminationGracePeriodSeconds": 10,
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": "kept"}},
            {"name": "set", "configMap": {"name": "settings"}},
        ],
    }
    template = {"metadata": {"labels": LABELS}, "spec": pod}
    return [
        document(
            "Deployment",
            "web",
            spec={"replicas": replicas, "strategy": {"type": strategy}, "template": template},
        ),
        document(
            "Service",
            "web",
            spec={
                "selector": LABELS,
                "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
            },
        ),
        document("ConfigMap", "settings", data={"a": "alpha"}),
        document("Secret", "hidden", data={"word": base64.b64encode(b"secret").decode()}),
        document(
            "PodDisruptionBudget",
            "web",
            spec={"selector": {"matchLabels": LABELS}, "minAvailable": 1},
        ),
    ]


def document(kind: str, name: str, **rest: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name}, **rest}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "serve.py").write_text(SERVER)
    (tmp_path / "serve.py").chmod(0o644)
    commands = {"serve": f"exec {sys.executable} -c '{SERVER}'"}
    with Cluster(tmp_path, Image(commands, {}), "models") as cluster:
        cluster.one_by_one_s = 0
        try:
            yield cluster
        finally:
            print(cluster.shown())


def settle(cluster: Cluster) -> None:
    cluster.wait(cluster.is_settled, 60, "not settled")


def say(cluster: Cluster, path: str = "/") -> str:
    return httpx.get(f"http://{cluster.address('web')}{path}", timeout=10).text


@pytest.mark.slow
def test_a_pod_from_its_start_to_its_end(cluster: Cluster) -> None:
    cluster.apply(documents())
    settle(cluster)
    (pod,) = cluster.of("web")
    told, host, user, pid = say(cluster).split()
    assert (told, host, user, pid) == ("one-secret", pod.name, "10001", "1")
    assert say(cluster, "/etc/set/a") == "alpha"
    with pytest.raises(httpx.HTTPError):
        say(cluster, "/exit")
    cluster.wait(lambda: pod.containers[-1].restarts == 1, 20, "it is not started again")
    settle(cluster)
    cluster.apply(documents("two"))
    cluster.wait(lambda: cluster.of("web")[:1] != [pod] and cluster.is_settled(), 60, "not changed")
    assert say(cluster).split()[0] == "two-secret"
    assert say(cluster, "/shared/ended") == "by SIGTERM", "in a claim, which outlives pods"
    cluster.apply([])
    cluster.wait(lambda: not cluster.pods, 20, "it is not gone")
    with pytest.raises(httpx.ConnectError):
        say(cluster)


@pytest.mark.long
@pytest.mark.parametrize("pre_stop_s", [0.0, 4.0])
def test_a_rolling_update_refuses_whom_a_pod_does_not_wait_for(
    cluster: Cluster, pre_stop_s: float
) -> None:
    """Proxies send to a pod for a while after it was told to end."""
    cluster.apply(documents("one", 2, "RollingUpdate", pre_stop_s))
    settle(cluster)
    cluster.apply(documents("two", 2, "RollingUpdate", pre_stop_s))
    heard, refused = set(), 0
    deadline = time.monotonic() + 60
    while not (cluster.is_settled() and len(cluster.gone) == 2):
        try:
            heard.add(say(cluster).split()[0])
        except httpx.HTTPError:
            refused += 1
        assert time.monotonic() < deadline, cluster.shown()
    assert heard | {say(cluster).split()[0]} == {"one-secret", "two-secret"}
    assert (refused > 0) is (pre_stop_s == 0)


@pytest.mark.long
def test_a_budget_holds_a_drain(cluster: Cluster) -> None:
    cluster.apply(documents("one", 2, "RollingUpdate"))
    settle(cluster)
    for pod in cluster.pods:
        pod.node = "node-0"
    cluster.drain("node-0", 60)
    evicted = [e for p in cluster.gone for e in p.events if "is evicted" in e]
    assert len(evicted) == 2
    first, second = (float(event.split()[0]) for event in sorted(evicted))
    ready = [float(e.split()[0]) for p in cluster.pods for e in p.events if "is started" in e]
    assert first < min(ready) < second, "the second waits for the successor of the first"


@pytest.mark.slow
def test_a_probe_that_fails_ends_its_container(cluster: Cluster) -> None:
    wanted = documents()
    (main,) = wanted[0]["spec"]["template"]["spec"]["containers"]
    main["livenessProbe"] = {"exec": {"command": ["test", "!", "-e", "/shared/sick"]}}
    main["livenessProbe"] |= {"periodSeconds": 1, "failureThreshold": 2}
    cluster.apply(wanted)
    settle(cluster)
    (pod,) = cluster.of("web")
    (cluster.objects.folder / "claims/kept/sick").touch()
    cluster.wait(lambda: pod.containers[-1].restarts >= 1, 30, "it goes on")
    (cluster.objects.folder / "claims/kept/ready").unlink()
    cluster.wait(lambda: not pod.is_ready, 30, "it is ready")


def test_rays_pods_are_as_kuberay_makes_them() -> None:
    (cluster,) = of_kind(render({}), "RayCluster")
    head = pod_template(cluster, None, "models")["spec"]
    worker = pod_template(cluster, cluster["spec"]["workerGroupSpecs"][0], "models")["spec"]
    for pod, container in ((head, head["containers"][0]), (worker, worker["containers"][0])):
        assert pod["restartPolicy"] == "Never", "with the autoscaler's second version"
        assert container["readinessProbe"]["httpGet"] == {"path": "/api/healthz", "port": 52365}
        names = [each["name"] for each in container["env"]]
        assert len(set(names)) == len(names)
        assert {"RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_CLOUD_INSTANCE_ID"} <= set(names)
    (start,) = worker["containers"][0]["args"]
    gpus = VALUES["ray"]["workerGroups"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert "--address=release-head-svc.models.svc.cluster.local:6379" in start
    assert f"--num-gpus={gpus}" in start
    assert f"--memory={128 << 30}" in start
    assert [each["name"] for each in worker["initContainers"]] == ["wait-gcs-ready"]
    (start,) = head["containers"][0]["args"]
    assert "ray start --head" in start
    assert "--redis-password=$REDIS_PASSWORD" in start
