"""`kvrelay serve`: one process that holds router, controller and API, and the workers around it.

Start: the port is taken first, then Ray, the model and the API's libraries come up side by side;
the controller starts the workers; when all are up, the API answers. Stop: the API finishes what it
can, the workers are stopped, Ray ends. Whatever goes wrong on the way is one line, `ServeError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, TypeVar

from cluster.api.tenants import Access, load_access, with_operations_key
from cluster.config import Config, require_extra
from cluster.control.audits import SharedAudit
from cluster.serve.certificates import with_certificates
from cluster.serve.deployment import Deployment, ServeError, Tell
from cluster.serve.reload import Source, follow
from cluster.serve.router_api import serve_api
from cluster.serve.router_process import RouterProcessError, bind
from cluster.state.opening import with_url
from cluster.worker.build import PreparedModel, prepare_model
from cluster.worker.kv_plan import BuildError

T = TypeVar("T")

HEAD_START_S = 3.0
"""At most this long Ray waits until the model is found: what is plainly wrong is told at once."""


async def serve(
    config: Config,
    tell: Tell,
    stop: asyncio.Event,
    on_ready: Callable[[Deployment, int], None],
    take_signals: Callable[[], None],
    source: Source | None = None,
) -> None:
    """Serve until `stop` is set. `on_ready` gets the deployment and the port. `take_signals` is
    called whenever a library may have taken the process's signals. `source`: of tenants that
    may change. Raises ServeError, and ConfigError for tenants, the store and an extra that is not
    installed."""
    config = with_operations_key(with_url(config))
    config = await asyncio.to_thread(with_certificates, config)
    if config.tracing.endpoint:
        modules = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
        await asyncio.to_thread(require_extra, "tracing", *modules)
    access = await asyncio.to_thread(load_access, config)
    sock = await asyncio.to_thread(_bind, config)
    stopping = asyncio.create_task(stop.wait())
    found = asyncio.Event()
    preparing = asyncio.create_task(_prepare(config, tell, found))
    starting: asyncio.Task[ModuleType] | None = None
    ray_thread = ThreadPoolExecutor(1, "ray")
    deployment: Deployment | None = None
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEAD_START_S):
                await found.wait()
        if preparing.done():
            preparing.result()
        starting = asyncio.create_task(_start_ray(config, tell, ray_thread))
        model, tokenizer = await _unless(stopping, preparing)
        ray = await _unless(stopping, starting)
        take_signals()
        port = sock.getsockname()[1]
        deployment = Deployment(config, model, access, port, ray, tell)
        await _unless(stopping, asyncio.create_task(deployment.start()))
        if source is not None:
            following = asyncio.create_task(follow(config, source, deployment.use_tenants))
            stopping.add_done_callback(lambda _: following.cancel())
        await _serve_api(deployment, tokenizer, access, sock, stop, on_ready)
    except _Stopped:
        return
    finally:
        sock.close()
        for task in (preparing, stopping):
            task.cancel()
        if deployment is not None:
            await deployment.close()
        if starting is not None and (ray_module := await _settled(starting)) is not None:
            await asyncio.get_running_loop().run_in_executor(ray_thread, ray_module.disconnect)


class _Stopped(Exception):
    """Asked to stop before serving began."""


async def _unless(stopping: asyncio.Task[Any], task: asyncio.Task[Any]) -> Any:
    """The result of `task`, or _Stopped if that comes first."""
    await asyncio.wait({stopping, task}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        raise _Stopped
    return task.result()


async def _settled(task: asyncio.Task[Any]) -> Any:
    """The result of `task`; None if it failed, which another task reports."""
    try:
        return await task
    except Exception:
        return None


def _in_thread(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `call` on a daemon thread: unlike one of asyncio's, it does not hold up the exit when
    the result is not wanted any more (a model may take minutes to download)."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            outcome: tuple[Any, Any] = (future.set_result, call())
        except BaseException as error:
            outcome = (future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _bind(config: Config) -> socket.socket:
    try:
        return bind(config.api.host, config.api.port)
    except RouterProcessError as error:
        raise ServeError(str(error)) from error


async def _start_ray(config: Config, tell: Tell, thread: ThreadPoolExecutor) -> ModuleType:
    """On `thread`, which has to live as long as Ray: the kernel ends Ray's processes with the very
    thread that started them."""

    def begin() -> ModuleType:
        from cluster.runtime import ray_environment

        ray_environment.apply()
        import cluster.runtime.ray as ray

        try:
            ray.connect(address)
            if address and not config.cluster.insecure_ray:
                tell("ray", "joined; does it ask for a token?", False)
                check_token(ray.control_plane())
        except ray.RayUnavailable as error:
            raise ServeError(str(error)) from error
        return ray

    address = config.cluster.address
    tell("ray", f"joining {address}" if address else "starting", False)
    ray = await asyncio.get_running_loop().run_in_executor(thread, begin)
    tell("ray", "up", True)
    return ray


def check_token(address: str) -> None:
    """Raises ServeError unless the Ray cluster at `address` asks for a token."""
    from cluster.runtime.ray_token import TokenUnknown, asks_for_token

    try:
        if asks_for_token(address):
            return
        problem = "asks for no token, so whoever reaches it runs code on its machines"
    except TokenUnknown as error:
        problem = f"does not say whether it asks for a token ({error})"
    raise ServeError(
        f"the Ray cluster at {address} {problem}. On each machine, put one token into "
        "~/.ray/auth_token (`ray get-auth-token --generate` makes it) and start Ray with "
        "RAY_AUTH_MODE=token: see deploy/README.md. --insecure-ray serves without."
    )


async def _prepare(config: Config, tell: Tell, found: asyncio.Event) -> tuple[PreparedModel, Any]:
    """The model on disk, its tokenizer, and the API's libraries imported. `found` is set once it
    is clear that the model is there, or is not, or will take a while."""
    loop = asyncio.get_running_loop()

    cluster = config.cluster
    num_here = 0 if cluster.address else cluster.prefill + cluster.decode

    def prepare() -> tuple[PreparedModel, Any]:
        def on_news(news: str) -> None:
            loop.call_soon_threadsafe(found.set)
            tell("model", news, False)

        try:
            model = prepare_model(config, num_here, on_news)
        except BuildError as error:
            raise ServeError(str(error)) from error
        loop.call_soon_threadsafe(found.set)
        from cluster.api.text.tokenizer import Tokenizer, TokenizerError

        try:
            tokenizer = Tokenizer(model.path)
        except TokenizerError as error:
            raise ServeError(str(error)) from error
        tell("model", str(model.path), True)
        import cluster.api.app  # noqa: F401  (slow: now rather than when all waits for it)

        return model, tokenizer

    tell("model", config.model.name, False)
    try:
        return await _in_thread(prepare, "prepare-model")
    finally:
        found.set()


async def _serve_api(
    deployment: Deployment,
    tokenizer: Any,
    access: Access,
    sock: socket.socket,
    stop: asyncio.Event,
    on_ready: Callable[[Deployment, int], None],
) -> None:
    """Serve HTTP until `stop`, or until the deployment has failed (raises ServeError)."""

    def stop_on_failure(_failed: asyncio.Future[None]) -> None:
        stop.set()

    deployment.failed.add_done_callback(stop_on_failure)
    await serve_api(
        deployment,
        tokenizer,
        access,
        sock,
        stop,
        on_ready=lambda port: on_ready(deployment, port),
        audit=SharedAudit(deployment.audit).ask,
        set_role=deployment.set_role,
    )
    deployment.failed.remove_done_callback(stop_on_failure)
    if deployment.failed.done():
        deployment.failed.result()
