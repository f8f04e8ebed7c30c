"""The processes of workers on this machine, found by their command lines."""

from __future__ import annotations

import contextlib

import psutil

from kvrelay.engine.node import NodeId

MODULE = "kvrelay.cluster.processes.worker"  # what a worker's process runs; its name follows
RANKS_MODULE = "kvrelay.worker.rank_host"  # what one runs that has some of its further ranks


def name_of(cluster: str, worker: NodeId, epoch: int) -> str:
    """Names a worker's process, in its command line."""
    return f"{cluster}/{worker}/{epoch}"


def worker_processes(
    cluster: str, module: str = MODULE
) -> list[tuple[psutil.Process, NodeId, int]]:
    """On this machine: the processes of `cluster`'s workers, each with its node and epoch."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if module in command[:-1]:
            parts = command[command.index(module) + 1].split("/")
            if len(parts) == 3 and parts[0] == cluster and parts[2].isdigit():
                found.append((process, parts[1], int(parts[2])))
    return found


def kill_workers(cluster: str, worker: NodeId = "", up_to: int | None = None) -> None:
    """End the processes on this machine of all workers of `cluster`, or of one, up to an epoch; by
    force."""
    for module in (MODULE, RANKS_MODULE):
        for process, node, epoch in worker_processes(cluster, module):
            if node == (worker or node) and (up_to is None or epoch <= up_to):
                kill_all(process)


def kill_all(process: psutil.Process) -> None:
    """With its ranks, which may be stopped, or hear too late that their leader is gone."""
    with contextlib.suppress(psutil.Error):
        for each in (*process.children(recursive=True), process):
            with contextlib.suppress(psutil.Error):
                each.kill()
