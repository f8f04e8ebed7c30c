"""How long starts take: of `kvrelay serve`, until it is ready, and of a worker that was killed.

    python -m benchmarks.serving.start [--rounds 5] [--kills 2] [--set cluster.fork_server=false]

Each round starts a server, kills each of its workers in turn so many times, and ends the server. An
idle worker is killed: nothing waits for it. The first round may fill the cache of the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from typing import Any

import httpx

from benchmarks.serving.served import Served

BACK_S = 60.0
SETTLE_S = 4.0  # between two kills, beyond which a pause after a failure is the shortest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=2, help="of each worker")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    args = parser.parse_args()
    settings: dict[str, object] = {}
    for each in args.set:
        name, _, value = each.partition("=")
        settings[name] = json.loads(value)
    ready: list[float] = []
    back: list[float] = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as state:
            began = time.monotonic()
            with Served(settings | {"sessions.state_dir": state}, "--port", "0") as served:
                ready.append(time.monotonic() - began)
                back += restarts(served.url, args.kills)
    for name, values in (("ready_s", ready), ("worker_back_s", back)):
        if values:
            print(f"{name:16}{statistics.median(values):8.2f}   ", *(f"{v:.2f}" for v in values))


def restarts(url: str, kills: int) -> list[float]:
    """Seconds from the death of a worker until it is up."""
    found = []
    with httpx.Client(base_url=url, timeout=30.0) as http:
        for _ in range(kills):
            for name in [each["worker"] for each in workers(http)]:
                time.sleep(SETTLE_S)
                pid = worker(http, name)["pid"]
                os.kill(pid, signal.SIGKILL)
                began = time.monotonic()
                while (now := worker(http, name))["state"] != "up" or now["pid"] == pid:
                    if time.monotonic() > began + BACK_S:
                        raise RuntimeError(f"{name} is not back after {BACK_S:g} s: {now}")
                    time.sleep(0.02)
                found.append(time.monotonic() - began)
    return found


def workers(http: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = http.get("/status").json()["workers"]
    return found


def worker(http: httpx.Client, name: str) -> dict[str, Any]:
    return next(each for each in workers(http) if each["worker"] == name)


if __name__ == "__main__":
    main()
