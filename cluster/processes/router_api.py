"""The API of one router: what it is made of, in whichever process the router lives."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import socket
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import structs

from kvrelay.cluster.api.operator import Operations
from kvrelay.cluster.api.tenants import Access, made_operations_key
from kvrelay.cluster.config import Config
from kvrelay.cluster.control.process_messages import RouterLoad
from kvrelay.cluster.processes.adapter_bases import adapter_base
from kvrelay.cluster.processes.router_spec import SHUTDOWN_S, ServedModel
from kvrelay.cluster.status import StoreStatus
from kvrelay.decode_worker.vllm.parser_process import parser_process
from kvrelay.engine.host import NodeHost, settle_memory
from kvrelay.engine.model.checkpoint.families import read_config
from kvrelay.engine.node import NodeId
from kvrelay.engine.support import Capability, engine_traits, model_traits, refusal_of
from kvrelay.engine.wire.channel import own_version
from kvrelay.router.models import ForModel, ModelRouters

if TYPE_CHECKING:
    from kvrelay.cluster.api.adapter_metrics import AdapterUse
    from kvrelay.cluster.api.adapters import Adapters
    from kvrelay.cluster.api.client import RouterClient
    from kvrelay.cluster.api.context import ApiContext, ApiSettings
    from kvrelay.cluster.api.output.vllm_parsers import VllmParsers
    from kvrelay.cluster.api.server import ServerCertificate
    from kvrelay.cluster.api.text.tokenizer import Tokenizer

_log = logging.getLogger("kvrelay.api")
_M_MMAP_THRESHOLD = -3  # as mallopt(3) numbers it


class RouterHost(Operations, Protocol):
    """Who hosts a router, and does what operators ask for."""

    config: Config
    configs: dict[str, Config]  # by model, as are the next
    served_models: dict[str, ServedModel]
    host: NodeHost
    routers: ModelRouters
    certificate: ServerCertificate | None  # None: the API is served in clear text
    context: ApiContext | None
    finish_s: float  # that live requests have when it stops, besides SHUTDOWN_S


def load_of(router: ModelRouters, now: float, state: StoreStatus) -> RouterLoad:
    status = router.status(now)
    return RouterLoad(status.num_live, status.num_queued, state.up)


def _open_responses(config: Config) -> Any:
    """Without durable sessions they are forgotten when the server stops."""
    from kvrelay.cluster.api.responses.store import FILE, ResponseStore

    return ResponseStore(config.sessions.state_path / FILE if config.sessions.durable else None)


def _open_batches(config: Config) -> Any:
    """One of several servers shares them with the others."""
    from kvrelay.cluster.api.batches.store import BatchStore

    folder = config.sessions.state_path if config.sessions.durable else None
    if name := config.cluster.name:
        from kvrelay.cluster.api.batches.shared import SharedBatchStore  # both need redis
        from kvrelay.cluster.state.redis_client import OWN_PART, PART, Room, connect, is_one_server

        state, prefix = config.state, f"{config.state.key_prefix}:cluster:{name}:"
        url = state.batches_url or state.url
        redis = connect(url, state.timeout_s)
        part = PART if is_one_server(url, state.url) else OWN_PART
        room = Room(redis, state.max_batch_bytes, part)
        return SharedBatchStore(folder, redis, prefix, room)
    if folder is not None:
        try:
            return BatchStore(folder)
        except (OSError, sqlite3.Error) as error:
            _log.warning("batches will be forgotten when the server stops: %s", error)
    return BatchStore()


def _open_keys(config: Config) -> Any:
    """Where they are: one of several servers shares them with the others."""
    from kvrelay.cluster.api.keys.keys import Keys
    from kvrelay.cluster.api.keys.store import FILE, KeyStore

    if name := config.cluster.name:
        from kvrelay.cluster.api.keys.shared import SharedKeyStore  # both need redis
        from kvrelay.cluster.state.redis_client import connect

        redis = connect(config.state.url, config.state.timeout_s)
        return Keys(SharedKeyStore(redis, f"{config.state.key_prefix}:cluster:{name}:"))
    path = config.sessions.state_path / FILE
    try:
        return Keys(KeyStore(path))
    except (OSError, sqlite3.Error) as error:
        _log.warning("API keys and usage will be forgotten when the server stops: %s", error)
    return Keys()


def _open_adapters(served: RouterHost) -> Any:
    """Those of the settings are read here. Raises ConfigError."""
    from kvrelay.cluster.api.adapters import FILE, Adapters

    config = served.config
    models = {
        each.served_name: adapter_base(served.configs[name], each.path)
        for name, each in served.served_models.items()
    }
    return Adapters.open(config.adapters, config.sessions.state_path / FILE, models)


def _adapter_uses(served: RouterHost, adapters: Adapters) -> Iterator[AdapterUse]:
    """Of each model that has adapters."""
    from kvrelay.cluster.api.adapter_metrics import adapter_use

    for model, router in served.routers.routers.items():
        name, room = served.served_models[model].served_name, served.configs[model].engine
        if registered := adapters.of_model(name):
            yield adapter_use(name, registered, router, room.adapter_bytes)


def _return_memory() -> None:
    """Let large blocks, of bodies and what is made of them, go back to the system when they are
    free. By default glibc keeps up to 32 MiB of each size that it has seen, in each thread's
    arena."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)


async def _know_bases(context: ApiContext) -> None:
    """Adapters that others have registered for another model of this name are not offered then."""
    for each in context.all:
        digest = await asyncio.to_thread(each.adapter_base.digest)
        context.adapters.know_base(each.model_name, digest)


def _settings(config: Config) -> ApiSettings:
    """Where no key of operators is set, one was made. Raises ConfigError."""
    from kvrelay.cluster.api.context import ApiSettings

    api, given = config.api, config.api.operations_key
    return ApiSettings(
        **structs.asdict(api) | {"operations_key": given or made_operations_key(config)},
        session_timeout_s=config.sessions.order_timeout_s + 2.0,
    )


def _tracing(served: RouterHost, metrics: Any) -> Any:
    """None where there is no collector."""
    from kvrelay.cluster.api.tracing import Tracing

    def count_spans(outcome: str, spans: int) -> None:
        metrics.spans.labels(outcome).inc(spans)

    section, name = served.config.tracing, served.config.cluster.name
    if not section.endpoint:
        return None
    about = {
        "service.version": own_version(),
        "service.instance.id": f"{socket.gethostname()}/{served.routers.node_id}",
        **({"service.namespace": name} if name else {}),
    }
    return Tracing(section.endpoint, section.sample, count_spans, about=about)


def _client(served: RouterHost, model: str) -> RouterClient:
    """Submits to the router of one model."""
    from kvrelay.cluster.api.client import RouterClient

    router, name = served.routers.node_id, _client_name(served, model)

    def deliver(to: NodeId, message: Any) -> None:
        served.host.deliver(to, ForModel(model, message))

    client = RouterClient(name, router, deliver)
    served.host.nodes.pop(name, None)  # a model of this name was removed
    served.host.add(client)
    return client


def _client_name(served: RouterHost, model: str) -> NodeId:
    return served.routers.node_id.replace("router", "api") + (f"/{model}" if model else "")


def _parsers(config: Config, model_dir: Path) -> VllmParsers | None:
    from kvrelay.cluster.api.output.vllm_parsers import VllmParsers

    process = parser_process(config.engine, model_dir, config.api.vllm_parsers)
    return None if process is None else VllmParsers(process)


def _images(config: Config, model_dir: Path) -> dict[str, Any]:
    """The fields of a model's context that say of images."""
    from kvrelay.cluster.api.openai.pictures import has_vision
    from kvrelay.engine.model.vision.layout import expand

    if config.engine.runs == "vllm":
        return {"reads_images": has_vision(model_dir)}
    model = read_config(model_dir)
    traits = engine_traits(config.engine, on_gpu=False)  # workers on GPUs refuse them in words
    if model.vision is None or refusal_of(Capability.IMAGES, traits | model_traits(model)):
        return {"reads_images": False}
    return {"reads_images": True, "expand": partial(expand, vision=model.vision)}


async def _of_model(
    served: RouterHost, model: str, tokenizer: Tokenizer, access: Access
) -> dict[str, Any]:
    """The fields of a model's context that follow from it."""
    from kvrelay.cluster.api.text.tokenizer import PublicPrompts

    config, router = served.configs[model], served.routers.routers[model]
    prompts = await asyncio.to_thread(PublicPrompts.of_texts, tokenizer, access.public_prompts)
    entry = next((each for each in served.config.models if each.name == model), None)
    return {
        "model_name": served.served_models[model].served_name,
        "aliases": entry.aliases if entry else tuple(config.model.served_name.split()[1:]),
        "allowed": entry.tenants if entry else (),
        "tokenizer": tokenizer,
        "client": _client(served, model),
        "max_model_len": served.served_models[model].max_model_len,
        "explanations": router.explanations,
        "refuse_early": lambda call: router.refuse(asyncio.get_running_loop().time(), call),
        "name": model,
        **await asyncio.to_thread(_images, config, served.served_models[model].path),
        "settings": _settings(config),
        "quest_mark": config.engine.quest_mark,
        "vllm_parsers": _parsers(config, served.served_models[model].path),
        "public_prompts": prompts,
        "adapter_base": adapter_base(
            config, served.served_models[model].path, lambda: router.loads
        ),
    }


async def offer_model(
    served: RouterHost, context: ApiContext, model: str, tokenizer: Tokenizer, access: Access
) -> None:
    """To clients, beside those that they have."""
    own = await _of_model(served, model, tokenizer, access)
    if served.context is not None:  # another model may have had this name, and adapters
        digest = await asyncio.to_thread(own["adapter_base"].digest)
        context.adapters.know_base(own["model_name"], digest)
    other = context.beside(**own)
    other.warm_up()


def forget_model(served: RouterHost, model: str, context: ApiContext | None) -> None:
    """What is only there for a model that is offered no more, and has no request left. Bodies of
    all models are parsed by threads of the first one's."""
    served.host.nodes.pop(_client_name(served, model), None)
    if context is not None and context is not served.context:
        context.end_threads()


async def open_context(
    served: RouterHost, tokenizers: Mapping[str, Tokenizer], access: Access
) -> ApiContext:
    """What the application of `served` is made of. `tokenizers`: by model."""
    from prometheus_client import CollectorRegistry

    from kvrelay.cluster.api.adapter_metrics import AdapterCollector
    from kvrelay.cluster.api.cluster_metrics import ClusterCollector
    from kvrelay.cluster.api.context import ApiContext
    from kvrelay.cluster.api.keys.metrics import KeyCollector
    from kvrelay.cluster.api.metrics import ApiMetrics

    config, registry = served.config, CollectorRegistry()
    ClusterCollector(registry, served.status)
    (first, tokenizer), *others = tokenizers.items()
    metrics = ApiMetrics(registry, served.served_models[first].served_name)
    tracing = await asyncio.to_thread(_tracing, served, metrics)
    context = ApiContext(
        **await _of_model(served, first, tokenizer, access),
        operations=served,
        metrics=metrics,
        tracing=tracing,
        cluster=config.cluster.name,
        tenants=access.tenants,
        retention_s=config.tiers.retention_s,
        responses=await asyncio.to_thread(_open_responses, config),
        batches=await asyncio.to_thread(_open_batches, config),
        keys=await asyncio.to_thread(_open_keys, config),
        adapters=await asyncio.to_thread(_open_adapters, served),
        log=config.log,
    )
    context.warm_up()
    KeyCollector(registry, context.keys)
    AdapterCollector(registry, partial(_adapter_uses, served, context.adapters))
    for model, its in others:
        await offer_model(served, context, model, its, access)
    return context


async def serve_api(
    served: RouterHost,
    tokenizers: Mapping[str, Tokenizer],
    access: Access,
    sock: socket.socket,
    stop: asyncio.Event,
    on_ready: Callable[[int], None],
) -> None:
    """Serve HTTP at `sock` until `stop`. `tokenizers`: by model. `on_ready` gets the port once
    requests are taken."""
    from kvrelay.cluster.api.app import create_app
    from kvrelay.cluster.api.http.connection import ConnectionLimits
    from kvrelay.cluster.api.server import serve_app

    settle_memory()
    _return_memory()
    config = served.config
    context = served.context = await open_context(served, tokenizers, access)
    knowing = asyncio.create_task(_know_bases(context))
    await serve_app(
        create_app(context),
        config.api.host,
        config.api.port,
        sock=sock,
        stop=stop,
        on_ready=on_ready,
        connections=ConnectionLimits(config.api.max_connections, config.api.max_header_bytes),
        certificate=served.certificate,
        max_message_bytes=config.api.max_body_bytes,
        messages=context.bodies,
        shutdown_timeout_s=lambda: served.finish_s + SHUTDOWN_S,
    )
    knowing.cancel()
    if context.tracing is not None:
        await asyncio.to_thread(context.tracing.close)
