"""`kvrelay serve`: finds the model, starts the supervisor, and ends it.

Start: the ports are taken first, then the controller, with Ray, and the model come up side by side;
the controller has workers and routers started; when all are up, the user is told. Stop: requests
are finished, the workers are ended, Ray ends. Whatever goes wrong on the way is one line,
`ServeError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvrelay.cluster.api.tenants import Access, load_access, with_keys
from kvrelay.cluster.config import Config, ConfigError
from kvrelay.cluster.config_checks import require_extra
from kvrelay.cluster.prepare import (
    PreparedModels,
    check_machines,
    for_gpus,
    num_gpus,
    prepare_models,
    uses_gpus,
)
from kvrelay.cluster.processes.adapter_bases import check_settings
from kvrelay.cluster.processes.certificates import (
    identity_of,
    keep_certificates,
    made_here,
    with_certificates,
)
from kvrelay.cluster.processes.handover import Handover, HandoverError
from kvrelay.cluster.processes.handover import check as check_program
from kvrelay.cluster.processes.here import num_cpus, own_host
from kvrelay.cluster.processes.life import Life, SharedLife, open_life, shared_life
from kvrelay.cluster.processes.ray_access import other_versions
from kvrelay.cluster.processes.ready import OnProgress, Ready, ServeError
from kvrelay.cluster.processes.reload import Source
from kvrelay.cluster.processes.router_spec import RouterProcessError, bind
from kvrelay.cluster.processes.supervisor import Supervisor
from kvrelay.cluster.state.given import with_cluster_token, with_url
from kvrelay.cluster.state.server_lock import ServerLock, StateInUse
from kvrelay.engine.host import in_thread, keep_running
from kvrelay.engine.model.checkpoint.resolve import license_notice
from kvrelay.engine.node import NodeId
from kvrelay.engine.wire.channel import inherited
from kvrelay.worker.fork_server import (
    KeepWeights,
    have_kept,
    start_fork_server,
    worker_environment,
)
from kvrelay.worker.kv_plan import BuildError
from kvrelay.worker.process import Listening

T = TypeVar("T")

HEAD_START_S = 3.0
"""At most this long Ray waits until the model is found: what is plainly wrong is told at once."""


async def serve(
    config: Config,
    on_progress: OnProgress,
    stop: asyncio.Event,
    on_ready: Callable[[Ready, Config], None],
    source: Source | None = None,
    on_stop: Callable[[], None] = lambda: None,
    on_cluster: Callable[[str], None] = lambda _: None,
    found: Handover | None = None,
) -> None:
    """Serve until `stop` is set, or until an operator asks for the end; `on_stop` is called when it
    begins to end. `source`: of tenants that may change. `on_cluster` gets the name of the cluster,
    as `worker.processes.kill_workers` takes it. `found`: from the server that this process was
    before. Raises ServeError, and ConfigError for tenants, the store and an extra that is not
    installed."""
    lock = await asyncio.to_thread(_lock_state, config, found)
    try:
        config = await asyncio.to_thread(settle, config, on_progress)
        access = await asyncio.to_thread(load_access, config)
        sockets = await asyncio.to_thread(_bind_all, config, found)
        lock.tell([sock.getsockname()[:2] for sock in sockets.values()])
    except BaseException:
        lock.release()
        raise
    is_found = asyncio.Event()
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(stop.wait())]
    supervisor: Supervisor | None = None
    forks: socket.socket | None = None
    try:
        is_fresh = found is None
        preparing = asyncio.create_task(_prepare(config, on_progress, is_found, is_fresh=is_fresh))
        tasks.append(preparing)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEAD_START_S):
                await is_found.wait()
        if preparing.done():
            preparing.result()
        life = await _open_life(config, sockets, found)
        if isinstance(life, SharedLife):  # routers' names are of the whole cluster
            sockets = {f"{name}@{life.server}": sock for name, sock in sockets.items()}
        else:  # workers of a cluster with several servers are not this one's to end
            on_cluster(life.record.cluster)
        forking = in_thread(
            partial(_start_fork_server, config, life, is_fresh=is_fresh), "fork-server"
        )
        supervisor = await _supervise(config, access, sockets, life, on_progress, source, found)
        forks = await forking
        tasks.append(asyncio.create_task(supervisor.asked_to_end.wait()))
        until = (tasks[0], tasks[2], supervisor.failed)
        models = await _first(preparing, until)
        supervisor.use_models(models, partial(_keep_first, forks))
        on_ready(await _first(supervisor.ready, until), config)
        if source is not None:
            tasks.append(asyncio.create_task(_forward(source, supervisor)))
        if made_here(config):
            keep = partial(keep_certificates, config)
            tasks.append(asyncio.create_task(keep_running("certificates", keep, Counter())))
        await _first(asyncio.shield(supervisor.failed), until)
    except _Stopped:
        on_stop()
    finally:
        for task in tasks:
            task.cancel()
        if supervisor is not None:
            has_clients = supervisor.ready.done() or found is not None
            await supervisor.end(config.cluster.drain_s if has_clients else 0.0)
        for sock in (*sockets.values(), *filter(None, [forks])):
            sock.close()
        lock.release()


def _lock_state(config: Config, found: Handover | None) -> ServerLock:
    """Raises ServeError where another server has its state in the same directory."""
    path = config.sessions.state_path
    try:
        return ServerLock.take(path, goes_on=found is not None)
    except StateInUse as error:
        raise ServeError(str(error)) from error
    except OSError as error:
        raise ServeError(f"cannot write to {path} (sessions.state_dir): {error}") from error


def _start_fork_server(config: Config, life: Life, *, is_fresh: bool) -> socket.socket | None:
    """Where the first workers will be on this machine, it imports torch while Ray starts. Returns
    the connection that it lives with."""
    if config.cluster.address or isinstance(life, SharedLife) or not config.cluster.fork_server:
        return None
    threads = config.engine.threads or num_cpus()
    env = worker_environment(os.environ, threads)
    try:
        return start_fork_server(life.record.cluster, env, low_priority=not is_fresh)
    except OSError:
        return None  # the guardian of the first worker tries again


def _keep_first(forks: socket.socket | None, config: Config, models: PreparedModels) -> None:
    """The fork server has the weights of the first model, on processors."""
    if forks is not None and not uses_gpus(config, num_gpus()):
        name, first = next(iter(config.by_model().items()))
        path = str(models.by_name[name].path)
        have_kept(forks, KeepWeights(path, first.model, first.engine))


def settle(config: Config, on_progress: OnProgress) -> Config:
    """As it will be served: with keys, certificates and what this machine decides. Raises
    ServeError and ConfigError."""
    config = with_cluster_token(with_url(config))
    config = with_keys(config, partial(_tell_of_key, on_progress))
    config = _for_gpus(with_certificates(config), on_progress)
    _check_chat_template(config)
    if config.tracing.endpoint:
        require_extra("tracing", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    if config.tiers.object_bucket:
        require_extra("object", "botocore")
    if config.events.endpoint:
        require_extra("events", "zmq")
    if config.cluster.ray_dashboard_port:
        require_extra("dashboard", "aiohttp", "opencensus")
    return config


async def check(config: Config, found: Handover | None) -> None:
    """Whether `serve` could serve this, without starting anything. Raises ServeError and
    ConfigError."""

    def ignore(*_: object) -> None:
        """Nobody watches what a check is at."""

    config = settle(config, ignore)
    load_access(config)
    models = await _prepare(config, ignore, asyncio.Event(), is_fresh=found is None)
    try:
        check_program(config, models, found)
    except HandoverError as error:
        raise ServeError(str(error)) from error
    address = config.cluster.address
    if address and (why := await asyncio.to_thread(other_versions, address)):
        raise ServeError(why)


def _tell_of_key(on_progress: OnProgress, path: Path) -> None:
    on_progress("API key", f"made, and kept in {path}: {path.read_text().strip()}", True)


def _for_gpus(config: Config, on_progress: OnProgress) -> Config:
    """As many workers as the GPUs of this machine are for. Raises ServeError."""
    try:
        for each in config.by_model().values():
            check_machines(each)
        config, notice = for_gpus(config, num_gpus())
    except BuildError as error:
        raise ServeError(str(error)) from error
    if notice:
        on_progress("GPUs", notice, True)
    return config


def _check_chat_template(config: Config) -> None:
    """Raises ServeError."""
    from kvrelay.cluster.api.text.chat_template import ChatTemplate  # jinja2, where it is set

    for name, own in config.by_model().items():
        try:
            if own.model.chat_template:
                ChatTemplate(own.model.chat_template, {})
        except ValueError as error:
            where = f"models.model.chat_template of {name}" if name else "model.chat_template"
            raise ServeError(f"{where}: {error}") from error


class _Stopped(Exception):
    """Raised when serving is to stop before what is awaited has come."""


async def _first(awaited: asyncio.Future[T], until: tuple[asyncio.Future[Any], ...]) -> T:
    """The result of `awaited`, or _Stopped if one of `until` comes first; raises what that did."""
    await asyncio.wait({awaited, *until}, return_when=asyncio.FIRST_COMPLETED)
    if awaited.done():
        return awaited.result()
    for ended in until:
        if ended.done():
            ended.result()
    raise _Stopped


async def _forward(source: Source, supervisor: Supervisor) -> None:
    """Has routers read tenants again whenever SIGHUP comes."""
    while True:
        await source.hangup.wait()
        source.hangup.clear()
        supervisor.reload()


async def _open_life(
    config: Config, sockets: dict[NodeId, socket.socket], found: Handover | None
) -> Life:
    port = next(iter(sockets.values())).getsockname()[1]
    if config.cluster.name:
        return shared_life(config, port)
    try:
        path = None if found is None else found.life
        return await asyncio.to_thread(open_life, config, port, path)
    except OSError as error:
        path = config.sessions.state_path
        raise ServeError(f"cannot write to {path} (sessions.state_dir): {error}") from error


async def _supervise(
    config: Config,
    access: Access,
    sockets: dict[NodeId, socket.socket],
    life: Life,
    on_progress: OnProgress,
    source: Source | None,
    found: Handover | None,
) -> Supervisor:
    host = own_host(config.cluster.address)
    cluster = config.cluster
    listening = Listening(
        # On a cluster of several machines an empty host means: the machine's own address.
        host="" if cluster.address else host,
        token=life.record.token,
        max_frame_bytes=cluster.max_frame_mib << 20,
        reconnect_s=cluster.reconnect_s,
        orphan_s=cluster.orphan_s,
        tls=identity_of(config.tls) if config.tls.frames else None,
    )
    supervisor = Supervisor(
        config, access, sockets, life, listening, host, on_progress, source, found
    )
    await supervisor.start()
    return supervisor


def _bind_all(config: Config, found: Handover | None) -> dict[NodeId, socket.socket]:
    """Opens a listening socket for each router: at the API's port and those after it."""
    if found is not None:
        return {name: inherited(str(number)) for name, number in found.sockets.items()}
    sockets: dict[NodeId, socket.socket] = {}
    try:
        for number in range(config.cluster.routers):
            port = config.api.port and config.api.port + number
            sockets[f"router-{number}"] = bind(config.api.host, port)
    except RouterProcessError as error:
        for sock in sockets.values():
            sock.close()
        raise ServeError(str(error)) from error
    return sockets


async def _prepare(
    config: Config, on_progress: OnProgress, found: asyncio.Event, *, is_fresh: bool
) -> PreparedModels:
    """The model on disk. `found` is set once it is clear that the model is there, or is not, or
    will take a while. `is_fresh`: no worker holds memory yet."""
    loop = asyncio.get_running_loop()
    on_gpu = uses_gpus(config, num_gpus())
    is_elsewhere = bool(config.cluster.address or config.cluster.name)
    are_here = is_fresh and not is_elsewhere  # else they run already

    def prepare() -> PreparedModels:
        def progress(state: str) -> None:
            loop.call_soon_threadsafe(found.set)
            on_progress("model", state, False)

        try:
            models = prepare_models(config, progress, are_here=are_here, on_gpu=on_gpu)
            own = {name: (each.served_name, each.path) for name, each in models.by_name.items()}
            check_settings(config, own, on_gpu=on_gpu)
        except (BuildError, ConfigError) as error:
            raise ServeError(str(error)) from error
        on_progress("model", ", ".join(map(str, models.paths.values())), True)
        return models

    names = [each.model.name for each in config.by_model().values()]
    on_progress("model", ", ".join(names), False)
    for notice in filter(None, map(license_notice, names)):
        on_progress("license", notice, True)
    try:
        return await in_thread(prepare, "prepare-model")
    finally:
        found.set()
