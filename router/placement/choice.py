"""A choice in native code: what it is asked, and what it answers. See `router/native/choice.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_bool, c_char, c_double, c_int64, c_uint8, c_uint64, c_void_p
from functools import cache
from struct import Struct
from typing import Any, NamedTuple
from weakref import finalize

from engine.kv.block_hash import HASH_BYTES
from engine.stats import Role
from router.index.prefix_index import Held
from router.index.table import IndexTable
from router.native.bindings import library
from router.placement.cost import CostModel
from router.placement.endpoint import Endpoint
from router.placement.fleet import Fleet
from router.placement.prompt_queue import WaitingMemory
from router.placement.work import Intake, Seconds, Work

_NAMED = Struct("=Q2qQqQq")  # `named_prompt` of native/cost.h
_WORK = Struct("=2dqQqQ2q")  # how a question begins, up to `total_tokens`
_OPTION = Struct("=Qq4q10d3q2dQq")
GROUP = {Role.DECODE: 0, Role.PREFILL: 1}  # of workers in the index; native code knows them
_ADDRESS = Struct("=Q")
_COUNTS = Struct("=2q")
MAX_CANDIDATES = 256  # of a role, as in native/choice.h
_HELD, _SECONDS, _INTAKE = slice(2, 6), slice(6, 16), slice(16, 22)


class Question(ctypes.Structure):
    """`question` of native/choice.h."""

    _fields_ = (
        ("now", c_double),
        ("output_tokens", c_double),
        ("num_tokens", c_int64),
        ("prompts", c_void_p),
        ("num_prompts", c_int64),
        ("lendings", c_void_p),
        ("num_lendings", c_int64),
        ("total_tokens", c_int64),
        ("max_inflight", c_int64),
        ("max_memory_wait_s", c_double),
        ("probe_after_s", c_double),
        ("avoid", c_void_p),
        ("num_avoid", c_int64),
        ("trusting", c_bool),
        ("given", c_bool),
        ("decodes", c_void_p),
        ("prefills", c_void_p),
        ("lenders", c_void_p),
        ("num_decodes", c_int64),
        ("num_prefills", c_int64),
        ("num_lenders", c_int64),
        ("num_idle", c_int64),
        ("num_holders", c_int64),
        ("max_tried", c_int64),
        ("lenders_of_a_role", c_int64),
        ("num_candidates", c_int64),
    )


class Option(NamedTuple):
    """One way to serve the request. For a prefill worker alone, only what comes before the first
    token counts."""

    endpoint: Endpoint
    prefill: Endpoint | None
    held: Held  # tokens on `endpoint`
    seconds: Seconds
    intake: Intake


class Options:
    """All ways that a choice has looked at: the `answer` that native code has written, read when
    somebody asks. At least one has a decode worker."""

    __slots__ = ("_answer", "_endpoints", "_first", "_num_decodes", "_num_prefills")

    def __init__(self, answer: Any, num_candidates: int, endpoints: Mapping[int, Endpoint]) -> None:
        """`endpoints`: by address; all that the answer names, for as long as it is read."""
        self._answer, self._endpoints = answer, endpoints
        self._num_decodes: int
        self._num_prefills: int
        self._num_decodes, self._num_prefills = _COUNTS.unpack_from(answer)
        self._first = num_candidates  # number of the first one with a decode worker

    def __bool__(self) -> bool:
        return self._num_decodes > 0

    @property
    def best(self) -> Option:
        """Decode worker and all."""
        return self._read(self._first)

    @property
    def best_prefill(self) -> Option | None:
        """The prefill worker's part of `best`."""
        number: int = _OPTION.unpack_from(self._answer, _at(self._first))[1]
        return None if number < 0 else self._read(number)

    @property
    def decodes(self) -> list[Option]:
        """Best first, as the following."""
        return [self._read(self._first + number) for number in range(self._num_decodes)]

    @property
    def prefills(self) -> list[Option]:
        return [self._read(number) for number in range(self._num_prefills)]

    def _read(self, number: int) -> Option:
        values = _OPTION.unpack_from(self._answer, _at(number))
        computed, loaded, fetched, load_s, fetch_s, lender = values[_INTAKE]
        fetch_from = self._endpoints[lender].worker if lender else None
        prefill = None
        if values[1] >= 0:
            (address,) = _ADDRESS.unpack_from(self._answer, _at(values[1]))
            prefill = self._endpoints[address]
        return Option(
            self._endpoints[values[0]],
            prefill,
            Held(*values[_HELD]),
            Seconds(*values[_SECONDS]),
            Intake(computed, loaded, fetched, load_s, fetch_s, fetch_from),
        )


def _at(number: int) -> int:
    return _COUNTS.size + _OPTION.size * number


class Chooser:
    """Owned by a policy. Invariant: native code has the endpoints in `_by_slot`, by their slots.
    What is asked of it is about the last `ask`, whose work native code reads until the next."""

    def __init__(self, cost: CostModel, index: IndexTable, **limits: float) -> None:
        """`limits`: fields of a question that are always the same."""
        _check_sizes()
        self._lib = library()
        self._cost, self._index = cost, index
        self._address: int = self._lib.chooser_new(index.address)
        finalize(self, self._lib.chooser_free, self._address)
        self._by_slot: dict[int, Endpoint] = {}
        self._by_address: dict[int, Endpoint] = {}  # replaced when one goes: answers keep theirs
        self._question = Question(**limits)
        self._at = ctypes.addressof(self._question)

    def put(self, endpoint: Endpoint, slot: int | None) -> None:
        """`endpoint` has this slot of the index from now on; None: none any more, it may go."""
        if self._by_slot.get(endpoint.slot) is endpoint:
            del self._by_slot[endpoint.slot]
            self._lib.chooser_put(self._address, endpoint.slot, None)
            self._by_address = {each.address: each for each in self._by_slot.values()}
        endpoint.slot = -1 if slot is None else slot
        if slot is not None:
            self._by_slot[slot] = self._by_address[endpoint.address] = endpoint
            self._lib.chooser_put(self._address, slot, endpoint.address)

    def ask(self, now: float, work: Work, *, trusting: bool) -> None:
        """What the following calls are about. `trusting`: silent workers, and those that have
        failed this request, are better than none."""
        num_tokens, total_tokens, output_tokens, prompts, avoid = work
        named = bytearray(_NAMED.size * len(prompts))
        for number, (model, block_size, unit, block_hashes) in enumerate(prompts):
            told = (
                model,
                block_size,
                unit,
                _address(block_hashes),
                len(block_hashes) // HASH_BYTES,
                0,
                0,
            )
            _NAMED.pack_into(named, _NAMED.size * number, *told)
        question = self._question
        told_work = now, output_tokens, num_tokens, _address(named), len(prompts), 0, 0
        _WORK.pack_into(question, 0, *told_work, total_tokens)
        question.trusting, question.num_avoid = trusting, len(avoid)
        addresses = None
        if avoid:
            addresses = _addresses(avoid)
            question.avoid = ctypes.addressof(addresses)
        self._asked = work, named, addresses
        self._lib.choice_look(self._address, self._at)

    def holders(self, role: Role) -> list[Endpoint]:
        """Those of the role that hold some of the prompt, most first."""
        found = (c_void_p * MAX_CANDIDATES)()
        count = self._lib.choice_holders(self._address, self._at, GROUP[role], found)
        return [self._by_address[address] for address in found[:count]]  # type: ignore[index]

    def is_usable(self, endpoint: Endpoint) -> bool:
        """Whether it can take the request now, and would have room for its KV soon."""
        usable: bool = self._lib.choice_is_usable(self._cost.address, self._at, endpoint.address)
        return usable

    def find(self, decodes: Fleet, prefills: Fleet, num_candidates: int) -> Options | None:
        """The cheapest of what `num_candidates` of each role, or fewer, can do; None: nobody who
        decodes is usable."""
        self._question.given = False
        return self._choose(decodes, prefills, num_candidates)

    def weigh(
        self,
        decodes: Fleet,
        prefills: Fleet,
        given: tuple[Sequence[Endpoint], Sequence[Endpoint]],
        lenders: Sequence[Endpoint] = (),
    ) -> Options | None:
        """What it costs to let the first of `given` decode and the second prefill, in this
        order."""
        question = self._question
        question.given = True
        arrays = [_addresses(each) for each in (*given, lenders)]
        question.decodes, question.prefills, question.lenders = map(ctypes.addressof, arrays)
        question.num_decodes, question.num_prefills, question.num_lenders = map(len, arrays)
        return self._choose(decodes, prefills, max(map(len, given)))

    def expect(self, fleet: Fleet, endpoint: Endpoint, first_new: int, until: float) -> None:
        """`endpoint` has been booked for what was asked: its place in its fleet changes, and blocks
        from number `first_new` on are expected there `until`."""
        self._lib.choice_expect(
            self._address, self._at, self._cost.address, fleet.address, endpoint.address,
            first_new, until,
        )  # fmt: skip

    def _choose(self, decodes: Fleet, prefills: Fleet, num_candidates: int) -> Options | None:
        self._question.num_candidates = num_candidates
        answer = _answer_type(num_candidates)()
        self._lib.choose(
            self._address, self._cost.address, decodes.address, prefills.address, self._at,
            ctypes.addressof(answer),
        )  # fmt: skip
        return Options(answer, num_candidates, self._by_address) or None


@cache
def _answer_type(num_candidates: int) -> type[ctypes.Array[Any]]:
    """Room for all that so many of each role can do."""
    return c_char * _at(3 * num_candidates)


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(c_uint8.from_buffer(buffer)) if buffer else 0


def _addresses(endpoints: Sequence[Endpoint]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(endpoints))(*(endpoint.address for endpoint in endpoints))


@cache
def _check_sizes() -> None:
    """What Python and C share has to look the same to both."""
    ours = [Endpoint, WaitingMemory, CostModel, Question]
    packed = [_NAMED, _COUNTS, _OPTION]
    sizes = (c_uint64 * (len(ours) + len(packed)))()
    library().choice_sizes(sizes)
    expected = [*map(ctypes.sizeof, ours), *(each.size for each in packed)]  # type: ignore[arg-type]
    assert list(sizes) == expected, (list(sizes), expected)
    assert Question.max_inflight.offset == _WORK.size
