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

A `Fleet` keeps the living workers of one role, the least busy first, so that a choice considers
only some. An endpoint's rank is that of its last `update`; the dispatcher updates it whenever what
it knows of the worker changes. A decode worker is as busy as its KV pool is full, and then as it
has sequences; a prefill worker as its queue is long, in time. The order is kept in
`router/native/fleet.c`, where choices read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import islice
from math import exp, log
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import finalize
from zlib import crc32

from kvrelay.engine.kv.block_hash import HASH_BYTES
from kvrelay.engine.node import NodeId
from kvrelay.engine.stats import Role
from kvrelay.router.index.prefix_index import Held, IndexTable
from kvrelay.router.native.bindings import address_of, bindings, constants, ffi
from kvrelay.router.placement.cost import COMPUTING, READING, CostModel, Seconds
from kvrelay.router.placement.endpoint import Endpoint
from kvrelay.router.placement.links import KVLinks
from kvrelay.router.placement.work import Intake, Work
from kvrelay.router.status import LinkLoss


class Fleet:
    """Owned by a dispatcher. Invariant: the native order has the `_endpoints`, each once. Equally
    busy ones come in the order in which they were last chosen; among those never chosen the order
    depends on `salt`, which differs between routers, so that they do not all choose the same."""

    def __init__(self, salt: str, cost: CostModel) -> None:
        self._salt = salt
        self._cost = cost
        self._lib = bindings()
        self.address: int = self._lib.kvr_fleet_new()
        finalize(self, self._lib.kvr_fleet_free, self.address)
        self._endpoints: dict[NodeId, Endpoint] = {}
        self._by_struct: dict[Any, Endpoint] = {}

    def __len__(self) -> int:
        return len(self._endpoints)

    def __iter__(self) -> Iterator[Endpoint]:
        return (self._endpoints[worker] for worker in sorted(self._endpoints))

    def get(self, worker: NodeId) -> Endpoint | None:
        return self._endpoints.get(worker)

    def add(self, now: float, endpoint: Endpoint) -> None:
        self._endpoints[endpoint.worker] = endpoint
        self._by_struct[endpoint.struct] = endpoint
        endpoint.struct.is_ranked = False
        endpoint.struct.tie_break = crc32(f"{self._salt} {endpoint.worker}".encode())
        self.update(now, endpoint)

    def remove(self, endpoint: Endpoint) -> None:
        if self._endpoints.get(endpoint.worker) is endpoint:
            self._lib.kvr_fleet_drop(self.address, endpoint.address)
            del self._endpoints[endpoint.worker]
            del self._by_struct[endpoint.struct]

    def update(self, now: float, endpoint: Endpoint) -> None:
        if self._endpoints.get(endpoint.worker) is endpoint:
            self._lib.kvr_fleet_update(self.address, endpoint.address, self._cost.address, now)

    def has_room(self, now: float, max_inflight: int) -> bool:
        """Whether any of them could take one more request."""
        has: bool = self._lib.kvr_fleet_has_room(self.address, now, max_inflight)
        return has

    def least_busy(self) -> list[Endpoint]:
        found = ffi.new("worker *[]", len(self))
        self._lib.kvr_fleet_list(self.address, address_of(found))
        return [self._by_struct[worker] for worker in found]


POOL = {Role.DECODE: Role.DECODE, Role.BOTH: Role.DECODE, Role.PREFILL: Role.PREFILL}
GROUP = {Role.DECODE: 0, Role.BOTH: 0, Role.PREFILL: 1}  # in the index; native code knows them
MAX_CANDIDATES: int = constants.MAX_CANDIDATES  # in a pool
_ANSWER, _BYTES = ffi.typeof("answer *"), ffi.typeof("uint8_t[]")
_HELD, _INTAKE = attrgetter(*Held._fields), attrgetter(*Intake._fields[:-1])
# Fields of a request that native code has by the same names.
_ARRAYS = {"prompts", "images"}
_ASKED = [name for name, _ in ffi.typeof("work").fields if name in {*Work._fields} - _ARRAYS]
_QUESTION = [n for n, _ in ffi.typeof("question").fields if n in {*Work._fields} - {"avoid"}]
_new = tuple.__new__  # makes a NamedTuple of all its fields in half the time


class Option(NamedTuple):
    """One way to serve the request. For a prefill worker alone, only what comes before the first
    token counts."""

    endpoint: Endpoint
    prefill: Endpoint | None
    held: Held  # tokens on `endpoint`
    seconds: Seconds
    intake: Intake

    @property
    def worker(self) -> NodeId:
        return self.endpoint.worker

    @property
    def prefill_from(self) -> NodeId | None:
        return None if self.prefill is None else self.prefill.worker

    @property
    def fetch_from(self) -> NodeId | None:
        """The peer whose KV is fetched by the worker that computes the prompt."""
        return self.intake.fetch_from


class Options:
    """All options that a choice has considered: the `answer` that native code has written, read
    when asked for. At least one says who decodes."""

    __slots__ = ("_answer", "_endpoints", "_first", "best", "best_prefill")

    def __init__(self, answer: Any, num_candidates: int, endpoints: Mapping[Any, Endpoint]) -> None:
        """`endpoints`: by their structs; all that are in the answer, for as long as it is read."""
        self._answer, self._endpoints = answer, endpoints
        self._first = 2 * num_candidates  # number of the first one that says who decodes
        self.best = self._read(self._first)  # decode worker and all
        number = answer.options[self._first].prefill
        self.best_prefill = None if number < 0 else self._read(number)  # its part of that

    @property
    def decodes(self) -> list[Option]:
        """Options are sorted, the best first."""
        return [self._read(self._first + number) for number in range(self._answer.num_decodes)]

    @property
    def prefills(self) -> list[Option]:
        return [self._read(number) for number in range(self._answer.num_prefills)]

    def _read(self, number: int) -> Option:
        endpoints, options = self._endpoints, self._answer.options
        option = options[number]
        placement, prefill = option.placement, option.prefill
        intake = placement.intake
        source = intake.fetch_from
        return Option(
            endpoints[option.worker],
            endpoints[options[prefill].worker] if prefill >= 0 else None,
            _new(Held, _HELD(option.held)),
            _new(Seconds, ffi.unpack(placement.seconds.terms, len(Seconds._fields))),
            _new(Intake, (*_INTAKE(intake), endpoints[source].worker if source else None)),
        )


class Chooser:
    """Owned by a policy. Invariant: native code has the endpoints in `_by_slot`, by their slots.
    What is asked of it is about the last `ask`, whose work native code reads until the next."""

    def __init__(self, cost: CostModel, index: IndexTable, **limits: float) -> None:
        """`limits`: fields of a question that are always the same."""
        self._lib = bindings()
        self._cost, self._index = cost, index
        self._address: int = self._lib.kvr_chooser_new(index.address)
        finalize(self, self._lib.kvr_chooser_free, self._address)
        self._by_slot: dict[int, Endpoint] = {}
        self._by_struct: dict[Any, Endpoint] = {}  # replaced when one goes: answers keep theirs
        self._question = ffi.new("question *", limits)
        self._question_address = address_of(self._question)
        self._hashed = ffi.new("hashed_prompt[]", 0)
        self.links = KVLinks()

    def put(self, endpoint: Endpoint, slot: int | None) -> None:
        """`endpoint` has this slot of the index from now on; None: none any more, it may go."""
        if self._by_slot.get(endpoint.slot) is endpoint:
            del self._by_slot[endpoint.slot]
            self._lib.kvr_chooser_put(self._address, endpoint.slot, None)
            self._by_struct = {each.struct: each for each in self._by_slot.values()}
        endpoint.slot = -1 if slot is None else slot
        if slot is not None:
            self._by_slot[slot] = self._by_struct[endpoint.struct] = endpoint
            self._lib.kvr_chooser_put(self._address, slot, endpoint.address)

    def ask(self, now: float, work: Work, *, trusting: bool) -> None:
        """What the following calls are about. `trusting`: silent workers, and those that have
        failed this request, are better than none."""
        question, hashed, prompts = self._question, self._hashed, work.prompts
        asked = question.asked
        asked.now, question.trusting, question.num_avoid = now, trusting, len(work.avoid)
        for name in _ASKED:
            setattr(asked, name, getattr(work, name))
        for name in _QUESTION:
            setattr(question, name, getattr(work, name))
        if len(hashed) != len(prompts):
            hashed = self._hashed = ffi.new("hashed_prompt[]", len(prompts))
            asked.prompts, asked.num_prompts = hashed, len(prompts)
        for number, (model, block_size, unit, block_hashes, mark_group) in enumerate(prompts):
            field = hashed[number]
            field.mark_group = mark_group
            field.model, field.block_size, field.unit = model, block_size, unit
            field.block_hashes = ffi.from_buffer(_BYTES, block_hashes)
            field.num_hashes = len(block_hashes) // HASH_BYTES
        if work.avoid:
            question.avoid = self._avoid = ffi.new("worker *[]", [e.struct for e in work.avoid])
        bad = [
            (source.struct, reader.struct, fetches, lost_share, wait_s)
            for (source, reader, fetches), lost_share, wait_s in self.links.bad(now)
        ]
        asked.num_links = len(bad)
        if bad:
            asked.links = self._bad_links = ffi.new("kv_link[]", bad)
        asked.num_images = len(work.images)
        if work.images:
            asked.images = self._images = ffi.new("placed_image[]", work.images)
        self._work = work
        self._lib.kvr_look_up(self._address, self._question_address)

    def holders(self, role: Role) -> list[Endpoint]:
        """Workers of the pool that hold some of the prompt, most first."""
        found = ffi.new("worker *[]", MAX_CANDIDATES)
        count = self._lib.kvr_find_holders(
            self._address, self._question_address, GROUP[role], address_of(found)
        )
        return [self._by_struct[worker] for worker in found[0:count]]

    def is_usable(self, endpoint: Endpoint, role: Role) -> bool:
        """Whether it can take the request in this role now, and would have room for its KV
        soon."""
        usable: bool = self._lib.kvr_is_usable(
            self._cost.address, self._question_address, endpoint.address, role is not Role.PREFILL
        )
        return usable

    def find(self, decodes: Fleet, prefills: Fleet, num_candidates: int) -> Options | None:
        """The cheapest of what `num_candidates` of each pool, or fewer, can do; None: no worker is
        usable."""
        self._question.given = False
        self._lib.kvr_find(
            self._address, self._cost.address, decodes.address, prefills.address,
            self._question_address,
        )  # fmt: skip
        return self._choose(num_candidates)

    def weigh(
        self,
        decodes: Sequence[Endpoint],
        prefills: Sequence[Endpoint],
        fetch_sources: Sequence[Endpoint] = (),
    ) -> Options | None:
        """What it costs to let these decode and prefill, in this order."""
        question, asked = self._question, self._question.asked
        question.given = True
        for found, given in (question.decodes, decodes), (question.prefills, prefills):
            found.workers, found.count = [e.struct for e in given], len(given)
        asked.fetch_sources = [{"worker": e.struct} for e in fetch_sources]
        asked.num_fetch_sources = len(fetch_sources)
        return self._choose(max(len(decodes), len(prefills)))

    def expect(self, fleet: Fleet, endpoint: Endpoint, first_new: int, until: float) -> None:
        """`endpoint` has been booked for what was asked: its rank in its fleet changes, and blocks
        from number `first_new` on are expected there `until`."""
        self._lib.kvr_expect(
            self._address, self._question_address, self._cost.address, fleet.address,
            endpoint.address, first_new, until,
        )  # fmt: skip

    def _choose(self, num_candidates: int) -> Options | None:
        question = self._question
        question.num_candidates = num_candidates
        for found in (question.decodes, question.prefills):
            for worker in found.workers[0 : found.count]:
                self._cost.write_terms(self._by_struct[worker], self._work)
        answer = ffi.new(_ANSWER, {"options": 5 * num_candidates})
        self._lib.kvr_choose(
            self._address, self._cost.address, self._question_address, address_of(answer)
        )
        if not answer.num_decodes:
            return None
        return Options(answer, num_candidates, self._by_struct)


NUM_HOLDERS = 2  # candidates of a role that hold most of the prefix
NUM_IDLE = 3  # and that are least busy
MAX_TRIED = 32  # least busy ones, to find those that can take the request
FETCH_SOURCES_PER_ROLE = 4  # the best ones of a role; more would only make the choice slower

RATE = 0.15  # share of a miss that is corrected at once
BOUND = 0.25  # for a miss, as a logarithm: the many near ones count, not the few far off
UNIT_S = 0.02  # for the part that all share: corrected by requests that are as short
MAX_FACTOR, MIN_FACTOR = 8.0, 0.125  # factors of what is computed
LEAST_S = 1e-4


@dataclass(slots=True)
class RoutingDecision:
    """A choice and its alternatives, so that it can be explained."""

    at_s: float  # the router's clock
    policy: str
    num_tokens: int
    predicted_ttft_s: float
    others_decode: bool  # on the decode worker, when this was decided
    was_measured: bool  # False: no worker had reported yet what prompts cost
    options: Options
    bad_links: tuple[LinkLoss, ...] = ()  # from the prefill worker, or to one that was chosen


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
    ) -> Options | None:
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
            options = self.chooser.weigh(*given)
        if options is None:
            return None
        best = options.best
        best.endpoint.chosen_at = self._num_choices
        if best.prefill is not None:
            best.prefill.chosen_at = self._num_choices
        return options

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
        self.factors[case] = min(MAX_FACTOR, max(MIN_FACTOR, factor))
        self.overhead_s = max(0.0, overhead_s + miss * (overhead_s + UNIT_S) / whole_s * UNIT_S)

    def _parts(self, seconds: Seconds, others_decode: bool) -> tuple[float, float, float]:
        """What is computed, what is read, and the rest, as far as it is known by now."""
        factor = self.factors.get((others_decode, seconds.queue > 0), 1.0)
        computed_s = seconds.sum_of(COMPUTING) * factor
        return computed_s, seconds.sum_of(READING), self.overhead_s


def _draw(worker: NodeId, name: bytes) -> bytes:
    return blake2b(worker.encode(), digest_size=8, key=name[:64]).digest()


def _first(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    return list(islice(endpoints, 1))
