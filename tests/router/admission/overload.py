"""A router with workers that are always late: requests come at a rate, workers give each of the
requests that they have a token at a time, and who is refused may come back as it was told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.kv.events import KVSnapshot
from kvrelay.engine.messages import Abort, Probe, TokenDeltas
from kvrelay.engine.node import Send, Wake, Woken
from kvrelay.engine.request import FinishReason, SamplingParams, TokenDelta
from kvrelay.engine.stats import WorkerStats
from kvrelay.router.config import RouterConfig
from kvrelay.router.messages import Failed, Output, Submit, TenantShare, WorkerUp
from kvrelay.router.router import TICK, Router
from tests.router.script import worker_info

WORKER = "decode-0"
TOKEN_S = 0.1
NUM_TOKENS = 10
PROMPT = 5  # tokens


@dataclass(slots=True)
class Client:
    """One request as its client sees it, with all the times that it was sent."""

    submit: Submit
    sent_at: list[float] = field(default_factory=list)
    refused: list[Failed] = field(default_factory=list)
    first_at: float | None = None
    ended_at: float | None = None
    num_tokens: int = 0
    num_endings: int = 0

    @property
    def returned(self) -> bool:
        return len(self.sent_at) > 1


class Overload:
    """Drives one router with one decode worker of `slots` requests at once, each of which takes a
    second: it serves `slots` requests a second. With `tokens_per_s` it gives no more than that to
    all together, and each takes the longer the more there are. With `prompt_tokens_per_s` prompts
    take time too, one after the other."""

    def __init__(
        self,
        slots: int = 2,
        tokens_per_s: float | None = None,
        prompt_tokens_per_s: float = inf,
        **config: Any,
    ) -> None:
        self.now = 0.0
        self.router = Router("router-0", RouterConfig(max_inflight_per_worker=slots, **config))
        self.clients: list[Client] = []
        self._by_id: dict[str, Client] = {}
        self.running: dict[str, Decode] = {}
        self.returns: Callable[[Client], bool] = lambda client: False
        self._token_s = TOKEN_S
        self.is_frozen = False  # True: the worker is up, and does nothing
        self.tokens_per_s = tokens_per_s
        self.prompt_tokens_per_s, self._prompts_until = prompt_tokens_per_s, 0.0
        self.says_times = 1.0  # how many times too fast the worker says that it computes prompts
        self._publishes = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._tell(WorkerUp(worker_info(WORKER, num_blocks=10_000, max_model_len=4096)))
        self._tell(KVSnapshot(WORKER, 1, 0, ()))

    def at(self, at_s: float, call: Callable[[], None]) -> None:
        heappush(self._events, (at_s, next(self._numbers), call))

    def offer(
        self,
        rate: float,
        from_s: float,
        until_s: float,
        tenant: str = "",
        share: TenantShare | None = None,
        **submit: Any,
    ) -> None:
        """Sends requests at even distances."""
        for number in range(int((until_s - from_s) * rate)):
            self.at(
                from_s + number / rate,
                lambda: self.submit(tenant, share or TenantShare(), **submit),
            )

    def submit(
        self,
        tenant: str = "",
        share: TenantShare | None = None,
        timeout_s: float = 600.0,
        priority: int = 0,
        call: bytes = b"",
        num_prompt_tokens: int = PROMPT,
        caller: str = "",
    ) -> Client:
        number = len(self.clients)
        submit = Submit(
            request_id="",
            reply_to="api",
            tokens=(number,) * num_prompt_tokens,
            sampling=SamplingParams(max_tokens=NUM_TOKENS),
            timeout_s=timeout_s,
            priority=priority,
            tenant=tenant,
            share=share or TenantShare(),
            call=call,
            caller=caller,
        )
        client = Client(submit)
        self.clients.append(client)
        self._send(client)
        return client

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now, _, call = heappop(self._events)
            call()
        self.now = until_s

    def slow_down(self, times: float) -> None:
        self._token_s *= times

    def drain(self) -> None:
        """Until all have their answers."""
        self.returns = lambda client: False
        while self.router.status(self.now).num_live:
            self.run(self.now + 1.0)
        assert self.router.check_idle() == []
        assert all(client.num_endings == len(client.sent_at) for client in self.clients)

    def served(self, **where: Any) -> int:
        """Requests that ended well, of those whose Submit is so."""
        return sum(
            client.ended_at is not None
            for client in self.clients
            if all(getattr(client.submit, name) == value for name, value in where.items())
        )

    def _send(self, client: Client) -> None:
        """Sends it under another id each time, as over HTTP."""
        client.sent_at.append(self.now)
        request_id = f"r{len(self._by_id)}"
        self._by_id[request_id] = client
        self._tell(replace(client.submit, request_id=request_id))

    def _tell(self, message: Any) -> None:
        for effect in self.router.receive(self.now, message):
            match effect:
                case Send(_, Decode() as decode):
                    self.running[decode.request_id] = decode
                    self._begin(decode)
                case Send(_, Probe() as probe) if probe.request_id in self.running:
                    decode, at = self.running[probe.request_id], probe.position
                    self.at(self.now, lambda d=decode, at=at: self._alive(d, at))
                case Send(_, Abort() as abort):
                    self.running.pop(abort.request_id, None)
                case Send(_, Failed() as failed):
                    self._on_failed(self._by_id[failed.request_id], failed)
                case Send(_, Output() as output):
                    self._on_output(self._by_id[output.request_id], output)
                case Wake(after_s, tag):
                    assert tag == TICK
                    self.at(self.now + after_s, lambda: self._tell(Woken(TICK)))

    def _begin(self, decode: Decode) -> None:
        self._prompts_until = max(self.now, self._prompts_until)
        self._prompts_until += len(decode.tokens) / self.prompt_tokens_per_s
        self.at(self._prompts_until, lambda: self._work_on(decode, 1))
        if self.prompt_tokens_per_s < inf and not self._publishes:
            self._publishes = True  # its first chunk is computed, and told of
            self.at(self.now + 1.0, self._publish)

    def _alive(self, decode: Decode, position: int) -> None:
        delta = TokenDelta(decode.request_id, decode.attempt, position, ())
        self._tell(TokenDeltas(WORKER, 1, (delta,)))

    def _publish(self) -> None:
        said = self.says_times * self.prompt_tokens_per_s
        stats = WorkerStats(WORKER, 1, 10_000, 0, 0, 0, 0, 0, said, 0.0, 0.0)
        self._tell(stats)
        self.at(self.now + 1.0, self._publish)

    def _work_on(self, decode: Decode, number: int) -> None:
        step_s = self._token_s
        if self.tokens_per_s is not None:
            step_s = max(step_s, len(self.running) / self.tokens_per_s)
        self.at(self.now + step_s, lambda: self._work(decode, number))

    def _work(self, decode: Decode, number: int) -> None:
        """Token `number` of a request is there."""
        if self.running.get(decode.request_id) is not decode:
            return
        if self.is_frozen:
            self.at(self.now + 1.0, lambda: self._work(decode, number))
            return
        is_last = number == NUM_TOKENS
        if is_last:
            del self.running[decode.request_id]
        else:
            self._work_on(decode, number + 1)
        finish = FinishReason.LENGTH if is_last else None
        position = len(decode.tokens) + number - 1
        delta = TokenDelta(decode.request_id, decode.attempt, position, (7,), finish=finish)
        self._tell(TokenDeltas(WORKER, 1, (delta,)))

    def _on_failed(self, client: Client, failed: Failed) -> None:
        client.refused.append(failed)
        client.num_endings += 1
        if failed.retry_after_s is not None and self.returns(client):
            self.at(self.now + failed.retry_after_s, lambda: self._send(client))

    def _on_output(self, client: Client, output: Output) -> None:
        client.num_tokens += len(output.tokens)
        if client.first_at is None:
            client.first_at = self.now
        if output.finish is not None:
            client.ended_at = self.now
            client.num_endings += 1
