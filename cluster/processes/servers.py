"""One of several servers of a cluster: whether it leads, and who does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvrelay.cluster.config import Config
from kvrelay.cluster.control.lease import Change, Lease, LeaseKey
from kvrelay.cluster.processes.life import SharedLife
from kvrelay.cluster.processes.orders import LeaseOrder
from kvrelay.worker.messages import Peer

if TYPE_CHECKING:
    from kvrelay.cluster.state.lease import LeaseKeeper, LeaseView

log = logging.getLogger("kvrelay.serve")


class Servers:
    """Owned by the supervisor, on its loop. The lease is looked at and written on a thread."""

    def __init__(
        self, config: Config, life: SharedLife, on_view: Callable[[LeaseView], None]
    ) -> None:
        """`on_view` hears after each look at the lease."""
        state, cluster = config.state, config.cluster
        key = f"{state.key_prefix}:cluster:{cluster.name}"
        self._key = LeaseKey(state.url, key, state.timeout_s)
        self._lease = Lease(life.server, cluster.lease_s, config.model.name, life.record.settings)
        self._life = life
        self._on_view = on_view
        self._loop = asyncio.get_running_loop()
        self._keeper: LeaseKeeper | None = None
        self._seen: LeaseView | None = None

    @property
    def leads(self) -> bool:
        return self._seen is not None and self._seen.term > 0

    @property
    def leader(self) -> str:
        return self._seen.leader.holder if self._seen is not None else ""

    def start(self) -> None:
        from kvrelay.cluster.state.lease import LeaseKeeper  # needs redis

        self._keeper = LeaseKeeper(self._key, self._lease, self._life.deadline, self._tell)
        self._keeper.start()

    def order(self) -> LeaseOrder:
        return LeaseOrder(self._key, self._life.term, self._life.deadline.fd)

    def listens(self, controller: Peer) -> None:
        """Where the controller of this server does, which leads."""
        if self._keeper is not None:
            self._keeper.listens(controller)

    async def close(self) -> None:
        """Neither leads nor follows any more."""
        if self._keeper is not None:
            await asyncio.to_thread(self._keeper.close)

    def _tell(self, view: LeaseView) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: this server has ended
            self._loop.call_soon_threadsafe(self._hear, view)

    def _hear(self, view: LeaseView) -> None:
        life = self._life
        self._seen = view
        if view.change is Change.LEADS:
            log.warning("%s leads from now on (term %d)", life.server, view.term)
            life.lead(view.term)
        elif view.change is Change.LOST:
            log.warning(
                "%s leads now (term %d): %s steps down, and its controller ends",
                view.leader.holder,
                view.leader.term,
                life.server,
            )
        self._on_view(view)
