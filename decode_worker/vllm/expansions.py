"""The node's part in images: it answers requests of which nothing is wanted but their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.decode_worker.vllm.messages import Expand, ExpandDone
from kvrelay.engine.messages import TokenDeltas, WorkRequest
from kvrelay.engine.node import Effect, Send
from kvrelay.engine.plug import Plug
from kvrelay.engine.request import FinishReason, PromptOutputs, Refusal, TokenDelta

if TYPE_CHECKING:
    from kvrelay.engine.core import EngineCore


class Expansions(Plug):
    """Requests whose images vLLM's processor is asked about. Owned by a worker's node."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._asked: dict[str, WorkRequest] = {}
        self.handlers = {ExpandDone: lambda now, done: self._on_done(done)}

    def begin(self, request: WorkRequest) -> list[Effect]:
        key = f"{request.request_id}/{request.attempt}"
        if key in self._asked:
            return []
        if request.images is None:
            return [self._refuse(request, "a prompt without images has none to expand")]
        if len(self._asked) >= self._core.config.max_waiting:
            return [self._refuse(request, "too many wait for their images", Refusal.QUEUE_FULL)]
        self._asked[key] = request
        return [Expand(key, request.images)]

    def _on_done(self, done: ExpandDone) -> list[Effect]:
        request = self._asked.pop(done.key)
        if done.expanded is None:
            return [self._refuse(request, done.why)]
        # One token ends it, as every request; it is none of the model's.
        position, outputs = len(request.tokens), PromptOutputs(expanded=done.expanded)
        delta = TokenDelta(
            *(request.request_id, request.attempt, position, (0,)),
            finish=FinishReason.LENGTH,
            prompt=outputs,
        )
        return [self._send(request, delta)]

    def alive(self, request_id: str, attempt: int) -> list[Effect] | None:
        """Returns the answer to a router's probe; None: the request is none of these."""
        request = self._asked.get(f"{request_id}/{attempt}")
        if request is None:
            return None
        return [self._send(request, TokenDelta(request_id, attempt, len(request.tokens), ()))]

    def _send(self, request: WorkRequest, delta: TokenDelta) -> Send:
        config = self._core.config
        return Send(request.router, TokenDeltas(config.node_id, config.epoch, (delta,)))

    def _refuse(
        self, request: WorkRequest, why: str, reason: Refusal = Refusal.UNSUPPORTED
    ) -> Send:
        key = request.request_id, request.attempt
        return Send(request.router, self._core.refusal(*key, reason, why))

    def check_idle(self) -> list[str]:
        """What an idle worker must not have; empty if all is well."""
        return [f"images of {key} are read" for key in self._asked]
