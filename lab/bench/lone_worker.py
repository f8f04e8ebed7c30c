"""One decode worker without a router, for measurements of the engine alone.

Life: built as the cluster builds it, with its own threads; `generate` gives it requests as a router
would and collects their tokens; closed at the end. There is no peer to exchange KV with.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from msgspec import structs

from kvrelay.cluster.config import Config
from kvrelay.cluster.prepare import PreparedModel
from kvrelay.cluster.roles import build_worker
from kvrelay.decode_worker.messages import Decode
from kvrelay.engine.messages import Refused, TokenDeltas
from kvrelay.engine.model.device import find_device
from kvrelay.engine.node import Effect, NodeId, Note, Send, Wake
from kvrelay.engine.request import FinishReason, SamplingParams, TokenLogprobs
from kvrelay.engine.stats import Role
from kvrelay.kvtransfer.agent import AgentError
from kvrelay.worker.node import Worker
from kvrelay.worker.spec import BuildOptions, WorkerSpec

ASKER = "measurement-0"
POLL_S = 1.0


class WorkerFailed(Exception):
    """A request was refused, or a step failed; one line."""


class _NoAgent:
    """Implements kvtransfer.agent.Agent where there is no peer."""

    def metadata(self) -> bytes:
        return b""

    def connect(self, peer: NodeId, epoch: int, num_blocks: int, metadata: bytes) -> None:
        raise AgentError(f"{peer}: this worker is alone")

    def disconnect(self, peer: NodeId) -> None:
        pass

    def read(self, peer: NodeId, *args: Any, **kwargs: Any) -> Any:
        raise AgentError(f"read from {peer}: this worker is alone")

    def poll(self, handle: Any) -> bool:
        return True

    def release(self, handle: Any) -> bool:
        return True

    def close(self) -> None:
        pass


@dataclass(slots=True)
class Answer:
    """What came for one request. Times are of time.perf_counter."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    arrived_at: list[float] = field(default_factory=list)  # each token's
    finish: FinishReason | None = None


class LoneWorker:
    """Owns the worker, from `with` to its end. Used from one thread."""

    def __init__(self, config: Config, model: PreparedModel) -> None:
        """Loads the model; takes seconds. Raises BuildError."""
        device = find_device(config.model.device).type
        spec = WorkerSpec(
            cluster="measurement",
            worker="decode-0",
            role=Role.DECODE,
            epoch=1,
            model_dir=str(model.path),
            model=structs.replace(config.model, device=device),
            engine=config.engine,
            tiers=config.tiers,
        )
        built = build_worker(spec, BuildOptions(make_agent=lambda *_: _NoAgent()))
        assert isinstance(built.node, Worker)
        self.node = built.node  # its state is at rest between calls of `generate`
        self.info = built.info
        self.notices = built.notices
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._executor = built.make_executor(self._inbox.put)
        if built.when_lost is not None:
            built.when_lost(self._inbox.put)
        self._ids = itertools.count()
        self._perform(self.node.start(time.monotonic()), {})

    def __enter__(self) -> LoneWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.close()

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        sampling: SamplingParams,
        *,
        on_step: Callable[[list[Answer]], None] = lambda _: None,
        timeout_s: float = 86_400.0,
    ) -> list[Answer]:
        """All prompts at once; their answers in order. `on_step` is called whenever tokens have
        come. Raises WorkerFailed."""
        answers: dict[str, Answer] = {}
        for prompt in prompts:
            name = f"request-{next(self._ids)}"
            answers[name] = Answer()
            work = Decode(
                request_id=name,
                attempt=1,
                router=ASKER,
                prefill_from=None,
                tokens=tuple(prompt),
                num_prompt_tokens=len(prompt),
                sampling=sampling,
                timeout_s=timeout_s,
            )
            self._inbox.put(work)
        found = list(answers.values())
        while any(answer.finish is None for answer in found):
            try:
                message = self._inbox.get(timeout=POLL_S)
            except Empty:
                continue
            if isinstance(message, Exception):  # what the worker computes with is gone
                raise WorkerFailed(str(message))
            if self._perform(self.node.receive(time.monotonic(), message), answers):
                on_step(found)
        return found

    def _perform(self, effects: list[Effect], answers: dict[str, Answer]) -> bool:
        """True if tokens have come. Without ticks: they are for peers, tiers and deadlines."""
        has_tokens = False
        for effect in effects:
            match effect:
                case Send(_, TokenDeltas() as frame):
                    has_tokens = True
                    _take(frame, answers)
                case Send(_, Refused(reason=reason, detail=detail)):
                    raise WorkerFailed(f"{reason}: {detail}")
                case Send() | Wake() | Note():
                    pass
                case _:
                    self._executor.perform(effect)
        return has_tokens


def _take(frame: TokenDeltas, answers: dict[str, Answer]) -> None:
    now = time.perf_counter()
    for delta in frame.deltas:
        answer = answers[delta.request_id]
        answer.tokens += delta.tokens
        answer.logprobs += delta.logprobs
        answer.arrived_at += [now] * len(delta.tokens)
        answer.finish = delta.finish or answer.finish
