"""A runner and its store in virtual time, above an endpoint whose rows take as long as they are to.

What tenants send, and how it is answered, is written down in `Backend`; nothing is computed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from kvrelay.cluster.api.batches.rows import ENDPOINTS
from kvrelay.cluster.api.batches.runner import Runner
from kvrelay.cluster.api.batches.store import KEEP_S, BatchStore
from kvrelay.cluster.api.batches.uploads import WINDOW_S, cancel
from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.errors import ApiError, overloaded
from kvrelay.cluster.api.keys.keys import Keys
from kvrelay.cluster.api.limiter import ConcurrencyLimiter, RateLimits
from kvrelay.cluster.api.metrics import ApiMetrics
from kvrelay.cluster.api.tenants import Tenant, Tenants

CHAT = ENDPOINTS[0]
BEGAN_AT = 1_000_000.0  # the clock says so, where the loop's time is 0
ENDS = ("completed", "failed", "expired", "cancelled")


@dataclass
class Sent:
    tenant: Tenant
    name: str
    custom_id: str
    timeout_s: float
    at: float


@dataclass
class Backend:
    """Takes `row_s` for a row, or what `seconds` says of its body. `refusal` may raise ApiError."""

    row_s: float = 1.0
    seconds: Callable[[Any], float] | None = None
    refusal: Callable[[Sent, Any], None] = lambda sent, body: None
    rates: RateLimits = field(default_factory=RateLimits)
    sent: list[Sent] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0
    live: Mapping[str, ConcurrencyLimiter] = field(default_factory=dict)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        loop, state = asyncio.get_running_loop(), scope["state"]
        body = json.loads((await receive())["body"])
        tenant = state["tenant"]
        sent = Sent(tenant, state["request_id"], body["i"], state["timeout_s"], loop.time())
        self.sent.append(sent)
        self.refusal(sent, body)
        self.rates.admit(loop.time(), tenant, 1)
        takes_s = self.row_s if self.seconds is None else self.seconds(body)
        gone = asyncio.ensure_future(receive())
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            with self.live[body.get("model", "a")].take():
                await asyncio.wait({gone}, timeout=min(takes_s, state["timeout_s"]))
        finally:
            self.num_running -= 1
        if gone.done():
            return
        gone.cancel()
        if takes_s > state["timeout_s"]:
            state["num_output_tokens"] = 1
            raise ApiError(504, "its time is over", type="timeout_error", code="deadline_exceeded")
        answer = {"id": sent.name, "created": 0, "usage": {"prompt_tokens": 2}}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


def no_workers(sent: Sent, body: Any) -> None:
    code = "no_workers"
    raise ApiError(503, "no worker is up", type="service_unavailable_error", code=code)


def no_room(sent: Sent, body: Any) -> None:
    raise overloaded("there is no room", 1.0)


class Cluster:
    """To be made in a loop in virtual time. Models are "a", which rows name by default, and "b"."""

    def __init__(
        self,
        store: Any,
        backend: Backend,
        tenants: Mapping[str, Tenant] | None = None,
        settings: ApiSettings | None = None,
        max_live: int = 4096,
    ) -> None:
        self.store, self.backend, self.loop = store, backend, asyncio.get_running_loop()
        self.window_s = WINDOW_S  # that added batches have
        self.queued = {"a": 0, "b": 0}
        models = {
            name: SimpleNamespace(
                model_name=name, live=ConcurrencyLimiter(max_live, self.loop.time)
            )
            for name in self.queued
        }
        backend.live = {name: model.live for name, model in models.items()}
        known = {name.encode(): tenant for name, tenant in (tenants or {}).items()}
        self.ctx: Any = SimpleNamespace(
            settings=settings or ApiSettings(),
            batches=store,
            tenants=Tenants(known),
            keys=Keys(),
            live=models["a"].live,
            operations=SimpleNamespace(status=self._status_now, draining=False),
            chosen=lambda model, tenant: models[model or "a"],
        )
        self.runner = self.another()
        self.ctx = self.runner.ctx

    def _status_now(self) -> Any:
        models = [SimpleNamespace(model=m, num_queued=n) for m, n in self.queued.items()]
        return SimpleNamespace(num_queued=sum(self.queued.values()), models=models)

    def another(self) -> Runner:
        """A runner of another process on the same store."""
        ctx: Any = SimpleNamespace(**vars(self.ctx) | {"metrics": ApiMetrics(CollectorRegistry())})
        return Runner(ctx, {CHAT: self.backend}, self.clock)

    def clock(self) -> float:
        return BEGAN_AT + self.loop.time()

    def add(self, name: str, rows: int | bytes, tenant: str = "", model: str = "a") -> str:
        text = rows if isinstance(rows, bytes) else b"".join(line(i, model) for i in range(rows))
        add(self.store, name, text, tenant, int(self.clock()), self.window_s)
        self.runner.wake()
        return name

    def cancel(self, name: str) -> None:
        cancel(self.store, name, int(self.clock()))
        self.runner.wake()

    def record(self, name: str, tenant: str = "") -> Any:
        return self.store.batch(tenant, name)

    def status(self, name: str, tenant: str = "") -> str:
        return str(self.record(name, tenant)["status"])

    def lines(self, name: str, kind: str, tenant: str = "") -> list[Any]:
        file = self.record(name, tenant)[f"{kind}_file_id"]
        path = self.store.fetched(file) if file else None
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path else []

    async def until(self, condition: Callable[[], Any], most_s: float = WINDOW_S + 60.0) -> float:
        """Returns the seconds that it took."""
        began_at = self.loop.time()
        while not condition():
            assert self.loop.time() - began_at < most_s, "it did not come true"
            await asyncio.sleep(0.25)
        return self.loop.time() - began_at

    async def ended(self, *names: str, tenant: str = "", most_s: float = WINDOW_S + 60.0) -> float:
        """Returns the seconds until all have."""
        return await self.until(
            lambda: all(self.status(name, tenant) in ENDS for name in names), most_s
        )


def line(i: int | str, model: str = "a", **body: Any) -> bytes:
    asked = {"i": i, "model": model} | body
    row = {"custom_id": f"r{i}", "method": "POST", "url": CHAT, "body": asked}
    return json.dumps(row).encode() + b"\n"


def add(store: Any, name: str, text: bytes, tenant: str, now: int, window_s: int) -> None:
    draft = store.draft()
    draft.write_bytes(text)
    file = {"id": f"file-{name}", "bytes": len(text), "expires_at": now + KEEP_S}
    store.add_file(tenant, file | {"purpose": "batch"}, draft, 1 << 30)
    draft.unlink(missing_ok=True)
    times = ("in_progress", "finalizing", "cancelling")
    record = {"id": name, "input_file_id": file["id"], "endpoint": CHAT, "status": "validating"}
    record |= {"errors": None, "created_at": now, "expires_at": now + window_s}
    record |= {f"{each}_at": None for each in times} | {"output_file_id": None}
    record |= {"request_counts": {"total": 0, "completed": 0, "failed": 0}, "error_file_id": None}
    store.add_batch(tenant, record)


def tenant(name: str, **limits: Any) -> Tenant:
    return Tenant(name, b"", **limits)


def in_memory(folder: Any) -> BatchStore:
    """A store whose commits wait for no disk."""
    store = BatchStore(folder)
    store._database.connection.execute("PRAGMA synchronous = OFF")
    return store
