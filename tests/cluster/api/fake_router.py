"""A scripted router node: answers each `Submit` with the tokens of a text that a test chooses, and
each `SessionCommand` with a reply that it chooses."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvrelay.engine.images import Expanded
from kvrelay.engine.request import (
    NO_OUTPUTS,
    FinishReason,
    PromptOutputs,
    Refusal,
    TokenLogprobs,
)
from kvrelay.router.explain import Explanations
from kvrelay.router.messages import Cancel, Failed, Output, SessionCommand, SessionReply, Submit
from kvrelay.router.record import RequestRecord


@dataclass
class FakeRouter:
    """`answer` gives the tokens for a request; those of the model's end among them end it."""

    answer: Callable[[Submit], list[int]]
    image_mark: int | None = None  # token of a template, for an image
    delay_s: float = 0.0  # between tokens
    per_output: int = 1  # tokens in each Output
    num_cached_tokens: int = 0
    drafts: tuple[int, int] = (0, 0)
    cached_by_source: dict[str, int] = field(default_factory=dict)
    answer_command: Callable[[SessionCommand], SessionReply | None] = lambda command: None
    refuse: Failed | None = None  # instead of an answer
    fail_after: int | None = None  # tokens, then Failed(ATTEMPTS)
    submits: list[Submit] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    commands: list[SessionCommand] = field(default_factory=list)
    reply: Callable[[Any], Any] = lambda message: None  # set when it is connected
    explanations: Explanations = field(default_factory=lambda: Explanations(512))
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def deliver(self, to: str, message: Any) -> None:
        assert to == "router-0"
        if isinstance(message, Submit):
            self.submits.append(message)
            task = asyncio.get_running_loop().create_task(self._serve(message))
            self._tasks[message.request_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(message.request_id, None))
        elif isinstance(message, SessionCommand):
            self.commands.append(message)
            reply = self.answer_command(message)
            if reply is not None:
                asyncio.get_running_loop().call_soon(self.reply, reply)
        else:
            assert isinstance(message, Cancel)
            self.cancels.append(message.request_id)
            if message.request_id in self._tasks:
                self._tasks[message.request_id].cancel()

    @property
    def num_live(self) -> int:
        return len(self._tasks)

    async def _serve(self, submit: Submit) -> None:
        """Each ends with an explanation, as at a real router."""
        clock = asyncio.get_running_loop().time
        began = clock()
        record = RequestRecord(submit, submit.sampling, 1, began, began + 60, began)
        try:
            await self._answer(submit)
        finally:
            self.explanations.add(clock(), record, FinishReason.STOP)

    async def _answer(self, submit: Submit) -> None:
        if self.refuse is not None:
            failed = self.refuse
            self.reply(
                Failed(submit.request_id, failed.reason, failed.detail, failed.retry_after_s)
            )
            return
        tokens = self.answer(submit)[: submit.sampling.max_tokens]
        ends = submit.sampling.stop_token_ids
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), None)
        finish = FinishReason.LENGTH if end is None else FinishReason.STOP
        tokens = tokens[:end]
        for index in range(0, len(tokens), self.per_output):
            if self.fail_after is not None and index >= self.fail_after:
                self.reply(Failed(submit.request_id, Refusal.ATTEMPTS, "3 attempts failed"))
                return
            await asyncio.sleep(self.delay_s)
            part = tuple(tokens[index : index + self.per_output])
            is_last = index + self.per_output >= len(tokens)
            self.reply(
                Output(
                    request_id=submit.request_id,
                    index=index,
                    tokens=part,
                    logprobs=self._logprobs(submit, part),
                    finish=finish if is_last else None,
                    num_cached_tokens=self.num_cached_tokens,
                    cached_by_source=self.cached_by_source,
                    prompt=self._prompt(submit) if index == 0 else NO_OUTPUTS,
                    drafts=self.drafts,
                )
            )

    def _prompt(self, submit: Submit) -> PromptOutputs:
        """Log-probabilities that tell the position; an embedding that tells the length."""
        sampling, length = submit.sampling, len(submit.tokens)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sampling.prompt_logprobs is not None:
            best = tuple((token, -0.125 * token) for token in range(sampling.prompt_logprobs))
            logprobs = tuple(TokenLogprobs(-0.25 * at, best) for at in range(1, length))
        if sampling.expands:
            return PromptOutputs(expanded=self._expanded(submit))
        vector = [float(length), 4.0, 0.0, 0.0] if sampling.pooling is not None else []
        return PromptOutputs(logprobs, struct.pack(f"{len(vector)}f", *vector))

    def _expanded(self, submit: Submit) -> Expanded:
        """Each mark of an image becomes four."""
        tokens: list[int] = []
        places: list[tuple[int, int]] = []
        for token in submit.tokens:
            is_mark = token == self.image_mark
            places += [(len(tokens), 4)] if is_mark else []
            tokens += [token] * (4 if is_mark else 1)
        return Expanded(tuple(tokens), tuple(places))

    def _logprobs(self, submit: Submit, tokens: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
        num, ids = submit.sampling.logprobs, submit.sampling.logprob_token_ids
        if num is None:
            return ()
        if ids:
            told = tuple((each, -1.5 - i) for i, each in enumerate(ids))
            return tuple(TokenLogprobs(-0.5, told) for _ in tokens)
        return tuple(
            TokenLogprobs(-0.5, tuple((token + i, -0.5 - i) for i in range(num)))
            for token in tokens
        )
