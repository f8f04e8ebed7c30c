"""One of several servers of a cluster: whether it leads, and who does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvrelay.cluster.config import Config
from kvrelay.cluster.control.lease import Change, Lease, LeaseKey
from kvrelay.cluster.control.messages import Checkpoint
from kvrelay.cluster.processes.life import Deadline, SharedLife
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

    def start(self, checkpoints: dict[str, str]) -> None:
        """`checkpoints`: of the models that it serves, by name."""
        self._lease.checkpoints = checkpoints
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


class Leadership:
    """Whether the controller of one of several servers may give orders. One that may not decides
    nothing, and keeps its connections, so that workers are not without a controller while the store
    is away for all; once the lease is its own again, the next controller begins from what was kept.

    With it goes the checkpoint, for the next leader."""

    def __init__(self, order: LeaseOrder, end: Callable[[str], None]) -> None:
        """`end` ends this process, for this reason."""
        from redis.exceptions import RedisError

        from kvrelay.cluster.state.lease import KeptInRedis, NotLeader

        self._errors = (RedisError, OSError)
        self._not_leader = NotLeader
        self._kept = KeptInRedis(order.key, order.term)
        self._deadline = Deadline(order.fd)
        self._end = end
        self._is_over = False

    def holds(self) -> bool:
        if not self._is_over and self._deadline.is_over():
            self._is_over = True
            log.warning("the lease is not renewed: this controller decides nothing until it is")
        return not self._is_over

    def look(self) -> None:
        """Once it may give no orders: whether it might again."""
        if not self._deadline.is_over():
            self._end("the lease was away, and is this server's again")

    def read(self) -> Checkpoint:
        try:
            return self._kept.read() or Checkpoint()
        except self._errors as error:
            self._end(f"what the last leader has kept cannot be read: {error}")
            raise

    def keep(self, checkpoint: Checkpoint) -> bool:
        """Whether it was written. Blocks for the store's deadline at most."""
        try:
            self._kept.write(checkpoint)
        except self._not_leader:
            self._end("another server leads")
        except self._errors as error:
            log.error("what the next leader has to know is not written, and tried again: %s", error)
            return False
        return True
