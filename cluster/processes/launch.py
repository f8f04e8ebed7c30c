"""`kvrelay serve`: finds the model, starts the supervisor, and ends it.

Start: the ports are taken first, then the controller, with Ray, and the model come up side by side;
the controller has workers and routers started; when all are up, the user is told. Stop: requests
are finished, the workers are ended, Ray ends. Whatever goes wrong on the way is one line,
`ServeError`.

Where the processes of this machine listen, so that those of other machines reach them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvrelay.cluster.api.tenants import Access, load_access, with_keys
from kvrelay.cluster.config import Config
from kvrelay.cluster.prepare import (
    PreparedModel,
    check_machines,
    for_gpus,
    num_gpus,
    prepare_model,
    uses_gpus,
)
from kvrelay.cluster.processes.certificates import identity_of, with_certificates
from kvrelay.cluster.processes.extras import require_extra
from kvrelay.cluster.processes.life import open_life
from kvrelay.cluster.processes.reload import Source
from kvrelay.cluster.processes.router_process import RouterProcessError, bind
from kvrelay.cluster.processes.supervisor import OnProgress, Ready, ServeError, Supervisor
from kvrelay.cluster.state.opening import with_url
from kvrelay.engine.host import in_thread
from kvrelay.engine.node import NodeId
from kvrelay.worker.kv_plan import BuildError
from kvrelay.worker.process import Listening

LOOPBACK = "127.0.0.1"
_SOMEWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737); nothing is sent there


def own_host(address: str) -> str:
    """`address`: of the Ray cluster, as in `cluster.address`. Without one all is on this machine.
    Else the address of the interface that leads there; does not wait for anything."""
    if not address:
        return LOOPBACK
    host = ray_address(address).rpartition(":")[0].strip("[]")
    own = _toward(host)
    # Ray's own control plane is here: then others reach us by what leads out.
    return _toward(_SOMEWHERE) if own.startswith("127.") else own


def ray_address(address: str) -> str:
    """HOST:PORT of the Ray cluster; "" if that is not known."""
    if address != "auto":
        return address
    if from_user := os.environ.get("RAY_ADDRESS", ""):
        return from_user
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        return note.read_text().strip()
    except OSError:
        return ""


def _toward(host: str) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # only looks up the route: it is a datagram socket
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


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
) -> None:
    """Serve until `stop` is set, or until an operator asks for the end; `on_stop` is called when it
    begins to end. `source`: of tenants that may change. `on_cluster` gets the name of the cluster,
    as `worker.processes.kill_workers` takes it. Raises ServeError, and ConfigError for
    tenants, the store and an extra that is not installed."""
    config = await asyncio.to_thread(
        with_keys, with_url(config), partial(_tell_of_key, on_progress)
    )
    config = await asyncio.to_thread(with_certificates, config)
    config = _for_gpus(config, on_progress)
    _check_chat_template(config)
    if config.tracing.endpoint:
        modules = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
        await asyncio.to_thread(require_extra, "tracing", *modules)
    if config.cluster.ray_dashboard_port:
        await asyncio.to_thread(require_extra, "dashboard", "aiohttp", "opencensus")
    access = await asyncio.to_thread(load_access, config)
    sockets = await asyncio.to_thread(_bind_all, config)
    found = asyncio.Event()
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(stop.wait())]
    supervisor: Supervisor | None = None
    try:
        preparing = asyncio.create_task(_prepare(config, on_progress, found))
        tasks.append(preparing)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEAD_START_S):
                await found.wait()
        if preparing.done():
            preparing.result()
        supervisor = await _supervise(config, access, sockets, on_progress, source)
        on_cluster(supervisor.cluster)
        tasks.append(asyncio.create_task(supervisor.asked_to_end.wait()))
        until = (tasks[0], tasks[2], supervisor.failed)
        supervisor.use_model(await _first(preparing, until))
        on_ready(await _first(supervisor.ready, until), config)
        if source is not None:
            tasks.append(asyncio.create_task(_forward(source, supervisor)))
        await _first(asyncio.shield(supervisor.failed), until)
    except _Stopped:
        on_stop()
    finally:
        for task in tasks:
            task.cancel()
        if supervisor is not None:
            await supervisor.end(config.cluster.drain_s if supervisor.ready.done() else 0.0)
        for sock in sockets.values():
            sock.close()


def _tell_of_key(on_progress: OnProgress, path: Path) -> None:
    on_progress("API key", f"made, and kept in {path}: {path.read_text().strip()}", True)


def _for_gpus(config: Config, on_progress: OnProgress) -> Config:
    """As many workers as the GPUs of this machine are for. Raises ServeError."""
    try:
        check_machines(config)
        config, notice = for_gpus(config, num_gpus())
    except BuildError as error:
        raise ServeError(str(error)) from error
    if notice:
        on_progress("GPUs", notice, True)
    return config


def _check_chat_template(config: Config) -> None:
    """Raises ServeError."""
    from kvrelay.cluster.api.text.chat_template import ChatTemplate  # jinja2, where it is set

    try:
        if config.model.chat_template:
            ChatTemplate(config.model.chat_template, {})
    except ValueError as error:
        raise ServeError(f"model.chat_template: {error}") from error


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


async def _supervise(
    config: Config,
    access: Access,
    sockets: dict[NodeId, socket.socket],
    on_progress: OnProgress,
    source: Source | None,
) -> Supervisor:
    port = next(iter(sockets.values())).getsockname()[1]
    try:
        life = await asyncio.to_thread(open_life, config, port)
    except OSError as error:
        path = config.sessions.state_path
        raise ServeError(f"cannot write to {path} (sessions.state_dir): {error}") from error
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
    supervisor = Supervisor(config, access, sockets, life, listening, host, on_progress, source)
    await supervisor.start()
    return supervisor


def _bind_all(config: Config) -> dict[NodeId, socket.socket]:
    """Opens a listening socket for each router: at the API's port and those after it."""
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


async def _prepare(config: Config, on_progress: OnProgress, found: asyncio.Event) -> PreparedModel:
    """The model on disk. `found` is set once it is clear that the model is there, or is not, or
    will take a while."""
    loop = asyncio.get_running_loop()
    on_gpu = uses_gpus(config, num_gpus())
    num_here, num_prefill = config.most_workers, config.cluster.prefill
    if config.cluster.address:
        num_here = num_prefill = 0

    def prepare() -> PreparedModel:
        def progress(state: str) -> None:
            loop.call_soon_threadsafe(found.set)
            on_progress("model", state, False)

        try:
            model = prepare_model(
                config, num_here, progress, num_prefill_here=num_prefill, on_gpu=on_gpu
            )
        except BuildError as error:
            raise ServeError(str(error)) from error
        on_progress("model", str(model.path), True)
        return model

    on_progress("model", config.model.name, False)
    try:
        return await in_thread(prepare, "prepare-model")
    finally:
        found.set()
