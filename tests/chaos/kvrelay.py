"""KVRelay as a system under test: on loopback, or over three hosts that share a Ray cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import httpx

from benchmarks.serving.served import Served
from tests.chaos.network import Hosts
from tests.chaos.system import System, get_json

PORT = 6397
API_PORT = 8477
RAY_ENV = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "9c41d7e05b8a4f3f9d26e1b7a05c8f64" * 2,
    "RAY_USAGE_STATS_ENABLED": "0",
}
KEY = "the-key-of-operators"
ENV = {"KVRELAY_OPERATIONS_KEY": KEY}
KINDS = {
    "worker": r"kvrelay (prefill|decode)-\d",
    "prefill worker": r"kvrelay prefill-\d",
    "decode worker": r"kvrelay decode-\d",
    "router": r"kvrelay router-\d",
    "server": r"(lab\.cli\.main|/kvrelay) serve",
    "raylet": r"raylet/raylet ",
    "GCS": r"gcs/gcs_server ",
}
SETTINGS: Mapping[str, object] = {"engine.kv_cache_gib": 0.25, "engine.max_model_len": 2048}


class _KVRelay(System):
    kinds = KINDS

    def __init__(self) -> None:
        self.served: Served | None = None

    @property
    def urls(self) -> list[str]:
        assert self.served is not None
        return [self.served.url]

    def roots(self) -> list[int]:
        assert self.served is not None
        return [self.served.process.pid]

    def is_up(self) -> bool:
        try:
            workers = get_json(self.urls[0], "/status", KEY)["workers"]
        except (httpx.HTTPError, ValueError):
            return False
        return bool(workers) and all(worker["state"] == "up" for worker in workers)

    def left_over(self) -> list[str]:
        deadline = time.monotonic() + 15
        while True:
            report = get_json(self.urls[0], "/audit", KEY)
            left = [*report["left"], *report["wrong"]]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.5)


class OnLoopback(_KVRelay):
    """Two workers of each role, Ray's processes among those of the server."""

    def __enter__(self) -> Self:
        self.served = Served(SETTINGS, "--prefill", "2", "--decode", "2", env=ENV)
        self.served.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self.served is not None:
            self.served.stop()


class OnHosts(_KVRelay):
    """The server and Ray's head on the first host, a raylet on each of the others."""

    def __init__(self, hosts: Hosts) -> None:
        super().__init__()
        self._hosts = hosts
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.TemporaryDirectory()

    @property
    def urls(self) -> list[str]:
        return [f"http://{self._hosts.address(0)}:{API_PORT}"]

    def roots(self) -> list[int]:
        assert self.served is not None
        return [self.served.process.pid, *(node.pid for node in self._nodes)]

    def __enter__(self) -> Self:
        address = f"{self._hosts.address(0)}:{PORT}"
        try:
            self._start_node(0, "--head", f"--port={PORT}", "--include-dashboard=0")
            for number in range(1, len(self._hosts.names)):
                self._start_node(number, f"--address={address}")
            self.served = Served(
                SETTINGS,
                *("--prefill", "2", "--decode", "2", "--address", address),
                *("--host", "0.0.0.0", "--port", str(API_PORT)),
                env=RAY_ENV | ENV,
                prefix=self._hosts.inside(0),
            )
            self.served.__enter__()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.served is not None:
            self.served.stop()
        for node in reversed(self._nodes):
            for process in (*self._tree(node.pid),):
                process.kill()
            node.wait(20)
        self._folder.cleanup()

    def _tree(self, pid: int) -> list[object]:
        import psutil

        try:
            process = psutil.Process(pid)
            return [*process.children(recursive=True), process]
        except psutil.NoSuchProcess:
            return []

    def _start_node(self, number: int, *where: str) -> None:
        log = Path(self._folder.name) / f"ray-{number}.log"
        command = [
            *self._hosts.inside(number),
            *(str(Path(sys.executable).parent / "ray"), "start", *where, "--block"),
            *("--num-cpus=2", "--object-store-memory=80000000"),
            f"--node-ip-address={self._hosts.address(number)}",
        ]
        with log.open("wb") as out:
            self._nodes.append(
                subprocess.Popen(
                    command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **RAY_ENV}
                )
            )
        deadline = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text(errors="replace"):
            if time.monotonic() > deadline or self._nodes[-1].poll() is not None:
                raise RuntimeError(log.read_text(errors="replace")[-2000:])
            time.sleep(0.1)
