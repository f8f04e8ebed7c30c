"""The workers that are wanted: the controller starts them, introduces them and takes them down.

A worker is introduced before a router may use it: it learns the addresses of all that it may talk
to (any worker may fetch KV from any other), they learn its own, and only when all have said so is
it announced. One that is up and makes no progress is ended by force: see `cluster.control.watches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from kvrelay.cluster.control.control_config import ControllerConfig
from kvrelay.cluster.control.lifecycle import (
    RUNNING,
    SERVING,
    DesiredProcess,
    ProcessEvent,
    ProcessSet,
    ProcessState,
)
from kvrelay.cluster.control.messages import (
    AdoptWorker,
    GiveUp,
    Machine,
    SendPeers,
    StartWorker,
    StopWorker,
    WorkerCheckpoint,
    differing,
)
from kvrelay.cluster.control.routers import RouterSet
from kvrelay.cluster.control.watches import Drains, Suspects
from kvrelay.engine.backoff import Backoff
from kvrelay.engine.node import Effect, NodeId, Note
from kvrelay.engine.stats import InfoChange, Role, WorkerInfo
from kvrelay.router.messages import RoleChanged
from kvrelay.worker.messages import Peer, WorkerStarted

MAX_DOUBLED = 2  # how often the time of a start is doubled
RESTART_S = 1.0  # for one that drained to be started again: it ends by itself


@dataclass(slots=True, kw_only=True)
class DesiredWorker(DesiredProcess):
    role: Role
    model: str = ""  # that it serves, by its name
    num_ranks: int = 1  # its processes, each with a GPU where they are used; whatever its role
    machine_id: str | None = None
    further: tuple[str, ...] = ()  # other machines, of the rest of its ranks
    hosts: tuple[str, ...] = ()  # where they are: what stays when Ray names machines anew
    fixed: dict[str, str] = field(default_factory=dict)  # see `WorkerCheckpoint`
    avoid: str | None = None  # where it failed to start
    info: WorkerInfo | None = None
    started: WorkerStarted | None = None  # while it listens
    hangs: int = 0  # times that it was ended because it did not answer
    ordered_at: float | None = None  # by the autoscaler; None: it was there before
    is_leaving: bool = False  # it goes for good when nothing needs it
    built: str = ""  # what it runs: as `WorkersConfig.built`, once it listens

    @property
    def is_draining(self) -> bool:
        return self.is_leaving or self.state is ProcessState.DRAINING

    @property
    def package(self) -> str:
        """The version that it runs."""
        return self.built.split(" ")[0]

    @property
    def machines(self) -> tuple[str, ...]:
        """Where it was placed the last time, with as many ranks on each."""
        return () if self.machine_id is None else (self.machine_id, *self.further)

    def checkpoint(self) -> WorkerCheckpoint:
        return WorkerCheckpoint(
            self.node,
            self.role,
            self.epoch,
            self.machine_id or "",
            self.peer,
            self.pid,
            self.restarts,
            self.is_leaving,
            self.hangs,
            self.further,
            self.hosts,
            self.built,
            model=self.model,
            fixed=self.fixed,
        )


@dataclass(frozen=True, slots=True)
class Assigned:
    """A worker that is starting or up, and where."""

    machine_id: str
    role: Role
    num_ranks: int = 1  # its processes, each with a GPU where they are used


class WorkerSet(ProcessSet[DesiredWorker]):
    """Owned by the controller. Invariant: routers use no worker that is not up."""

    tag = ""

    def __init__(self, config: ControllerConfig, routers: RouterSet, controller: NodeId) -> None:
        super().__init__(config)
        self.routers = routers
        self.machines: tuple[Machine, ...] = ()
        self.by_name = {
            node: self.desired(node, role, model)
            for model in config.models
            for node, role in config.first_workers(model)
        }
        self.suspects = Suspects(controller, config.silent_grace_s)
        self.drains = Drains(controller)
        self.backoff = Backoff(config.backoff_s, config.max_backoff_s)
        # Any worker, ever; routers that outlived an earlier controller have had some.
        self.has_been_up = bool(config.kept.joined or config.kept.own)
        self._gave_up = False
        self._failures = 0  # that removed workers had in a row, since one came up
        # Where workers come and go: names with lower numbers may have been used.
        scaled = [own for own in config.models.values() if own.scaling is not None]
        self.num_named = max([config.kept.num_named, *(len(own.first) for own in scaled)])
        # What one that starts has in place of its model's weights; None: nothing.
        self.starts_with: Callable[[DesiredWorker], Any] = lambda _: None

    def desired(self, node: NodeId, role: Role, model: str = "") -> DesiredWorker:
        """A worker that is to be started as `role`."""
        config = self.config.models[model]
        num_ranks = config.prefill_ranks if role is Role.PREFILL else config.decode_ranks
        return DesiredWorker(node, role=role, model=model, num_ranks=num_ranks)

    def up(self) -> dict[NodeId, WorkerInfo]:
        """Those that routers may use."""
        up = (w for w in self.by_name.values() if w.state is ProcessState.UP)
        return {w.node: w.info for w in up if w.info is not None}

    def outdated(self) -> list[NodeId]:
        """Those that serve, and that another version or other settings have started."""
        serving = [w for w in self.by_name.values() if w.is_serving]
        return [w.node for w in serving if w.built != self.config.models[w.model].built]

    def held_back(self, versions: Mapping[str, str]) -> dict[NodeId, str]:
        """Those that a start would not bring to this version, and the version of each: another one
        is on their machine. `versions`: of what a start gets there, by machine."""
        found = {}
        for node in self.outdated():
            worker = self.by_name[node]
            ours, *settings = self.config.models[worker.model].built.split(" ")
            others = {versions.get(each, ours) for each in worker.machines} - {ours}
            if others and worker.built.split(" ")[1:] == settings:
                found[node] = min(others)
        return found

    def listening(self) -> dict[NodeId, Peer]:
        return {w.node: w.peer for w in self.by_name.values() if w.peer is not None}

    def adopt(self, kept: WorkerCheckpoint) -> list[Effect]:
        """What an earlier controller has left: one that listened is asked whether it lives; one
        that had not come so far, or computes something else than those of now, is ended."""
        if kept.model not in self.config.models:
            return [StopWorker(kept.worker, kept.epoch)]
        worker, fixed = self.by_name.get(kept.worker), self.config.models[kept.model].fixed
        if worker is None and kept.peer is not None:  # fewer are wanted: it is drained first
            worker = self.desired(kept.worker, kept.role, kept.model)
            self.by_name[kept.worker] = worker
            kept = replace(kept, is_draining=True)
        if worker is not None:
            worker.role, worker.epoch, worker.restarts = kept.role, kept.epoch, kept.restarts
            worker.is_leaving, worker.hangs = kept.is_draining, kept.hangs
        if worker is None or kept.peer is None:
            return [StopWorker(kept.worker, kept.epoch)]
        if others := differing(kept.fixed, fixed):
            text = f"{kept.worker} ends, since it has other values: {', '.join(others)}"
            return [Note("warning", "worker_differs", text), StopWorker(kept.worker, kept.epoch)]
        worker.on(ProcessEvent.ADOPT)
        worker.machine_id, worker.further = kept.machine_id, kept.further
        worker.hosts = kept.hosts or (kept.peer.host,)
        worker.pid, worker.peer, worker.built = kept.pid, kept.peer, kept.built
        worker.fixed = fixed
        self.has_been_up = True
        return [
            AdoptWorker(worker.node, worker.epoch, kept.peer, kept.machine_id, kept.pid),
            self.wake(self.config.adopt_timeout_s, worker),
        ]

    def see_machines(self, machines: tuple[Machine, ...]) -> None:
        """These are there. Ray that has ended and begun again has other names for the same ones:
        workers that it knows nothing of run there still, and hold GPUs."""
        self.machines = machines
        named = {machine.machine_id for machine in machines}
        at = {machine.host: machine.machine_id for machine in machines}
        for worker in self.by_name.values():
            # One whose host is not known goes by its name.
            places = zip_longest(worker.machines, worker.hosts[: len(worker.machines)])
            now = [name if name in named else at.get(host, name) for name, host in places]
            if now:
                worker.machine_id, worker.further = now[0], tuple(now[1:])

    def add(self, now: float, role: Role, model: str = "") -> list[Effect]:
        """Start one more, under a name that none has had; where the last ones failed, not at
        once."""
        worker = self.desired(worker_name(role, model, self.num_named), role, model)
        self.num_named += 1
        worker.ordered_at = now
        self.by_name[worker.node] = worker
        if not self._failures:
            return self.start(worker)
        worker.on(ProcessEvent.HOLD)
        worker.failures = self._failures
        worker.last_error = "the last workers failed"
        return [self.wake(self.backoff.pause_s(worker.failures), worker)]

    def place(self, worker: DesiredWorker) -> tuple[str, ...] | None:
        """Where there is room for it; None: nowhere."""
        config = self.config.models[worker.model]
        placed = [
            Assigned(machine, other.role, other.num_ranks // len(other.machines))
            for other in self.by_name.values()
            if other is not worker and _has_place(other, worker)
            for machine in other.machines
        ]
        return assign_machines(
            worker.role,
            [machine for machine in self.machines if not machine.is_draining],
            placed,
            num_ranks=worker.num_ranks,
            num_machines=config.machines_for(worker.num_ranks),
            avoid=worker.avoid,
            most=config.workers_per_machine,
            use_gpus=config.use_gpus,
        )

    def start(self, worker: DesiredWorker) -> list[Effect]:
        config = self.config.models[worker.model]
        machines = self.place(worker)
        if machines is None:
            worker.on(ProcessEvent.NO_ROOM)
            worker.last_error = self._no_room(worker)
            text = f"{worker.last_error} for {worker.node}"
            return [Note("warning", "no_machine", text)]
        worker.on(ProcessEvent.START)
        worker.epoch += 1
        worker.built, worker.fixed = config.built, config.fixed
        worker.machine_id, *further = machines
        worker.further = tuple(further)
        host_of = {machine.machine_id: machine.host for machine in self.machines}
        worker.hosts = tuple(host_of[machine] for machine in machines)
        start = StartWorker(
            worker.node,
            worker.role,
            worker.epoch,
            machines[0],
            worker.num_ranks,
            worker.further,
            worker.model,
            self.starts_with(worker),
        )
        return [start, self.wake(self._start_s(worker), worker)]

    def _no_room(self, worker: DesiredWorker) -> str:
        config = self.config.models[worker.model]
        number = config.machines_for(worker.num_ranks)
        if config.use_gpus and any(machine.num_gpus for machine in self.machines):
            each = worker.num_ranks // number
            if number > 1:
                return f"no room: {each} free GPU(s) on each of {number} machines are needed"
            return f"no machine has room: {each} free GPU(s) of one are needed"
        if number > 1:
            return f"no room: {number} machines are needed, {len(self.machines)} are there"
        return "no machine has room"

    def introduce(self, worker: DesiredWorker, started: WorkerStarted) -> list[Effect]:
        """It listens: it and all others get each other's addresses."""
        worker.on(ProcessEvent.LISTENS)
        worker.info = replace(started.info, role=worker.role, model=worker.model)
        worker.started = started
        worker.built = built_of(started.package, worker.built)
        worker.pid = started.pid
        versions = started.protocol, started.package
        worker.peer = me = Peer(worker.node, started.host, started.port, worker.epoch, *versions)
        others = [w for w in self.by_name.values() if w is not worker and w.peer is not None]
        peers = [*self.routers.peers, *(other.peer for other in others if other.peer is not None)]
        for router in self.routers.peers:
            self.routers.address(router.node, me.node, worker.incarnation)
        known = (*peers, *self.config.listeners)
        effects: list[Effect] = [SendPeers(worker.node, me.node, me.epoch, known)]
        effects += [SendPeers(peer.node, me.node, me.epoch, (me,)) for peer in peers]
        # Workers of one role only save each other work, and those of two models none: one that
        # hangs must not keep others down.
        mine = worker.role, worker.model
        spared = {o.node for o in others if o.role is mine[0] or o.model != mine[1]}
        # A router comes together with it when it can.
        spared |= self.routers.by_name.keys()
        worker.waiting_for = {effect.to for effect in effects} - spared
        notes = [Note("warning", "worker_notice", f"{worker.node}: {n}") for n in started.notices]
        return [*effects, self.wake(self.config.introduce_timeout_s, worker), *notes]

    def updated(self, now: float, worker: DesiredWorker, to: NodeId) -> list[Effect]:
        """`to` has the address of `worker`, which is introduced, or is gone."""
        worker.waiting_for.discard(to)
        if worker.waiting_for:
            return []
        worker.on(ProcessEvent.INTRODUCED)
        worker.up_at = now
        worker.avoid = None
        self.has_been_up, self._failures = True, 0
        effects: list[Effect] = [Note("info", "worker_up", _is_up(worker))]
        if worker.is_leaving:  # the controller before began with it
            return effects + self.drain(now, worker)
        return effects + self.routers.announce(self.up())

    def set_role(self, worker: DesiredWorker, role: Role) -> list[Effect]:
        """Weights and KV stay where they are: only what routers prefer the worker for changes."""
        if worker.role is role:
            return []
        if worker.info is not None and not worker.info.hands_over:
            why = f"{worker.node} computes for itself alone, and stays for {worker.role}"
            return [Note("warning", "role_not_changed", why)]
        text = f"{worker.node} was preferred for {worker.role}, and is for {role} now"
        worker.role = role
        effects: list[Effect] = [Note("info", "role_changed", text)]
        if worker.info is not None:
            worker.info = replace(worker.info, role=role)
        change = RoleChanged(worker.node, worker.epoch, role)
        return effects + self.routers.role_changed(change)

    def changed(self, node: NodeId, epoch: int, change: InfoChange) -> None:
        """It says something else of itself than when it started."""
        worker = self.current(node, epoch, *SERVING)
        if worker is not None and worker.info is not None:
            worker.info = change.changed(worker.info)

    def let_go(self, now: float, worker: DesiredWorker) -> list[Effect]:
        """It is not needed: when it has nothing left to do, or at once if it is not up."""
        if worker.is_serving:
            return self.drain(now, worker)
        return self.remove(now, worker, "not needed any more")

    def drain(self, now: float, worker: DesiredWorker, *, comes_back: bool = False) -> list[Effect]:
        """Let it go when nothing needs it; `comes_back`: to be started again."""
        config = self.config.models[worker.model]
        worker.on(ProcessEvent.DRAIN)
        worker.is_leaving = not comes_back
        timeout_s = config.restart_drain_s if comes_back else config.drain_timeout_s
        routers = [peer.node for peer in self.routers.peers]
        what = "restarts" if comes_back else "goes"
        text = f"{worker.node} drains, for {timeout_s:g} s at most, and {what} then"
        note = Note("info", "worker_drains", text)
        return [note, *self.drains.begin(now, worker.incarnation, routers, timeout_s)]

    def drained(self, now: float, worker: DesiredWorker, why: str) -> list[Effect]:
        """Nothing needs it any more, or its time is over."""
        if worker.is_leaving:
            return self.remove(now, worker, why, gently=True)
        worker.end(ProcessEvent.END)
        worker.restarts += 1
        return [
            Note("info", "worker_restarts", f"{worker.node} {why}"),
            StopWorker(worker.node, worker.epoch, gently=True, has_heir=True),
            *self._forget(now, worker, why),
            self.wake(RESTART_S, worker),
        ]

    def lost(self, now: float, worker: DesiredWorker, reason: str) -> list[Effect]:
        if worker.is_leaving:
            return self.remove(now, worker, reason)
        if worker.is_serving and now - worker.up_at >= self.config.stable_s:
            worker.failures = 0
        worker.end(ProcessEvent.END)
        worker.failures += 1
        worker.restarts += 1
        worker.last_error = reason
        pause_s = self.backoff.pause_s(worker.failures)
        text = f"{worker.node} (epoch {worker.epoch}) is gone: {reason}; again in {pause_s:g} s"
        return [
            Note("warning", "worker_lost", text),
            StopWorker(worker.node, worker.epoch),
            self.wake(pause_s, worker),
            *self._forget(now, worker, reason),
        ]

    def failed(
        self, now: float, worker: DesiredWorker, reason: str, permanent: bool
    ) -> list[Effect]:
        """It did not start. `permanent`: it would fail again in the same way."""
        worker.avoid = worker.machine_id
        effects = self.lost(now, worker, reason)
        hopeless = permanent or worker.failures >= self.config.max_first_failures
        if hopeless and not self.has_been_up and not self._gave_up:
            self._gave_up = True
            effects.append(GiveUp(reason))
        return effects

    def overdue(self, now: float, worker: DesiredWorker) -> list[Effect]:
        match worker.state:
            case ProcessState.BACKOFF:
                return self.start(worker)
            case ProcessState.STARTING:
                reason = f"did not start within {self._start_s(worker):g} s"
                return self.failed(now, worker, reason, permanent=False)
            case ProcessState.ADOPTING:
                reason = "did not answer the controller that came after its own"
            case _:
                reason = f"not introduced to {', '.join(sorted(worker.waiting_for))} in time"
        return self.lost(now, worker, reason)

    def _start_s(self, worker: DesiredWorker) -> float:
        """How long its start may take: longer after each failure, since a start that is ended
        begins anew, and on a machine that is busy none would come to its end."""
        return self.config.start_timeout_s * 2.0 ** min(worker.failures, MAX_DOUBLED)

    def remove(
        self, now: float, worker: DesiredWorker, why: str, *, gently: bool = False
    ) -> list[Effect]:
        """It is wanted no more."""
        del self.by_name[worker.node]
        self._failures = max(self._failures, worker.failures)
        worker.end(ProcessEvent.REMOVE)
        effects: list[Effect] = [Note("info", "worker_gone", f"{worker.node} has gone: {why}")]
        if worker.epoch:
            has_heir = gently and self._has_heir(worker)
            effects.append(StopWorker(worker.node, worker.epoch, gently, has_heir))
            effects += self._forget(now, worker, why)
        return effects

    def _has_heir(self, worker: DesiredWorker) -> bool:
        """Whether another one can read what `worker` leaves in host memory: it is where all ranks
        of `worker` are, with as many ranks, and means the same by a block."""
        return any(
            other.state is ProcessState.UP
            and other.machines == worker.machines
            and other.num_ranks == worker.num_ranks
            and _kind(other) == _kind(worker)
            for other in self.by_name.values()
        )

    def _forget(self, now: float, worker: DesiredWorker, reason: str) -> list[Effect]:
        """It has ended: whoever uses it hears so, and whoever waits for it goes on."""
        worker.info = worker.started = None
        worker.is_leaving = False
        self.suspects.forget(worker.incarnation)
        self.drains.forget(worker.incarnation)
        effects = self.routers.worker_lost(worker.node, worker.epoch, reason)
        for other in list(self.by_name.values()):
            if worker.node in other.waiting_for:
                effects += self.updated(now, other, worker.node)
        return effects


def built_of(package: str, built: str) -> str:
    """As `WorkersConfig.built`, of what runs: its machine may have another version."""
    return " ".join([package, *built.split(" ")[1:]]) if package != "unknown" else built


def worker_name(role: Role, model: str, number: int) -> NodeId:
    """ "decode-0", or where there are several models "decode-small-0"."""
    return f"{role}-{model}-{number}" if model else f"{role}-{number}"


def _is_up(worker: DesiredWorker) -> str:
    started = worker.started
    assert started is not None
    facts = [f"epoch {worker.epoch}", str(worker.role), started.host, started.device]
    facts += [f"started in {started.took_s:.1f} s"] if started.took_s else []
    log = f"; log: {started.log}" if started.log else ""
    return f"{worker.node} is up ({', '.join(filter(None, facts))}){log}"


def _kind(worker: DesiredWorker) -> bytes:
    return worker.info.kind if worker.info is not None else b""


def _has_place(other: DesiredWorker, worker: DesiredWorker) -> bool:
    """Whether what `other` holds, or comes back to, is not for `worker`: one that has failed leaves
    its GPUs to those of its size, but smaller ones would leave it too few."""
    comes_back = other.state is ProcessState.BACKOFF and other.num_ranks > worker.num_ranks
    return other.state in RUNNING or comes_back


def assign_machines(
    role: Role,
    machines: Iterable[Machine],
    assigned: Iterable[Assigned],
    avoid: str | None = None,
    most: int = 0,
    num_ranks: int = 1,
    use_gpus: bool = True,
    num_machines: int = 1,
) -> tuple[str, ...] | None:
    """The machines for one more worker of `role` and `num_ranks` processes, divided evenly among
    `num_machines`: that of the first rank first; None if too few have room. Prefill and decode
    disturb each other least on machines of their own, so it goes where the fewest of the other role
    are, then where the least runs for the size of the machine.

    Where any machine has GPUs, only those count, one for each rank; where none has, or they are not
    used, each has room for `most` workers, if that is not 0. `avoid` is where the last attempt
    failed: it is taken only if there is no other.
    """
    machines, assigned = list(machines), list(assigned)
    if use_gpus and any(machine.num_gpus for machine in machines):
        each = num_ranks // num_machines
        machines = [m for m in machines if _ranks_on(m, assigned) + each <= int(m.num_gpus)]
    elif most:
        machines = [m for m in machines if len(_on(m, assigned)) < most]
    if len(machines) < num_machines:
        return None

    def cost(machine: Machine) -> tuple[bool, int, float, str]:
        others = sum(each.role != role for each in _on(machine, assigned))
        load = _ranks_on(machine, assigned) / max(machine.num_gpus or machine.num_cpus, 1.0)
        return machine.machine_id == avoid, others, load, machine.machine_id

    return tuple(machine.machine_id for machine in sorted(machines, key=cost)[:num_machines])


def _on(machine: Machine, assigned: list[Assigned]) -> list[Assigned]:
    return [each for each in assigned if each.machine_id == machine.machine_id]


def _ranks_on(machine: Machine, assigned: list[Assigned]) -> int:
    return sum(each.num_ranks for each in _on(machine, assigned))
