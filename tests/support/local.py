"""The local runtime: a whole cluster in one process, for tests and measurements.

The router and the workers are the real nodes over real models, with NIXL between their memories and
a real disk tier; only the wire is missing: messages are handed over in memory. The event loop runs
on a thread of its own; everything public here blocks or returns a future.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kvrelay.cluster.control.audits import audit_dict
from kvrelay.cluster.roles import build_worker
from kvrelay.engine.config import EngineSection, ModelSection, TiersSection
from kvrelay.engine.host import Executor, LoopThread, NodeHost
from kvrelay.engine.kv.scope import UNSALTED, CacheScope
from kvrelay.engine.node import Effect, NodeId
from kvrelay.engine.request import (
    NO_OUTPUTS,
    FinishReason,
    PromptOutputs,
    SamplingParams,
    TokenLogprobs,
    needing,
)
from kvrelay.engine.stats import Role, RouterUp
from kvrelay.kvtransfer.store.arena import remove_arenas
from kvrelay.router.config import RouterConfig
from kvrelay.router.messages import Cancel, Failed, Output, Submit, WorkerDown, WorkerUp
from kvrelay.router.models import ForModel, ModelRouters
from kvrelay.router.placement.policy import RoutingDecision
from kvrelay.router.router import Router
from kvrelay.router.status import RouterStatus
from kvrelay.worker.kv_plan import GIB
from kvrelay.worker.process import BuiltWorker
from kvrelay.worker.spec import BuildOptions, WorkerSpec

ROUTER, CLIENT = "router-0", "client-0"
_numbers = itertools.count()  # one for each cluster of this process


@dataclass(slots=True)
class Completion:
    """What came for one request. `failed` is set if it was refused or given up."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    failed: Failed | None = None
    num_cached_tokens: int = 0
    cached_by_source: dict[str, int] = field(default_factory=dict)
    prompt: PromptOutputs = NO_OUTPUTS
    weights: tuple[tuple[int, str], ...] = ()
    submitted_at: float = 0.0  # by time.monotonic
    arrived_at: list[float] = field(default_factory=list)  # each token's


class _Client:
    """Node. Collects what the router answers; a request is here until it has ended."""

    def __init__(self) -> None:
        self.node_id = CLIENT
        self.waiting: dict[str, tuple[Completion, Future[Completion]]] = {}

    def start(self, now: float) -> list[Effect]:
        return []

    def receive(self, now: float, message: Any) -> list[Effect]:
        entry = self.waiting.get(message.request_id)
        if entry is None:
            return []
        completion, future = entry
        if isinstance(message, Output):
            assert message.index == len(completion.tokens), "a gap or a repeat"
            completion.tokens += message.tokens
            completion.logprobs += message.logprobs
            completion.arrived_at += [now] * len(message.tokens)
            completion.num_cached_tokens = message.num_cached_tokens
            completion.cached_by_source = message.cached_by_source
            completion.finish, completion.weights = message.finish, message.weights
            if message.prompt != NO_OUTPUTS:
                assert completion.prompt == NO_OUTPUTS, "twice"
                completion.prompt = message.prompt
        elif isinstance(message, Failed):
            completion.failed = message
        if completion.finish is not None or completion.failed is not None:
            del self.waiting[completion.request_id]
            future.set_result(completion)
        return []


class LocalCluster:
    """Owns its loop, nodes and models, from `with` to its end.

    A node that raises fails every request that waits, and `check` raises its error.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: Literal["cpu", "cuda"] = "cpu",
        quantization: Literal["none", "int8", "int4", "fp8"] = "none",
        engine: EngineSection | None = None,
        engines: Mapping[Role, EngineSection] | None = None,
        router: RouterConfig | None = None,
        num_routers: int = 1,
        corrupt: Callable[..., None] | None = None,
        host_bytes: int = 0,
        disk_bytes: int = 0,
        name: str = "",
        further: Mapping[str, str | Path] | None = None,
        **tiers: Any,
    ) -> None:
        """`engines`: of the workers of a role, in place of `engine`. `num_routers`: each knows all
        workers, and hears where the others send prompts. `host_bytes`, `disk_bytes`: of every
        worker. `further`: models by name, each with as many workers, named after it; the
        first model's name is "". `tiers`: as in TiersSection. Two clusters with the same disk_path
        continue each other, and two of one `name` may by what is left in host memory."""
        self._thread = LoopThread("local-cluster")
        self._name = name or f"local-{os.getpid()}-{next(_numbers)}"
        self._leaves_memory = bool(name)
        self.host = NodeHost(self._thread.loop, on_failure=self._on_failure)
        self._models = {"": model, **(further or {})}
        self.routers: dict[NodeId, ModelRouters] = {}
        for number in range(num_routers):
            node = f"router-{number}"
            each = {name: Router(node, router, clock=time.perf_counter) for name in self._models}
            self.routers[node] = ModelRouters(each)
        self._node = self.routers[ROUTER]
        self.router = self._node.routers[""]
        self._client = _Client()
        self._ids = itertools.count()
        roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
        tiers |= {"host_gib": host_bytes / GIB, "disk_gib": disk_bytes / GIB}
        self._specs = [
            (
                of,
                WorkerSpec(
                    cluster=self._name,
                    worker=f"{role}-{of and f'{of}-'}{i if role is Role.PREFILL else i - prefill}",
                    role=role,
                    epoch=1,
                    model_dir=str(path),
                    model=ModelSection(
                        name=str(path), dtype=dtype, device=device, quantization=quantization
                    ),
                    engine=(engines or {}).get(role) or engine or EngineSection(),
                    tiers=TiersSection(**tiers),
                    num_sharing=1,
                    num_peers=len(roles) * len(self._models) - 1,
                ),
            )
            for of, path in self._models.items()
            for i, role in enumerate(roles)
        ]
        self._options = BuildOptions(corrupt=corrupt)
        self.workers: dict[NodeId, BuiltWorker] = {}
        self._of_killed: list[Executor] = []

    def __enter__(self) -> LocalCluster:
        try:
            for model, spec in self._specs:
                self.workers[spec.worker] = self._built(model, spec)
            self._thread.call(self._start)
        except BaseException:
            self._thread.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        async def close() -> None:
            await asyncio.to_thread(self.host.close)
            for executor in self._of_killed:
                await asyncio.to_thread(executor.close)

        self._thread.submit(close()).result(60.0)
        self._thread.close()
        if not self._leaves_memory:
            remove_arenas(self._name)

    def submit(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        timeout_s: float = 120.0,
        scope: CacheScope = UNSALTED,
        request_id: str | None = None,
        model: str = "",
        router: NodeId = ROUTER,
        **fields: Any,
    ) -> Future[Completion]:
        """The future's result is the whole answer, or what it failed with. fields: as of Submit."""
        request_id = request_id or f"local-{next(self._ids)}"
        future: Future[Completion] = Future()
        fields |= needing(fields.pop("adapter", None), scope)
        submit = Submit(request_id, sampling, CLIENT, tuple(tokens), timeout_s, **fields)

        def begin() -> None:
            completion = Completion(request_id, submitted_at=time.monotonic())
            self._client.waiting[request_id] = (completion, future)
            self.host.deliver(router, ForModel(model, submit))

        self._thread.loop.call_soon_threadsafe(begin)
        return future

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        sampling: SamplingParams,
        timeout_s: float = 120.0,
        **fields: Any,
    ) -> list[Completion]:
        """All prompts at once; their answers in order. fields: as of `submit`, for all of them."""
        fields["timeout_s"] = timeout_s
        futures = [self.submit(prompt, sampling, **fields) for prompt in prompts]
        answers = [future.result(timeout_s + 10) for future in futures]
        self.check()
        return answers

    def cancel(self, request_id: str) -> None:
        """As a client that has gone: nothing more comes for it."""

        def forget() -> None:
            self._client.waiting.pop(request_id, None)
            for router, model in itertools.product(self.routers, self._models):
                self.host.deliver(router, ForModel(model, Cancel(request_id)))

        self._thread.call(forget)

    def decided(self, request_id: str, model: str) -> tuple[RoutingDecision, ...]:
        """Where it went, and why, as the router of `model` knows it."""
        return self._thread.call(lambda: self._node.routers[model].explain(request_id))

    def kill(self, worker: NodeId) -> None:
        """It neither hears nor says anything more; routers are told at once, its peers never."""

        def end() -> None:
            del self.host.nodes[worker]
            # Its memory stays till the end: others may be reading it.
            self._of_killed.append(self.host._executors.pop(worker))
            built = self.workers.pop(worker)
            for router in self.routers:
                self.host.deliver(router, WorkerDown(worker, built.info.epoch, "killed"))

        self._thread.call(end)

    def revive(self, worker: NodeId) -> None:
        """One that was killed comes back, empty, as its next epoch."""
        at = next(i for i, (_, spec) in enumerate(self._specs) if spec.worker == worker)
        model, spec = self._specs[at]
        self._specs[at] = model, replace(spec, epoch=spec.epoch + 1)
        built = self._built(*self._specs[at])

        def begin() -> None:
            self.workers[worker] = built
            self._add(built)
            self._announce(built)

        self._thread.call(begin)

    def status(self) -> RouterStatus:
        return self._thread.call(lambda: self.router.status(self._thread.loop.time()))

    def check(self) -> None:
        """Raises what a node raised, if one did."""
        for error in self.host.failed.values():
            raise error

    def leftovers(self) -> list[str]:
        """What is leaked; empty if all is well."""

        def look() -> list[str]:
            workers = (built.node for built in self.workers.values())
            nodes: list[Any] = [*self.routers.values(), *workers]
            return [line for node in nodes for line in node.check_idle()]

        return self._thread.call(look)

    def audit(self) -> dict[str, Any]:
        """Where the workers' blocks are, and what is leaked; see `cluster.control.audits`."""

        def look() -> dict[str, Any]:
            now = self._thread.loop.time()
            each = [router.status(now) for router in self.routers.values()]
            num_live = sum(status.num_live + status.num_queued for status in each)
            kept = [line for router in self.routers.values() for line in router.check_idle()]
            nodes: dict[NodeId, Any] = {worker: each.node for worker, each in self.workers.items()}
            audits = {
                worker: None if worker in self.host.failed else node.audit()
                for worker, node in nodes.items()
            }
            return audit_dict(audits, num_live, kept)

        return self._thread.call(look)

    def wait_idle(self, timeout_s: float = 5.0) -> None:
        """Raises AssertionError with what is not idle after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while left := self.leftovers():
            self.check()
            assert time.monotonic() < deadline, f"not idle after {timeout_s} s: {left}"
            time.sleep(0.01)

    def run(self, look: Callable[[], Any]) -> Any:
        """Call `look` on the loop, where the state of nodes may be read."""
        return self._thread.call(look)

    def _start(self) -> None:
        for router in self.routers.values():
            self.host.add(router)
        for one, other in itertools.permutations(self.routers, 2):
            self.host.deliver(one, RouterUp(other))
        self.host.add(self._client)
        for built in self.workers.values():
            self._add(built)
        for built in self.workers.values():
            self._announce(built)

    def _built(self, model: str, spec: WorkerSpec) -> BuiltWorker:
        built = build_worker(spec, self._options)
        return replace(built, info=replace(built.info, model=model))

    def _add(self, built: BuiltWorker) -> None:
        node_id = built.node.node_id
        self.host.add(built.node, built.make_executor(self.host.inbox(node_id)))
        if built.when_lost is not None:
            built.when_lost(functools.partial(self._on_lost, node_id))

    def _announce(self, built: BuiltWorker) -> None:
        for router in self.routers:
            self.host.deliver(built.node.node_id, RouterUp(router))
            self.host.deliver(router, WorkerUp(built.info))

    def _on_lost(self, node: NodeId, error: Exception) -> None:
        """From any thread: the worker gets no further message."""

        def fail() -> None:
            self.host.failed[node] = error
            self._on_failure(node, error)

        self._thread.loop.call_soon_threadsafe(fail)

    def _on_failure(self, node: NodeId, error: BaseException) -> None:
        for _completion, future in self._client.waiting.values():
            future.set_exception(RuntimeError(f"{node} failed: {error!r}"))
        self._client.waiting.clear()
