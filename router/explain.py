"""Where the time of a request went, and why it was routed so: for the last ones that have ended.

Life of an explanation: made once, when its request ends (finished or failed), from the times in its
record; dropped when `max_decisions` later ones are there.

Phases follow each other without gap or overlap, from the arrival of the request here to its end.
Their borders are times of the router's clock. A worker reports only durations, so between two
borders its durations are laid end to end, and the rest was spent on messages:

    queue   waiting for a worker that can take it
    route   the decision; wall time, absent where time is virtual
    messages                         not reported by a worker: on the way there and back
    worker_queue                     waiting for room on the worker
    load, fetch                      KV from its own lower tiers, or from a peer
    prefill                          until the first token
    prefill_wait                     a decode worker's wait for a prefill worker
    transfer, first_decode           after the prefill: the last KV moves, and the next token
    decode  until the last token
    lost    a failed attempt, or a handoff that did not complete
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median

from kvrelay.engine.node import NodeId
from kvrelay.engine.request import FinishReason, Refusal
from kvrelay.router.placement.policy import Option, RoutingDecision
from kvrelay.router.record import Attempt, RequestRecord
from kvrelay.router.status import LinkLoss

MAX_ERRORS = 512  # predictions that the median is taken over
TINY_S = 1e-9  # rounding error

Part = tuple[str, float, NodeId]  # phase, seconds, worker


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a request. `attempt` 0 and `worker` "": it belongs to none."""

    name: str
    seconds: float
    attempt: int = 0
    worker: NodeId = ""
    to_first: bool = True  # it lies before the request's first token


@dataclass(frozen=True, slots=True)
class Prediction:
    """The time from a decision to the first token: as predicted then, and as it was."""

    predicted_s: float
    real_s: float

    @property
    def error(self) -> float:
        """The miss, relative to the real time."""
        return abs(self.predicted_s - self.real_s) / self.real_s


@dataclass(slots=True)
class Explanation:
    """Why an ended request took so long. Invariant: `phases` sum to `e2e_s`, and those before the
    first token to `ttft_s`. They are computed when they are read."""

    request_id: str
    tenant: str
    service_tier: str
    session: str | None
    outcome: FinishReason | Refusal
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    cached_by_source: dict[str, int]
    recomputed: dict[str, int]  # as in TokenDelta
    images: tuple[int, int]  # likewise
    drafts: tuple[int, int]  # accepted and rejected
    waited_s: dict[str, float]  # in the router's queue, by `WaitsFor`
    attempts: list[Attempt]
    submitted_at: float
    first_token_at: float | None  # None: there was no token
    ended_at: float
    prediction: Prediction | None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.submitted_at

    @property
    def e2e_s(self) -> float:
        return self.ended_at - self.submitted_at

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(_phases(self))


class Explanations:
    """Owned by a router. Invariant: at most `limit` explanations, in the order of their ends."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_id: OrderedDict[str, Explanation] = OrderedDict()
        self._errors: deque[float] = deque(maxlen=MAX_ERRORS)

    def add(self, now: float, record: RequestRecord, outcome: FinishReason | Refusal) -> None:
        """`record` has ended: keep its explanation."""
        prediction = _prediction(record)
        if prediction is not None:
            self._errors.append(prediction.error)
        submit = record.submit
        self._by_id[record.request_id] = Explanation(
            request_id=record.request_id,
            tenant=submit.tenant,
            service_tier=submit.service_class.tier,
            session=submit.session,
            outcome=outcome,
            num_prompt_tokens=record.num_prompt_tokens,
            num_output_tokens=record.num_output_tokens,
            num_cached_tokens=record.num_cached_tokens or 0,
            cached_by_source=record.cached_by_source,
            recomputed=record.recomputed,
            images=record.images,
            drafts=record.drafts,
            waited_s=record.waited_s,
            attempts=record.attempts,
            submitted_at=record.submitted_at,
            first_token_at=record.first_token_at,
            ended_at=now,
            prediction=prediction,
        )
        self._by_id.move_to_end(record.request_id)
        if len(self._by_id) > self._limit:
            self._by_id.popitem(last=False)

    def get(self, request_id: str) -> Explanation | None:
        return self._by_id.get(request_id)

    def recent(self) -> Iterator[Explanation]:
        """All that are kept, the youngest first."""
        return reversed(self._by_id.values())

    @property
    def prediction_error(self) -> float | None:
        """The median of the last relative errors; None before the first."""
        return median(self._errors) if self._errors else None


def _phases(request: Explanation) -> Iterator[Phase]:
    first_at, free_at, end = request.first_token_at, request.submitted_at, request.ended_at
    for attempt, following in zip_longest(request.attempts, request.attempts[1:]):
        before = first_at is None or attempt.sent_at <= first_at
        begin = max(attempt.sent_at, free_at)  # one that takes over begins before the other ends
        yield Phase("queue", begin - free_at, to_first=before)
        ends = [end, attempt.ended_at, following.first_at if following else None]
        free_at = max(begin, min(at for at in ends if at is not None))
        yield from _attempt_phases(attempt, first_at, begin, free_at)
    if free_at < end or not request.attempts:
        yield Phase("queue", end - free_at, to_first=first_at is None)


def _attempt_phases(
    attempt: Attempt, first_token_at: float | None, begin: float, end: float
) -> Iterator[Phase]:
    """From `begin` to `end`. `first_token_at`: of the request."""
    number, decode = attempt.number, attempt.decode.worker
    if attempt.first_at is None or attempt.first_at < begin:
        before = first_token_at is None or end <= first_token_at
        if end > begin:
            yield Phase("lost", end - begin, number, decode, before)
        return
    is_first = attempt.first_at == first_token_at
    reported = attempt.phases.get(attempt.first_from, {})
    parts: list[Part] = [("route", attempt.route_s, "")] if attempt.route_s else []
    parts += [(name, seconds, attempt.first_from) for name, seconds in reported.items()]
    yield from _explained(parts, attempt.first_at - begin, number, is_first)
    at = attempt.first_at
    if attempt.second_at is not None:
        reported = attempt.phases.get(decode, {})
        parts = [(name, seconds, decode) for name, seconds in _after_prefill(reported).items()]
        yield from _explained(parts, attempt.second_at - at, number, to_first=False)
        at = attempt.second_at
    last = min(attempt.last_at, end) if attempt.cause else end
    yield Phase("decode", last - at, number, decode, to_first=False)
    if last < end:
        yield Phase("lost", end - last, number, decode, to_first=False)


def _after_prefill(reported: dict[str, float]) -> dict[str, float]:
    """Phases of a decode worker after the prefill worker's last block. If it never waited for the
    prefill worker, it was itself queued until after that: then all of them count."""
    if not reported.get("prefill_wait"):
        return reported
    names = list(reported)
    return {name: reported[name] for name in names[names.index("prefill_wait") + 1 :]}


def _explained(
    parts: Sequence[Part], total_s: float, attempt: int, to_first: bool
) -> Iterator[Phase]:
    """`total_s` of the router's clock as `parts`, and messages for the rest. If the parts take
    longer than that, the first are cut."""
    explained_s = sum(seconds for _, seconds, _ in parts)
    rest_s, cut_s = max(0.0, total_s - explained_s), max(0.0, explained_s - total_s)
    for name, seconds, worker in parts:
        if rest_s > TINY_S and name != "route":
            yield Phase("messages", rest_s, attempt, "", to_first)
            rest_s = 0.0
        kept_s = max(0.0, seconds - cut_s)
        cut_s -= seconds - kept_s
        if kept_s > TINY_S:
            yield Phase(name, kept_s, attempt, worker, to_first)
    if rest_s > TINY_S:
        yield Phase("messages", rest_s, attempt, "", to_first)


def _prediction(record: RequestRecord) -> Prediction | None:
    """The phases of the attempt that brought the first token."""
    for attempt in record.attempts:
        if attempt.first_at is not None:
            real_s = attempt.first_at - attempt.sent_at
            if attempt.decision is None or real_s <= 0:
                return None
            return Prediction(attempt.decision.predicted_ttft_s, real_s)
    return None


def reason(decision: RoutingDecision) -> str:
    """Why the chosen workers were chosen, in a sentence for operators."""
    best, *others = decision.options.decodes
    computing = best
    if best.prefill_from is not None:
        computing = next((c for c in decision.options.prefills if c.endpoint is best.prefill), best)
    said = [_holding(computing, decision.num_tokens)]
    if best.fetch_from is not None:
        said.append(f"fetching from {best.fetch_from} takes {seconds_text(best.seconds.fetch)}")
    said.append(f"computing the rest takes {seconds_text(best.seconds.prefill)}")
    if best.prefill_from is not None:
        said.append(f"handing over to {best.worker} {seconds_text(best.seconds.transfer)}")
    said += map(link_text, decision.bad_links)
    if decision.policy != "prefix":
        said.append(f"chosen by {decision.policy}, whatever it costs")
    elif others:
        mine, other = best.seconds.total, others[0]
        next_best = f"next best {name_of(other)}: {seconds_text(other.seconds.total)}"
        said.append(f"in all {seconds_text(mine)}; {next_best}")
    else:
        said.append("no other worker could take it")
    return "; ".join(said)


def link_text(link: LinkLoss) -> str:
    what = "peers' KV" if link.fetches else "KV that was handed over"
    waited = seconds_text(link.wait_s)
    return (
        f"{link.lost_share:.0%} of the last {what} from {link.source} to {link.reader} did not come"
        f", after waiting {waited}"
    )


def name_of(candidate: Option) -> str:
    if candidate.prefill_from is None:
        return candidate.worker
    return f"{candidate.worker} after {candidate.prefill_from}"


def seconds_text(seconds: float) -> str:
    """A short text; it says "0 s" only for zero."""
    if seconds >= 0.09995:
        return f"{seconds:.2f} s" if seconds >= 9.9995 else f"{seconds:.3f} s"
    if seconds >= 0.00005:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} µs" if seconds else "0 s"


def _holding(candidate: Option, num_tokens: int) -> str:
    held = candidate.held
    tiers = (
        (held.device, "in device memory"),
        (held.host, "in host memory"),
        (held.disk, "on disk"),
        (held.object, "in the object store"),
    )
    found = [(count, where) for count, where in tiers if count]
    if not found:
        return f"{candidate.worker} holds none of {num_tokens:,} tokens"
    (first, where), *more = found
    text = f"{candidate.worker} holds {first:,} of {num_tokens:,} tokens {where}"
    return ", ".join([text, *(f"{count:,} {where}" for count, where in more)])
