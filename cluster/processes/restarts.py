"""What a server does to itself while it serves: a restart, a rollback, another model. One at a
time, and how it goes is in the log and the status. Its workers are started anew one after the
other, while their requests go on at the others."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvrelay.cluster.control.lifecycle import ProcessState
from kvrelay.cluster.control.messages import RestartWorker
from kvrelay.cluster.processes.handover import HandoverError
from kvrelay.cluster.status import RestartStatus
from kvrelay.engine.backoff import Backoff
from kvrelay.engine.node import NodeId

if TYPE_CHECKING:
    from kvrelay.cluster.control.controller import Controller

log = logging.getLogger("kvrelay.serve")

STABLE_S = 60.0  # a controller that ran for so long is started again at once
RAY_AGAIN = Backoff(0.5, 60.0)  # before a start of Ray follows one that failed
RAY = "ray"  # in StartupProgress
MAX_FAILURES = 2  # a worker that fails so often leaves the others as they are
Versions = Callable[[], Awaitable[Mapping[str, str]]]
"""What a worker that is started now would have, by machine."""


class Restarts:
    """The restarts that were asked for. Owned by the supervisor."""

    def __init__(self, status: RestartStatus, tell: Callable[[RestartStatus], None]) -> None:
        """`tell`: has operators see it."""
        self.status, self._tell = status, tell
        self.is_under_way = False

    def begin(self, is_rollback: bool) -> None:
        self.is_under_way = True
        self.status.number += 1
        self.status.is_rollback = is_rollback

    async def finish(self, doing: Coroutine[Any, Any, None]) -> None:
        try:
            await doing
            self.show("done")
        except HandoverError as error:
            self.show("stopped", str(error))
        except Exception as error:
            log.exception("restart")
            self.show("stopped", f"{type(error).__name__}: {error}")
        finally:
            self.is_under_way = False

    def show(self, state: str, why: str = "") -> None:
        self.status = replace(self.status, state=state, why=why)
        self._tell(self.status)
        what = "rollback" if self.status.is_rollback else "restart"
        if why:
            log.error("%s stopped: %s", what, why)
        else:
            log.info("%s: %s", what, state)


class Ends:
    """Ends of a process in a row, and how long the next one waits. One that ended before it had
    Ray was in the step that the next one begins with, however long that took: its end is not
    forgotten, and where two servers of a machine start Ray, they leave each other time for it."""

    def __init__(self, backoff: Backoff, longest_s: float) -> None:
        """`backoff`: of ends that have nothing to do with Ray. `longest_s`: without a controller,
        workers end."""
        self._backoff, self._longest_s = backoff, longest_s
        self.failures = 0
        self._ray_failures = 0
        self._is_starting_ray = False

    def see(self, part: str, is_up: bool) -> None:
        """The controller says how far it is."""
        if part == RAY:
            self._is_starting_ray = not is_up
            self._ray_failures = 0 if is_up else self._ray_failures

    def ended(self, lived_s: float) -> float:
        """Returns how long to wait."""
        if lived_s >= STABLE_S:
            self.failures = 0
        if self._is_starting_ray:
            self._ray_failures += 1
        self._is_starting_ray = False
        return self.failed()

    def failed(self) -> float:
        """It could not even be started."""
        self.failures += 1
        pause_s = max(self._backoff.pause_s(self.failures), RAY_AGAIN.pause_s(self._ray_failures))
        return min(pause_s, self._longest_s)


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
