"""Where the blocks of sessions are, and what is asked of the workers that hold them."""

from __future__ import annotations

from engine.kv.tier import Tier
from engine.node import NodeId, Send
from engine.stats import Role, WorkerInfo
from kvtransfer.messages import CacheAction, CacheOrder
from router.dispatch import Dispatcher
from router.messages import SessionHolder, SessionInfo
from router.sessions.table import Session, SessionTable, kind_of


class SessionBlocks:
    """Owned by `Sessions`. Changes nothing but the number of its last order; what it says of
    workers is what the router's index knows at that moment."""

    def __init__(self, router: NodeId, dispatcher: Dispatcher, table: SessionTable) -> None:
        self._router = router
        self._dispatcher = dispatcher
        self._table = table
        self._num_orders = 0

    def orders(
        self,
        action: CacheAction,
        session: Session,
        only: Tier | None = None,
        at_most: int | None = None,
    ) -> list[Send]:
        """`CacheOrder`s to the workers that hold blocks of `session`, the best `at_most` of them;
        with `only`, to those that hold some in this tier."""
        workers = self._workers()
        sends: list[Send] = []
        for holder in self._holders(session, workers)[:at_most]:
            block_hashes = self._hashes(action, session, workers[holder.worker])
            if block_hashes and (only is None or only in holder.num_blocks):
                self._num_orders += 1
                order_id = f"{self._router}/{self._num_orders}"
                order = CacheOrder(order_id, self._router, action, tuple(block_hashes))
                sends.append(Send(holder.worker, order))
        return sends

    def info(self, now: float, session: Session) -> SessionInfo:
        workers = self._workers()
        holders = self._holders(session, workers)
        infos = [workers[holder.worker] for holder in holders] or list(workers.values())
        return SessionInfo(
            session=session.name,
            tenant=session.tenant,
            state=session.state,
            num_tokens=session.num_tokens,
            num_blocks=session.num_blocks(kind_of(infos[0])) if infos else 0,
            num_turns=session.num_turns,
            pinned=session.pinned,
            retention=session.retention,
            age_s=now - session.created_at,
            last_used_s=now - session.used_at,
            worker=session.worker,
            holders=tuple(holder for holder in holders if holder.num_blocks),
        )

    def _workers(self) -> dict[NodeId, WorkerInfo]:
        return {e.worker: e.info for e in self._dispatcher.endpoints if e.alive}

    def _holders(self, session: Session, workers: dict[NodeId, WorkerInfo]) -> list[SessionHolder]:
        """Whoever holds some of its blocks, the one to go on with first; and the worker of its last
        turn, of which the index may not have heard yet."""
        held: dict[NodeId, dict[Tier, int]] = {}
        for kind in {kind_of(info) for info in workers.values()}:
            found = self._dispatcher.index.holdings(session.block_hashes(kind))
            held.update((w, counts) for w, counts in found.items() if kind_of(workers[w]) == kind)
        if session.tokens and session.worker in workers:
            held.setdefault(session.worker, {})

        def rank(worker: NodeId) -> tuple[bool, int, int, bool]:
            counts = held[worker]
            in_device, most = counts.get(Tier.DEVICE, 0), max(counts.values(), default=0)
            decodes = workers[worker].role is Role.DECODE
            return decodes, most, in_device, worker == session.worker

        best_first = sorted(sorted(held), key=rank, reverse=True)
        return [SessionHolder(worker, held[worker]) for worker in best_first]

    def _hashes(self, action: CacheAction, session: Session, info: WorkerInfo) -> list[bytes]:
        """What an order is about. What another session stands for too (the beginning of a fork) is
        not dropped, and not unpinned while that one is pinned; nor is a public region dropped."""
        block_hashes = session.block_hashes(kind_of(info))
        num_kept = 0
        if action is CacheAction.DROP:
            num_kept = session.scope.num_public_tokens // info.block_size
        elif action is not CacheAction.UNPIN:
            return block_hashes
        for other in self._table.of_tenant(session.tenant):
            if other is not session and (action is CacheAction.DROP or other.pinned):
                num_kept = max(num_kept, session.num_shared(other, info.block_size))
        return block_hashes[num_kept:]
