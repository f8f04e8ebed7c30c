"""The status of a cluster: what `/status` answers, and the console, metrics and commands show.

The router's process fills in what its router knows. What the controller knows comes to it as a
`ClusterView`, about once a second, and is merged once, in `merge`. Fields that are not known are
left out; docs/status.md lists them all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import asdict, replace

from kvrelay.engine.wire.codec import register
from kvrelay.router.status import RouterStatus, WorkerStatus

CONTROLLERS = (
    *("epoch", "pid", "machine", "further_machines", "tensor_parallel_size"),
    *("restarts", "hangs", "last_error", "version", "start_s", "model"),
)
"""Fields of a worker that only the controller knows for sure."""


class RouterProcessStatus(Struct, omit_defaults=True, kw_only=True):
    """A router's process, as itself or the controller knows it."""

    router: str
    epoch: int  # counts its starts
    state: str  # a `ProcessState`
    http_port: int  # 0: none yet
    url: str  # of its API, from its own machine; "" without a port
    num_live: int | None  # requests; None: it does not say
    num_queued: int | None  # among them, those that wait for a worker
    store_up: bool | None  # whether it reaches Redis; None: there is none, or it does not say
    # By the controller:
    pid: int | None = None
    restarts: int | None = None
    last_error: str | None = None
    version: str | None = None  # the package's; "unknown": it does not say


class ControllerStatus(Struct, omit_defaults=True, kw_only=True):
    """The controller's process. `known`: whether it has said anything to this router."""

    known: bool
    epoch: int | None = None
    pid: int | None = None
    has_ray: bool | None = None  # whether Ray answers it; None: nobody needs it yet
    failed_writes: int | None = None  # attempts to keep what the next controller needs
    unwritten_s: float | None = None  # for how long that has not been written; 0: it is
    open_files: int | None = None
    max_files: int | None = None
    lines_dropped: int | None = None  # its log found no room for them
    server: str | None = None  # which of several servers leads; None: there is one
    age_s: float | None = None  # since it said what is shown, or since the router waits for it
    version: str | None = None  # the package's


class RestartStatus(Struct, omit_defaults=True, kw_only=True):
    """`kvrelay restart` and `kvrelay rollback`: the last one, or the one that is under way."""

    number: int = 0  # counts them; 0: there was none
    state: str = ""  # "checking", "controller", "workers", "routers", "done" or "stopped"
    why: str = ""  # it was stopped
    is_rollback: bool = False
    version: str = ""  # kvrelay's, that the supervisor has


class RefusedUpdate(Struct, frozen=True):
    """An order to change weights that was not followed."""

    number: int  # as the order was counted
    name: str  # that was asked for; "": the version before
    why: str


class WeightsStatus(Struct, omit_defaults=True, kw_only=True):
    """The weights of a model, once an operator has changed them or paused its workers. Versions are
    shown by their names."""

    model: str = ""  # by its name in [[models]]
    number: int = 0  # counts orders to change them
    state: str = ""  # "updating", "done" or "stopped"
    current: str | None = None  # with which workers start
    previous: str | None = None
    target: str | None = None  # that the workers get, one after the other
    mode: str | None = None
    why: str = ""  # it was stopped
    paused: str | None = None  # an operator's pause, by its mode
    pause_s: float | None = None  # the longest of the last change, in which a worker ran no step
    refused: RefusedUpdate | None = None  # the last order that was refused


class StateFolderStatus(Struct, omit_defaults=True, kw_only=True):
    """The disk below `sessions.state_dir`. Empty: it was not looked at yet, or does not answer."""

    free_bytes: int | None = None
    free_files: int | None = None  # inodes; None: its file system does not count them

    @classmethod
    def of(cls, folder: Path) -> StateFolderStatus:
        """Empty if there is no such folder. It waits as long as the disk does."""
        try:
            stat = os.statvfs(folder)
        except OSError:
            return cls()
        files = stat.f_favail if stat.f_files else None
        return cls(free_bytes=stat.f_bavail * stat.f_frsize, free_files=files)


class StoreStatus(Struct, omit_defaults=True, kw_only=True):
    """The store that routers share, Redis, as this router sees it. Empty: none is set."""

    store: str | None = None  # its URL, without a password
    up: bool | None = None
    outages: int | None = None
    dropped: int | None = None  # changes that found no room
    unreadable: int | None = None  # entries
    unwritten: int | None = None  # changes that wait
    writes_index: bool | None = None  # this router writes the prefix index
    last_error: str | None = None
    read_s: float | None = None  # that the last reading of everything took


class ScalingStatus(Struct, kw_only=True):
    """The autoscaler. Counts are of workers; None: nothing was decided yet."""

    why: str
    reason: str
    wanted: int | None
    wanted_decode: int | None
    least: int
    most: int
    coming: int
    draining: int
    ticks: dict[str, int]  # decisions since its start, by reason
    actions: dict[str, int]  # "start", "drain" and "flip"
    decisions: list[dict[str, Any]]  # those that said something new, oldest first


class ClusterView(Struct, kw_only=True):
    """From the controller's process to a router's: what it knows. A worker here has no more than
    the controller's fields."""

    controller: ControllerStatus
    workers: list[WorkerStatus]
    routers: list[RouterProcessStatus]
    scaling: ScalingStatus | None  # None: as many workers as were asked for
    restarted_tasks: dict[str, int] = field(default_factory=dict)
    restart: RestartStatus = field(default_factory=RestartStatus)
    scaling_by_model: dict[str, ScalingStatus] = field(default_factory=dict)  # where it is several
    weights: list[WeightsStatus] = field(default_factory=list)  # by model, where they were changed


class ModelStatus(Struct, kw_only=True):
    """One of several models, by the router that is asked."""

    model: str
    aliases: tuple[str, ...] = ()
    num_up: int = 0  # workers
    num_live: int = 0  # requests
    num_queued: int = 0
    cache_hit_rate: float = 0.0
    output_tokens: int = 0  # since the router's start
    prompt_tokens: int = 0
    cached_tokens_by_source: dict[str, int] = field(default_factory=dict)
    scaling: ScalingStatus | None = None


def scaling_by_model(status: ClusterStatus) -> dict[str, ScalingStatus]:
    """What the autoscaler of each model says, where there is one."""
    found = {each.model: each.scaling for each in status.models} or {status.model: status.scaling}
    return {model: each for model, each in found.items() if each is not None}


def model_status(name: str, aliases: tuple[str, ...], router: RouterStatus) -> ModelStatus:
    """What the router of one model knows of it."""
    return ModelStatus(
        model=name,
        aliases=aliases,
        num_up=sum(worker.state != "down" for worker in router.workers),
        num_live=router.num_live,
        num_queued=router.num_queued,
        cache_hit_rate=router.cache_hit_rate,
        output_tokens=router.totals.output_tokens,
        prompt_tokens=router.totals.prompt_tokens,
        cached_tokens_by_source=router.totals.cached_tokens_by_source,
    )


class ClusterStatus(RouterStatus, kw_only=True):
    """What the router that is asked knows, and what the controller has said."""

    model: str  # where there are several, the first
    models: list[ModelStatus] = field(default_factory=list)  # where there are several
    routers: list[RouterProcessStatus] = field(default_factory=list)
    controller: ControllerStatus = field(default_factory=lambda: ControllerStatus(known=False))
    # None: no autoscaler, or nothing was said of it yet; or `models` have it
    scaling: ScalingStatus | None = None
    state: StoreStatus = field(default_factory=StoreStatus)
    wire: dict[str, float] = field(default_factory=dict)  # frames of this process, by their fate
    kv_events: dict[str, int] = field(default_factory=dict)  # of this process; {}: none are wanted
    sessions: dict[str, int] = field(default_factory=dict)  # by state
    state_folder: StateFolderStatus = field(default_factory=StateFolderStatus)
    lines_dropped: int = 0  # the log of this process found no room for them
    restarted_tasks: dict[str, int] = field(default_factory=dict)  # that had failed, by name
    certificates: dict[str, float] = field(default_factory=dict)  # seconds since 1970 of their ends
    restart: RestartStatus = field(default_factory=RestartStatus)
    weights: list[WeightsStatus] = field(default_factory=list)  # by model, where they were changed

    def json(self) -> bytes:
        """What `/status` answers: of each worker its facts."""
        facts = [worker.facts() for worker in self.workers]
        return msgspec.json.encode(asdict(self) | {"workers": facts})


def merge(own: ClusterStatus, view: ClusterView, age_s: float) -> None:
    """Add what the controller said `age_s` ago to what a router knows, of which `routers` has its
    own entry only."""
    own.controller = replace(view.controller, age_s=round(age_s, 3))
    known = {worker.worker: worker for worker in own.workers}
    for seen in view.workers:
        worker = known.get(seen.worker)
        if worker is None:
            own.workers.append(replace(seen))
            continue
        if worker.state != "backoff" or seen.state != "up":
            worker.state = seen.state
        for name in CONTROLLERS:
            setattr(worker, name, getattr(seen, name))
    wanted = {worker.worker for worker in view.workers}  # others have gone, and are not missed
    own.workers = [w for w in own.workers if w.worker in wanted or w.state != "down"]
    mine = {router.router: router for router in own.routers}
    own.routers = [_router(mine.get(seen.router), seen) for seen in view.routers]
    own.scaling = None if own.models else view.scaling
    own.restart, own.weights = view.restart, view.weights
    for model in own.models:
        model.scaling = view.scaling_by_model.get(model.model)
    own.restarted_tasks = own.restarted_tasks | view.restarted_tasks


def _router(own: RouterProcessStatus | None, seen: RouterProcessStatus) -> RouterProcessStatus:
    if own is None:
        return seen
    names = ("pid", "restarts", "last_error", "version")
    return replace(own, **{name: getattr(seen, name) for name in names})


register(ClusterView)
