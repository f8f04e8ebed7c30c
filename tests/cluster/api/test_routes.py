"""The application that a router process serves, put together as it does that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import escape
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message

from kvrelay.cluster.api.app import create_app
from kvrelay.cluster.api.http.route import ApiRoute, ApiWebSocketRoute
from kvrelay.cluster.api.tenants import load_access
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.config import build_config
from kvrelay.cluster.processes.router_api import open_context
from kvrelay.cluster.processes.router_process import RouterProcess
from kvrelay.cluster.processes.router_spec import RouterProcessSpec, ServedModel
from kvrelay.worker.process import Listening

OPERATOR = {"authorization": "Bearer the-operator-of-it"}
SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {"sessions": {"durable": False}},
    "with keys, pages and a collector": {
        "tenant": [{"name": "red", "keys": ["red"]}],
        "api": {"cors_origins": "https://page.example"},
        "tracing": {"endpoint": "http://127.0.0.1:9"},
    },
    "two models": {
        "models": [{"name": name, "checkpoint": "smollm2-135m"} for name in ("one", "two")]
    },
}
pytestmark = pytest.mark.anyio


@asynccontextmanager
async def production(
    settings: dict[str, Any], state: Path, tokenizer: Tokenizer
) -> AsyncIterator[FastAPI]:
    """What `kvrelay serve` would serve by these settings, without a socket."""
    sessions = {"state_dir": str(state), **settings.get("sessions", {})}
    api = {"operations_key": "the-operator-of-it", **settings.get("api", {})}
    config = build_config({**settings, "sessions": sessions, "api": api}, "test")
    access, directory = load_access(config), tokenizer.directory
    names = [each.name for each in config.models] or [""]
    models = {name: ServedModel(directory, name or "small", 512) for name in names}
    spec = RouterProcessSpec("life", "router-0", 1, ("router-0",), config, models, access)
    process = RouterProcess(spec, Listening("127.0.0.1", b"token", 1 << 20))
    process.host.add(process.routers)
    context = await open_context(process, dict.fromkeys(names, tokenizer), access)
    try:
        yield create_app(context)
    finally:
        context.close()
        if context.tracing is not None:
            context.tracing.close()
        for opened in process._opened.values():
            if opened.executor is not None:
                opened.executor.close()


async def reads_body(app: FastAPI, route: ApiRoute) -> bool:
    """Whether a call of an operator would, seen by asking with a body that nothing accepts."""
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if asked:
            return {"type": "http.disconnect"}
        asked = True
        return {"type": "http.request", "body": b"{no", "more_body": False}

    async def send(message: Message) -> None:
        pass

    path = route.path_format.replace("{", "").replace("}", "")
    form = b"multipart/form-data; boundary=x" if path == "/v1/files" else b"application/json"
    headers = [(b"authorization", b"Bearer the-operator-of-it"), (b"content-type", form)]
    scope = {
        "type": "http",
        "method": route.method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [*headers, (b"host", b"localhost")],
        "http_version": "1.1",
        "scheme": "http",
        "client": ("127.0.0.1", 9),
        "server": ("server", 80),
    }
    await app(scope, receive, send)
    return asked


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
async def test_all_routes_are_documented(
    settings: dict[str, Any], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with production(settings, tmp_path, tokenizer) as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            described = await client.get("/openapi.json", headers=OPERATOR)
            page = await client.get("/docs", headers=OPERATOR)
        assert (described.status_code, page.status_code) == (200, 200)
        routes = [each for each in app.routes if isinstance(each, ApiRoute)]
        others = [each for each in app.routes if each not in routes]
        assert all(isinstance(each, ApiWebSocketRoute) for each in others), "no method, no words"
        calls = {
            (method, path): call
            for path, methods in described.json()["paths"].items()
            for method, call in methods.items()
        }
        keys = [(each.method.lower(), each.path_format) for each in routes]
        assert len(keys) == len(calls)
        assert set(keys) == calls.keys()
        assert {("post", "/v1/weights"), ("post", "/drain"), ("post", "/models")} <= calls.keys()
        for key, route in zip(keys, routes, strict=True):
            assert calls[key]["summary"]
            assert escape(route.summary) in page.text
            assert escape(route.path_format) in page.text


async def test_each_call_that_reads_a_body_says_what_it_may_be(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with production({}, tmp_path, tokenizer) as app:
        changing = [
            each for each in app.routes if isinstance(each, ApiRoute) and each.method != "GET"
        ]
        read = {each.path_format: await reads_body(app, each) for each in changing}
        assert read == {each.path_format: each.body is not None for each in changing}
