"""Calls that generate, from their first byte to their last: where their time went.

Life of a call: made when it arrives, told its times as it is served, and handed to `Calls.ended`
with its outcome. There the router's explanation of each of its choices gets what only the API can
know around it: receiving and tokenising before, messages between the two, sending the last text
after. That goes into metrics and spans, and is kept for a while, to be asked for.
"""

from __future__ import annotations

import re
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvrelay.cluster.api.client import RequestStream
from kvrelay.cluster.api.metrics import ApiMetrics
from kvrelay.router.explain import Explanation, Explanations, Phase

MAX_TOKENS = 2**22  # all prompts that are kept together


@dataclass(frozen=True, slots=True)
class Earlier:
    """The earlier prompt that has most in common with one."""

    call: str
    ended_at: float
    tokens: Sequence[int]
    num_common: int  # tokens, from the first


@dataclass(frozen=True, slots=True)
class _Kept:
    tenant: str
    ended_at: float
    tokens: array[int]


class PromptHistory:
    """The last prompts, to see where one ceases to be what an earlier one was. A prompt is served
    from cached KV as far as it begins as an earlier one did: where a client changes something in
    the middle of a conversation, all that follows is computed again.

    Owned by the calls of one process. Invariant: the prompts have MAX_TOKENS together, at most;
    in the order in which their calls ended."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_tokens = 0

    def add(self, call: str, tenant: str, ended_at: float, tokens: Sequence[int]) -> None:
        """Keeps the prompt of `call`, which has ended."""
        self._kept[call] = _Kept(tenant, ended_at, array("I", tokens))
        self._num_tokens += len(tokens)
        while self._num_tokens > MAX_TOKENS:
            _, oldest = self._kept.popitem(last=False)
            self._num_tokens -= len(oldest.tokens)

    def tokens(self, call: str) -> Sequence[int]:
        """Returns those of its prompt; empty, if it is kept no more."""
        kept = self._kept.get(call)
        return () if kept is None else kept.tokens

    def closest(self, call: str) -> Earlier | None:
        """Finds it among those of the tenant that ended before; of several the last. None: none
        begins as this one does."""
        mine = self._kept.get(call)
        if mine is None:
            return None
        best: Earlier | None = None
        for name, each in self._before(call):
            count = num_common(each.tokens, mine.tokens)
            if count and (best is None or count >= best.num_common):
                best = Earlier(name, each.ended_at, each.tokens, count)
        return best

    def _before(self, call: str) -> Iterator[tuple[str, _Kept]]:
        tenant = self._kept[call].tenant
        for name, each in self._kept.items():
            if name == call:
                return
            if each.tenant == tenant:
                yield name, each


def num_common(a: array[int], b: array[int]) -> int:
    """Tokens that both begin with."""
    longest = min(len(a), len(b))
    left, right = (np.frombuffer(each, np.uint32, longest) for each in (a, b))
    differ = left != right
    return int(differ.argmax()) if differ.any() else longest


# By endpoint; those of embeddings have none.
ANSWER_IDS = {"chat": "chatcmpl-", "completions": "cmpl-", "messages": "msg_", "responses": "resp_"}
MAX_CALLS = 512  # that are kept to be explained
MAX_ROWS = 64  # batches' rows that are kept beside these
_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def client_request_id(headers: Mapping[str, str]) -> str:
    """What the client calls its request, where that can stand in logs and headers; "": nothing.
    Any number of requests may have one name, so it is no key."""
    given = headers.get("x-request-id", "")
    return given if _SAFE_ID.fullmatch(given) else ""


@dataclass(frozen=True, slots=True)
class CallResult:
    """What a call has generated. `streams`: of the choices that were submitted to the router."""

    tenant: str
    usage: dict[str, Any]
    sampling: dict[str, Any]  # what spans say of it
    streams: tuple[RequestStream, ...]
    prompt: tuple[int, ...] = ()  # tokens, of the first
    has_begun: bool = True  # it was answered, or something of it was


@dataclass(slots=True)
class Call:
    """One HTTP call. Times are of the loop's clock; None: it did not get so far."""

    request_id: str
    endpoint: str
    arrived_at: float
    headers: Mapping[str, str]
    received_at: float | None = None  # all of its body is there
    submitted_at: float | None = None
    ended_at: float = 0.0
    outcome: str = ""
    status: int = 0  # that says so, or would if the answer had not begun
    result: CallResult | None = None
    model: str = ""  # once it is known which; "": the first
    is_row: bool = False  # a batch's
    timeout_s: float = 0.0  # from its arrival to its last token


@dataclass(frozen=True, slots=True)
class ServedChoice:
    """One choice of a call that has ended. Invariant: `phases` sum to the call's time from its
    arrival to its last byte. `explanation` None: the router has given it up already."""

    request_id: str  # the router's
    phases: tuple[Phase, ...]
    ttft_s: float | None  # from the arrival of the call
    explanation: Explanation | None


@dataclass(frozen=True, slots=True)
class ServedCall:
    request_id: str
    endpoint: str
    tenant: str
    outcome: str
    model: str
    usage: dict[str, Any]
    e2e_s: float
    choices: tuple[ServedChoice, ...]
    sampling: dict[str, Any] = field(default_factory=dict)
    client_id: str = ""  # what the client calls it; others may be called the same
    is_row: bool = False  # a batch's

    @property
    def answer_id(self) -> str:
        """As the client knows it."""
        return ANSWER_IDS.get(self.endpoint, "") + self.request_id


class Calls:
    """Owned by the API of one process. Invariant: at most MAX_CALLS are kept, the last that ended,
    and MAX_ROWS rows of batches, which take no place of these and are in no histogram. Lives in
    one asyncio loop."""

    def __init__(
        self,
        model: str,
        explanations: Explanations,
        metrics: ApiMetrics,
        trace: Callable[[ServedCall, Mapping[str, str], int], None] | None = None,
    ) -> None:
        """`explanations`: of the router that the API submits to. `trace`: makes spans of a call,
        from its headers and the time of its end in nanoseconds since 1970."""
        self._model = model
        self._explanations = explanations
        self._metrics = metrics
        self._trace = trace
        self._kept: OrderedDict[str, ServedCall] = OrderedDict()  # whatever their model
        self.prompts = PromptHistory()

    def beside(self, model: str, explanations: Explanations) -> Calls:
        """Calls of another model, which are found here too."""
        other = Calls(model, explanations, self._metrics.of(model), self._trace)
        other._kept = self._kept
        return other

    def ended(self, call: Call) -> ServedCall | None:
        """`call` has sent its last byte. One that has submitted nothing has no phases: None."""
        if call.result is None or call.submitted_at is None:
            return None
        served = self._served(call, call.result)
        if not call.is_row:
            self._measure(call, call.result, served)
        if self._trace is not None:
            self._trace(served, call.headers, time.time_ns())
        if not call.is_row:
            self.prompts.add(call.request_id, served.tenant, call.ended_at, call.result.prompt)
        self._kept[call.request_id] = served
        alike = {name: kept for name, kept in self._kept.items() if kept.is_row is call.is_row}
        if len(alike) > (MAX_ROWS if call.is_row else MAX_CALLS):
            # The model with most loses one: it pushes out no other's.
            ((most, _),) = Counter(kept.model for kept in alike.values()).most_common(1)
            del self._kept[next(name for name, kept in alike.items() if kept.model == most)]
        return served

    def _measure(self, call: Call, result: CallResult, served: ServedCall) -> None:
        """Observes what it took in the histograms."""
        for choice in served.choices:
            self._record_phases(choice)
        for stream in result.streams:
            if stream.first_at is not None:
                ended_at = call.ended_at if stream.ended_at is None else stream.ended_at
                first_s, rest_s = stream.first_at - call.arrived_at, ended_at - stream.first_at
                self._metrics.served(
                    call.endpoint, call.outcome, first_s, rest_s, stream.num_tokens
                )

    def find(self, name: str, tenant: str) -> tuple[ServedCall, ServedChoice] | None:
        """`name`: the id of a call or of its answer; with "-2" behind it, of its choice 2; or what
        the client called it, of which the last counts. Other tenants' are not there."""
        for recent in self.recent(tenant):
            if recent.client_id == name and recent.choices:
                return recent, recent.choices[0]
        for prefix in ANSWER_IDS.values():
            name = name.removeprefix(prefix)
        call_id, _, index = name.partition("-")
        served = self._kept.get(call_id)
        if served is None or served.tenant != tenant:
            return None
        wanted = f"{call_id}-{index or 0}"
        found = next((c for c in served.choices if c.request_id == wanted), None)
        return None if found is None else (served, found)

    def recent(self, tenant: str) -> Iterator[ServedCall]:
        """Yields those that are kept, the youngest first."""
        return (served for served in reversed(self._kept.values()) if served.tenant == tenant)

    def _served(self, call: Call, result: CallResult) -> ServedCall:
        choices = []
        for stream in result.streams:
            explanation = self._explanations.get(stream.request_id)
            phases = tuple(_phases(call, stream, explanation))
            first_at = stream.first_at
            ttft_s = None if first_at is None else first_at - call.arrived_at
            choices.append(ServedChoice(stream.request_id, phases, ttft_s, explanation))
        return ServedCall(
            request_id=call.request_id,
            endpoint=call.endpoint,
            tenant=result.tenant,
            outcome=call.outcome,
            model=self._model,
            usage=result.usage,
            e2e_s=call.ended_at - call.arrived_at,
            choices=tuple(choices),
            sampling=result.sampling,
            client_id=client_request_id(call.headers),
            is_row=call.is_row,
        )

    def _record_phases(self, choice: ServedChoice) -> None:
        sums: dict[str, float] = {}
        for phase in choice.phases:
            sums[phase.name] = sums.get(phase.name, 0.0) + phase.seconds
        for name, seconds in sums.items():
            self._metrics.phase_s.labels(name).observe(seconds)
        self._metrics.queue_s.observe(sums.get("queue", 0.0) + sums.get("worker_queue", 0.0))
        prediction = None if choice.explanation is None else choice.explanation.prediction
        if prediction is not None:
            self._metrics.prediction_ratio.observe(prediction.predicted_s / prediction.real_s)


def _phases(call: Call, stream: RequestStream, explanation: Explanation | None) -> Iterator[Phase]:
    """Takes the phases of one choice, from the arrival of `call` to its end."""
    assert call.received_at is not None
    assert call.submitted_at is not None
    has_first = stream.first_at is not None
    ended_at = call.ended_at if stream.ended_at is None else stream.ended_at
    yield Phase("receive", call.received_at - call.arrived_at)
    yield Phase("tokenise", call.submitted_at - call.received_at)
    routed_s = ended_at - call.submitted_at
    if explanation is None:
        yield Phase("router", routed_s, to_first=not has_first)
    else:
        # What the router does not know of was spent between it and here: before the first token,
        # as far as that came late, and after it.
        rest_s = max(0.0, routed_s - explanation.e2e_s)
        before_s = rest_s
        if stream.first_at is not None and explanation.ttft_s is not None:
            late_s = stream.first_at - call.submitted_at - explanation.ttft_s
            before_s = min(rest_s, max(0.0, late_s))
        yield from _with_messages(explanation.phases, before_s)
        if rest_s > before_s:
            yield Phase("messages", rest_s - before_s, to_first=False)
    yield Phase("stream", call.ended_at - ended_at, to_first=not has_first)


def _with_messages(phases: tuple[Phase, ...], before_s: float) -> Iterator[Phase]:
    """`phases`, and `before_s` more of messages on the way to the first token."""
    for index, phase in enumerate(phases):
        is_last = index + 1 == len(phases) or not phases[index + 1].to_first
        yield phase
        if before_s > 0 and phase.to_first and is_last:
            yield Phase("messages", before_s)
            before_s = 0.0
    if before_s > 0:
        yield Phase("messages", before_s)
