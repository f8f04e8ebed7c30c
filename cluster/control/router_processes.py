"""Routers beside the first: each with an API, in a process of its own that may die and come back.

    down -> starting -> up
              |         |
              +---------+--> backoff -> starting (next epoch) ...

A router that is up is told of a worker, and the worker of it, once each knows where the other
listens: pair by pair, so that one process that hangs keeps no other waiting. When a router is
lost, its workers are told: its clients went with it, so no client could take the tokens of its
requests, and deadlines are far too late to give their blocks and their share of a step to others.
Routers are told of each other as well: see `router.state.ReplicaSync`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvrelay.cluster.control.messages import (
    GiveUp,
    Introduce,
    RouterFailed,
    RouterLost,
    RouterStarted,
    StartRouter,
    StopRouter,
)
from kvrelay.engine.node import Effect, NodeId, Note, Send, Wake
from kvrelay.engine.stats import RouterDown, RouterUp, WorkerInfo
from kvrelay.router.messages import RoleChanged, WorkerDown, WorkerUp
from kvrelay.worker.messages import Introduced, Peer

TAG = "router"
Life = tuple[NodeId, int]  # a worker and its epoch


class RouterState(StrEnum):
    DOWN = "down"
    STARTING = "starting"
    UP = "up"
    BACKOFF = "backoff"


@dataclass(frozen=True, slots=True)
class RouterProcessLimits:
    start_timeout_s: float = 180.0
    backoff_s: float = 0.25
    max_backoff_s: float = 30.0
    stable_s: float = 60.0  # up for this long: earlier failures are forgotten
    max_first_failures: int = 3  # before it ever was up


@dataclass(slots=True)
class WantedRouter:
    """One wanted router. `peer` is set exactly while it is up."""

    node: NodeId
    epoch: int = 0
    state: RouterState = RouterState.DOWN
    peer: Peer | None = None
    http_port: int = 0
    pid: int = 0
    failures: int = 0
    restarts: int = 0
    up_at: float = 0.0
    last_error: str = ""
    offered: set[Life] = field(default_factory=set)  # workers it is told of when it starts
    greeted: set[Life] = field(default_factory=set)  # workers that are told of it when they start
    knows: set[Life] = field(default_factory=set)  # workers whose address it has
    known_by: set[Life] = field(default_factory=set)  # workers that have its address
    told: set[Life] = field(default_factory=set)  # workers that were announced to it
    believed: set[Life] = field(default_factory=set)  # told by an earlier controller, perhaps

    @property
    def lives(self) -> tuple[set[Life], ...]:
        return self.offered, self.greeted, self.knows, self.known_by, self.told, self.believed


class RouterProcesses:
    """Owned by the controller. Invariant: at most one epoch of a router is starting or up, the
    latest; `told` of a router that is up has exactly the workers it believes to be up."""

    def __init__(
        self,
        names: Iterable[NodeId],
        fixed: Iterable[Peer],
        limits: RouterProcessLimits,
        controller: NodeId,
        listeners: Iterable[Peer] = (),
    ) -> None:
        """`fixed`: routers that live as long as the controller, in its process; `listeners`: other
        nodes that routers send to."""
        self._fixed = tuple(fixed)
        self._listeners = tuple(listeners)
        self.routers = {name: WantedRouter(name) for name in names}
        self._limits = limits
        self._controller = controller
        self._gave_up = False

    @property
    def peers(self) -> list[Peer]:
        """Those that are up."""
        return [router.peer for router in self.routers.values() if router.peer is not None]

    def all_up(self) -> bool:
        return all(router.state is RouterState.UP for router in self.routers.values())

    def start(
        self,
        now: float,
        epochs: Mapping[NodeId, int],
        running: Iterable[RouterStarted],
        workers: Mapping[NodeId, Peer],
    ) -> list[Effect]:
        """`epochs`: the last of each; `running`: those that outlived the last controller, which
        may have announced `workers` to them."""
        effects: list[Effect] = []
        alive = {started.peer.node: started for started in running}
        for router in self.routers.values():
            router.epoch = epochs.get(router.node, 0)
            started = alive.get(router.node)
            if started is None:
                effects += self._start(router)
                continue
            router.epoch = started.peer.epoch
            effects += self._started(now, router, started, workers)
            router.believed = {(peer.node, peer.epoch) for peer in workers.values()}
        return effects

    @property
    def epochs(self) -> dict[NodeId, int]:
        return {router.node: router.epoch for router in self.routers.values()}

    def handle(
        self,
        now: float,
        message: RouterStarted | RouterFailed | RouterLost,
        listening: Mapping[NodeId, Peer],
        up: Mapping[NodeId, WorkerInfo],
    ) -> list[Effect]:
        """`listening`: workers that have an address; `up`: those that requests may go to."""
        match message:
            case RouterStarted(peer):
                router = self._current(peer.node, peer.epoch, RouterState.STARTING)
                return self._started(now, router, message, listening) if router else []
            case RouterFailed(node, epoch, reason, permanent):
                router = self._current(node, epoch, RouterState.STARTING)
                return self._failed(now, router, reason, permanent) if router else []
            case RouterLost(node, epoch, reason):
                router = self._current(node, epoch, RouterState.STARTING, RouterState.UP)
                return self._lost(now, router, reason, up) if router else []

    def introduced(
        self, done: Introduced, worker_epoch: int | None, up: Mapping[NodeId, WorkerInfo]
    ) -> list[Effect]:
        """A node has been told an address. `worker_epoch`: of the worker `done.to`, if it is one;
        else `done.to` is a router."""
        router = self.routers.get(done.to)
        effects: list[Effect] = []
        if router is not None and router.peer is not None:
            about = self.routers.get(done.about)
            if about is None:
                router.knows.add((done.about, done.epoch))
            elif about is router and done.epoch == router.epoch:
                router.knows |= router.offered
                effects += [Send(router.node, RouterUp(o.node)) for o in self._others(router)]
            elif about.peer is not None and done.epoch == about.epoch:
                effects.append(Send(router.node, RouterUp(about.node)))
        elif worker_epoch is not None:
            life = (done.to, worker_epoch)
            itself = done.about == done.to and done.epoch == worker_epoch
            for other in self.routers.values():
                of_it = (done.about, done.epoch) == (other.node, other.epoch)
                if other.peer is not None and (of_it or (itself and life in other.greeted)):
                    other.known_by.add(life)
        return effects + self.announce(up)

    def greet(self, worker: NodeId, epoch: int) -> None:
        """`worker` is being told of all routers that are up, and they of it."""
        for router in self.routers.values():
            if router.peer is not None:
                router.greeted.add((worker, epoch))

    def announce(self, up: Mapping[NodeId, WorkerInfo]) -> list[Effect]:
        """Bring together whoever knows each other by now and was not told yet."""
        effects: list[Effect] = []
        for router in self.routers.values():
            for info in up.values():
                life = (info.worker, info.epoch)
                if life in router.knows and life in router.known_by and life not in router.told:
                    router.told.add(life)
                    effects.append(Send(info.worker, RouterUp(router.node)))
                    effects.append(Send(router.node, WorkerUp(info)))
        return effects

    def part(self, router: NodeId, worker: NodeId, epoch: int) -> None:
        """The router has given up this worker, until it is announced again."""
        if router in self.routers:
            self.routers[router].told.discard((worker, epoch))

    def role_changed(self, change: RoleChanged) -> list[Effect]:
        life = (change.worker, change.epoch)
        return [Send(r.node, change) for r in self.routers.values() if life in r.told]

    def worker_lost(self, worker: NodeId, epoch: int, reason: str) -> list[Effect]:
        effects: list[Effect] = []
        life = (worker, epoch)
        for router in self.routers.values():
            if life in router.told or life in router.believed:
                effects.append(Send(router.node, WorkerDown(worker, epoch, reason)))
            for lives in router.lives:
                lives.discard(life)
        return effects

    def woken(self, now: float, tag: str) -> list[Effect]:
        _, state, epoch, node = tag.split(" ", 3)
        router = self._current(node, int(epoch), RouterState(state))
        if router is None:
            return []
        if router.state is RouterState.BACKOFF:
            return self._start(router)
        reason = f"did not start within {self._limits.start_timeout_s:g} s"
        return self._failed(now, router, reason, permanent=False)

    def _current(self, node: NodeId, epoch: int, *states: RouterState) -> WantedRouter | None:
        router = self.routers.get(node)
        if router is None or router.epoch != epoch or router.state not in states:
            return None
        return router

    def _start(self, router: WantedRouter) -> list[Effect]:
        router.epoch += 1
        router.state = RouterState.STARTING
        return [
            StartRouter(router.node, router.epoch, router.http_port),
            Wake(self._limits.start_timeout_s, f"{TAG} starting {router.epoch} {router.node}"),
        ]

    def _started(
        self,
        now: float,
        router: WantedRouter,
        started: RouterStarted,
        listening: Mapping[NodeId, Peer],
    ) -> list[Effect]:
        me = started.peer
        router.state = RouterState.UP
        router.peer, router.up_at, router.pid = me, now, started.pid
        router.http_port = started.http_port
        router.offered = {(peer.node, peer.epoch) for peer in listening.values()}
        others = self._others(router)
        known = (*listening.values(), *others)
        effects: list[Effect] = [
            Introduce(self._controller, me.node, me.epoch, (me,)),
            Introduce(me.node, me.node, me.epoch, (*known, *self._listeners)),
        ]
        strangers = [peer for peer in known if peer not in self._fixed]
        effects += [Introduce(peer.node, me.node, me.epoch, (me,)) for peer in strangers]
        effects += [Send(peer.node, RouterUp(me.node)) for peer in self._fixed]
        text = f"{router.node} is up (epoch {router.epoch}) at port {router.http_port}"
        return [*effects, Note("info", "router_up", text)]

    def _failed(
        self, now: float, router: WantedRouter, reason: str, permanent: bool
    ) -> list[Effect]:
        effects = self._lost(now, router, reason, {})
        hopeless = permanent or router.failures >= self._limits.max_first_failures
        if hopeless and router.http_port == 0 and not self._gave_up:
            self._gave_up = True
            effects.append(GiveUp(f"{router.node}: {reason}"))
        return effects

    def _lost(
        self, now: float, router: WantedRouter, reason: str, up: Mapping[NodeId, WorkerInfo]
    ) -> list[Effect]:
        limits = self._limits
        if router.state is RouterState.UP and now - router.up_at >= limits.stable_s:
            router.failures = 0
        router.state = RouterState.BACKOFF
        router.failures += 1
        router.restarts += 1
        router.last_error, router.peer = reason, None
        told = [info.worker for info in up.values() if (info.worker, info.epoch) in router.told]
        for lives in router.lives:
            lives.clear()
        pause_s = min(limits.max_backoff_s, limits.backoff_s * 2 ** min(router.failures - 1, 20))
        text = f"{router.node} (epoch {router.epoch}) is gone: {reason}; again in {pause_s:g} s"
        effects: list[Effect] = [
            Note("warning", "router_lost", text),
            StopRouter(router.node, router.epoch),
            Wake(pause_s, f"{TAG} backoff {router.epoch} {router.node}"),
        ]
        told += [other.node for other in self._others(router)]
        return effects + [Send(node, RouterDown(router.node)) for node in told]

    def _others(self, router: WantedRouter) -> list[Peer]:
        """Routers that are up, but this one."""
        return [*self._fixed, *(peer for peer in self.peers if peer.node != router.node)]


def api_url(host: str, port: int, scheme: str = "http") -> str:
    """Where an API that listens at `host` is found from its own machine; "" without a port."""
    shown = "127.0.0.1" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}" if port else ""
