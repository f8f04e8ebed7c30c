"""Who serves a request: decode worker first, then whether to hand its prefill over, then to whom.

"prefix" takes the cheapest placement in seconds; in each, whoever computes may fetch from a third
worker what that one holds of the prefix. It looks at the workers that hold most of the prefix and
at the least busy ones: any other has neither. The rest are baselines. They fetch nothing, and hand
every prefill over when there is anybody to hand it to:

  random          anybody
  round_robin     the one that was chosen longest ago
  least_loaded    the one with the least work
  session_sticky  always the same one for a session, or for a beginning of a prompt
  prefix_only     the one that holds most of the prefix, however busy it is

Choices repeat exactly. Ties (within a millisecond) go to the worker with the fewest requests, then
to the one that was chosen longest ago.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

from engine.node import NodeId
from router.cost import CostModel
from router.endpoint import Endpoint
from router.fleet import Fleet
from router.placement import Placement, Seconds, Work
from router.prefix_index import Held

NUM_HOLDERS = 2  # candidates of a role that hold most of the prefix
NUM_IDLE = 3  # and that are least busy
MAX_TRIED = 32  # of the least busy ones, to find those that can take the request


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve the request. For a prefill worker alone, only what comes before the first
    token counts."""

    worker: NodeId
    prefill_from: NodeId | None
    fetch_from: NodeId | None  # who lends whoever computes what it holds of the prefix
    cached: Held  # tokens on `worker`
    seconds: Seconds


@dataclass(slots=True)
class Option:
    """A candidate, with all that a choice needs."""

    endpoint: Endpoint
    prefill: Option | None
    placement: Placement
    key: tuple[float, ...] = ()

    def candidate(self, work: Work) -> Candidate:
        return Candidate(
            worker=self.endpoint.worker,
            prefill_from=None if self.prefill is None else self.prefill.endpoint.worker,
            fetch_from=self.placement.intake.fetch_from,
            cached=work.held_by(self.endpoint),
            seconds=self.placement.seconds,
        )


@dataclass(slots=True)
class Choice:
    """What was chosen, and what from, best first."""

    work: Work
    decodes: list[Option]
    prefills: list[Option]

    @property
    def decode(self) -> Endpoint:
        return self.decodes[0].endpoint

    @property
    def prefill(self) -> Endpoint | None:
        option = self.decodes[0].prefill
        return None if option is None else option.endpoint

    @property
    def placement(self) -> Placement:
        return self.decodes[0].placement


@dataclass(slots=True)
class Decision:
    """A choice and what stood beside it, so that it can be explained."""

    request_id: str
    attempt: int
    at_s: float  # the router's clock
    policy: str
    num_tokens: int
    decode: NodeId
    prefill: NodeId | None
    fetch_from: NodeId | None  # by `prefill`, or else by `decode`
    seconds: Seconds
    predicted_ttft_s: float
    others_decode: bool  # on the decode worker, when this was decided
    was_measured: bool  # False: no worker had told yet what prompts cost
    choice: Choice

    @property
    def decode_candidates(self) -> tuple[Candidate, ...]:
        """Best first."""
        return tuple(option.candidate(self.choice.work) for option in self.choice.decodes)

    @property
    def prefill_candidates(self) -> tuple[Candidate, ...]:
        return tuple(option.candidate(self.choice.work) for option in self.choice.prefills)


@dataclass(slots=True)
class Question:
    """What a policy is asked. `usable`: whether a worker may be chosen for this request."""

    now: float
    work: Work
    decodes: Fleet
    prefills: Fleet
    usable: Callable[[Endpoint], bool]
    holders: Callable[[Fleet], Sequence[Endpoint]]  # of the prefix, most first
    sticky: Callable[[], bytes]  # equal for what should go to the same worker


class Policy:
    """Owned by a router. Invariant: its choice depends on its arguments and on earlier choices
    only; `chosen_at` of an endpoint is the number of the last choice that took it."""

    def __init__(self, name: str, cost: CostModel) -> None:
        self.name = name
        self._cost = cost
        self._num_choices = 0

    def choose(self, question: Question) -> Choice | None:
        """None: nobody who decodes is usable. Only prefill workers with the fingerprint of the
        decode worker are considered."""
        self._num_choices += 1
        now, work, cost = question.now, question.work, self._cost
        candidates = self._candidates(question, question.decodes)
        if not candidates:
            return None
        prefills = self._ranked(
            [
                Option(endpoint, None, cost.prefill(now, endpoint, work))
                for endpoint in self._candidates(question, question.prefills)
            ]
        )
        decodes = self._ranked(
            [
                option
                for endpoint in candidates
                for option in self._decode_options(now, endpoint, work, prefills)
            ]
        )
        best = decodes[0]
        best.endpoint.chosen_at = self._num_choices
        if best.prefill is not None:
            best.prefill.endpoint.chosen_at = self._num_choices
        return Choice(work, decodes, prefills)

    def _candidates(self, question: Question, fleet: Fleet) -> Sequence[Endpoint]:
        if not len(fleet):
            return ()
        # A fleet whose least busy ones cannot take it is not searched to its end.
        tried = islice(fleet.least_busy(), MAX_TRIED if self.name == "prefix" else None)
        usable = filter(question.usable, tried)
        match self.name:
            case "prefix":
                return self._holders_and_idle(question, fleet, usable)
            case "least_loaded":
                return list(islice(usable, 1))
            case "round_robin":
                return _first(usable, key=lambda endpoint: (endpoint.chosen_at, endpoint.worker))
            case "prefix_only":
                holders = filter(question.usable, question.holders(fleet))
                return list(islice(holders, 1)) or list(islice(usable, 1))
            case _:
                drawn = self.name == "random"
                name = self._num_choices.to_bytes(8, "big") if drawn else question.sticky()
                # The highest of all: whoever comes or goes moves only what is its own.
                return _first(usable, key=lambda endpoint: _draw(endpoint.worker, name))

    def _holders_and_idle(
        self, question: Question, fleet: Fleet, usable: Iterator[Endpoint]
    ) -> list[Endpoint]:
        """A holder of no more than an idle worker has is only busier."""
        found = list(islice(usable, NUM_IDLE))
        held_by = question.work.held_by
        most = -1
        for endpoint in found:
            most = max(most, held_by(endpoint).total)
        for endpoint in question.holders(fleet)[:NUM_HOLDERS]:
            if held_by(endpoint).total <= most:
                break
            if endpoint not in found and question.usable(endpoint):
                found.append(endpoint)
        return found

    def _decode_options(
        self, now: float, decode: Endpoint, work: Work, prefills: list[Option]
    ) -> list[Option]:
        """On `decode`: all of it there, and with the best prefill worker that fits to it."""
        fingerprint = decode.info.fingerprint
        best = next((p for p in prefills if p.endpoint.info.fingerprint == fingerprint), None)
        options = []
        if best is not None:
            options.append(Option(decode, best, self._cost.remote(decode, best.placement, work)))
        if best is None or (
            self.name == "prefix" and self._cost.may_be_local(decode, best.placement, work)
        ):
            options.append(Option(decode, None, self._cost.local(now, decode, work)))
        return options

    def _ranked(self, options: list[Option]) -> list[Option]:
        """Best first. A baseline has made its choice already."""
        if self.name == "prefix":
            for option in options:
                endpoint = option.endpoint
                total_s = sum(option.placement.seconds)
                option.key = (round(total_s, 3), endpoint.num_seqs, endpoint.chosen_at)
            options.sort(key=_key)
        return options


def _draw(worker: NodeId, name: bytes) -> bytes:
    return blake2b(worker.encode(), digest_size=8, key=name[:64]).digest()


def _key(option: Option) -> tuple[float, ...]:
    return option.key


def _first(usable: Iterator[Endpoint], key: Callable[[Endpoint], object]) -> list[Endpoint]:
    best = min(usable, key=key, default=None)  # type: ignore[arg-type]
    return [] if best is None else [best]
