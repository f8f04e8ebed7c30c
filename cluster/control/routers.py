"""The routers that servers have started, each with an API, and what routers and workers know of
each other.

A router that is up and a worker are announced to each other once each knows where the other
listens: pair by pair, so that one process that hangs keeps no other waiting. When a router is
lost, its workers hear of it: its clients went with it, so no client could take the tokens of its
requests, and deadlines are far too late to give their blocks and their share of a step to others.
Routers hear of each other as well: see `router.state.ReplicaSync`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvrelay.cluster.control.control_config import ControllerConfig
from kvrelay.cluster.control.lifecycle import (
    DesiredProcess,
    Incarnation,
    ProcessEvent,
    ProcessSet,
    ProcessState,
)
from kvrelay.cluster.control.messages import (
    AdoptRouter,
    RouterStarted,
    SendPeers,
)
from kvrelay.engine.node import Effect, NodeId, Note, Send
from kvrelay.engine.stats import RouterDown, RouterUp, WorkerInfo
from kvrelay.router.messages import RoleChanged, WorkerDown, WorkerUp
from kvrelay.worker.messages import Peer, PeersUpdated


class PairState(StrEnum):
    UNKNOWN = "unknown"
    ADDRESSED = "addressed"  # each is sent where the other listens
    CONNECTED = "connected"  # each has said that it knows
    ANNOUNCED = "announced"  # the router may send requests to the worker


@dataclass(slots=True)
class Pair:
    """A router that is up and the worker's epoch that listens.

    Invariant: it is addressed exactly while one of the two has not answered for `newcomer`."""

    router: NodeId
    worker: NodeId
    state: PairState = PairState.UNKNOWN
    newcomer: Incarnation = ("", 0)  # the one of the two that listens since later
    unanswered: set[NodeId] = field(default_factory=set)
    in_use: bool = False  # announced, by this controller or by the one before

    def updated(self, done: PeersUpdated) -> None:
        if (done.about, done.epoch) == self.newcomer and self.state is PairState.ADDRESSED:
            self.unanswered.discard(done.to)
            if not self.unanswered:
                self.state = PairState.CONNECTED


@dataclass(slots=True, kw_only=True)
class DesiredRouter(DesiredProcess):
    http_port: int = 0
    said: RouterStarted | None = None  # where it is, by its own account


class RouterSet(ProcessSet[DesiredRouter]):
    """Owned by the controller. Invariant: `pairs` has each router that is up with each worker that
    listens; a router uses a worker only if the two are announced to each other.

    Servers start routers. Those of the controller's own server are waited for while they are away;
    those of others come and go."""

    tag = "router "

    def __init__(self, config: ControllerConfig, controller: NodeId) -> None:
        super().__init__(config)
        epochs = config.kept.routers
        self.by_name = {
            name: DesiredRouter(name, epochs.get(name, 0), ProcessState.STARTING)
            for name in config.routers
        }
        self.pairs: dict[tuple[NodeId, NodeId], Pair] = {}  # by router and worker
        self._controller = controller

    @property
    def peers(self) -> list[Peer]:
        """Where those listen that are up."""
        return [router.peer for router in self.by_name.values() if router.peer is not None]

    @property
    def epochs(self) -> dict[NodeId, int]:
        return {router.node: router.epoch for router in self.by_name.values() if router.epoch}

    @property
    def joined(self) -> dict[NodeId, RouterStarted]:
        """For the next controller."""
        return {name: r.said for name, r in self.by_name.items() if r.said is not None}

    def all_up(self) -> bool:
        return all(router.is_serving for router in self.by_name.values())

    def resume(self, workers: Mapping[NodeId, Peer]) -> list[Effect]:
        """Call those that the last controller knew, which may have announced `workers` to them."""
        effects: list[Effect] = []
        for joined in (*self.config.kept.joined, *self.config.kept.own):
            router = self._add(joined)
            self.pairs |= {(router.node, w): Pair(router.node, w, in_use=True) for w in workers}
            effects.append(AdoptRouter(joined.peer))
            effects.append(self.wake(self.config.adopt_timeout_s, router))
        return effects

    def _add(self, joined: RouterStarted) -> DesiredRouter:
        """One that has not said to this controller yet that it is up."""
        peer = joined.peer
        router = DesiredRouter(peer.node, peer.epoch, said=joined)
        router.on(ProcessEvent.ADOPT)
        self.by_name[peer.node] = router
        return router

    def join(
        self, now: float, joined: RouterStarted, listening: Mapping[NodeId, Peer]
    ) -> list[Effect]:
        """A router says, again and again, that it is up. `listening`: workers that do."""
        me, effects = joined.peer, list[Effect]()
        router = self.by_name.get(me.node)
        if router is not None and router.said is not None and me.epoch > router.epoch:
            effects = self.lost(now, router, "it was started again")
            router = self.by_name.get(me.node)
        if router is not None and (me.epoch < router.epoch or router.is_serving):
            return []
        downs: list[Effect] = []
        if router is None or router.said is None:
            if router is None or me.epoch == router.epoch:  # what it had at workers has ended
                why = "the controller did not know of this router"
                downs = [
                    Send(me.node, WorkerDown(w.node, w.epoch, why)) for w in listening.values()
                ]
            error = router.last_error if router is not None else ""
            router = self._add(joined)
            router.last_error = error
        address, *rest = self._started(now, router, joined, listening)
        return [*effects, address, *downs, *rest]

    def updated(self, done: PeersUpdated) -> list[Effect]:
        """A worker or router has got addresses."""
        for pair in self.pairs.values():
            if done.to in (pair.router, pair.worker):
                pair.updated(done)
        to = self.by_name.get(done.to)
        about = self.current(done.about, done.epoch, ProcessState.UP)
        if to is None or to.peer is None or about is None:
            return []
        others = [peer.node for peer in self._others(to)] if about is to else [about.node]
        return [Send(to.node, RouterUp(other)) for other in others]

    def address(self, router: NodeId, worker: NodeId, newcomer: Incarnation) -> None:
        """Each of the two is sent where the other listens, since `newcomer` does from now on."""
        pair = self.pairs.setdefault((router, worker), Pair(router, worker))
        pair.state, pair.newcomer = PairState.ADDRESSED, newcomer
        pair.unanswered = {router, worker}

    def announce(self, up: Mapping[NodeId, WorkerInfo]) -> list[Effect]:
        """Announce to each other those that know each other by now. `up`: workers that requests
        may go to."""
        effects: list[Effect] = []
        for pair in self.pairs.values():
            if pair.state is PairState.CONNECTED and pair.worker in up:
                pair.state, pair.in_use = PairState.ANNOUNCED, True
                effects.append(Send(pair.worker, RouterUp(pair.router)))
                effects.append(Send(pair.router, WorkerUp(up[pair.worker])))
        return effects

    def part(self, router: NodeId, worker: NodeId) -> None:
        """The router has given up this worker. Each still knows where the other listens."""
        pair = self.pairs.get((router, worker))
        if pair is not None:
            pair.in_use = False
            if pair.state is PairState.ANNOUNCED:
                pair.state = PairState.CONNECTED

    def role_changed(self, change: RoleChanged) -> list[Effect]:
        announced = [p for p in self.pairs.values() if p.state is PairState.ANNOUNCED]
        return [Send(p.router, change) for p in announced if p.worker == change.worker]

    def worker_lost(self, worker: NodeId, epoch: int, reason: str) -> list[Effect]:
        down = WorkerDown(worker, epoch, reason)
        return [Send(pair.router, down) for pair in self._take_pairs(worker) if pair.in_use]

    def _take_pairs(self, node: NodeId) -> list[Pair]:
        """Forget those of a router or worker that is gone."""
        gone = [ends for ends in self.pairs if node in ends]
        return [self.pairs.pop(ends) for ends in gone]

    def lost(self, now: float, router: DesiredRouter, reason: str) -> list[Effect]:
        """Its server starts it again, or has gone with it."""
        workers = [pair.worker for pair in self._take_pairs(router.node) if pair.in_use]
        others = [peer.node for peer in self._others(router)]
        node, epoch, text = router.node, router.epoch, f"is gone: {reason}"
        router.end(ProcessEvent.REMOVE)
        if node in self.config.routers:
            self.by_name[node] = DesiredRouter(
                node, epoch, ProcessState.BACKOFF, last_error=reason, http_port=router.http_port
            )
        else:
            del self.by_name[node]
        return [
            Note("warning", "router_lost", f"{node} (epoch {epoch}) {text}"),
            *(Send(each, RouterDown(node)) for each in (*workers, *others)),
        ]

    def overdue(self, now: float, router: DesiredRouter) -> list[Effect]:
        return self.lost(now, router, "did not answer the controller that came after its own")

    def _started(
        self,
        now: float,
        router: DesiredRouter,
        started: RouterStarted,
        listening: Mapping[NodeId, Peer],
    ) -> list[Effect]:
        """It listens, and waits for nobody before it is up."""
        me = started.peer
        router.on(ProcessEvent.LISTENS)
        router.on(ProcessEvent.INTRODUCED)
        router.peer, router.up_at, router.pid = me, now, started.pid
        router.http_port = started.http_port
        for worker in listening:
            self.address(me.node, worker, router.incarnation)
        known = (*listening.values(), *self._others(router))
        text = f"{router.node} is up (epoch {router.epoch}) at port {router.http_port}"
        return [
            SendPeers(self._controller, me.node, me.epoch, (me,)),
            SendPeers(me.node, me.node, me.epoch, (*known, *self.config.listeners)),
            *(SendPeers(peer.node, me.node, me.epoch, (me,)) for peer in known),
            Note("info", "router_up", text),
        ]

    def _others(self, router: DesiredRouter) -> list[Peer]:
        """Routers that are up, but this one."""
        return [peer for peer in self.peers if peer.node != router.node]


def is_router(node: NodeId) -> bool:
    return node.startswith("router-")


def api_url(host: str, port: int, scheme: str = "http") -> str:
    """Where an API that listens at `host` is found from its own machine; "" without a port."""
    shown = "127.0.0.1" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}" if port else ""
