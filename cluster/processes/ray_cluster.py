"""The Ray cluster that this process is part of: started or joined, its machines, and left.

Import this after `apply_environment`.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import ray

from kvrelay.cluster.control.machines import Machine
from kvrelay.cluster.processes.here import num_cpus
from kvrelay.engine.host import first_line

REACH_TIMEOUT_S = 5.0
NAMESPACE = "kvrelay"  # where actors have their names
OBJECT_STORE_BYTES = 80 << 20  # nothing of ours goes through it


class RayUnavailable(Exception):
    """Ray did not start, or the cluster to join cannot be reached; one line."""


def connect(address: str, dashboard_port: int = 0) -> None:
    """Join the Ray cluster at `address`, or start one that asks for a token, with a dashboard if
    that has a port. Blocks for seconds. Raises RayUnavailable."""
    if address not in ("", "auto"):
        _check_reachable(address)
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": logging.CRITICAL,
    }
    if address:
        options["address"] = address
    else:
        options |= {
            "address": "local",
            "num_cpus": num_cpus(),  # as workers count them that are started before
            "include_dashboard": dashboard_port > 0,
            "dashboard_port": dashboard_port or None,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not address and visible.startswith("MIG-"):  # Ray counts whole GPUs
        options["num_gpus"] = len(visible.split(","))
    # Ray prints the last words of dead processes; what matters of them, the controller logs.
    ray._private.worker._worker_logs_enabled = False
    if ray.is_initialized():  # by an attempt that came through after all, or was then refused
        ray.shutdown()
    try:
        ray.init(**options)
    except Exception as error:  # it raises all kinds, and Exception itself for a timeout
        what = f"join the Ray cluster at {address}" if address else "start Ray"
        raise RayUnavailable(f"cannot {what}: {first_line(error)}") from error


def _check_reachable(address: str) -> None:
    """Ray tries for half a minute; whether anything listens is known at once."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH_TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise RayUnavailable(f"cannot reach a Ray cluster at {address}: {reason}") from error


def disconnect() -> None:
    """Leave the cluster; one that `connect` started ends with that."""
    ray.shutdown()


def control_plane() -> str:
    """HOST:PORT of the cluster that was joined."""
    return str(ray.get_runtime_context().gcs_address)


def logs_folder() -> str:
    """Where Ray and the guardians write their own logs, on this machine."""
    return str(ray._private.worker.global_worker.node.get_logs_dir_path())


def own_machine() -> str:
    return str(ray.get_runtime_context().get_node_id())


def alive_nodes() -> list[dict[str, Any]]:
    """Ray's records of the machines that it believes alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def ask_for_machines(num_machines: int, resources: dict[str, float]) -> None:
    """Ask Ray's autoscaler; see `RayWorkers.request_machines`. Blocks."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[resources] * num_machines)


def machines_of(nodes: list[dict[str, Any]], use_gpus: bool) -> tuple[Machine, ...]:
    """In a stable order; without their GPUs if those are not wanted. A node that was started with
    no CPUs and no GPUs, as heads are, is for Ray alone."""
    found = [
        Machine(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0) if use_gpus else 0.0,
        )
        for node in nodes
        if node["Resources"].keys() & {"CPU", "GPU"}
    ]
    return tuple(sorted(found, key=lambda machine: (machine.host, machine.machine_id)))
