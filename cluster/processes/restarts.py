"""What a server does to itself while it serves: a restart, a rollback, another model. One at a
time, and how it goes is in the log and the status."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from kvrelay.cluster.processes.handover import HandoverError
from kvrelay.cluster.status import RestartStatus

log = logging.getLogger("kvrelay.serve")


class Restarts:
    """The supervisor has one of these, and nobody else changes it."""

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
