"""Who serves a request: decode worker first, then whether to hand its prefill over, then to whom.

"prefix" takes what costs least, in seconds; the worker that computes the prompt may fetch the part
of the prefix that a third worker holds. It looks at the workers that hold most of the prefix and at
the least busy ones. The other policies are baselines. They fetch nothing, and hand every prefill
over if there is a usable prefill worker:

  random          any worker
  round_robin     the one that was chosen longest ago
  least_loaded    the one with the least work
  session_sticky  always the same one for a session, or for a beginning of a prompt
  prefix_only     the one that holds most of the prefix, however busy it is

Costs, candidates and their order are worked out in `router/native/choice.c`. Choices repeat
exactly. Ties (within a millisecond) go to the worker with the fewest requests, then to the one that
was chosen longest ago.

When the first token will come is predicted from the parts of the cost, corrected by how long first
tokens took: messages, the step under way and the client's own share of the cores come on top of the
parts. And where prefill and decode workers share a machine, a prompt takes longer while others
decode: what workers report of their passes is a mean over both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import islice
from math import exp, log
from typing import NamedTuple

from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.router.index.table import IndexTable
from kvrelay.router.placement.choice import Chooser, Option, Options
from kvrelay.router.placement.cost import CostModel
from kvrelay.router.placement.endpoint import Endpoint
from kvrelay.router.placement.fleet import Fleet
from kvrelay.router.placement.work import Candidate, Seconds, Work

NUM_HOLDERS = 2  # candidates of a role that hold most of the prefix
NUM_IDLE = 3  # and that are least busy
MAX_TRIED = 32  # of the least busy ones, to find those that can take the request
FETCH_SOURCES_PER_ROLE = 4  # the best ones of a role; more would only make the choice slower

RATE = 0.15  # share of a miss that is corrected at once
BOUND = 0.25  # of a miss, as a logarithm: the many near ones count, not the few far off
UNIT_S = 0.02  # of the part that is the same for all: corrected by requests that are as short
MOST, LEAST = 8.0, 0.125  # factors of what is computed
LEAST_S = 1e-4


class Choice(NamedTuple):
    """What was chosen, and from which options."""

    best: Option
    prefill_option: Option | None  # the prefill worker's part of it
    options: Options

    @property
    def decode(self) -> Endpoint:
        return self.best.endpoint

    @property
    def prefill(self) -> Endpoint | None:
        return self.best.prefill

    def candidates(self, role: Role) -> tuple[Candidate, ...]:
        """Best first."""
        of_role = self.options.decodes if role is Role.DECODE else self.options.prefills
        return tuple(map(_candidate, of_role))


class Policy:
    """Owned by a router. Invariant: its choice depends on its arguments and on earlier choices
    only; `chosen_at` of an endpoint is the number of the last choice that took it."""

    def __init__(
        self,
        name: str,
        cost: CostModel,
        index: IndexTable,
        fleets: Mapping[Role, Fleet],
        **limits: float,
    ) -> None:
        """`limits`: who can take a request (max_inflight, max_memory_wait_s, probe_after_s), and
        fetch_sources_per_role."""
        self.name = name
        numbers = {"num_holders": NUM_HOLDERS, "num_idle": NUM_IDLE, "max_tried": MAX_TRIED}
        sources = {"fetch_sources_per_role": FETCH_SOURCES_PER_ROLE}
        self.chooser = Chooser(cost, index, **(numbers | sources | limits))
        self._fleets = fleets
        self._num_choices = 0

    def choose(
        self, now: float, work: Work, sticky: Callable[[], bytes], *, trusting: bool = False
    ) -> Choice | None:
        """None: no worker is usable. Prompts are handed over only between workers of the same
        fingerprint. `sticky`, for a baseline: equal for what should go to the same
        worker. `trusting`: silent workers, and those that have failed this request, are better than
        none."""
        self._num_choices += 1
        decodes, prefills = self._fleets[Role.DECODE], self._fleets[Role.PREFILL]
        self.chooser.ask(now, work, trusting=trusting)
        if self.name == "prefix":
            options = self.chooser.find(decodes, prefills, NUM_HOLDERS + NUM_IDLE)
        else:
            given = self._pick(Role.DECODE, sticky), self._pick(Role.PREFILL, sticky)
            if not given[0]:  # rather than none, those decode that should not
                given = self._pick(Role.PREFILL, sticky, decodes=True), ()
            options = self.chooser.weigh(decodes, prefills, given)
        if options is None:
            return None
        best, first = options.best, options.best_prefill
        best.endpoint.chosen_at = self._num_choices
        if best.prefill is not None:
            best.prefill.chosen_at = self._num_choices
        return Choice(best, first, options)

    def _pick(
        self, pool: Role, sticky: Callable[[], bytes], *, decodes: bool = False
    ) -> Sequence[Endpoint]:
        """The worker of a pool that a baseline takes; none, if none is usable."""
        role = Role.DECODE if decodes else pool
        is_usable = partial(self.chooser.is_usable, role=role)
        usable = filter(is_usable, self._fleets[pool].least_busy())
        match self.name:
            case "least_loaded":
                return _first(usable)
            case "round_robin":
                return _first(sorted(usable, key=lambda each: (each.chosen_at, each.worker)))
            case "prefix_only":
                holders = filter(is_usable, self.chooser.holders(pool))
                return _first(holders) or _first(usable)
            case _:
                drawn = self.name == "random"
                name = self._num_choices.to_bytes(8, "big") if drawn else sticky()
                # The highest of all: a worker that comes or goes moves only its own requests.
                return _first(sorted(usable, key=lambda each: _draw(each.worker, name)))


@dataclass(slots=True)
class TtftPredictor:
    """Owned by a dispatcher. A prediction is what is computed, times a factor, what is read, and a
    constant. There is a factor for each of four cases: whether others decode meanwhile, and whether
    other prompts come first, as more may then."""

    factors: dict[tuple[bool, bool], float] = field(default_factory=dict)
    overhead_s: float = 0.0

    def predict(self, seconds: Seconds, *, others_decode: bool) -> float:
        return sum(self._parts(seconds, others_decode))

    def on_first_token(self, seconds: Seconds, real_s: float, *, others_decode: bool) -> None:
        """A first token came `real_s` after the decision."""
        computed_s, read_s, overhead_s = self._parts(seconds, others_decode)
        predicted_s = max(LEAST_S, computed_s + read_s + overhead_s)
        miss = RATE * min(BOUND, max(-BOUND, log(max(LEAST_S, real_s) / predicted_s)))
        whole_s = predicted_s + UNIT_S
        case = others_decode, seconds.queue > 0
        factor = self.factors.get(case, 1.0) * exp(miss * computed_s / whole_s)
        self.factors[case] = min(MOST, max(LEAST, factor))
        self.overhead_s = max(0.0, overhead_s + miss * (overhead_s + UNIT_S) / whole_s * UNIT_S)

    def _parts(self, seconds: Seconds, others_decode: bool) -> tuple[float, float, float]:
        """What is computed, what is read, and the rest, as far as it is known by now."""
        factor = self.factors.get((others_decode, seconds.queue > 0), 1.0)
        computed_s = (seconds.queue + seconds.prefill) * factor
        return computed_s, seconds.load + seconds.fetch, self.overhead_s


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
