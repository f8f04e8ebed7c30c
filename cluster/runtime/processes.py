"""The processes of workers on this machine, found by their command lines."""

from __future__ import annotations

import contextlib

import psutil

from engine.node import NodeId

MODULE = "cluster.worker.main"  # what a worker's process runs; its name follows


def name_of(cluster: str, worker: NodeId, epoch: int) -> str:
    """Of a worker's process, in its command line."""
    return f"{cluster}/{worker}/{epoch}"


def worker_processes(cluster: str) -> list[tuple[psutil.Process, NodeId, int]]:
    """On this machine: the processes of `cluster`'s workers, each with its node and epoch."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if MODULE in command[:-1]:
            parts = command[command.index(MODULE) + 1].split("/")
            if len(parts) == 3 and parts[0] == cluster and parts[2].isdigit():
                found.append((process, parts[1], int(parts[2])))
    return found


def kill_workers(cluster: str, worker: NodeId = "", up_to: int | None = None) -> None:
    """End the processes on this machine of all workers of `cluster`, or of one, up to an epoch; by
    force."""
    for process, node, epoch in worker_processes(cluster):
        if node == (worker or node) and (up_to is None or epoch <= up_to):
            with contextlib.suppress(psutil.Error):
                process.kill()
