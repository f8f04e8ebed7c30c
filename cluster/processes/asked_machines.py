"""How many machines Ray's autoscaler is asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvrelay.engine.backoff import Backoff

log = logging.getLogger("kvrelay.control")

RETRY = Backoff(2.0, 60.0)


class AskedMachines:
    """The last number that the controller wants is asked for until Ray has heard it: it may come
    while Ray is not there yet, or does not answer. Owned by the controller's process."""

    def __init__(self, ask: Callable[[int], Awaitable[bool]]) -> None:
        """`ask`: of Ray; False: it is not known yet what a machine is. Raises what Ray does."""
        self._ask = ask
        self.wanted: int | None = None  # None: nothing was wanted
        self._asked: int | None = None

    async def settle(self) -> None:
        """Ask for what is wanted, and try again where that fails, until it is done."""
        failures = 0
        while self._asked != (wanted := self.wanted) and wanted is not None:
            try:
                if not await self._ask(wanted):
                    return
                self._asked, failures = wanted, 0
            except Exception as error:  # Ray's: what serves goes on with the machines there are
                failures += 1
                pause_s = RETRY.pause_s(failures)
                text = "Ray was not asked for %d machines: %s; again in %g s"
                log.warning(text, wanted, error, pause_s)
                await asyncio.sleep(pause_s)

    async def give_back(self, timeout_s: float) -> None:
        """At the end of the cluster nobody needs those that were asked for: what Ray was asked for
        outlives who did."""
        if self._asked:
            self.wanted = 0
            try:
                await asyncio.wait_for(self.settle(), timeout_s)
            except TimeoutError:
                log.warning("Ray did not hear that its machines are needed no more")
