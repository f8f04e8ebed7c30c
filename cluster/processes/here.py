"""This machine: where its processes listen, so that those of other machines reach them, and workers
that the controller starts on it itself.

It does so where it also starts Ray, until that is up: Ray takes longer to start than workers that
are forked, and its guardians would end with the controller as these do.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvrelay.cluster.config import Config
from kvrelay.cluster.control.messages import Machine, WorkerLost
from kvrelay.cluster.prepare import ROOT, num_gpus, uses_gpus
from kvrelay.engine.host import first_line, in_thread
from kvrelay.worker.guardian import WorkerGuardian
from kvrelay.worker.messages import StartFailed, WorkerStarted
from kvrelay.worker.spec import WorkerOrder

HERE = "here"  # the name of the machine whose Ray is its own: Ray has another one each time
LOOPBACK = "127.0.0.1"
_SOMEWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737); nothing is sent there


def own_host(address: str) -> str:
    """`address`: of the Ray cluster, as in `cluster.address`. Without one all is on this machine.
    Else the address of the interface that leads there; does not wait for anything."""
    if not address:
        return LOOPBACK
    host = ray_address(address).rpartition(":")[0].strip("[]")
    own = _toward(host)
    # Ray's own control plane is here: then others reach us by what leads out.
    return _toward(_SOMEWHERE) if own.startswith("127.") else own


def ray_address(address: str) -> str:
    """HOST:PORT of the Ray cluster; "" if that is not known."""
    if address != "auto":
        return address
    if from_user := os.environ.get("RAY_ADDRESS", ""):
        return from_user
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        return note.read_text().strip()
    except OSError:
        return ""


def _toward(host: str) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # only looks up the route: it is a datagram socket
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def num_cpus(root: Path = ROOT) -> int:
    """Cores that a process here may use; as many as a quota allows whole."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # "max": there is no quota
        quota, period = map(int, (root / "sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores


def this_machine(config: Config) -> Machine | None:
    """Where workers are started before Ray is up; None: Ray says where. On GPUs it is Ray that
    holds these for workers."""
    cluster = config.cluster
    if cluster.address or cluster.name or uses_gpus(config, num_gpus()):
        return None
    return Machine(HERE, _toward(_SOMEWHERE), float(num_cpus()))


class _Guardian(WorkerGuardian):
    """Not in an actor: when its worker ends, it lets go of what it holds."""

    def _leave(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()


async def run_here(order: WorkerOrder, tell: Callable[[Any], None]) -> None:
    """The life of a worker that is started here. `tell` gets StartFailed, or WorkerStarted and, at
    the end, WorkerLost."""
    spec = order.spec
    try:
        with open(os.devnull, "wb") as nothing:  # who reads our stdout waits for no worker's end
            guardian = _Guardian(spec.worker, nothing.fileno())
            outcome = await in_thread(partial(guardian.run, order), f"start-{spec.worker}")
    except Exception as error:  # whatever it was, the controller waits for an answer
        outcome = StartFailed(spec.worker, spec.epoch, first_line(error), permanent=False)
    tell(outcome)
    if isinstance(outcome, WorkerStarted):
        why = await in_thread(guardian.wait, f"guard-{spec.worker}")
        tell(WorkerLost(spec.worker, spec.epoch, why))
