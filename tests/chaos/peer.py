"""Any deployment that speaks OpenAI's API as a system under test: replicas behind a proxy.

A TOML file says how each is started, and by what their processes are known
(tests/chaos/vllm.toml). What ends is started again, as systemd or Kubernetes would.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec
import psutil

from tests.chaos.kvrelay import System
from tests.chaos.network import Hosts
from tests.chaos.services import Service

PORT = 8560  # the proxy's, and the replicas' those after it
ASK_S = 5.0


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Texts may have {python}, {prefix}, {model_path}, {address}, {port}, {number}, {core} and
    {file}."""

    command: list[str]
    env: dict[str, str] = {}
    file: str = ""  # the text of {file}; {servers} is a `server` for each replica
    server: str = ""


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    model: str  # as clients name it
    replica: Command
    kinds: dict[str, str]  # a pattern of the command lines of each kind of process
    proxy: Command | None = None  # without one, clients ask each replica
    replicas: int = 2
    ready: str = "/health"  # replicas and the proxy answer it with 200
    ready_s: float = 600.0  # from the start of one

    @classmethod
    def read(cls, path: Path) -> Deployment:
        """Raises ValueError, which says what is wrong."""
        try:
            return msgspec.convert(tomllib.loads(path.read_text()), cls)
        except (msgspec.ValidationError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{path}: {error}") from error


class Peer(System):
    """Owns the deployment's processes. With `hosts`, the proxy is on the first of them, and the
    replicas are on the others."""

    def __init__(self, deployment: Deployment, values: Mapping[str, str], hosts: Hosts | None):
        super().__init__()
        self.model, self.kinds = deployment.model, deployment.kinds
        self.up_within_s = deployment.ready_s
        self.restart_within_s = deployment.ready_s * deployment.replicas
        self.slowed = next(iter(deployment.kinds))
        self._deployment, self._values, self._hosts = deployment, values, hosts
        self._folder = tempfile.TemporaryDirectory()
        self._services: list[Service] = []

    def _address(self, number: int) -> str:
        """Returns the proxy's for 0, those of the replicas from 1 on."""
        if self._hosts is None:
            return "127.0.0.1"
        return self._hosts.address(number and 1 + (number - 1) % (len(self._hosts.names) - 1))

    def _url(self, number: int) -> str:
        return f"http://{self._address(number)}:{PORT + number}"

    @property
    def urls(self) -> list[str]:
        if self._deployment.proxy is not None:
            return [self._url(0)]
        return [self._url(i + 1) for i in range(self._deployment.replicas)]

    def roots(self) -> list[int]:
        return [service.pid for service in self._services]

    def is_up(self) -> bool:
        numbers = range(0 if self._deployment.proxy else 1, self._deployment.replicas + 1)
        return all(self._is_ready(number) for number in numbers)

    def restart(self, timeout_s: float) -> bool:
        """Ends one replica after the other by SIGTERM, each when the last one is ready again."""
        deadline = time.monotonic() + timeout_s
        for number, service in enumerate(self._services[: self._deployment.replicas], 1):
            before = psutil.Process(service.pid)
            before.send_signal(signal.SIGTERM)
            while service.pid == before.pid or not self._is_ready(number):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.2)
        return True

    def left_over(self) -> list[str]:
        """Its processes cannot be asked for an audit."""
        return []

    def __enter__(self) -> Self:
        proxy = self._deployment.proxy
        try:
            for number in range(1, self._deployment.replicas + 1):
                self._start(number, self._deployment.replica, "")
            if proxy is not None:
                numbers = range(1, self._deployment.replicas + 1)
                servers = (self._fill(proxy.server, number, "") for number in numbers)
                path = Path(self._folder.name) / "proxy"
                path.write_text(self._fill(proxy.file, 0, "", servers="\n".join(servers)))
                self._start(0, proxy, str(path))
            if not self._starts_up():
                raise RuntimeError(f"not ready after {self.up_within_s:g} s:\n{self._logs()}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for service in self._services:
            service.stop()
        self._folder.cleanup()

    def _starts_up(self) -> bool:
        """Asks seldom, for replicas that compile; whether it was up in time."""
        deadline = time.monotonic() + self.up_within_s
        while not self.is_up():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.5)
        return True

    def _start(self, number: int, what: Command, file: str) -> None:
        log = Path(self._folder.name) / f"{number}.log"
        log.touch()
        command = [self._fill(each, number, file) for each in what.command]
        if (found := shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin")) is None:
            raise RuntimeError(f"{command[0]} is not there")
        inside = self._hosts.inside(number % len(self._hosts.names)) if self._hosts else []
        env = {name: self._fill(value, number, file) for name, value in what.env.items()}
        service = Service([*inside, found, *command[1:]], {**os.environ, **env}, log)
        self._services.append(service)
        service.start("")

    def _fill(self, text: str, number: int, file: str, **more: str) -> str:
        cores = sorted(os.sched_getaffinity(0))
        own: dict[str, Any] = {"number": number, "file": file, "port": PORT + number}
        own["core"] = cores[(number - 1) % len(cores)]  # one replica's, by turns
        try:
            return text.format_map({**self._values, **own, "address": self._address(number)} | more)
        except KeyError as error:
            raise RuntimeError(f"{text!r} needs a value for {error}") from error

    def _is_ready(self, number: int) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            url = f"{self._url(number)}{self._deployment.ready}"
            return httpx.get(url, timeout=ASK_S).status_code == 200
        return False

    def _logs(self) -> str:
        paths = sorted(Path(self._folder.name).glob("*.log"))
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in paths)
