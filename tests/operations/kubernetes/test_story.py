"""The chart, played: installed, used, upgraded, drained and hit, under requests. Takes minutes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from tests.chaos.network import what_is_missing
from tests.e2e.serving import MODEL
from tests.operations.kubernetes.cluster import Cluster, image_of
from tests.operations.kubernetes.pod import Pod
from tests.operations.test_chart import render
from tests.support.adapters import write_adapter

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(what_is_missing() != "", reason=f"needs {what_is_missing()}"),
]

NAME = "release"
UP_S = 600.0  # five pods with Ray and the model, on two cores
GROUP = {
    "name": "cpu",
    "replicas": 2,
    "minReplicas": 2,
    "maxReplicas": 3,
    "resources": {"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {"memory": "4Gi"}},
    "sharedMemory": "512Mi",
}
VALUES: dict[str, Any] = {
    "ray": {"workerGroups": [GROUP]},
    "modelCache": {"existingClaim": "models"},
    "api": {"drainSeconds": 10},
    "config": {
        "cluster": {"prefill": 1, "decode": 1},
        "engine": {"num_blocks": 256, "max_model_len": 2048},
    },
}
ROLLED: dict[str, Any] = {
    "api": {"drainSeconds": 20, "replicas": 2},
    "ray": {"workerGroups": [GROUP | {"maxReplicas": 2, "diskTier": {"storage": "8Gi"}}]},
    "modelCache": {"existingClaim": "models"},
    "extraVolumes": [{"name": "adapters", "persistentVolumeClaim": {"claimName": "adapters"}}],
    "extraVolumeMounts": [{"name": "adapters", "mountPath": "/adapters", "readOnly": True}],
    "config": {
        "models": [{"name": "small", "checkpoint": MODEL, "aliases": [MODEL]}],
        "adapters": [{"name": "tuned", "path": "/adapters/tuned", "model": "small"}],
        "engine": {"num_blocks": 256, "max_model_len": 2048},
        "tiers": {"disk_gib": 0.5, "host_gib": 0.25, "disk_after_s": 1.0},
    },
}
LONG = " ".join(f"Keeper {number} saw a whale." for number in range(60))


@pytest.fixture(scope="session")
def ray_default() -> Path | None:
    """What `ray[default]` asks for beside Ray, which KubeRay's probes need; None: it is there.
    Installed once per machine, into the user's cache."""
    if subprocess.run([sys.executable, "-c", "import ray.dashboard.optional_deps"]).returncode == 0:
        return None
    folder = Path.home() / ".cache" / "kvrelay-tests" / f"ray-default-{version('ray')}"
    if not folder.is_dir():
        wanted = [
            found[1]
            for each in requires("ray") or ()
            if (found := re.match(r"([\w-]+).*extra == .default.", each))
        ]
        new = folder.with_suffix(".new")
        constraints = Path(__file__).parents[3] / "constraints.txt"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(new)]
        subprocess.run([*command, "-c", str(constraints), *wanted], check=True, timeout=300)
        subprocess.run(["chmod", "-R", "a+rX", str(new)], check=True)
        new.replace(folder)
    return folder


class Client:
    """Asks by the Service, as one whose requests are not tried again."""

    def __init__(self, cluster: Cluster) -> None:
        self.url = f"http://{cluster.address(NAME)}:8000"
        secret = cluster.objects.secrets[NAME]
        self._keys = secret["api-key"], secret["operations-key"]

    def post(self, path: str, **body: Any) -> Any:
        headers = {"authorization": f"Bearer {self._keys[0]}"}
        body = {"model": MODEL, "temperature": 0, **body}
        answer = httpx.post(self.url + path, json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path: str, as_operator: bool = False) -> Any:
        headers = {"authorization": f"Bearer {self._keys[as_operator]}"}
        answer = httpx.get(self.url + path, headers=headers, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ask(
        self,
        question: str = "What is the capital of France?",
        tokens: int = 12,
        model: str = MODEL,
    ) -> str:
        said = [{"role": "user", "content": question}]
        answer = self.post("/v1/chat/completions", messages=said, max_tokens=tokens, model=model)
        return str(answer["choices"][0]["message"]["content"])

    def workers(self) -> dict[str, tuple[int, int]]:
        """Process and epoch of each worker."""
        state = self.status()["workers"]
        return {w["worker"]: (w["pid"], w["epoch"]) for w in state if w["state"] == "up"}

    def status(self) -> Any:
        return self.get("/status", as_operator=True)

    def has_workers(self, count: int) -> bool:
        try:
            return len(self.workers()) == count
        except httpx.HTTPError:
            return False

    def cached(self) -> float:
        """The share of a conversation's prompt that its session still has."""
        usage = self.post("/v1/completions", prompt=LONG, max_tokens=1, prompt_cache_key="c")
        usage = usage["usage"]
        return float(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])


class Traffic:
    """One request after the other, from `with` to its end; none is tried again. `refused`: no pod
    was behind the Service, so that nothing took them."""

    def __init__(self, client: Client, model: str = MODEL) -> None:
        self._client, self._model = client, model
        self.failed: list[str] = []
        self.answered = self.refused = 0
        self.longest_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            try:
                self._client.ask("Count to three.", 8, self._model)
            except httpx.ConnectError:
                self.refused += 1
                time.sleep(0.1)
            except Exception as error:
                self.failed.append(repr(error)[:300])
            else:
                self.answered += 1
                self.longest_s = max(self.longest_s, time.monotonic() - last)
                last = time.monotonic()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(150)

    def assert_none_failed(self, what: str, may_refuse: bool) -> None:
        counts = f"{self.answered} answered, {self.refused} refused"
        print(f"{what}: {counts}, longest silence {self.longest_s:.1f} s")
        assert not self.failed, (what, self.failed)
        assert self.answered
        assert may_refuse or not self.refused, what


@pytest.fixture
def cluster(tmp_path: Path, ray_default: Path | None, smollm2_dir: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, image_of(ray_default), "models") as cluster:
        models = cluster.objects.claim("models", 10001)
        shutil.copytree(smollm2_dir, models / "kvrelay" / "models" / smollm2_dir.name)
        subprocess.run(["chown", "-R", "10001:10001", str(models)], check=True)
        try:
            yield cluster
        finally:
            print(cluster.shown())


def assert_probes_are_green(cluster: Cluster) -> None:
    for pod in cluster.pods:
        wrong = [event for event in pod.events if "probe has failed" in event]
        assert not wrong, wrong
        assert all(results[-1] for results in pod.probes.values()), pod.probes
        for container in pod.containers:
            kinds = {kind for name, kind in pod.probes if name == container.name}
            assert kinds >= {k[:-5] for k in container.spec if k.endswith("Probe")} - {"liveness"}


def test_a_release_through_its_upgrade_a_drain_and_the_death_of_a_pod(cluster: Cluster) -> None:
    def settle(why: str) -> None:
        print(f"{why}: {cluster.wait(cluster.is_settled, UP_S, why):.0f} s")

    cluster.apply(render(VALUES))
    settle("installed")
    assert_probes_are_green(cluster)
    client = Client(cluster)
    assert "Paris" in client.ask()
    first = client.post("/v1/responses", input="My name is Ada.", max_output_tokens=8)
    client.cached()
    assert client.cached() >= 0.95

    # A changed value: the API's pod is replaced, the workers' go on.
    before, old_pods = client.workers(), {pod.name for pod in cluster.of("worker")}
    changed = VALUES["config"] | {"api": {"request_timeout_s": 500.0}}
    with Traffic(client) as traffic:
        cluster.apply(render(VALUES | {"config": changed}))
        time.sleep(1)
        settle("upgraded")
        cluster.wait(lambda: client.has_workers(2), 60, "workers are away")
        time.sleep(2)
    traffic.assert_none_failed("upgrade", may_refuse=True)
    assert client.workers() == before
    assert {pod.name for pod in cluster.of("worker")} == old_pods
    assert client.cached() >= 0.95
    assert_state_is_kept(client, first["id"])

    # A node is drained: what its worker did, the other one does.
    node = cluster.of("worker")[0].node
    for pod in cluster.pods:  # only workers are on it
        if pod.node == node and pod not in cluster.of("worker"):
            pod.node = next(name for name in cluster.nodes if name != node)
    with Traffic(client) as traffic:
        cluster.drain(node, UP_S)
        settle("drained")
        cluster.wait(lambda: client.has_workers(2), 120, "workers are away")
    traffic.assert_none_failed("drain", may_refuse=False)

    # The pod that has both workers by now dies: until one is back, nobody can be served.
    with Traffic(client) as traffic:
        cluster.of("worker")[0].kill()
        time.sleep(1)
        settle("a worker's pod killed")
        cluster.wait(lambda: client.has_workers(2), 120, "workers are away")
    traffic.assert_none_failed("killed", may_refuse=True)
    assert_state_is_kept(client, first["id"])


@pytest.mark.timeout(2700)
def test_a_rolling_update_of_all_pods_refuses_nobody(cluster: Cluster, smollm2_dir: Path) -> None:
    """Models and adapters are values, and what is on the disk of a pod is there in the next."""
    adapters = cluster.objects.claim("adapters", 10001)
    write_adapter(adapters / "tuned", smollm2_dir, modules=("q_proj", "v_proj"))
    subprocess.run(["chmod", "-R", "a+rX", str(adapters)], check=True)

    def settle(why: str) -> None:
        print(f"{why}: {cluster.wait(cluster.is_settled, 2 * UP_S, why):.0f} s")

    def all_up() -> bool:
        return cluster.is_settled() and client.has_workers(2)

    cluster.apply(render(ROLLED))
    settle("installed")
    client = Client(cluster)
    cluster.wait(all_up, UP_S, "workers are away")
    said = {model: client.ask(model=model) for model in ("small", "tuned")}
    assert said["small"] != said["tuned"]
    client.cached()
    time.sleep(5)  # until it is on the disk

    old = list(cluster.pods)
    # Both workers end where the first pod was, so that is the one whose disk has the conversation.
    home = max(client.status()["workers"], key=lambda worker: worker["num_disk_blocks"])["machine"]
    rolled = sorted(cluster.of("worker"), key=lambda pod: not runs(pod, f"--node_id={home}"))
    with Traffic(client) as traffic, Traffic(client, "tuned") as tuned:
        for pod in rolled:
            cluster.evict(pod)
            cluster.wait(lambda pod=pod: pod.is_gone, 120, "it does not end")
            cluster.wait(all_up, UP_S, "workers are away")
            killed = [event for event in pod.events if "SIGKILL" in event]
            assert not killed, "its workers left before"
    traffic.assert_none_failed("worker pods", may_refuse=False)
    tuned.assert_none_failed("worker pods, an adapter", may_refuse=False)
    assert client.cached() >= 0.9, "read from the claim"

    changed = ROLLED["config"] | {"api": {"request_timeout_s": 500.0}}
    with Traffic(client) as traffic, Traffic(client, "tuned") as tuned:
        cluster.apply(render(ROLLED | {"config": changed}))
        time.sleep(1)
        settle("API pods rolled")
        time.sleep(2)
    traffic.assert_none_failed("API pods", may_refuse=False)
    tuned.assert_none_failed("API pods, an adapter", may_refuse=False)
    replaced = [pod for pod in old if pod in cluster.of("api") + cluster.of("worker")]
    assert not replaced
    assert {model: client.ask(model=model) for model in said} == said


def runs(pod: Pod, argument: str) -> bool:
    """Whether a process in its main container has this in its command line."""
    return pod.containers[-1].execute(["pgrep", "-f", "--", argument], 10) == 0


def assert_state_is_kept(client: Client, response: str) -> None:
    again = client.post(
        "/v1/responses", input="And?", previous_response_id=response, max_output_tokens=4
    )
    assert again["previous_response_id"] == response
    assert "c" in str(client.get("/v1/sessions/c"))
