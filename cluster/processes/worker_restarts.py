"""Workers that are started anew, one after the other, while their requests go on at the others."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvrelay.cluster.control.controller import Controller
from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.messages import RestartWorker
from kvrelay.engine.node import NodeId

log = logging.getLogger("kvrelay.control")

MAX_FAILURES = 2  # a worker that fails so often leaves the others as they are
Versions = Callable[[], Awaitable[Mapping[str, str]]]
"""What a worker that is started now would have, by machine."""


async def restart_workers(
    controller: Controller,
    say: Callable[[Any], None],
    versions: Versions,
    drain_s: float,
    only_outdated: bool,
) -> str:
    """Returns why it stopped, or why some are left as they are; "" if all are up again. `say`:
    tells the controller. `only_outdated`: those that another version or other settings have
    started, and of these no worker that would come back as it was."""
    loop = asyncio.get_running_loop()
    timeout_s = controller.config.start_timeout_s
    deadline = loop.time() + timeout_s
    while not controller.machines:  # a worker that ends now would have nowhere to start
        if loop.time() > deadline:
            return f"no machine is known after {timeout_s:g} s: Ray does not answer"
        await asyncio.sleep(0.1)
    workers, held_back = controller.worker_set, dict[NodeId, str]()
    outdated = workers.outdated()
    if only_outdated and outdated:
        held_back = workers.held_back(await versions())
    for worker in list(controller.workers.values()):
        is_passed = worker.node in held_back or (only_outdated and worker.node not in outdated)
        if worker.state is not ProcessState.UP or is_passed:
            continue  # what is started later is started anew in any case
        before, failures = worker.epoch, worker.failures
        say(RestartWorker(worker.node, "an operator restarts all workers"))
        deadline = loop.time() + drain_s + timeout_s
        while worker.epoch == before or worker.state is not ProcessState.UP:
            if controller.workers.get(worker.node) is not worker:
                break  # the autoscaler has let it go
            if worker.failures > failures + MAX_FAILURES:
                return f"{worker.node} does not come up again: {worker.last_error}"
            if loop.time() > deadline:
                return f"{worker.node} is not up again after {timeout_s:g} s"
            await asyncio.sleep(0.1)
    if left := _said({node: workers.by_name[node].package for node in workers.outdated()}):
        log.warning("%s", left)
    return _said(held_back)


def _said(versions: Mapping[NodeId, str]) -> str:
    """Why workers have another version than this; "": none has."""
    if not versions:
        return ""
    counts = sorted(Counter(versions.values()).items())
    runs = " and ".join(f"{number} workers run {version}" for version, number in counts)
    return (
        f"{runs}: their machines or pods have it, and a start would bring it again. Install this"
        " version there, or replace the pods, one by one"
    )
