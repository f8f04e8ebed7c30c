"""What a server does to itself while it serves: a restart, a rollback, another model. One at a
time, and how it goes is in the log and the status."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from kvrelay.cluster.processes.handover import HandoverError
from kvrelay.cluster.status import RestartStatus
from kvrelay.engine.backoff import Backoff

log = logging.getLogger("kvrelay.serve")

STABLE_S = 60.0  # a controller that ran for so long is started again at once
RAY_AGAIN = Backoff(0.5, 60.0)  # before a start of Ray follows one that failed
RAY = "ray"  # in StartupProgress


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
