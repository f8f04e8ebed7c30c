"""A real router over scripted decode workers, in the place of `FakeRouter`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.host import NodeHost
from kvrelay.engine.kv.events import KVSnapshot, KVSnapshotRequest
from kvrelay.engine.messages import Abort, TokenDeltas
from kvrelay.engine.node import Effect, Send, Wake, Woken
from kvrelay.engine.request import FinishReason, TokenDelta
from kvrelay.engine.stats import WorkerInfo
from kvrelay.router.explain import Explanations
from kvrelay.router.messages import WorkerDown, WorkerUp
from kvrelay.router.router import Router
from tests.router.script import worker_info

QUEUE_S, PREFILL_S, STEP_S = 0.02, 0.1, 0.01


class ScriptedWorker:
    """Node. Answers each Decode with `tokens`, one a step, after waiting and computing a while."""

    def __init__(self, info: WorkerInfo, tokens: list[int]) -> None:
        self.node_id = info.worker
        self.info = info
        self.tokens = tokens
        self.is_silent = False
        self.num_ignored = 0
        self.live: dict[str, tuple[Decode, int]] = {}

    def start(self, now: float) -> list[Effect]:
        return []

    def receive(self, now: float, message: Any) -> list[Effect]:
        match message:
            case Decode() if self.is_silent:
                self.num_ignored += 1
            case Decode():
                self.live[message.request_id] = (message, 0)
                return [Wake(QUEUE_S + PREFILL_S, message.request_id)]
            case Woken(request_id) if request_id in self.live:
                return self._next_token(request_id)
            case Abort(request_id):
                self.live.pop(request_id, None)
            case KVSnapshotRequest(router):
                return [Send(router, KVSnapshot(self.node_id, 1, 0, ()))]
        return []

    def _next_token(self, request_id: str) -> list[Effect]:
        order, count = self.live.pop(request_id)
        is_last = count + 1 == min(len(self.tokens), order.sampling.max_tokens)
        delta = TokenDelta(
            request_id,
            order.attempt,
            len(order.tokens) + count,
            (self.tokens[count],),
            finish=FinishReason.STOP if is_last else None,
            num_cached_tokens=0 if count == 0 else None,
            phases={"worker_queue": QUEUE_S, "prefill": PREFILL_S} if count == 0 else {},
        )
        told = Send(order.router, TokenDeltas(self.node_id, 1, (delta,)))
        if is_last:
            return [told]
        self.live[request_id] = (order, count + 1)
        return [told, Wake(STEP_S, request_id)]


@dataclass
class RealRouter:
    """Begins with the first message, on the loop that it comes on."""

    tokens: list[int]
    names: tuple[str, ...] = ("decode-0", "decode-1")
    host: NodeHost | None = None
    client: Any = None  # the API's node
    workers: dict[str, ScriptedWorker] = field(default_factory=dict)
    node: Router = field(default_factory=lambda: Router("router-0", clock=time.perf_counter))

    @property
    def explanations(self) -> Explanations:
        return self.node.explanations

    @property
    def num_live(self) -> int:
        return self.node.status(0.0).num_live

    def deliver(self, to: str, message: Any) -> None:
        if self.host is None:
            self.host = NodeHost(asyncio.get_running_loop())
            self.host.add(self.node)
            self.host.add(self.client)
            for name in self.names:
                info = worker_info(name, num_blocks=4096, max_model_len=512)
                self.workers[name] = ScriptedWorker(info, self.tokens)
                self.host.add(self.workers[name])
                self.host.deliver("router-0", WorkerUp(info))
        self.host.deliver(to, message)

    def kill(self, name: str) -> None:
        assert self.host is not None
        self.host.deliver_soon("router-0", WorkerDown(name, 1, "killed"))
