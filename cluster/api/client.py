"""The API's end of the conversation with a router.

A request is submitted with `RouterClient.submit`, which returns its `RequestStream`. The router's
`Output`s and `Failed`s arrive at `RouterClient.receive` and wait in the stream, merged into one,
until the caller takes them. The stream ends with the last output, a failure, or a cancel. A command
about sessions (`RouterClient.command`) has one reply.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextvars import Context
from typing import Any

from kvrelay.engine.node import Effect, NodeId
from kvrelay.engine.request import (
    NO_OUTPUTS,
    FinishReason,
    Refusal,
    TokenLogprobs,
)
from kvrelay.router.messages import (
    Cancel,
    Failed,
    Output,
    SessionCommand,
    SessionLimits,
    SessionOp,
    SessionReply,
    Submit,
)


class RequestStream:
    """What has come for one request and was not taken yet.

    Invariant: at most one unread `Output` (later ones are merged into it), so at most `max_tokens`
    tokens wait here. Owned by `RouterClient`, read by whoever submitted the request.
    """

    def __init__(self, request_id: str, max_tokens: int, signal: asyncio.Event) -> None:
        self.request_id = request_id
        self.ended = False  # nothing more will arrive
        self.first_at: float | None = None  # loop time: its first token came
        self.ended_at: float | None = None  # and its end
        self._max_tokens = max_tokens
        self._signal = signal
        self._next_index = 0  # the next token to arrive has it
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self.prompt = NO_OUTPUTS  # what the prompt gave, with the first token
        self._num_cached_tokens = 0
        self._cached_by_source: dict[str, int] = {}
        self._weights: tuple[tuple[int, str], ...] = ()
        self._drafts = 0, 0
        self._finish: FinishReason | None = None
        self._failed: Failed | None = None

    @property
    def num_tokens(self) -> int:
        """That have come so far."""
        return self._next_index

    @property
    def has_unread(self) -> bool:
        return bool(self._tokens) or self._finish is not None or self._failed is not None

    def take(self, max_tokens: int | None = None) -> Output | Failed | None:
        """What is unread, as one message of at most `max_tokens` tokens; None: nothing is."""
        if self._tokens or self._finish is not None:
            num = len(self._tokens) if max_tokens is None else min(max_tokens, len(self._tokens))
            is_all = num == len(self._tokens)
            output = Output(
                request_id=self.request_id,
                index=self._next_index - len(self._tokens),
                tokens=tuple(self._tokens[:num]),
                logprobs=tuple(self._logprobs[:num]),
                finish=self._finish if is_all else None,
                num_cached_tokens=self._num_cached_tokens,
                cached_by_source=self._cached_by_source,
                weights=self._weights,
                drafts=self._drafts,
            )
            del self._tokens[:num], self._logprobs[:num]
            if is_all:
                self._finish = None
            return output
        failed, self._failed = self._failed, None
        return failed

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Output | Failed:
        while True:
            message = self.take()
            if message is not None:
                return message
            if self.ended:
                raise StopAsyncIteration
            self._signal.clear()
            await self._signal.wait()

    def _accept(self, now: float, output: Output) -> str | None:
        """Merge what is new in `output`. The text says what is wrong with it, None: nothing."""
        if output.index > self._next_index:
            return f"tokens {self._next_index} to {output.index - 1} were lost on the way"
        known = self._next_index - output.index
        tokens = output.tokens[known:]
        if self._next_index + len(tokens) > self._max_tokens:
            return f"more than the {self._max_tokens} tokens that were asked for came"
        if tokens and self.first_at is None:
            self.first_at = now
        self._tokens.extend(tokens)
        self._logprobs.extend(output.logprobs[known:])
        if output.prompt != NO_OUTPUTS:
            self.prompt = output.prompt
        self._next_index += len(tokens)
        if output.num_cached_tokens >= self._num_cached_tokens:
            self._num_cached_tokens = output.num_cached_tokens
            self._cached_by_source = output.cached_by_source or self._cached_by_source
        self._weights = output.weights or self._weights
        self._drafts = max(self._drafts, output.drafts)
        if output.finish is not None:
            self._finish, self.ended, self.ended_at = output.finish, True, now
        self._signal.set()
        return None

    def _fail(self, failed: Failed) -> None:
        self._failed, self.ended = failed, True
        self._signal.set()

    def _close(self) -> None:
        self.ended = True
        self._signal.set()


class RouterClient:
    """A node that submits requests to one router and hands its answers to their readers.

    Invariant: a stream is known here until it has ended; every stream that ends before the router
    ended it has been cancelled there; a command is known until its reply or its deadline. Lives in
    one asyncio loop and is called from it only.
    """

    def __init__(
        self, node_id: NodeId, router: NodeId, deliver: Callable[[NodeId, Any], None]
    ) -> None:
        """`deliver(to, message)` must not block; `router` answers to `node_id`."""
        self.node_id = node_id
        self.router = router
        # What comes of it in the router may concern other requests: this one's name is not for it.
        self._deliver: Callable[[NodeId, Any], None] = lambda to, message: Context().run(
            deliver, to, message
        )
        self._streams: dict[str, RequestStream] = {}
        self._replies: dict[str, asyncio.Future[SessionReply]] = {}
        self._numbers = itertools.count()

    @property
    def num_live(self) -> int:
        return len(self._streams)

    def submit(self, submit: Submit, signal: asyncio.Event | None = None) -> RequestStream:
        """Send a request, which has this client's `node_id`. `signal` is set when something
        arrives; several streams may share one.

        Read either by `async for`, or by waiting for `signal` and `take()`.
        """
        request_id, most = submit.request_id, submit.sampling.max_tokens
        assert request_id not in self._streams, request_id
        stream = RequestStream(request_id, most, signal or asyncio.Event())
        self._streams[request_id] = stream
        self._deliver(self.router, submit)
        return stream

    async def command(
        self,
        op: SessionOp,
        tenant: str,
        session: str = "",
        argument: str = "",
        *,
        limit: int = 20,
        limits: SessionLimits = SessionLimits(),
        timeout_s: float,
    ) -> SessionReply:
        """Send a command, and wait for its reply. Raises TimeoutError."""
        command_id = f"{self.node_id}/{next(self._numbers)}"
        command = SessionCommand(
            command_id, self.node_id, tenant, op, session, argument, limit, limits
        )
        reply: asyncio.Future[SessionReply] = asyncio.get_running_loop().create_future()
        self._replies[command_id] = reply
        try:
            self._deliver(self.router, command)
            async with asyncio.timeout(timeout_s):
                return await reply
        finally:
            del self._replies[command_id]

    def cancel(self, request_id: str) -> None:
        """End a stream from this side and tell the router. Nothing happens if it has ended."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream._close()
            self._deliver(self.router, Cancel(request_id))

    def give_up(self, failed: Failed) -> None:
        """End a stream with a failure that was found on this side, and tell the router."""
        stream = self._streams.pop(failed.request_id, None)
        if stream is not None:
            stream._fail(failed)
            self._deliver(self.router, Cancel(failed.request_id))

    def start(self, now: float) -> list[Effect]:
        return []

    def receive(self, now: float, message: Any) -> list[Effect]:
        """Take an `Output`, a `Failed` or a `SessionReply`. What no call waits for any more is
        dropped."""
        if isinstance(message, SessionReply):
            reply = self._replies.get(message.command_id)
            if reply is not None and not reply.done():
                reply.set_result(message)
            return []
        stream = self._streams.get(message.request_id)
        if stream is None:
            return []
        if isinstance(message, Failed):
            stream.ended_at = now
            stream._fail(message)
        else:
            assert isinstance(message, Output), message
            wrong = stream._accept(now, message)
            if wrong is not None:
                self.give_up(Failed(message.request_id, Refusal.WORKER_FAILED, wrong))
        if stream.ended:
            self._streams.pop(message.request_id, None)
        return []
