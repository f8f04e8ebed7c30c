"""One HTTP request while it is served: its choices, their tokens, their text.

`Generation.batches` submits every choice and yields what has come, as text that is certain. It ends
when every choice has finished, raises `ApiError` when one fails, and stops when the client is gone.
`close` cancels at the router whatever has not ended; it is always called.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from kvrelay.cluster.api.calls import Call, CallResult
from kvrelay.cluster.api.client import RequestStream
from kvrelay.cluster.api.context import ApiContext
from kvrelay.cluster.api.errors import parser_lost, refused, shutting_down
from kvrelay.cluster.api.limiter import caller_name
from kvrelay.cluster.api.openai.parts import ChoicePlan, Piece, Plan, TokenText
from kvrelay.cluster.api.output.events import THINK
from kvrelay.cluster.api.output.vllm_parsers import CallLost, VllmReader
from kvrelay.cluster.api.text.detokenizer import Detokenizer
from kvrelay.cluster.api.utility.weights import usage_of_weights
from kvrelay.decode_worker.vllm.parse import Part
from kvrelay.engine.request import FinishReason, Refusal, TokenLogprobs
from kvrelay.router.messages import Failed, Output, Submit

# A client that fell behind finds thousands of tokens waiting. Turning them into text in slices lets
# the event loop serve the others in between: about this many of each choice, and of all choices.
_MAX_TOKENS_AT_ONCE = 64
_MAX_AT_ONCE = 128  # choices of a call that are submitted; the others follow them
_MAX_TOKENS_A_TURN = 256
_LOGPROBS_OF_A_TOKEN = 4  # that take as long as to detokenise it
# The router keeps the deadline; this is for a router that does not answer any more.
_DEADLINE_GRACE_S = 2.0


def draft_tokens(accepted: int, rejected: int) -> dict[str, int]:
    """By OpenAI's names; empty where none were computed."""
    if not accepted + rejected:
        return {}
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


class Choice:
    """One choice, from its tokens to its text. Owned by a `Generation`."""

    def __init__(self, ctx: ApiContext, plan: ChoicePlan, whole: Plan) -> None:
        self.plan = plan
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.cached_by_source: dict[str, int] = {}
        self.weights: tuple[tuple[int, str], ...] = ()  # as in Output
        self.finish_reason: str | None = None
        self.last_token_at: float | None = None  # loop time
        self.stream: RequestStream | None = None  # once it is submitted
        self._wants_logprobs = plan.sampling.logprobs is not None
        self._includes_stop = whole.includes_stop
        self._tells_ids = whole.tells_ids
        self._own_ends = ctx.tokenizer.eos_token_ids
        self._held: list[TokenText] = []
        self._untold: list[int] = []  # token ids that no piece has had yet
        self._unread: list[Part] = []  # likewise, where others read them
        self._is_outside = _is_outside(whole)
        self._begun = False
        self.num_reasoning_tokens = 0  # where its marks are tokens
        self.drafts = 0, 0  # accepted and rejected
        tags = whole.reading.tags if whole.reading else THINK
        self._marks = tuple(map(ctx.tokenizer.token_id, tags))
        self._reasons = bool(whole.reading and whole.reading.begun and self._marks[1] is not None)
        markers = whole.reading.markers if whole.reading else ()
        self._detokenizer = Detokenizer(
            ctx.tokenizer.showing(None if whole.shows_special else markers),
            stop=whole.stop,
            includes_stop=whole.includes_stop,
            context=plan.tokens if plan.continues else (),
            min_tokens=plan.sampling.min_tokens,
        )

    def absorb(self, output: Output) -> Piece:
        """Take tokens; return the text that is certain now."""
        detokenizer = self._detokenizer
        parts: list[Part] = []
        num_before, stop_token = self.num_tokens, None
        embedding = b""
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if not self._begun:
            self._begun = True
            parts.append(Part(self.plan.text, ()))
            embedding, prompt_logprobs = self._take_prompt()
        if self.plan.is_silent:
            output = replace(output, tokens=(), finish=output.finish and FinishReason.LENGTH)
        for i, token in enumerate(output.tokens):
            self.num_tokens += 1
            self._count_reasoning(token)
            is_last = i + 1 == len(output.tokens) and output.finish is FinishReason.STOP
            is_end = is_last and token in self.plan.sampling.stop_token_ids
            if is_end:
                stop_token = None if token in self._own_ends else token
            is_text = self._includes_stop or not is_end
            if self._wants_logprobs and i < len(output.logprobs) and (is_text or self._tells_ids):
                offset = len(self.plan.text) + detokenizer.num_decoded
                self._held.append(TokenText(token, output.logprobs[i], offset))
            parts.append(Part(detokenizer.push(token) if is_text else "", (token,)))
            if not is_text or detokenizer.stopped:
                break
        if output.finish is not None and not detokenizer.stopped:
            parts.append(Part(detokenizer.finish(), ()))
        if detokenizer.stopped:
            self.finish_reason = FinishReason.STOP.value
        elif output.finish is not None:
            self.finish_reason = output.finish.value
        self.num_cached_tokens = output.num_cached_tokens
        self.cached_by_source = output.cached_by_source
        self.weights = output.weights or self.weights
        self.drafts = output.drafts
        self._untold += output.tokens[: self.num_tokens - num_before]
        self._unread += parts if self._is_outside else ()
        piece = Piece(
            self.plan.index,
            "".join(part.text for part in parts),
            self._certain_tokens(),
            self.finish_reason,
            detokenizer.stopped_by,
            stop_token,
            embedding=embedding,
            prompt_logprobs=prompt_logprobs,
        )
        if piece.is_empty:  # such as half a character: nothing is sent
            return piece
        ids, self._untold = tuple(self._untold), []
        unread, self._unread = tuple(self._unread), []
        return replace(piece, token_ids=ids, parts=unread)

    def _count_reasoning(self, token: int) -> None:
        if token in self._marks:
            self._reasons = token == self._marks[0]
        self.num_reasoning_tokens += self._reasons

    def _take_prompt(self) -> tuple[bytes, tuple[TokenLogprobs, ...]]:
        """What the prompt gave, with the first tokens: its tokens come first; its embedding, and
        the log-probabilities that are shown beside the text."""
        assert self.stream is not None
        plan, outputs = self.plan, self.stream.prompt
        if plan.offsets:
            cut = _cut(outputs.logprobs, plan.sampling.logprobs or 0)
            self._held += map(TokenText, plan.tokens, (None, *cut), plan.offsets)
        if plan.prompt_logprobs is None:
            return outputs.embedding, ()
        return outputs.embedding, _cut(outputs.logprobs, plan.prompt_logprobs)

    def _certain_tokens(self) -> tuple[TokenText, ...]:
        """Tokens whose text has been let go of; at the natural end all the others too."""
        held = self._held
        num = len(held)
        is_cut = self._detokenizer.stopped and not self._tells_ids
        if is_cut or self.finish_reason is None:
            end = len(self.plan.text) + self._detokenizer.num_released
            num = next((i for i, token in enumerate(held) if token.offset >= end), len(held))
        certain = tuple(held[:num])
        del held[:num]
        return certain


def _is_outside(plan: Plan) -> bool:
    return plan.reading is not None and plan.reading.outside is not None


def _readers(ctx: ApiContext, plan: Plan) -> list[VllmReader]:
    """One of each choice, where outputs are read by parsers that are not here."""
    if not _is_outside(plan):
        return []
    assert plan.reading is not None
    assert ctx.vllm_parsers is not None
    make, is_whole = ctx.vllm_parsers.reader, not plan.stream
    return [make(plan.reading, each.tokens, is_whole=is_whole) for each in plan.choices]


def _cut(logprobs: Sequence[TokenLogprobs], num_best: int) -> tuple[TokenLogprobs, ...]:
    """With so many alternatives: echo and `prompt_logprobs` may have asked for different ones."""
    return tuple(replace(each, top=each.top[:num_best]) for each in logprobs)


class Generation:
    """All choices of one HTTP request.

    Invariant: after `close`, none of its requests is live at the router. Owned by the call that
    serves the request.
    """

    def __init__(self, ctx: ApiContext, plan: Plan, call: Call) -> None:
        """call: whose body has come."""
        assert call.received_at is not None
        self.plan = plan
        self.choices = [Choice(ctx, choice, plan) for choice in plan.choices]
        self.gone = False  # the client went away
        self._ctx = ctx
        self._request_id, self._timeout_s = call.request_id, call.timeout_s
        self._signal = asyncio.Event()
        self._is_tick = False
        self._streams: dict[int, RequestStream] = {}  # choice index -> stream, until it finished
        self._unsent = deque(self.choices)
        self._started_at = call.received_at
        self._is_timed = not call.is_row  # in the histograms of what clients wait for
        self._deadline = call.arrived_at + call.timeout_s
        self._readers = _readers(ctx, plan)
        self._reading: asyncio.Task[list[Piece]] | None = None

    async def batches(self, tick_s: float = 0.0) -> AsyncIterator[list[Piece]]:
        """What is new, at most one piece per choice at a time; also nothing, every `tick_s` seconds
        (0: never). Raises `ApiError`."""
        loop = asyncio.get_running_loop()
        timer = loop.call_at(self._deadline + _DEADLINE_GRACE_S, self._expire)
        ticks = asyncio.create_task(self._tick(tick_s)) if tick_s > 0 else None
        try:
            self._submit(loop.time())
            while self._streams:
                try:
                    await self._signal.wait()
                except asyncio.CancelledError:  # nothing else cancels a call
                    raise shutting_down() from None
                self._signal.clear()
                if self.gone:
                    return
                pieces = self._take()
                self._submit(loop.time())
                if self._readers and pieces:
                    self._reading = asyncio.create_task(self._with_events(pieces))
                    async for _ in self._while_read(tick_s):
                        yield []
                    if self.gone:
                        return
                    pieces = self._reading.result()
                if any(stream.has_unread for stream in self._streams.values()):
                    self._signal.set()
                is_tick, self._is_tick = self._is_tick, False
                if pieces or is_tick:
                    yield pieces
                await asyncio.sleep(0)
        finally:
            timer.cancel()
            if ticks is not None:
                ticks.cancel()

    async def _with_events(self, pieces: list[Piece]) -> list[Piece]:
        """With what they say, by parsers that are not here. Raises ApiError."""

        async def read(piece: Piece) -> Piece:
            is_last = piece.finish_reason is not None
            reader = self._readers[piece.index]
            events = await reader.read(piece.parts, is_last=is_last)
            return replace(piece, events=events, parts=())

        try:
            async with asyncio.timeout_at(self._deadline + _DEADLINE_GRACE_S):
                return await asyncio.gather(*map(read, pieces))
        except TimeoutError:
            detail = f"not done in {self._timeout_s:g} s"
            raise refused(Failed("", Refusal.DEADLINE, detail)) from None
        except CallLost as lost:
            raise parser_lost(str(lost)) from None

    async def _while_read(self, tick_s: float) -> AsyncIterator[None]:
        """Until `_reading` is done; yields every `tick_s` seconds (0: never)."""
        assert self._reading is not None
        while not self._reading.done():
            try:
                await asyncio.wait({self._reading}, timeout=tick_s or None)
            except asyncio.CancelledError:
                raise shutting_down() from None
            if not self._reading.done():
                yield

    async def _tick(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self._is_tick = True
            self._signal.set()

    def abandon(self) -> None:
        """The client is gone: cancel at once, and let `batches` end."""
        self.gone = True
        self.close()
        self._signal.set()

    def close(self) -> None:
        """Cancel what has not ended."""
        self._unsent.clear()
        for index in list(self._streams):
            self._cancel(index)
        if self._reading is not None:
            self._reading.cancel()
        for reader in self._readers:
            reader.close()

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage: each prompt counts once, however many choices it has."""
        num_prompt = num_cached = 0
        by_source: Counter[str] = Counter()
        first_of: dict[int, Choice] = {}
        for choice in self.choices:
            # A later choice finds what the first has just computed; that was not cached before.
            known = first_of.setdefault(choice.plan.prompt, choice)
            if choice.num_cached_tokens < known.num_cached_tokens:
                first_of[choice.plan.prompt] = choice
        for first in first_of.values():
            num_prompt += len(first.plan.tokens)
            num_cached += first.num_cached_tokens
            by_source.update(first.cached_by_source)
        kv = next((choice.plan.spec.scope.kv for choice in self.choices), "exact")
        num_output = sum(choice.num_tokens for choice in self.choices)
        num_reasoning = sum(choice.num_reasoning_tokens for choice in self.choices)
        drafts = draft_tokens(*(sum(c.drafts[i] for c in self.choices) for i in (0, 1)))
        weights = {each.plan.index: each.weights for each in self.choices if each.weights}
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {
                "cached_tokens": num_cached,
                "cache_write_tokens": num_prompt - num_cached,  # all that is computed is kept
                "cached_tokens_by_source": {s: n for s, n in by_source.items() if n > 0},
                **({"kv": kv} if kv != "exact" else {}),
            },
            "completion_tokens_details": {"reasoning_tokens": num_reasoning, **drafts},
            **usage_of_weights(weights),
        }

    def result(self) -> CallResult:
        """What has come so far."""
        sampling = self.choices[0].plan.sampling
        return CallResult(
            tenant=self.plan.tenant.name,
            usage=self.usage(),
            sampling={"max_tokens": sampling.max_tokens, "temperature": sampling.temperature},
            streams=tuple(c.stream for c in self.choices if c.stream is not None),
            prompt=self.choices[0].plan.tokens,
            has_begun=any(each.num_tokens or each.finish_reason for each in self.choices),
        )

    def _submit(self, now: float) -> None:
        while self._unsent and len(self._streams) < _MAX_AT_ONCE:
            choice = self._unsent.popleft()
            plan = choice.plan
            asked = replace(plan.spec, request_id=f"{self._request_id}-{plan.index}")
            submit = Submit(
                **asked.carried(),
                reply_to=self._ctx.client.node_id,
                tokens=plan.tokens,
                timeout_s=max(0.0, self._deadline - now),
                session=plan.session,
                has_branches=self.plan.has_branches,
                has_twins=self.plan.has_twins,
                tenant=self.plan.tenant.name,
                share=self.plan.tenant.share,
                call=self.plan.call,
                weights=self.plan.weights,
                caller=caller_name(),
            )
            choice.stream = self._ctx.client.submit(submit, self._signal)
            self._streams[plan.index] = choice.stream

    def _cancel(self, index: int) -> None:
        """Choice `index` needs no more tokens. Nothing happens if none would come."""
        stream = self._streams.pop(index)
        self._ctx.client.cancel(stream.request_id)
        if stream.ended_at is None:
            stream.ended_at = asyncio.get_running_loop().time()

    def _expire(self) -> None:
        for stream in list(self._streams.values()):
            detail = f"not done in {self._timeout_s:g} s"
            failed = Failed(stream.request_id, Refusal.DEADLINE, detail)
            self._ctx.client.give_up(failed)

    def _take(self) -> list[Piece]:
        """What has come, at most so many tokens of each choice. Choices take turns where that is
        too much at once."""
        pieces = []
        sampling = self.choices[0].plan.sampling
        num_logprobs = max(sampling.logprobs or 0, len(sampling.logprob_token_ids))
        left = _MAX_TOKENS_A_TURN // (1 + num_logprobs // _LOGPROBS_OF_A_TOKEN)
        for index, stream in list(self._streams.items()):
            if left <= 0:
                break
            message = stream.take(min(left, _MAX_TOKENS_AT_ONCE))
            if message is None:
                continue
            self._streams[index] = self._streams.pop(index)  # the last in line
            if isinstance(message, Failed):
                raise refused(message)
            choice = self.choices[index]
            num_before = choice.num_tokens
            piece = choice.absorb(message)
            left -= max(1, choice.num_tokens - num_before)
            self._record_times(choice, choice.num_tokens - num_before)
            if piece.finish_reason is not None:
                self._cancel(index)  # at a stop string the router would go on
            if not piece.is_empty:
                pieces.append(piece)
        return pieces

    def _record_times(self, choice: Choice, num_tokens: int) -> None:
        metrics = self._ctx.metrics
        if num_tokens == 0 or not self._is_timed:
            return
        now = asyncio.get_running_loop().time()
        if choice.last_token_at is not None:
            metrics.itl_s.observe((now - choice.last_token_at) / num_tokens)
        elif all(other.last_token_at is None for other in self.choices):
            metrics.ttft_s.observe(now - self._started_at)
        choice.last_token_at = now
