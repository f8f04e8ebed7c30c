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

Costs, candidates and their order are worked out in `router/native/choice.c`. Choices repeat
exactly. Ties (within a millisecond) go to the worker with the fewest requests, then to the one that
was chosen longest ago.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

from engine.node import NodeId
from engine.stats import Role
from router.index.prefix_index import Held
from router.index.table import IndexTable
from router.placement.choice import Chooser, Option, Options
from router.placement.cost import CostModel
from router.placement.endpoint import Endpoint
from router.placement.fleet import Fleet
from router.placement.work import Seconds, Work

NUM_HOLDERS = 2  # candidates of a role that hold most of the prefix
NUM_IDLE = 3  # and that are least busy
MAX_TRIED = 32  # of the least busy ones, to find those that can take the request
FETCH_SOURCES_PER_ROLE = 4  # the best ones of a role; more would only make the choice slower


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve the request, as it is explained. For a prefill worker alone, only what comes
    before the first token counts."""

    worker: NodeId
    prefill_from: NodeId | None
    fetch_from: NodeId | None  # who lends whoever computes what it holds of the prefix
    cached: Held  # tokens on `worker`
    seconds: Seconds


class Choice(NamedTuple):
    """What was chosen, and what from."""

    best: Option
    prefill_option: Option | None  # the prefill worker's part of it
    options: Options

    @property
    def decode(self) -> Endpoint:
        return self.best.endpoint

    @property
    def prefill(self) -> Endpoint | None:
        return self.best.prefill


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
    options: Options

    @property
    def decode_candidates(self) -> tuple[Candidate, ...]:
        """Best first."""
        return tuple(map(_candidate, self.options.decodes))

    @property
    def prefill_candidates(self) -> tuple[Candidate, ...]:
        return tuple(map(_candidate, self.options.prefills))


class Question(NamedTuple):
    """What a policy is asked."""

    now: float
    work: Work
    decodes: Fleet
    prefills: Fleet
    trusting: bool  # silent workers, and those that have failed this request, are better than none
    sticky: Callable[[], bytes]  # for a baseline: equal for what should go to the same worker


class Policy:
    """Owned by a router. Invariant: its choice depends on its arguments and on earlier choices
    only; `chosen_at` of an endpoint is the number of the last choice that took it."""

    def __init__(self, name: str, cost: CostModel, index: IndexTable, **limits: float) -> None:
        """`limits`: who can take a request (max_inflight, max_memory_wait_s, probe_after_s), and
        fetch_sources_per_role."""
        self.name = name
        numbers = {"num_holders": NUM_HOLDERS, "num_idle": NUM_IDLE, "max_tried": MAX_TRIED}
        sources = {"fetch_sources_per_role": FETCH_SOURCES_PER_ROLE}
        self.chooser = Chooser(cost, index, **(numbers | sources | limits))
        self._num_choices = 0

    def choose(self, question: Question) -> Choice | None:
        """None: nobody who decodes is usable. Only prefill workers with the fingerprint of the
        decode worker are considered."""
        self._num_choices += 1
        now, work, decodes, prefills, trusting, _ = question
        self.chooser.ask(now, work, trusting=trusting)
        if self.name == "prefix":
            options = self.chooser.find(decodes, prefills, NUM_HOLDERS + NUM_IDLE)
        else:
            given = self._pick(question, Role.DECODE), self._pick(question, Role.PREFILL)
            options = self.chooser.weigh(decodes, prefills, given)
        if options is None:
            return None
        best, first = options.best, options.best_prefill
        best.endpoint.chosen_at = self._num_choices
        if best.prefill is not None:
            best.prefill.chosen_at = self._num_choices
        return Choice(best, first, options)

    def _pick(self, question: Question, role: Role) -> Sequence[Endpoint]:
        """Whom a baseline takes; nobody, if nobody is usable."""
        fleet = question.decodes if role is Role.DECODE else question.prefills
        is_usable = self.chooser.is_usable
        usable = filter(is_usable, fleet.least_busy())
        match self.name:
            case "least_loaded":
                return _first(usable)
            case "round_robin":
                return _first(sorted(usable, key=lambda each: (each.chosen_at, each.worker)))
            case "prefix_only":
                holders = filter(is_usable, self.chooser.holders(role))
                return _first(holders) or _first(usable)
            case _:
                drawn = self.name == "random"
                name = self._num_choices.to_bytes(8, "big") if drawn else question.sticky()
                # The highest of all: whoever comes or goes moves only what is its own.
                return _first(sorted(usable, key=lambda each: _draw(each.worker, name)))


def _draw(worker: NodeId, name: bytes) -> bytes:
    return blake2b(worker.encode(), digest_size=8, key=name[:64]).digest()


def _first(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    return list(islice(endpoints, 1))


def _candidate(option: Option) -> Candidate:
    return Candidate(
        worker=option.endpoint.worker,
        prefill_from=None if option.prefill is None else option.prefill.worker,
        fetch_from=option.intake.fetch_from,
        cached=option.held,
        seconds=option.seconds,
    )
