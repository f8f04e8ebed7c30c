"""The real application on a real server, with a scripted router behind it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from prometheus_client import CollectorRegistry

from kvrelay.cluster.api.app import create_app
from kvrelay.cluster.api.client import RouterClient
from kvrelay.cluster.api.cluster_metrics import ClusterCollector
from kvrelay.cluster.api.context import ApiContext, ApiSettings
from kvrelay.cluster.api.listening import bind_socket
from kvrelay.cluster.api.metrics import ApiMetrics
from kvrelay.cluster.api.server import serve_app
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.orders import Order, SetRole
from kvrelay.cluster.state.server_lock import ServerLock
from kvrelay.cluster.status import ClusterStatus
from kvrelay.engine.files import write_private
from kvrelay.engine.settings import OPERATIONS_KEY_FILE
from kvrelay.engine.stats import WorkerStats
from kvrelay.router.status import STATS_FACTS
from tests.cluster.api.fake_router import FakeRouter

JSON = "application/json"
MODEL = "smollm2-135m"
MAX_MODEL_LEN = 512
OPERATORS_KEY = "0123456789abcdef" * 4  # where a server here has no other
AS_OPERATOR = {"authorization": f"Bearer {OPERATORS_KEY}"}
ANSWER = " The capital of France is Paris."  # the scripted router's, where a test says nothing


def cluster_status(plain: dict[str, Any]) -> ClusterStatus:
    """A status of which only some fields matter. Workers have their facts side by side."""
    rest = {"router": "router-0", "policy": "seconds", "model": MODEL}
    nested = rest | plain | {"workers": [_worker(each) for each in plain.get("workers", ())]}
    return msgspec.convert(nested, ClusterStatus, dec_hook=lambda _, counts: Counter(counts))


def _worker(facts: dict[str, Any]) -> dict[str, Any]:
    said = {name: value for name, value in facts.items() if name in STATS_FACTS}
    if not said:
        return facts
    required = [each for each in fields(WorkerStats) if each.default is each.default_factory]
    unsaid = {each.name: 0 for each in required}
    return facts | {"stats": unsaid | {"worker": facts["worker"], "epoch": 1} | said}


_STATUS = {
    "model": MODEL,
    "cache_hit_rate": 0.25,
    "num_live": 1,
    "num_queued": 0,
    "totals": {
        "requests": {"stop": 7},
        "retries": {},
        "prompt_tokens": 400,
        "cached_tokens": 100,
        "cached_tokens_by_source": {"device": 60, "disk": 40},
    },
    "workers": [
        {
            "worker": "decode-0",
            "role": "decode",
            "state": "up",
            "num_blocks": 100,
            "num_used_blocks": 40,
            "num_cached_blocks": 30,
            "num_host_blocks": 70,
            "num_disk_blocks": 900,
            "num_running": 2,
            "num_waiting": 1,
            "num_handoffs": 0,
            "cache_hit_rate": 0.25,
            "counters": {"preemptions": 3},
        }
    ],
}
STATUS: dict[str, Any] = msgspec.json.decode(cluster_status(_STATUS).json())

SCALING = {
    "why": "2 are enough",
    "reason": "enough",
    "wanted": 2,
    "wanted_decode": 1,
    "least": 1,
    "most": 4,
    "coming": 0,
    "draining": 0,
    "ticks": {"enough": 3},
    "actions": {"start": 1},
    "decisions": [{"at": 1.0, "action": "none"}],
}

AUDIT = {
    "clean": True,
    "live": 0,
    "left": [],
    "wrong": [],
    "workers": [
        {
            "worker": "decode-0",
            "epoch": 2,
            "counts": {
                "device.blocks": 100,
                "device.in_use": 0,
                "device.evictable": 30,
                "device.blank": 70,
                "host.blocks": 400,
                "host.used": 31,
                "host.pinned": 0,
                "disk.blocks": 0,
                "disk.used": 0,
                "disk.pinned": 0,
                "transfers": 0,
                "leases": 0,
            },
        }
    ],
}


@pytest.fixture(scope="session")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer(smollm2_dir)


@dataclass
class Served:
    """A running server; its loop runs in a thread of its own."""

    url: str
    port: int
    router: FakeRouter
    client: RouterClient
    ctx: ApiContext
    health: list[Any]  # [is_healthy, detail], may be changed
    audits: list[Any]  # what `/audit` answers next; when it is used up, AUDIT
    http: httpx.Client
    stop: Callable[[], None]  # returns at once

    def openai(self) -> openai.OpenAI:
        key = self.ctx.settings.operations_key or "none"
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)

    def post(self, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
        if isinstance(body, bytes):
            return self.http.post(path, content=body)
        return self.http.post(path, json=body)

    def wait_idle(self) -> None:
        """Nothing is live, neither here nor at the router; fails after a bounded time."""
        wait_until(lambda: self.client.num_live == 0 and self.router.num_live == 0)
        wait_until(lambda: self.ctx.live.num_taken == 0)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not become true"
        time.sleep(0.005)


def _as_json(request: httpx.Request) -> None:
    """A body that says nothing else."""
    if request.method == "POST":
        request.headers.setdefault("content-type", JSON)


@contextlib.contextmanager
def found_by_commands(port: int, key: str = OPERATORS_KEY) -> Iterator[Path]:
    """A state directory as a server has it; commands find the key in it."""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        lock = ServerLock.take(state)
        lock.tell([("127.0.0.1", port)])
        write_private(state / OPERATIONS_KEY_FILE, key.encode())
        yield state
        lock.release()


async def _running(
    ctx: ApiContext, port: int, stop: list[Callable[[], None]], **options: Any
) -> None:
    """Serves until it is stopped, by what `stop` then has."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    stop.append(lambda: loop.call_soon_threadsafe(stopping.set))
    own = {"shutdown_timeout_s": lambda: 2, "messages": ctx.bodies}
    await serve_app(create_app(ctx), "127.0.0.1", port, stop=stopping, **{**own, **options})


class FakeOperations:
    """What operators ask for is taken, and nothing comes of it. A test sets what it looks at."""

    def __init__(self, health: list[Any], audits: list[Any]) -> None:
        self.draining = False
        self._health, self._audits = health, audits

    def status(self) -> ClusterStatus:
        return cluster_status(STATUS)

    def healthy(self, model: str = "") -> tuple[bool, dict[str, Any]]:
        return self._health[0], self._health[1]

    async def audit(self) -> dict[str, Any]:
        return self._audits.pop(0) if self._audits else AUDIT

    async def order(self, order: Order) -> dict[str, Any]:
        return {"was": order.role} if isinstance(order, SetRole) else {}

    def reserved(self) -> dict[str, str]:
        return {}


OPERATIONS = ("draining", *(name for name in vars(FakeOperations) if not name.startswith("_")))


@contextlib.contextmanager
def serve(
    tokenizer: Tokenizer,
    settings: ApiSettings,
    sock: socket.socket | None = None,
    context: dict[str, Any] | None = None,
    real_router: Any = None,
    further: Callable[[ApiContext], None] = lambda ctx: None,
    **options: Any,
) -> Iterator[Served]:
    """`sock`: to listen on; `context`: more of the `ApiContext`, or of its operations;
    `real_router`: in place of a fake one; `further`: adds models; `options`: of `serve_app`. Where
    clients have no keys, `http` and the commands of this process are those of an operator."""
    is_keyless = not (settings.operations_key or "tenants" in (context or {}))
    if not settings.operations_key:
        settings = msgspec.structs.replace(settings, operations_key=OPERATORS_KEY)
    answer = [*tokenizer.encode(ANSWER), tokenizer.eos_token_ids[0]]
    router: Any = real_router or FakeRouter(answer=lambda submit: answer)
    client = router.client = RouterClient("api-0", "router-0", router.deliver)
    router.reply = lambda message: client.receive(asyncio.get_running_loop().time(), message)
    registry = CollectorRegistry()
    audits, health = list[Any](), list[Any]([True, {}])

    given = context or {}
    operations = FakeOperations(health, audits)
    for name in given.keys() & set(OPERATIONS):
        setattr(operations, name, given[name])
    ctx = ApiContext(
        model_name=MODEL,
        tokenizer=tokenizer,
        client=client,
        max_model_len=MAX_MODEL_LEN,
        operations=operations,
        metrics=ApiMetrics(registry, MODEL),
        explanations=router.explanations,
        settings=settings,
        **{name: value for name, value in given.items() if name not in OPERATIONS},
    )
    ClusterCollector(registry, operations.status)
    further(ctx)
    sock = sock or bind_socket("127.0.0.1", 0)
    port = sock.getsockname()[1]
    ready = threading.Event()
    stop: list[Callable[[], None]] = []

    options |= {"sock": sock, "on_ready": lambda _: ready.set()}
    running = _running(ctx, port, stop, **options)
    thread = threading.Thread(target=lambda: asyncio.run(running), daemon=True)
    thread.start()
    assert ready.wait(20)
    headers = AS_OPERATOR if is_keyless else {}
    url = f"http://127.0.0.1:{port}"
    hooks = {"request": [_as_json]}
    http = httpx.Client(base_url=url, timeout=20, headers=headers, event_hooks=hooks)
    served = Served(url, port, router, client, ctx, health, audits, http, stop[0])
    try:
        with found_by_commands(port) if is_keyless else contextlib.nullcontext():
            yield served
    finally:
        stop[0]()
        thread.join(20)
        http.close()
        assert not thread.is_alive()
        assert (client.num_live, router.num_live) == (0, 0)


@pytest.fixture(scope="session")
def shared_server(tokenizer: Tokenizer) -> Iterator[Served]:
    settings = ApiSettings(max_body_bytes=64 * 1024, max_live_requests=64, request_timeout_s=20)
    with serve(tokenizer, settings) as running:
        yield running


@pytest.fixture
def served(shared_server: Served) -> Iterator[Served]:
    """One server for all tests, its router as new for each, and idle after each."""
    router = shared_server.router
    kept = {name: getattr(router, name) for name in vars(router)}
    router.submits, router.cancels, router.commands = [], [], []
    yield shared_server
    shared_server.wait_idle()
    vars(router).update(kept)
    shared_server.health[:] = [True, {}]
    shared_server.audits.clear()
