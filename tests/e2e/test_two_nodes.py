"""Two raylets on one machine: the launcher spreads the pools, and a node may go away."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.serving.served import Served
from kvrelay.cluster.processes.ray_access import drain_node
from tests.e2e.serving import Status, all_up, ask, slack, status, wait_for

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
            words = words_of(tree)
            for worker in status(url)["workers"] if url else ():
                if f"--node_id={worker['machine']}" in words:  # its raylet's
                    tree.append(psutil.Process(worker["pid"]))
            for process in (*tree, self.process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait(10)
            psutil.wait_procs(tree, timeout=10)
        self._log.close()


def words_of(processes: list[psutil.Process]) -> set[str]:
    """All that their command lines have; some may end meanwhile."""
    words = set[str]()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie too
            words.update(process.cmdline())
    return words


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


def test_a_node_that_is_drained_is_left_under_requests(
    nodes: list[RayNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pod's preStop has it, a cloud that takes a machine back, or Ray's autoscaler."""
    for name, value in RAY_ENV.items():
        monkeypatch.setenv(name, value)
    with Served({"router.policy": "round_robin"}, "--address", ADDRESS, env=RAY_ENV) as served:
        before = status(served.url)["workers"]
        tree = psutil.Process(nodes[1].process.pid).children(recursive=True)
        words = words_of(tree)
        (leaving,) = {w["machine"] for w in before if f"--node_id={w['machine']}" in words}

        def has_left(state: Status) -> bool:
            return all_up(state) and all(w["machine"] != leaving for w in state["workers"])

        failed, answered = [], 0
        drain_node(leaving, ADDRESS, 600)
        deadline = time.monotonic() + 180 * slack()
        while not has_left(status(served.url)):
            assert time.monotonic() < deadline, status(served.url)
            try:
                ask(served.url)
                answered += 1
            except Exception as error:
                failed.append(repr(error))
        print(f"{answered} answered while the workers left, {len(failed)} failed")
        assert not failed
        assert answered
        assert "Paris" in ask(served.url)


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
