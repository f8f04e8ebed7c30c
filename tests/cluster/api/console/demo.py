"""A cluster to look at: a real API and a real router over scripted workers, with a status, past
latencies and sessions that a seed gives."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from kvrelay.cluster.api.console.history import History
from kvrelay.cluster.api.console.routes import Console
from kvrelay.cluster.api.context import ApiSettings
from kvrelay.cluster.api.metrics import ApiMetrics
from kvrelay.cluster.api.text.tokenizer import Tokenizer
from kvrelay.cluster.orders import Order, SetRole, UnknownWorker
from kvrelay.cluster.status import ClusterStatus
from kvrelay.engine.kv.tier import Retention, Tier
from kvrelay.engine.stats import Role
from kvrelay.router.messages import (
    SessionCommand,
    SessionHolder,
    SessionInfo,
    SessionOp,
    SessionRefusal,
    SessionReply,
    SessionState,
)
from tests.cluster.api.conftest import MODEL, SCALING, Served, cluster_status, serve
from tests.cluster.api.routed import RealRouter

ANSWER = (
    " KV blocks leave the prefill worker as they are computed, and the decode worker reads them"
    " while the rest of the prompt is still being computed. It confirms what it has read before it"
    " uses it, so a block that was freed in between is never used."
)
NAMES = (
    "ticket-4711",
    "ticket-4720",
    "agents/build-113",
    "agents/review-9",
    "onboarding",
    "rag-eu",
)


class Fleet:
    """Owned by the test. `status()` is one of `num_workers` workers, and changes with each call."""

    def __init__(self, num_workers: int, seed: int = 1) -> None:
        self._draw = random.Random(seed)
        self.workers = [self._worker(i, num_workers) for i in range(num_workers)]
        self.scaling: dict[str, Any] | None = None
        self.models: list[str] = []
        self.num_calls = 0
        self.output_tokens = 4_812_000

    def set_role(self, worker: str, role: Role) -> Role:
        found = next((w for w in self.workers if w["worker"] == worker), None)
        if found is None:
            raise KeyError([w["worker"] for w in self.workers])
        was, found["role"] = Role(found["role"]), str(role)
        return was

    async def order(self, order: Order) -> dict[str, Any]:
        if not isinstance(order, SetRole):
            return {}
        try:
            return {"was": self.set_role(order.worker, order.role)}
        except KeyError as error:
            raise UnknownWorker(str(error)) from None

    def status(self) -> ClusterStatus:
        self.num_calls += 1
        for worker in self.workers:
            self._go_on(worker)
        self.output_tokens += 700
        running = sum(worker["num_running"] for worker in self.workers)
        status = {
            "model": MODEL,
            "router": "router-0",
            "policy": "seconds",
            "cache_hit_rate": 0.683,
            "num_live": running,
            "num_queued": 3,
            "prediction_error": 0.11,
            "totals": {
                "requests": {"stop": 20_812, "length": 411, "cancelled": 96},
                "retries": {"worker_down": 4},
                "prompt_tokens": 31_400_000,
                "cached_tokens": 21_446_000,
                "output_tokens": self.output_tokens,
                "cached_tokens_by_source": {
                    "device": 15_100_000,
                    "host": 4_300_000,
                    "disk": 1_246_000,
                    "peer": 800_000,
                },
            },
            "routers": [],
            "workers": [dict(worker) for worker in self.workers],
            "models": [self._model(name) for name in self.models],
        }
        return cluster_status(status | {"scaling": self.scaling})

    def serve_models(self, *names: str) -> None:
        """From now on; workers take turns in having them."""
        self.models = [*names]
        for index, worker in enumerate(self.workers):
            worker["model"] = names[index % len(names)] if names else None

    def _model(self, name: str) -> dict[str, Any]:
        its = [worker for worker in self.workers if worker["model"] == name]
        return {
            "model": name,
            "num_up": sum(worker["state"] == "up" for worker in its),
            "num_live": sum(worker["num_running"] for worker in its),
            "num_queued": self.models.index(name),
            "cache_hit_rate": 0.5,
            "prompt_tokens": 1000,
            "cached_tokens_by_source": {"device": 500},
            "scaling": SCALING if self.models.index(name) else None,
        }

    def _worker(self, index: int, num_workers: int) -> dict[str, Any]:
        draw = self._draw
        role = "prefill" if index < num_workers // 3 else "decode"
        number = index if role == "prefill" else index - num_workers // 3
        is_last = index in (num_workers - 1, num_workers - 2)
        state = ("down", "backoff")[num_workers - 1 - index] if is_last else "up"
        num_blocks = 2048
        used = draw.betavariate(2, 3 if role == "prefill" else 1.6)
        return {
            "worker": f"{role}-{number}",
            "role": "both" if index == num_workers // 3 + 1 else role,
            "state": state,
            "epoch": 1 + (draw.random() < 0.1),
            "num_blocks": num_blocks,
            "num_used_blocks": 0 if state == "down" else int(used * num_blocks),
            "num_cached_blocks": 0
            if state == "down"
            else int(draw.uniform(0.4, 0.95) * num_blocks),
            "num_host_blocks": draw.randrange(2000, 6000),
            "num_disk_blocks": draw.randrange(3000, 9000),
            "num_running": 0 if state == "down" else draw.randrange(2, 24),
            "num_waiting": int(draw.random() < 0.2) * draw.randrange(1, 6),
            "num_handoffs": draw.randrange(0, 4),
            "num_inflight": 2,
            "num_decoding": draw.randrange(0, 16) if role == "decode" else 0,
            "pending_prefill_tokens": draw.randrange(0, 9000) if role == "prefill" else 0,
            "cache_hit_rate": draw.uniform(0.5, 0.8),
            "prefill_tokens_per_s": draw.uniform(20e3, 26e3),
            "decode_step_s": 0.0 if role == "prefill" else draw.uniform(0.014, 0.024),
            "read_bytes_per_s": draw.uniform(8e9, 20e9),
            "host_read_bytes_per_s": 21e9,
            "disk_read_bytes_per_s": 4.2e9,
            "counters": {"preemptions": 3},
        }

    def _go_on(self, worker: dict[str, Any]) -> None:
        if worker["state"] != "up":
            return
        draw = self._draw
        used = worker["num_used_blocks"] + draw.randrange(-90, 91)
        worker["num_used_blocks"] = max(0, min(worker["num_blocks"], used))
        worker["num_running"] = max(0, worker["num_running"] + draw.randrange(-1, 2))


class DemoRouter(RealRouter):
    """The real router, but for sessions, which are as a test wants them."""

    sessions: dict[str, SessionInfo]

    def deliver(self, to: str, message: Any) -> None:
        if isinstance(message, SessionCommand):
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: self.client.receive(loop.time(), self._answer(message)))
        else:
            super().deliver(to, message)

    def _answer(self, command: SessionCommand) -> SessionReply:
        if command.op is SessionOp.LIST:
            names = [name for name in sorted(self.sessions) if name > command.session]
            shown = tuple(self.sessions[name] for name in names[: command.limit])
            more = len(names) > command.limit
            return SessionReply(command.command_id, sessions=shown, has_more=more)
        found = self.sessions.get(command.session)
        if found is None:
            refusal = SessionRefusal.UNKNOWN
            return SessionReply(command.command_id, refusal, f"no session {command.session!r}")
        found, done = carried_out(command.op, found)
        self.sessions[command.session] = found
        return SessionReply(command.command_id, sessions=(found,), done=done)


def carried_out(op: SessionOp, session: SessionInfo) -> tuple[SessionInfo, dict[str, int]]:
    """What becomes of it, and how many blocks its worker moved."""
    blocks, worker = session.num_blocks, session.worker or ""
    if op is SessionOp.PARK:
        holders = (SessionHolder(worker, {Tier.HOST: blocks, Tier.DISK: blocks // 2}),)
        return replace(session, state=SessionState.PARKED, holders=holders), {worker: blocks}
    if op is SessionOp.RESUME:
        holders = (SessionHolder(worker, {Tier.DEVICE: blocks, Tier.HOST: blocks}),)
        return replace(session, state=SessionState.IDLE, holders=holders), {worker: blocks}
    return replace(session, pinned=op is SessionOp.PIN), {}


def demo_sessions() -> dict[str, SessionInfo]:
    found = {}
    for i, name in enumerate(NAMES):
        blocks = 40 + 31 * i
        session = SessionInfo(
            session=name,
            tenant="",
            state=SessionState.IDLE,
            num_tokens=16 * blocks + 5,
            num_blocks=blocks,
            num_turns=3 + i,
            pinned=i == 2,
            retention=Retention(3600.0),
            age_s=4000.0,
            last_used_s=40.0 + 71 * i,
            worker=f"decode-{i}",
            holders=(SessionHolder(f"decode-{i}", {Tier.DEVICE: blocks, Tier.HOST: blocks // 2}),),
        )
        found[name] = carried_out(SessionOp.PARK, session)[0] if i in (1, 4) else session
    return found


class Traffic:
    """What the API would have counted, a second at a time."""

    def __init__(self, metrics: ApiMetrics) -> None:
        self._metrics = metrics
        self._draw = random.Random(2)
        self._second = 0

    def go_on(self) -> None:
        metrics, draw = self._metrics, self._draw
        load = 1.0 + 0.6 * (self._second % 120 > 70)
        self._second += 1
        for _ in range(int(14 * load)):
            metrics.count("chat", "stop", 200)
            metrics.ttft_s.observe(draw.lognormvariate(-1.9, 0.5) * load)
            metrics.prompt_tokens.inc(1500)
            metrics.cached_tokens.inc(draw.randrange(700, 1300))
        for _ in range(60):
            metrics.itl_s.observe(draw.lognormvariate(-3.9, 0.25) * load**0.5)
        metrics.output_tokens.inc(2400 * load)
        metrics.live_requests.set(int(300 * load) + draw.randrange(40))


def fill_history(history: History, traffic: Traffic, num_s: int = 300) -> None:
    """As if the API had served for so long until now."""
    for at in range(num_s):
        traffic.go_on()
        history.sample(time.time() - num_s + at)


@contextlib.contextmanager
def demo(tokenizer: Tokenizer, num_workers: int, **context: Any) -> Iterator[tuple[Served, Fleet]]:
    """A server with a fleet of that many workers, of which the router knows two."""
    fleet = Fleet(num_workers)
    tokens = [*tokenizer.encode(ANSWER), tokenizer.eos_token_ids[0]]
    router = DemoRouter(tokens, names=("decode-0", "decode-1", "decode-2"))
    router.sessions = demo_sessions()
    given: dict[str, Any] = {"order": fleet.order, **context}
    began = Console.start

    def start(console: Console) -> None:
        traffic, sample = Traffic(console._ctx.metrics), console.history.sample
        fill_history(console.history, traffic)

        def go_on(at: float, models: Collection[str] = ()) -> None:
            traffic.go_on()
            sample(at, models)

        console.history.sample = go_on  # type: ignore[method-assign]
        console._ctx.operations.status = fleet.status
        began(console)

    with contextlib.ExitStack() as stack:
        Console.start = start  # type: ignore[method-assign]
        try:
            served = stack.enter_context(
                serve(tokenizer, ApiSettings(), context=given, real_router=router)
            )
        finally:
            Console.start = began  # type: ignore[method-assign]
        yield served, fleet
