"""How long starts take: of `kvrelay serve`, until it is ready, and of a worker that was killed.

    python -m benchmarks.serving.start [--rounds 10] [--kills 0] [--set cluster.fork_server=false]

Each round starts a server, has it answer, kills each of its workers in turn so many times, and ends
it. An idle worker is killed: nothing waits for it. The first round may fill the cache of the disk,
and compiles what was not imported before.

The medians of all rounds, and each value: when the API answers, when the server is ready, when the
first token is there. Then by process, of the start until it was ready: when it began, and what it
took of the CPU. Others' work on the machine delays a start and takes little CPU more, so CPU is
what to compare where there is such work.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from benchmarks.serving.served import Served
from kvrelay.cluster.cli.own_key import OwnKey
from tests.operations.served import free_port

BACK_S = 60.0
SETTLE_S = 4.0  # between two kills, beyond which a pause after a failure is the shortest
LOOK_S = 0.02
MARK = "KVRELAY_START"  # in the environment of what a start begins
KINDS = (
    (r"cli\.main", "kvrelay serve"),
    (r"fork_server", "fork server"),
    (r"processes\.child (\S+)", "{}"),
    (r"processes\.worker", "workers"),
    (r"constraints\.compiler", "grammar compiler"),
    (r"ray|gcs_server", "Ray"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kills", type=int, default=0, help="of each worker")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    args = parser.parse_args()
    settings: dict[str, object] = {}
    for each in args.set:
        name, _, value = each.partition("=")
        settings[name] = json.loads(value)
    found: defaultdict[str, list[float]] = defaultdict(list)
    began: defaultdict[str, list[float]] = defaultdict(list)
    took: defaultdict[str, list[float]] = defaultdict(list)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as `make serve` does
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as state:
            one_round(settings | {"sessions.state_dir": state}, args.kills, found, began, took)
    for name, values in found.items():
        print(f"{name:18}{statistics.median(values):8.2f}   ", *(f"{v:.2f}" for v in values))
    print(f"\n{'':18}{'from_s':>8}{'cpu_s':>8}")
    for kind in sorted(took, key=lambda kind: statistics.median(began[kind])):
        print(f"{kind:18}{statistics.median(began[kind]):8.2f}{statistics.median(took[kind]):8.2f}")


def one_round(
    settings: dict[str, object],
    kills: int,
    found: dict[str, list[float]],
    began: dict[str, list[float]],
    took: dict[str, list[float]],
) -> None:
    mark, port = uuid.uuid4().hex, free_port()
    url = f"http://127.0.0.1:{port}"
    with Watched(mark) as watched:
        served = Served(settings, "--port", str(port), env={MARK: mark}, with_ray=False)
        answers = threading.Thread(target=watched.until_it_answers, args=(url,), daemon=True)
        answers.start()
        served.__enter__()
        ready_s = watched.now_s()
    with served:
        answers.join(BACK_S)
        found["api_answers_s"].append(watched.answers_s)
        found["ready_s"].append(ready_s)
        with httpx.Client(base_url=url, timeout=120.0, auth=OwnKey()) as http:
            model = http.get("/v1/models").json()["data"][0]["id"]
            body = {"model": model, "prompt": "The capital of France is", "max_tokens": 1}
            http.post("/v1/completions", json=body).raise_for_status()
        found["first_token_s"].append(watched.now_s())
        by_kind = watched.by_kind()
        found["cpu_s"].append(sum(cpu_s for _, cpu_s in by_kind.values()))
        for kind, (from_s, cpu_s) in by_kind.items():
            began[kind].append(from_s)
            took[kind].append(cpu_s)
        if kills:
            found["worker_back_s"] += restarts(url, kills)


@dataclass(slots=True)
class Seen:
    kind: str
    from_s: float
    cpu_s: float = 0.0


class Watched:
    """From `with` to its end: the processes that have `mark` in their environment."""

    def __init__(self, mark: str) -> None:
        self._mark = f"{MARK}={mark}".encode()
        self._seen: dict[int, Seen] = {}
        self._others: set[int] = set()
        self._ends = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.answers_s = float("nan")

    def now_s(self) -> float:
        return time.monotonic() - self._began

    def until_it_answers(self, url: str) -> None:
        while not self._ends.is_set() or self.answers_s != self.answers_s:
            try:
                httpx.get(f"{url}/health/live", timeout=BACK_S).raise_for_status()
            except httpx.HTTPError:
                time.sleep(LOOK_S)
            else:
                self.answers_s = self.now_s()
                return

    def by_kind(self) -> dict[str, tuple[float, float]]:
        """When its first process began, and the CPU of all."""
        kinds: dict[str, tuple[float, float]] = {}
        for seen in self._seen.values():
            if not seen.kind:
                continue  # it was there to fork another
            from_s, cpu_s = kinds.get(seen.kind, (seen.from_s, 0.0))
            kinds[seen.kind] = min(from_s, seen.from_s), cpu_s + seen.cpu_s
        return kinds

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(LOOK_S):
            self._look()
        self._look()

    def _look(self) -> None:
        for pid in psutil.pids():
            if pid in self._others:
                continue
            try:
                self._look_at(pid)
            except (OSError, psutil.Error):
                continue

    def _look_at(self, pid: int) -> None:
        process = psutil.Process(pid)
        if pid not in self._seen:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if self._mark not in environment:
                if environment:  # a process that has just begun shows none
                    self._others.add(pid)
                return
            self._seen[pid] = Seen("", self.now_s())
        line = " ".join(process.cmdline())
        self._seen[pid].kind = kind_of(line) or self._seen[pid].kind  # Ray's change their titles
        times = process.cpu_times()
        self._seen[pid].cpu_s = times.user + times.system


def kind_of(command_line: str) -> str:
    for pattern, kind in KINDS:
        if match := re.search(pattern, command_line):
            return kind.format(*match.groups())
    return "others" if command_line else ""


def restarts(url: str, kills: int) -> list[float]:
    """Seconds from the death of a worker until it is up."""
    found = []
    with httpx.Client(base_url=url, timeout=30.0, auth=OwnKey()) as http:
        for _ in range(kills):
            for name in [each["worker"] for each in workers(http)]:
                time.sleep(SETTLE_S)
                pid = worker(http, name)["pid"]
                os.kill(pid, signal.SIGKILL)
                began = time.monotonic()
                while (now := worker(http, name))["state"] != "up" or now["pid"] == pid:
                    if time.monotonic() > began + BACK_S:
                        raise RuntimeError(f"{name} is not back after {BACK_S:g} s: {now}")
                    time.sleep(LOOK_S)
                found.append(time.monotonic() - began)
    return found


def workers(http: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = http.get("/status").json()["workers"]
    return found


def worker(http: httpx.Client, name: str) -> dict[str, Any]:
    return next(each for each in workers(http) if each["worker"] == name)


if __name__ == "__main__":
    main()
