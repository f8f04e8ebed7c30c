"""A pod, played: its containers as processes in namespaces of their own, as a kubelet runs them.

A pod has a network, a host name and shared memory of its own, held by a process that does nothing.
A container has a root of its own above this machine's files, with the pod's volumes in it, and is
PID 1 unless the pod shares its processes. Init containers run one after the other, sidecars
(`restartPolicy: Always`) from their turn on; probes, restarts and their pauses go by the
container's own fields; the end is preStop, SIGTERM, the grace period, SIGKILL, sidecars last.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.chaos.network import run

PAUSE = (
    "import signal as s;[s.signal(n,s.SIG_IGN) for n in (s.SIGCHLD,s.SIGTERM)];"
    "[s.pause() for _ in iter(int,1)]"
)
CHECKOUT = {Path(__file__).resolve().parents[3], Path(sys.prefix)}
LOOK_S = 0.1
FIRST_BACKOFF_S, MAX_BACKOFF_S = 10.0, 300.0
DEFAULTS = {"initialDelaySeconds": 0, "periodSeconds": 10, "timeoutSeconds": 1}
DEFAULTS |= {"successThreshold": 1, "failureThreshold": 3}
SETUP = """set -e
mount --make-rprivate /
mount -t overlay overlay -o lowerdir=/,upperdir=$1/upper,workdir=$1/work $1/root
cd $1/root
mount -t proc proc proc
mount --rbind /dev dev; mount --rbind /sys sys
mount -t tmpfs -o size=64m,mode=1777 tmpfs dev/shm
mount -t tmpfs -o mode=1777 tmpfs tmp
chmod 755 root
"""
Spec = dict[str, Any]


@dataclass
class Image:
    """What all containers find: commands, by name, and the environment."""

    commands: Mapping[str, str]
    env: Mapping[str, str]
    folders: Mapping[str, Path] = field(default_factory=dict)  # by where they are in it
    home: str = "home/kvrelay"
    path: str = "opt/kvrelay/bin"


@dataclass
class Objects:
    """What pods refer to, by name. `claims` and all else that is mounted are folders."""

    folder: Path
    namespace: str
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    config_maps: dict[str, dict[str, str]] = field(default_factory=dict)
    service_env: dict[str, str] = field(default_factory=dict)

    def data_folder(self, kind: str, name: str) -> Path:
        """A ConfigMap or Secret as files; a change of it is seen in pods that have it mounted."""
        data = (self.secrets if kind == "secret" else self.config_maps)[name]
        folder = self.folder / "data" / kind / name
        folder.mkdir(parents=True, exist_ok=True)
        for key, text in data.items():
            new = folder / f"..{key}"
            new.write_text(text)
            new.replace(folder / key)
        return folder

    def claim(self, name: str, owner: int) -> Path:
        folder = self.folder / "claims" / name
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, 0, owner)
        folder.chmod(0o2775)
        return folder

    def value_of(self, source: Spec, pod: Pod) -> str:
        """What an environment variable's `valueFrom` is."""
        if key := source.get("secretKeyRef"):
            return self.secrets[key["name"]][key["key"]]
        if key := source.get("configMapKeyRef"):
            return self.config_maps[key["name"]][key["key"]]
        path = source["fieldRef"]["fieldPath"]
        if found := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
            return pod.labels[found[1]]
        fields = {"metadata.name": pod.name, "metadata.namespace": self.namespace}
        return {**fields, "status.podIP": pod.ip}[path]


def decoded(secret: Spec) -> dict[str, str]:
    found = {k: base64.b64decode(v).decode() for k, v in secret.get("data", {}).items()}
    return found | secret.get("stringData", {})


class Container:
    """One container of a pod, through all its restarts."""

    def __init__(self, pod: Pod, spec: Spec, is_init: bool) -> None:
        self.pod, self.spec, self.name = pod, spec, spec["name"]
        self.is_sidecar = is_init and spec.get("restartPolicy") == "Always"
        self.is_init = is_init and not self.is_sidecar
        self.process: subprocess.Popen[bytes] | None = None
        self.main = 0  # its first process, as this machine numbers it
        self.restarts = -1
        self.has_started = self.is_ready = False
        self.started_at = 0.0
        self.again_at: float | None = None
        self.log = pod.objects.folder / "logs" / f"{pod.name}-{self.name}.log"
        self.env = self._environment()

    def _environment(self) -> dict[str, str]:
        env = {**self.pod.objects.service_env, "HOSTNAME": self.pod.hostname}
        env |= {"HOME": "/" + self.pod.image.home, "PATH": f"/{self.pod.image.path}:/usr/bin:/bin"}
        env |= self.pod.image.env
        for each in self.spec.get("env", []):
            if "valueFrom" in each:
                env[each["name"]] = self.pod.objects.value_of(each["valueFrom"], self.pod)
            else:
                env[each["name"]] = expanded(str(each.get("value", "")), env)
        return env

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def is_over(self) -> bool:
        """It has ended, and is not started again."""
        has_ended = self.process is not None and not self.is_running and not self.main
        return has_ended and self.again_at is None

    def start(self) -> None:
        self.restarts += 1
        self.again_at, self.has_started, self.is_ready = None, False, False
        self.started_at = time.monotonic()
        layer = self.pod.folder / self.name / str(self.restarts)
        for each in ("upper", "work", "root"):
            (layer / each).mkdir(parents=True)
        self._fill(layer / "upper")
        spec = self.spec
        command = [expanded(c, self.env) for c in (*spec["command"], *spec.get("args", []))]
        script = SETUP + "".join(self._mounts())
        if spec.get("securityContext", {}).get("readOnlyRootFilesystem"):
            script += "mount -o remount,ro $1/root\n"
        script += f"exec chroot . {shlex.join(self._as_user(command))}\n"
        pid = str(self.pod.pause)
        enter = ["nsenter", "-t", pid, "--net", "--uts", "--ipc"]
        if self.pod.spec.get("shareProcessNamespace"):
            enter += ["--pid", "unshare", "--mount"]
        else:
            enter += ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        with self.log.open("ab") as log:
            log.write(f"--- start {self.restarts}: {shlex.join(command)}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                [*enter, "sh", "-c", script, "sh", str(layer)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.main = child_of(self.process.pid)
        while self.is_running and not has_own_root(self.main):  # before that, its root is ours
            time.sleep(0.01)
        for kind in ("startup", "liveness", "readiness"):
            if f"{kind}Probe" in spec:
                probe = Probe(self, kind, self.restarts)
                threading.Thread(target=probe.run, daemon=True).start()
        self.has_started = "startupProbe" not in spec
        self.is_ready = self.has_started and "readinessProbe" not in spec

    def _fill(self, upper: Path) -> None:
        """Write what the image brings: its commands and its home."""
        image = self.pod.image
        (upper / image.path).mkdir(parents=True)
        for name, text in image.commands.items():
            file = upper / image.path / name
            file.write_text(f"#!/bin/sh\n{text}\n")
            file.chmod(0o755)
        home = upper / image.home
        for path in (home, home / ".cache", home / ".local"):
            path.mkdir(parents=True)
            os.chown(path, self.pod.user, self.pod.user)

    def _mounts(self) -> Iterator[str]:
        mounts = [(m["name"], m["mountPath"]) for m in self.spec.get("volumeMounts", [])]
        brought = [(source, target) for target, source in self.pod.image.folders.items()]
        # A checkout below /tmp would be behind the pod's own.
        brought += [(path, str(path)) for path in CHECKOUT if path.is_relative_to("/tmp")]
        for source, target in (
            *brought,
            *self.pod.files,
            *((self.pod.volumes[n], p) for n, p in mounts),
        ):
            where = shlex.quote(target.lstrip("/"))
            if source.is_dir():
                yield f"mkdir -p {where}\n"
            yield f"mount --rbind {shlex.quote(str(source))} {where}\n"

    def _as_user(self, command: list[str]) -> list[str]:
        user = str(self.pod.user)
        env = [f"{name}={value}" for name, value in self.env.items()]
        ids = ["setpriv", f"--reuid={user}", f"--regid={user}", f"--groups={user}"]
        return [*ids, "--no-new-privs", "--bounding-set=-all", "env", "-i", *env, *command]

    def execute(self, command: list[str], timeout_s: float) -> int:
        """In the running container; its exit status."""
        enter = ["nsenter", "-t", str(self.main), "--all", "--root"]
        done = subprocess.run(
            [*enter, *self._as_user(command)], capture_output=True, timeout=timeout_s, check=False
        )
        return done.returncode

    def port(self, name: str | int) -> int:
        ports = {each.get("name"): each["containerPort"] for each in self.spec.get("ports", [])}
        return name if isinstance(name, int) else int(ports[name])

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.main, number)

    def kill(self) -> None:
        """All that runs in it: whatever has its root."""
        if self.main:
            kill_in_namespace("mnt", self.mount_namespace)
        if self.process is not None:
            self.process.kill()

    @property
    def mount_namespace(self) -> str:
        with contextlib.suppress(OSError):
            self._mount_namespace = os.readlink(f"/proc/{self.main}/ns/mnt")
        return getattr(self, "_mount_namespace", "")

    def stop(self, until: float) -> None:
        """By its preStop and SIGTERM; by force at `until`."""
        if not self.is_running:
            return
        hook = self.spec.get("lifecycle", {}).get("preStop", {}).get("exec")
        namespace = self.mount_namespace
        if hook:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.execute(hook["command"], max(0.1, until - time.monotonic()))
        self.signal(signal.SIGTERM)
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.1, until - time.monotonic()))
        if self.is_running:
            self.pod.tell(f"{self.name}: the grace period is over; SIGKILL")
        kill_in_namespace("mnt", namespace)
        self.process.wait(10)

    def look(self, policy: str) -> None:
        """Start it again when it has ended, as the policy says."""
        if self.process is None or self.is_running:
            return
        code = self.process.returncode
        if self.again_at is None and self.main:
            kill_in_namespace("mnt", self.mount_namespace)
            self.main, self.is_ready = 0, False
            self.pod.tell(f"{self.name} has ended with {code}")
            if policy == "Always" or (policy == "OnFailure" and code):
                pause_s = min(FIRST_BACKOFF_S * 2 ** (self.restarts - 1), MAX_BACKOFF_S)
                self.again_at = time.monotonic() + (pause_s if self.restarts else 0)
        if self.again_at is not None and time.monotonic() >= self.again_at:
            self.start()


class Probe:
    """One probe of one start of a container."""

    def __init__(self, container: Container, kind: str, start: int) -> None:
        self.container, self.kind, self._start = container, kind, start
        self.spec = DEFAULTS | container.spec[f"{kind}Probe"]

    def run(self) -> None:
        failures, spec, container = 0, self.spec, self.container
        time.sleep(spec["initialDelaySeconds"])
        while self._is_current():
            if container.has_started or self.kind == "startup":
                is_good = self._ask()
                if not self._is_current() or container.pod.is_ending:
                    return
                failures = 0 if is_good else failures + 1
                container.pod.probes.setdefault((container.name, self.kind), []).append(is_good)
                if self._act(is_good, failures):
                    return
            time.sleep(spec["periodSeconds"])

    def _act(self, is_good: bool, failures: int) -> bool:
        """What follows from it; whether the probe is done."""
        container = self.container
        if self.kind == "readiness":
            if is_good or failures >= self.spec["failureThreshold"]:
                container.is_ready = is_good
        elif failures >= self.spec["failureThreshold"]:
            container.pod.tell(f"{container.name}: the {self.kind} probe has failed")
            container.stop(time.monotonic() + container.pod.grace_s)
            return True
        elif self.kind == "startup" and is_good:
            container.has_started = True
            container.is_ready = "readinessProbe" not in container.spec
            return True
        return False

    def _is_current(self) -> bool:
        return self.container.restarts == self._start and self.container.is_running

    def _ask(self) -> bool:
        container, timeout_s = self.container, float(self.spec["timeoutSeconds"])
        try:
            if "exec" in self.spec:
                return container.execute(self.spec["exec"]["command"], timeout_s) == 0
            if "tcpSocket" in self.spec:
                port = container.port(self.spec["tcpSocket"]["port"])
                socket.create_connection((container.pod.ip, port), timeout_s).close()
                return True
            get = self.spec["httpGet"]
            port = container.port(get["port"])
            url = f"{get.get('scheme', 'HTTP').lower()}://{container.pod.ip}:{port}{get['path']}"
            return httpx.get(url, timeout=timeout_s, verify=False).status_code < 400
        except (OSError, httpx.HTTPError, subprocess.TimeoutExpired):
            return False


class Pod:
    """Runs on a thread of its own from `start` to the end of `delete`."""

    def __init__(
        self,
        name: str,
        template: Spec,
        objects: Objects,
        image: Image,
        network: Callable[[Pod], None],
        files: list[tuple[Path, str]],
        node: str,
    ) -> None:
        """`network` gives it an address in a network namespace; `files` are mounted into
        each container."""
        self.name, self.spec, self.objects, self.image = name, template["spec"], objects, image
        self.labels: dict[str, str] = template["metadata"].get("labels", {})
        self.hostname = self.spec.get("hostname", name)
        self.files, self.node, self._network = files, node, network
        self.ip = self.network_namespace = ""
        self.folder = objects.folder / "pods" / name
        self.user = int(self.spec["securityContext"]["runAsUser"])
        self.grace_s = float(self.spec.get("terminationGracePeriodSeconds", 30))
        self.is_ending = self.is_gone = self.has_failed = False
        self.pause = 0
        self.made_at = time.monotonic()
        self.told_at = 0.0  # to end
        self.slot = ""  # which of the wanted pods it is
        self.has_rules = False  # its network knows the services
        self.volumes: dict[str, Path] = {}
        self.events: list[str] = []
        self.probes: dict[tuple[str, str], list[bool]] = {}
        self.containers: list[Container] = []
        self._holder: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def tell(self, event: str) -> None:
        self.events.append(f"{time.monotonic():.1f} {self.name}: {event}")

    @property
    def is_ready(self) -> bool:
        lasting = [each for each in self.containers if not each.is_init]
        names = {each["name"] for each in self.spec["containers"]}
        is_all = names <= {each.name for each in lasting}
        return is_all and not self.is_ending and all(c.is_ready and c.is_running for c in lasting)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self._make()
            self._run_containers()
        except Exception as error:
            self.tell(f"cannot run: {error!r}")
            self.has_failed = True

    def _make(self) -> None:
        self.folder.mkdir(parents=True)
        self._network(self)
        inside = [
            "nsenter",
            f"--net=/run/netns/{self.network_namespace}",
            "unshare",
            "--uts",
            "--ipc",
            "--pid",
        ]
        hold = f"hostname {self.hostname}; exec {sys.executable} -c {shlex.quote(PAUSE)}"
        self._holder = subprocess.Popen([*inside, "--fork", "--kill-child", "sh", "-c", hold])
        self.pause = child_of(self._holder.pid)
        for volume in self.spec.get("volumes", []):
            self.volumes[volume["name"]] = self._volume(volume)

    def _volume(self, volume: Spec) -> Path:
        if claim := volume.get("persistentVolumeClaim"):
            return self.objects.claim(claim["claimName"], self.user)
        if "configMap" in volume:
            return self.objects.data_folder("configMap", volume["configMap"]["name"])
        if "secret" in volume:
            return self.objects.data_folder("secret", volume["secret"]["secretName"])
        folder = self.folder / "volumes" / volume["name"]
        folder.mkdir(parents=True)
        if volume["emptyDir"].get("medium") == "Memory":
            size = volume["emptyDir"]["sizeLimit"].replace("Gi", "g").replace("Mi", "m")
            run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
        os.chown(folder, 0, self.user)
        folder.chmod(0o2777)
        return folder

    def _run_containers(self) -> None:
        policy = self.spec.get("restartPolicy", "Always")
        for spec in self.spec.get("initContainers", []):
            container = Container(self, spec, is_init=True)
            self.containers.append(container)
            container.start()
            while not (container.has_started and container.is_sidecar):
                if self.is_ending or container.is_over:
                    break
                container.look("Always" if container.is_sidecar else "OnFailure")
                time.sleep(LOOK_S)
        if self.is_ending:
            return
        own = [Container(self, spec, is_init=False) for spec in self.spec["containers"]]
        self.containers += own
        for container in own:
            container.start()
        while not self.is_ending:
            for container in self.containers:
                if not container.is_init and not self.is_ending:
                    container.look("Always" if container.is_sidecar else policy)
            self.has_failed = any(each.is_over for each in own)
            time.sleep(LOOK_S)

    def delete(self, grace_s: float | None = None) -> None:
        """Blocks until it is gone."""
        self.is_ending = True
        until = time.monotonic() + (self.grace_s if grace_s is None else grace_s)
        sidecars = [each for each in self.containers if each.is_sidecar]
        others = [each for each in self.containers if not each.is_sidecar]
        threads = [threading.Thread(target=each.stop, args=(until,)) for each in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for container in reversed(sidecars):
            container.stop(until)
        self.kill()

    def kill(self) -> None:
        """By force, as when its node dies; with its network."""
        self.is_ending = True
        self._thread.join(30)
        for container in self.containers:
            container.kill()
        if self._holder is not None:
            self._holder.kill()
            self._holder.wait(10)
        for volume in self.volumes.values():
            if volume.is_relative_to(self.folder) and os.path.ismount(volume):
                subprocess.run(["umount", "-l", str(volume)], check=False)
        subprocess.run(
            ["ip", "netns", "del", self.network_namespace], capture_output=True, check=False
        )
        self.is_gone = True
        self.tell("is gone")


def expanded(text: str, env: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), text)


def child_of(pid: int, timeout_s: float = 10.0) -> int:
    """The process that `nsenter` or `unshare` has forked; 0: none came."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if found := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                return int(found[0])
        time.sleep(0.005)
    return 0


def has_own_root(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/root") != "/"
    except OSError:
        return False


def kill_in_namespace(kind: str, namespace: str) -> None:
    own = os.readlink(f"/proc/self/ns/{kind}")
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if (
                namespace
                and namespace != own
                and os.readlink(f"/proc/{pid}/ns/{kind}") == namespace
            ):
                os.kill(pid, signal.SIGKILL)
