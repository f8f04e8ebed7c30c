"""A choice in native code: what it is asked, and what it answers. See `router/native/choice.c`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import finalize

from kvrelay.engine.kv.block_hash import HASH_BYTES
from kvrelay.engine.stats import Role
from kvrelay.router.index.table import Held, IndexTable
from kvrelay.router.native.bindings import address_of, bindings, constants, ffi
from kvrelay.router.placement.cost import CostModel
from kvrelay.router.placement.endpoint import Endpoint
from kvrelay.router.placement.fleet import Fleet
from kvrelay.router.placement.links import Links
from kvrelay.router.placement.work import Intake, Seconds, Work

POOL = {Role.DECODE: Role.DECODE, Role.BOTH: Role.DECODE, Role.PREFILL: Role.PREFILL}
GROUP = {Role.DECODE: 0, Role.BOTH: 0, Role.PREFILL: 1}  # in the index; native code knows them
MAX_CANDIDATES: int = constants.MAX_CANDIDATES  # of a pool
_ANSWER, _BYTES = ffi.typeof("answer *"), ffi.typeof("uint8_t[]")
_HELD, _INTAKE = attrgetter(*Held._fields), attrgetter(*Intake._fields[:-1])
_new = tuple.__new__  # makes a NamedTuple of all its fields in half the time


class Option(NamedTuple):
    """One way to serve the request. For a prefill worker alone, only what comes before the first
    token counts."""

    endpoint: Endpoint
    prefill: Endpoint | None
    held: Held  # tokens on `endpoint`
    seconds: Seconds
    intake: Intake


class Options:
    """All options that a choice has considered: the `answer` that native code has written, read
    when asked for. At least one says who decodes."""

    __slots__ = ("_answer", "_endpoints", "_first")

    def __init__(self, answer: Any, num_candidates: int, endpoints: Mapping[Any, Endpoint]) -> None:
        """`endpoints`: by their structs; all that are in the answer, for as long as it is read."""
        self._answer, self._endpoints = answer, endpoints
        self._first = 2 * num_candidates  # number of the first one that says who decodes

    @property
    def best(self) -> Option:
        """Decode worker and all."""
        return self._read(self._first)

    @property
    def best_prefill(self) -> Option | None:
        """The prefill worker's part of `best`."""
        number: int = self._answer.options[self._first].prefill
        return None if number < 0 else self._read(number)

    @property
    def decodes(self) -> list[Option]:
        """Best first, as the following."""
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
            _new(Seconds, ffi.unpack(placement.seconds.parts, len(Seconds._fields))),
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
        self.links = Links()

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
        num_tokens, total_tokens, output_tokens, others_output, prompts, avoid, *rest = work
        num_left, alone, patient, resumes = rest
        question, hashed = self._question, self._hashed
        asked = question.asked
        if len(hashed) != len(prompts):
            hashed = self._hashed = ffi.new("hashed_prompt[]", len(prompts))
            asked.prompts, asked.num_prompts = hashed, len(prompts)
        for number, (model, block_size, unit, block_hashes) in enumerate(prompts):
            field = hashed[number]
            field.model, field.block_size, field.unit = model, block_size, unit
            field.block_hashes = ffi.from_buffer(_BYTES, block_hashes)
            field.num_hashes = len(block_hashes) // HASH_BYTES
        asked.now, asked.output_tokens, asked.num_tokens = now, output_tokens, num_tokens
        asked.others_output, asked.resumes = others_output, resumes
        question.total_tokens, question.trusting = total_tokens, trusting
        question.alone, question.patient = alone, patient
        question.num_avoid, question.num_left = len(avoid), num_left
        if avoid:
            question.avoid = self._avoid = _structs(avoid)
        bad = [
            (source.struct, reader.struct, fetches, lost_share, wait_s)
            for (source, reader, fetches), lost_share, wait_s in self.links.bad(now)
        ]
        asked.num_links = len(bad)
        if bad:
            asked.links = self._bad_links = ffi.new("kv_link[]", bad)
        self._work = work
        self._lib.kvr_look_up(self._address, self._question_address)

    def holders(self, role: Role) -> list[Endpoint]:
        """Those of the pool that hold some of the prompt, most first."""
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
        return self._choose(decodes, prefills, num_candidates)

    def weigh(
        self,
        decodes: Fleet,
        prefills: Fleet,
        given: tuple[Sequence[Endpoint], Sequence[Endpoint]],
        fetch_sources: Sequence[Endpoint] = (),
    ) -> Options | None:
        """What it costs to let the first of `given` decode and the second prefill, in this
        order."""
        question = self._question
        question.given = True
        arrays = [_structs(each) for each in (*given, fetch_sources)]
        question.decodes, question.prefills, question.fetch_sources = arrays
        question.num_decodes, question.num_prefills, question.num_fetch_sources = map(len, arrays)
        return self._choose(decodes, prefills, max(map(len, given)))

    def expect(self, fleet: Fleet, endpoint: Endpoint, first_new: int, until: float) -> None:
        """`endpoint` has been booked for what was asked: its rank in its fleet changes, and blocks
        from number `first_new` on are expected there `until`."""
        self._lib.kvr_expect(
            self._address, self._question_address, self._cost.address, fleet.address,
            endpoint.address, first_new, until,
        )  # fmt: skip

    def _choose(self, decodes: Fleet, prefills: Fleet, num_candidates: int) -> Options | None:
        self._question.num_candidates = num_candidates
        answer = ffi.new(_ANSWER, {"options": 5 * num_candidates})
        self._lib.kvr_choose(
            self._address, self._cost.address, decodes.address, prefills.address,
            self._question_address, address_of(answer),
        )  # fmt: skip
        if not answer.num_decodes:
            return None
        return Options(answer, num_candidates, self._by_struct)


def _structs(endpoints: Sequence[Endpoint]) -> Any:
    return ffi.new("worker *[]", [endpoint.struct for endpoint in endpoints])
