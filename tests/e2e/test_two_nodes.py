"""Two raylets on one machine: the launcher spreads the pools, and a node may go away."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.serving.served import Served
from tests.e2e.serving import all_up, ask, status, wait_for

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(240)]

PORT = 6391
ADDRESS = f"127.0.0.1:{PORT}"
# A token of its own: the cluster asks for it, and kvrelay has it, whatever else is set here.
RAY_ENV = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "5e1d0c7a9b3f42868a1f7c2e4d6b8091" * 2,
    "RAY_USAGE_STATS_ENABLED": "0",
}


class RayNode:
    """One raylet (and, for the head, the control plane) in a process group of its own."""

    def __init__(
        self, log: Path, *where: str, env: dict[str, str] = RAY_ENV, num_cpus: int = 1
    ) -> None:
        ray = Path(sys.executable).parent / "ray"
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            [
                *(ray, "start", *where, "--block"),
                *(f"--num-cpus={num_cpus}", "--object-store-memory=80000000"),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
        )

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in (said := Path(self._log.name).read_text(errors="replace")):
            assert time.monotonic() < deadline, said
            assert self.process.poll() is None, said
            time.sleep(0.1)

    def kill(self, url: str = "") -> None:
        """As a machine that loses power. `url`: of a server that has workers there, which are no
        children of Ray."""
        if self.process.poll() is None:
            tree = psutil.Process(self.process.pid).children(recursive=True)
            words = {word for process in tree for word in process.cmdline()}
            for worker in status(url)["workers"] if url else ():
                if f"--node_id={worker['machine']}" in words:  # its raylet's
                    tree.append(psutil.Process(worker["pid"]))
            for process in (*tree, self.process):
                process.kill()
            self.process.wait(10)
            psutil.wait_procs(tree, timeout=10)
        self._log.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[RayNode]]:
    started = [RayNode(tmp_path / "head.log", "--head", f"--port={PORT}", "--include-dashboard=0")]
    try:
        started[0].wait_for("Ray runtime started")
        started.append(RayNode(tmp_path / "second.log", f"--address={ADDRESS}"))
        started[1].wait_for("Ray runtime started")
        yield started
    finally:
        for node in reversed(started):
            node.kill()


def test_pools_are_spread_and_a_lost_node_is_survived(nodes: list[RayNode]) -> None:
    settings = {"router.policy": "round_robin"}
    with Served(settings, "--address", ADDRESS, env=RAY_ENV) as served:
        homes = {worker["worker"]: worker["machine"] for worker in status(served.url)["workers"]}
        assert set(homes) == {"prefill-0", "decode-0"}
        assert homes["prefill-0"] != homes["decode-0"]
        assert "Paris" in ask(served.url)
        nodes[1].kill(served.url)
        assert "Paris" in ask(served.url)
        wait_for(served.url, all_up, 90, "the worker has not moved")
        homes = {worker["worker"]: worker["machine"] for worker in status(served.url)["workers"]}
        assert len(set(homes.values())) == 1
        assert "Paris" in ask(served.url)
