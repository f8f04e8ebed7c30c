"""The processes of workers on this machine, found by their command lines, and the GPUs that they
hold.

Ray counts GPUs, and forgets who holds them when it ends; workers go on. So a worker that starts
takes only such as no other worker's process here holds, whoever has started that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from kvrelay.engine.files import held_lock, runtime_folder
from kvrelay.engine.node import NodeId

MODULE = "kvrelay.cluster.processes.worker"  # what a worker's process runs; its name follows
RANKS_MODULE = "kvrelay.worker.rank_host"  # what one runs that has some of its further ranks
FORK_MODULE = "kvrelay.cluster.processes.fork_server"  # what one runs that workers are forked from

CHOOSING_S = 60.0  # for workers that are being started here
GPUS = "KVRELAY_GPUS"  # in the environment of each: what it holds, as CUDA_VISIBLE_DEVICES names it


def name_of(cluster: str, worker: NodeId, epoch: int) -> str:
    """Names a worker's process, in its command line."""
    return f"{cluster}/{worker}/{epoch}"


def fork_server_name(cluster: str) -> str:
    return name_of(cluster, "fork-server", 0)


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


def workers_here() -> list[NodeId]:
    """On this machine, of any cluster."""
    commands = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    names = (c[c.index(m) + 1] for c in commands for m in (MODULE, RANKS_MODULE) if m in c[:-1])
    return sorted({name.split("/")[1] for name in names if name.count("/") == 2})


def held_gpus() -> dict[str, str]:
    """By worker processes of all clusters on this machine: the name of each holder, by GPU."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        module = next((each for each in (MODULE, RANKS_MODULE) if each in command[:-1]), None)
        if module is None:
            continue
        with contextlib.suppress(psutil.Error):
            held = _split(process.environ().get(GPUS, ""))
            found.update(dict.fromkeys(held, command[command.index(module) + 1]))
    return found


def choose_gpus(
    num: int, given: Sequence[str], here: Sequence[str], held: Mapping[str, str]
) -> list[str]:
    """Those that a worker takes: of the `given`, and where somebody holds these, others that are
    `here`; fewer than `num` if there are no more."""
    wanted = [*given, *(gpu for gpu in here if gpu not in given)]
    return [gpu for gpu in wanted if gpu not in held][:num]


def gpus_here(root: Path = Path("/")) -> list[str]:
    """All that the raylet of this guardian may give: what was visible to it, or the machine's."""
    with contextlib.suppress(psutil.Error, AttributeError):
        visible = psutil.Process().parent().environ().get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return _split(visible)
    found = len([*(root / "proc/driver/nvidia/gpus").glob("*")])
    return [str(number) for number in range(found)]


@contextlib.contextmanager
def choosing() -> Iterator[None]:
    """One at a time on this machine: until its process is there, nobody sees what it holds. Raises
    OSError where the lock is another user's, or is held for long."""
    with held_lock(runtime_folder() / "gpus.lock", CHOOSING_S):
        yield


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def kill_workers(cluster: str, worker: NodeId = "", up_to: int | None = None) -> None:
    """End the processes on this machine of all workers of `cluster`, or of one, up to an epoch; by
    force. With all of them go what they are forked from and their host memory, which one alone
    leaves to its successor."""
    if not worker:
        for process, *_ in worker_processes(cluster, FORK_MODULE):
            kill_all(process)  # first, or one more worker could come of it
    for module in (MODULE, RANKS_MODULE):
        for process, node, epoch in worker_processes(cluster, module):
            if node == (worker or node) and (up_to is None or epoch <= up_to):
                kill_all(process)
    if not worker:
        from kvrelay.kvtransfer.store.arena import remove_arenas

        remove_arenas(cluster)


def kill_all(process: psutil.Process) -> None:
    """With its ranks, which may be stopped, or hear too late that their leader is gone."""
    with contextlib.suppress(psutil.Error):
        for each in (*process.children(recursive=True), process):
            with contextlib.suppress(psutil.Error):
                each.kill()
