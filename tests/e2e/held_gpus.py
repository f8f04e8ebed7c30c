"""Start a worker by Ray, end its guardian, then the worker: `python -m tests.e2e.held_gpus FOLDER`.

FOLDER holds a checkpoint. The GPUs are made up: Ray counts what it is told. Prints, as JSON, what
Ray has free of them at each point, and the classes of the actors.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from typing import Any

import psutil

from kvrelay.cluster.processes.ray_access import apply_environment

apply_environment()

import ray  # noqa: E402

import kvrelay.cluster.processes.ray as ray_workers  # noqa: E402
from kvrelay.cluster.processes.ray import NAMESPACE, RayWorkers, own_machine  # noqa: E402
from kvrelay.engine.config import EngineSection, ModelSection, TiersSection  # noqa: E402
from kvrelay.engine.stats import Role  # noqa: E402
from kvrelay.worker.messages import WorkerStarted  # noqa: E402
from kvrelay.worker.process import Listening  # noqa: E402
from kvrelay.worker.spec import WorkerSpec  # noqa: E402

NUM_GPUS = 3
CLUSTER = f"kvrelay-held-{os.getpid()}"


def spec(folder: str, worker: str, role: Role, num_gpus: int) -> WorkerSpec:
    return WorkerSpec(
        cluster=CLUSTER,
        worker=worker,
        role=role,
        epoch=1,
        model_dir=folder,
        model=ModelSection(name="tiny", dtype="float32", device="cpu"),
        engine=EngineSection(num_blocks=16, threads=1),
        tiers=TiersSection(),
        num_gpus=num_gpus,
        machine=own_machine(),
    )


def free_gpus(expected: float) -> float:
    """Once it is so many, or after 20 s."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        free = float(ray.available_resources().get("GPU", 0.0))
        if free == expected:
            break
        time.sleep(0.1)
    return free


def guardian_of(worker: str) -> psutil.Process:
    """There is one of each role."""
    title = f"ray::{worker.partition('-')[0].title()}Worker"
    for process in psutil.Process().children(recursive=True):
        if " ".join(process.cmdline()).startswith(title):
            return process
    raise LookupError(worker)


async def run(folder: str) -> dict[str, Any]:
    told: asyncio.Queue[Any] = asyncio.Queue()
    workers = RayWorkers(Listening("127.0.0.1", b"0" * 32, 1 << 20), told.put_nowait)
    watching = asyncio.create_task(workers.watch_machines(use_gpus=True))
    await told.get()
    pids = {}
    for worker, role, num in (("decode-0", Role.DECODE, 2), ("prefill-0", Role.PREFILL, 1)):
        workers.start(spec(folder, worker, role, num))
        answer = await told.get()
        assert isinstance(answer, WorkerStarted), answer
        pids[worker] = answer.pid
    seen: dict[str, Any] = {"started": free_gpus(0.0)}
    seen["actors"] = sorted([guardian_of(worker).cmdline()[0].partition(".")[0] for worker in pids])
    ray_workers.PLACE_TIMEOUT_S = 3.0
    workers.start(spec(folder, "decode-1", Role.DECODE, 1))
    seen["refused"] = (await told.get()).reason
    guardian = guardian_of("decode-0")
    os.kill(guardian.pid, signal.SIGKILL)
    guardian.wait(10)
    await asyncio.sleep(3.0)  # Ray notices, and would give the GPUs to others
    seen["guardian killed"] = free_gpus(0.0)
    seen["worker lives"] = psutil.pid_exists(pids["decode-0"])
    workers.end("decode-0", 1)
    seen["worker ended"] = await asyncio.to_thread(free_gpus, 2.0)
    watching.cancel()
    await workers.close()
    seen["closed"] = await asyncio.to_thread(free_gpus, float(NUM_GPUS))
    seen["groups left"] = len(
        [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
    )
    psutil.Process(pids["decode-0"]).kill()  # who ends it is the controller, which is not here
    return seen


def main() -> None:
    ray.init(
        address="local",
        namespace=NAMESPACE,
        num_cpus=1,
        num_gpus=NUM_GPUS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
    )
    print(json.dumps(asyncio.run(run(sys.argv[1]))))


if __name__ == "__main__":
    main()
